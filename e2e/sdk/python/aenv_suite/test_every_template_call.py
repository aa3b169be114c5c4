"""Every call of the template builder, and of templates, with both halves of the SDK.

What needs registries or package mirrors, which a test must not, is looked at as the SDK would send it; installers are
stand-ins in the build, so that their steps run all the same.
"""

import json
import os
import pathlib
import sys
import tempfile
import uuid

from e2b import (
    BuildException,
    CopyItem,
    Sandbox,
    TemplateException,
    default_build_logger,
    wait_for_file,
    wait_for_port,
    wait_for_process,
    wait_for_timeout,
    wait_for_url,
)

from .both import Both, both_halves, done, load_halves
from .support import TEMPLATE, fresh_name

# Each notes what it was called with, and by whom.
STAND_IN = '#!/bin/sh\numask 0\necho "$(id -un) $(basename "$0") $*" >> /code/calls\n'
INSTALLERS = ["apt-get", "bun", "git", "npm", "pip"]


@both_halves
class Images(Both):
    """Where a template can begin."""

    def start(self, template):
        return json.loads(self.Template.to_json(template))

    async def test_images_of_registries_are_named(self):
        new = self.Template
        for template, image in [
            (new().from_alpine_image(), "alpine:"),
            (new().from_arch_image(), "archlinux:"),
            (new().from_base_image(), "e2bdev/base"),
            (new().from_bun_image(), "oven/bun:"),
            (new().from_debian_image("bookworm"), "debian:bookworm"),
            (new().from_fedora_image(), "fedora:"),
            (new().from_node_image("22"), "node:22"),
            (new().from_python_image("3.11"), "python:3.11"),
            (new().from_ubuntu_image("24.04"), "ubuntu:24.04"),
            (new().from_image("registry.test/x:1"), "registry.test/x:1"),
        ]:
            self.assertIn(image, self.start(template)["fromImage"])

    async def test_credentials_for_registries_are_sent(self):
        new = self.Template
        self.assertEqual(self.start(new().from_image("r.test/x", "me", "secret"))["fromImageRegistry"]["username"], "me")
        aws = self.start(new().from_aws_registry("1.dkr.ecr.eu-west-1.amazonaws.com/x", "id", "secret", "eu-west-1"))
        self.assertEqual(aws["fromImageRegistry"]["type"], "aws")
        gcp = self.start(new().from_gcp_registry("gcr.io/x", {"project_id": "p"}))
        self.assertEqual(gcp["fromImageRegistry"]["type"], "gcp")

    async def test_other_beginnings(self):
        self.assertEqual(self.start(self.Template().from_template("base"))["fromTemplate"], "base")
        gateway = self.start(self.Template().from_template("mcp-gateway").add_mcp_server(["exa"]))
        self.assertIn("mcp-gateway pull exa", gateway["steps"][0]["args"][0])
        container = self.Template().from_template("devcontainer").beta_dev_container_prebuild("/c")
        self.assertIn("devcontainer build", self.start(container)["steps"][0]["args"][0])
        self.assertIn("devcontainer up", self.start(container.beta_set_dev_container_start("/c"))["startCmd"])

    async def test_a_dockerfile_goes_in_and_out(self):
        recipe = "FROM debian:bookworm\nENV A=1\nRUN echo hi\n"
        template = self.Template().from_dockerfile(recipe)
        self.assertIn("RUN echo hi", self.Template.to_dockerfile(template))
        self.assertTrue(self.start(self.Template().skip_cache().from_image("debian:bookworm"))["force"])

    async def test_ready_commands(self):
        for ready, command in [
            (wait_for_file("/up"), "[ -f /up ]"),
            (wait_for_port(80), "80"),
            (wait_for_process("init"), "pgrep init > /dev/null"),
            (wait_for_timeout(3000), "sleep 3"),
            (wait_for_url("http://localhost/"), "http://localhost/"),
        ]:
            self.assertIn(command, ready.get_cmd())


@both_halves
class Builds(Both):
    def recipe(self, folder):
        (folder / "installers").mkdir()
        for name in INSTALLERS:
            (folder / "installers" / name).write_text(STAND_IN)
        for name in ("one", "two"):
            (folder / f"{name}.txt").write_text(name)
        return (
            self.Template(file_context_path=str(folder))
            .from_template(TEMPLATE)
            .copy("installers", "/usr/local/bin", user="root", mode=0o755)
            .apt_install(["jq", "tree"], no_install_recommends=True)
            .pip_install("numpy")
            .pip_install(["left", "right"], g=False)
            .npm_install("left-pad", g=True)
            .bun_install("left-pad", dev=True)
            .git_clone("https://git.test/x.git", "/tmp/x", branch="main", depth=1)
            .copy_items([CopyItem(src="one.txt", dest="items/"), CopyItem(src="two.txt", dest="items/")])
            .make_dir(["made/deep", "other"], mode=0o700)
            .rename("items/one.txt", "made/renamed")
            .remove("items/two.txt")
            .remove("other", recursive=True, force=True)
            .make_symlink("made/renamed", "link")
            .skip_cache()
            .set_envs({"GREETING": "hello"})
            .set_workdir("made")
            .run_cmd(["echo $GREETING > said", "pwd >> said"])
            .set_user("root")
            .run_cmd("id -un > /tmp/who")
            .set_user("user")
            .set_ready_cmd(wait_for_file("/tmp/who"))
        )

    async def test_every_step_of_a_build(self):
        name, logs = fresh_name("every"), []
        with tempfile.TemporaryDirectory() as folder:
            template = self.recipe(pathlib.Path(folder))
            console = default_build_logger()

            def log(entry):
                console(entry)
                logs.append(entry.message)

            built = await done(
                self.Template.build(template, f"{name}:v1", tags=["stable"], cpu_count=1, memory_mb=512, on_build_logs=log)
            )
        self.addCleanup(Sandbox.delete_snapshot, built.template_id)
        self.assertTrue(any("Build finished" in line for line in logs), logs)
        with self.subTest("steps have made what they say"):
            sandbox = await self.create(f"{name}:v1")
            run = lambda command: sandbox.commands.run(command, cwd="/home/user")
            result = await done(run("cat link made/said /tmp/who; stat -c %a made/deep; ls -d other items/*; true"))
            self.assertEqual(result.stdout, "onehello\n/home/user/made\nroot\n700\n")
            calls = (await done(run("cat /code/calls"))).stdout
            for call in [
                "root apt-get update",
                "root apt-get install -y --no-install-recommends jq tree",
                "root pip install numpy",
                "user pip install --user left right",
                "root npm install -g left-pad",
                "user bun install --dev left-pad",
                "user git clone https://git.test/x.git --branch main --single-branch --depth 1 /tmp/x",
            ]:
                self.assertIn(call, calls)
            self.assertEqual((await done(sandbox.get_info())).memory_mb, 512)
        with self.subTest("names and tags"):
            self.assertTrue(await done(self.Template.exists(f"{name}:v1")))
            self.assertTrue(await done(self.Template.alias_exists(f"{name}:stable")))
            given = await done(self.Template.assign_tags(f"{name}:v1", ["v2"]))
            self.assertEqual((given.build_id, given.tags), (built.build_id, ["v2"]))
            await done(self.Template.remove_tags(name, ["stable"]))
            self.assertEqual({tag.tag for tag in await done(self.Template.get_tags(name))}, {"v1", "v2"})
            self.assertFalse(await done(self.Template.exists(f"{name}:stable")))

    async def test_a_build_in_the_background_is_asked_about(self):
        template = self.Template().from_template(TEMPLATE).run_cmd("exit 4")
        build = await done(self.Template.build_in_background(template, fresh_name("failing")))
        self.addCleanup(Sandbox.delete_snapshot, build.template_id)
        status, seen = None, 0
        while status is None or status.status.value in ("waiting", "building"):
            status = await done(self.Template.get_build_status(build, logs_offset=seen))
            seen += len(status.log_entries)
        self.assertEqual((status.status.value, status.reason.step), ("error", "1"))
        await self.assert_raises(BuildException, self.Template.build, template, fresh_name("failing"))

    async def test_what_is_not_there(self):
        nobody = fresh_name("nobody")
        self.assertFalse(await done(self.Template.exists(nobody)))
        self.assertFalse(await done(self.Template.alias_exists(nobody)))
        await self.assert_raises(TemplateException, self.Template.get_tags, nobody)
        await self.assert_raises(TemplateException, self.Template.assign_tags, nobody, ["x"])
        await self.assert_raises(TemplateException, self.Template.remove_tags, nobody, ["x"])


load_tests = load_halves(sys.modules[__name__])
