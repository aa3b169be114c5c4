"""Templates that the SDK's builder describes: what steps do, what is done only once, names and tags.

Each build boots a machine or two, so the tests share what they build.
"""

import os
import pathlib
import tempfile
import unittest

from e2b import BuildException, Sandbox, SandboxException, Template, TemplateException, wait_for_file

from .support import TEMPLATE, fresh_name

IMAGE = os.environ.get("AENV_IMAGE")

# Counts in its memory: what is read proves that the process went on from the build.
SERVE = "n=0; echo up > /tmp/up; while :; do n=$((n+1)); echo \"$n $GREETING $(id -un) $PWD\" > /tmp/serving; sleep 0.2; done"


def context(folder: pathlib.Path) -> None:
    """The files that the template copies."""
    (folder / "app/lib").mkdir(parents=True)
    (folder / "app/main.sh").write_text("#!/bin/sh\necho main\n")
    (folder / "app/lib/part.txt").write_text("part")
    (folder / "app/link").symlink_to("main.sh")
    (folder / "one.txt").write_text("one")
    (folder / "two.txt").write_text("two")
    (folder / "left.md").write_text("left")


@unittest.skipUnless(IMAGE, "AENV_IMAGE names no image to build on")
class Builds(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        context(cls.folder)
        cls.name = fresh_name("built")
        # A home that is kept between runs has points of the one before.
        cls.built, cls.logs = cls.build(cls.recipe("hello"), cls.name, skip_cache=True)
        cls.addClassCleanup(cls.delete, cls.built.template_id)

    @classmethod
    def recipe(cls, greeting):
        return (
            Template(file_context_path=str(cls.folder))
            .from_image(IMAGE)
            .set_envs({"GREETING": greeting, "TWICE": "$GREETING-$GREETING"})
            .run_cmd("echo $TWICE > /home/user/said; id -un >> /home/user/said; echo heard; echo complained >&2")
            .copy("app", "/srv/app", user="root", mode=0o750)
            .copy("*.txt", "texts/")
            .copy("one.txt", "/home/user/renamed", mode=0o600)
            .set_user("worker")
            .set_workdir("/srv/work")
            .run_cmd("pwd > where; id -un >> where")
            .run_cmd("touch /root-was-here", user="root")
            .set_start_cmd(SERVE, wait_for_file("/tmp/up"))
        )

    @staticmethod
    def build(template, name, **options):
        logs = []
        # The SDK logs of its own, too; those of the build have steps and stages in brackets.
        return Template.build(template, name, on_build_logs=lambda entry: logs.append(entry.message), **options), logs

    @staticmethod
    def delete(template_id):
        Sandbox.delete_snapshot(template_id)

    def create(self, template):
        sandbox = Sandbox.create(template, timeout=120)
        self.addCleanup(sandbox.kill)
        return sandbox

    def test_steps_have_made_what_they_say(self):
        sandbox = self.create(self.name)
        run = lambda command, user=None: sandbox.commands.run(command, user=user).stdout
        with self.subTest("commands see the build's variables, and sandboxes do not"):
            self.assertEqual(run("cat /home/user/said", "root"), "hello-hello\nuser\n")
            self.assertEqual(run("echo [$GREETING]"), "[]\n")
        with self.subTest("a directory is copied with owner, modes and links"):
            listed = run("stat -c '%n %U %a' /srv/app/* /srv/app/lib/*; readlink /srv/app/link", "root")
            self.assertIn("/srv/app/main.sh root 750", listed)
            self.assertIn("/srv/app/lib/part.txt root 750", listed)
            self.assertTrue(listed.endswith("main.sh\n"), listed)
        with self.subTest("a pattern takes what it matches, to where the build is at home"):
            self.assertEqual(run("ls /home/user/texts; stat -c %U /home/user/texts/*", "root"), "one.txt\ntwo.txt\nuser\nuser\n")
        with self.subTest("a file takes the name and the mode that it is given"):
            self.assertEqual(run("cat /home/user/renamed; stat -c ' %U %a' /home/user/renamed", "root"), "one user 600\n")
        with self.subTest("later steps and sandboxes have the last user and directory"):
            self.assertEqual(run("cat /srv/work/where; stat -c %U /srv/work"), "/srv/work\nworker\nworker\n")
            self.assertEqual(run("id -un; pwd"), "worker\n/srv/work\n")
            self.assertEqual(run("stat -c %U /root-was-here"), "root\n")
        with self.subTest("the start command runs, as the build left it"):
            served = run("cat /tmp/serving").split()
            self.assertEqual(served[1:], ["hello", "worker", "/srv/work"])
            self.assertGreater(int(served[0]), 0)

    def test_the_log_tells_what_was_done(self):
        text = "\n".join(self.logs)
        for part in ["[base] FROM", "[builder 2/9] RUN echo", "[stdout]: heard", "[stderr]: complained", "Build finished"]:
            self.assertIn(part, text)
        self.assertNotIn("CACHED", text)

    def test_what_was_done_is_not_done_again(self):
        again, logs = self.build(self.recipe("hello"), self.name)
        self.assertEqual(again.template_id, self.built.template_id)
        self.assertNotEqual(again.build_id, self.built.build_id)
        cached = [line for line in logs if line.startswith("CACHED")]
        self.assertEqual(len(cached), 9, logs)
        self.assertIn("Skipping upload of 'app', already cached", logs)
        self.assertEqual(self.create(self.name).commands.run("cat where").stdout, "/srv/work\nworker\n")

    def test_a_template_on_a_template_inherits_and_is_tagged(self):
        base = Template().from_template(self.name)
        name = fresh_name("derived")
        derived, _ = self.build(base.run_cmd("echo $GREETING > derived"), f"{name}:v1", tags=["stable"])
        self.addCleanup(self.delete, derived.template_id)
        with self.subTest("it has what its base has, and its own"):
            sandbox = self.create(f"{name}:v1")
            self.assertEqual(sandbox.commands.run("cat derived; id -un").stdout, "hello\nworker\n")
            self.assertEqual(sandbox.files.read("/tmp/up"), "up\n")
        tags = lambda: {tag.tag: tag.build_id for tag in Template.get_tags(name)}
        with self.subTest("tags are given, moved and taken"):
            self.assertEqual(tags(), {"v1": derived.build_id, "stable": derived.build_id})
            given = Template.assign_tags(f"{name}:v1", ["v2"])
            self.assertEqual((given.build_id, given.tags), (derived.build_id, ["v2"]))
            Template.remove_tags(name, ["stable"])
            self.assertEqual(set(tags()), {"v1", "v2"})
            self.assertTrue(Template.exists(name) and Template.exists(f"{name}:v2"))
            self.assertFalse(Template.exists(f"{name}:stable"))
        with self.subTest("a tag that is not there is no template"):
            with self.assertRaises(SandboxException):
                Sandbox.create(f"{name}:stable")
            with self.assertRaises(SandboxException):
                Sandbox.create(name)
            with self.assertRaises(TemplateException):
                Template.assign_tags(f"{name}:stable", ["x"])


class Failures(unittest.TestCase):
    def test_a_step_that_fails_ends_the_build_and_is_named(self):
        name = fresh_name("failing")
        template = Template().from_template(TEMPLATE).run_cmd("echo before").run_cmd("echo why >&2; exit 3")
        logs = []
        with self.assertRaises(BuildException) as caught:
            Template.build(template, name, on_build_logs=lambda entry: logs.append(entry.message))
        self.assertEqual(str(caught.exception), "failed to run command 'echo why >&2; exit 3': exit status 3")
        self.assertTrue(any(line.endswith("[stderr]: why") for line in logs), logs)
        with self.subTest("the SDK finds the line by the step's number"):
            build = Template.build_in_background(template, name)
            status = Template.get_build_status(build)
            while status.status.value in ("waiting", "building"):
                status = Template.get_build_status(build)
            self.assertEqual((status.status.value, status.reason.step), ("error", "2"))
        with self.subTest("a user that nobody has made"):
            template = Template().from_template(TEMPLATE).run_cmd("whoami", user="root123")
            with self.assertRaises(BuildException) as caught:
                Template.build(template, name)
            text = "failed to run command 'whoami': command failed: unauthenticated: invalid username: 'root123'"
            self.assertEqual(str(caught.exception), text)
        Sandbox.delete_snapshot(build.template_id)
        self.assertFalse(Template.exists(name))

    def test_a_build_ends_with_its_template(self):
        name = fresh_name("deleted")
        build = Template.build_in_background(Template().from_template(TEMPLATE).run_cmd("sleep 600"), name)
        self.assertEqual(Template.get_build_status(build).status.value, "building")
        Sandbox.delete_snapshot(build.template_id)
        with self.assertRaises(BuildException):
            Template.get_build_status(build)
        self.assertFalse(Template.exists(name))
