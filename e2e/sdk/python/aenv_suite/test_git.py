"""sandbox.git, which runs `git` in the guest: in a template that has it, between a repository and its bare twin."""

import functools
import os
import pathlib
import sys

from e2b import CommandExitException, GitAuthException, GitUpstreamException, InvalidArgumentException, Sandbox, Template

from . import support
from .both import Both, both_halves, done, load_halves
from .support import TEMPLATE, fresh_name

# Packages of the image's distribution, for a guest that reaches no mirror.
PACKAGES = os.environ.get("AENV_GIT_PACKAGES")


@functools.cache
def template() -> str:
    """Built once for both halves; deleted at the end."""
    folder = pathlib.Path(PACKAGES)
    name = fresh_name("git")
    recipe = Template(file_context_path=str(folder)).from_template(TEMPLATE).copy("*.deb", "/tmp/debs/", user="root")
    # Unpacked, not installed: of what git depends on, only this is not in the image, and perl is for scripts of its own.
    built = Template.build(recipe.run_cmd("for deb in /tmp/debs/*; do dpkg-deb -x $deb /; done", user="root"), name)
    support.at_the_end(Sandbox.delete_snapshot, built.template_id)
    return name


@both_halves
class Git(Both):
    async def test_a_repository_from_init_to_pull(self):
        if not PACKAGES:
            self.skipTest("AENV_GIT_PACKAGES names no folder with git's packages")
        sandbox = await self.create(template())
        git, here, bare = sandbox.git, "/home/user/work", "/home/user/bare.git"
        write = lambda name, text: done(sandbox.files.write(f"{here}/{name}", text))
        run = lambda command: done(sandbox.commands.run(command, cwd=here))
        with self.subTest("init and settings"):
            await done(git.init(bare, bare=True, initial_branch="main"))
            await done(git.init(here, initial_branch="main"))
            await done(git.configure_user("Some One", "some@one.test"))
            await done(git.set_config("core.abbrev", "12", scope="local", path=here))
            self.assertEqual(await done(git.get_config("core.abbrev", scope="local", path=here)), "12")
            self.assertEqual(await done(git.get_config("user.name")), "Some One")
            self.assertIsNone(await done(git.get_config("no.such")))
        with self.subTest("commits and what is changed"):
            await write("file", "one\n")
            status = await done(git.status(here))
            self.assertTrue(status.has_untracked and not status.is_clean)
            await done(git.add(here, files=["file"]))
            self.assertTrue((await done(git.status(here))).has_staged)
            await done(git.commit(here, "First"))
            self.assertTrue((await done(git.status(here))).is_clean)
        with self.subTest("branches"):
            await done(git.create_branch(here, "side"))
            self.assertEqual((await done(git.branches(here))).current_branch, "side")
            await done(git.checkout_branch(here, "main"))
            await done(git.delete_branch(here, "side"))
            self.assertEqual((await done(git.branches(here))).branches, ["main"])
        with self.subTest("reset and restore"):
            await write("file", "two\n")
            await done(git.restore(here, ["file"]))
            await write("file", "three\n")
            await done(git.add(here))
            await done(git.reset(here, mode="hard"))
            self.assertEqual(await done(sandbox.files.read(f"{here}/file")), "one\n")
        with self.subTest("a remote"):
            await self.assert_raises(InvalidArgumentException, git.push, here, username="me", password="secret")
            await done(git.remote_add(here, "origin", bare))
            self.assertEqual(await done(git.remote_get(here, "origin")), bare)
            self.assertIsNone(await done(git.remote_get(here, "other")))
            await self.assert_raises(GitUpstreamException, git.pull, here)
            await done(git.push(here, remote="origin", branch="main"))
            await done(git.clone(bare, path="/home/user/clone", branch="main"))
            await write("file", "four\n")
            await run("git commit -qam Second && git push -q")
            await done(git.pull("/home/user/clone"))
            self.assertEqual(await done(sandbox.files.read("/home/user/clone/file")), "four\n")
        with self.subTest("credentials"):
            await done(git.dangerously_authenticate("me", "secret", host="git.test"))
            self.assertIn("https://me:secret@git.test", (await run("cat ~/.git-credentials")).stdout)
        with self.subTest("what is refused"):
            await self.assert_raises(InvalidArgumentException, git.clone, "https://git.test/x", password="only")
            await self.assert_raises(CommandExitException, git.clone, "/no/such/repository", path="/home/user/no")
            refused = {"GIT_SSH_COMMAND": "echo 'Permission denied (publickey).' >&2; false"}
            await self.assert_raises(GitAuthException, git.clone, "ssh://git.test/x", path="/home/user/no", envs=refused)


load_tests = load_halves(sys.modules[__name__])
