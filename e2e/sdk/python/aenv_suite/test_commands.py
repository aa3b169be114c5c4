"""sandbox.commands"""

import asyncio
import unittest

from e2b import AsyncSandbox, CommandExitException, NotFoundException, TimeoutException

from .support import shared_sandbox, wait_until


class Commands(unittest.TestCase):
    def setUp(self):
        self.commands = shared_sandbox().commands

    def test_run_gives_stdout_stderr_and_exit_code(self):
        result = self.commands.run("echo out; echo err >&2")
        self.assertEqual((result.stdout, result.stderr, result.exit_code), ("out\n", "err\n", 0))

    def test_a_nonzero_exit_is_an_exception_with_all_the_output(self):
        with self.assertRaises(CommandExitException) as caught:
            self.commands.run("echo before; echo why >&2; exit 7")
        self.assertEqual(caught.exception.exit_code, 7)
        self.assertEqual((caught.exception.stdout, caught.exception.stderr), ("before\n", "why\n"))

    def test_a_command_that_does_not_exist_exits_127(self):
        with self.assertRaises(CommandExitException) as caught:
            self.commands.run("no-such-command-anywhere")
        self.assertEqual(caught.exception.exit_code, 127)

    def test_output_is_handed_over_while_the_command_runs(self):
        seen = []
        self.commands.run("echo 1; echo 2 >&2", on_stdout=seen.append, on_stderr=seen.append)
        self.assertEqual("".join(sorted(seen)), "1\n2\n")

    def test_text_beyond_ascii_and_large_output_arrive_whole(self):
        self.assertEqual(self.commands.run("printf 'žluťoučký 🐎'").stdout, "žluťoučký 🐎")
        self.assertEqual(len(self.commands.run("head -c 1000000 /dev/zero | tr '\\0' x").stdout), 1_000_000)

    def test_environment_and_working_directory_are_the_callers(self):
        result = self.commands.run("echo $GREETING; pwd", envs={"GREETING": "hello there"}, cwd="/usr")
        self.assertEqual(result.stdout, "hello there\n/usr\n")

    def test_the_default_user_and_home_are_the_templates(self):
        self.assertEqual(self.commands.run("whoami; pwd").stdout, "user\n/home/user\n")

    def test_commands_run_as_the_user_asked_for(self):
        self.assertEqual(self.commands.run("id -u", user="root").stdout, "0\n")

    def test_python_is_in_the_image(self):
        self.assertEqual(self.commands.run("python3 -c 'print(6 * 7)'").stdout, "42\n")

    def test_a_command_in_the_background_is_listed_and_waited_for(self):
        handle = self.commands.run("sleep 1; echo done", background=True)
        self.assertIn(handle.pid, [process.pid for process in self.commands.list()])
        self.assertEqual(handle.wait().stdout, "done\n")
        self.assertNotIn(handle.pid, [process.pid for process in self.commands.list()])

    def test_a_command_in_the_background_can_be_killed_once(self):
        handle = self.commands.run("sleep 600", background=True)
        self.assertTrue(handle.kill())
        with self.assertRaises(CommandExitException):
            handle.wait()
        self.assertFalse(self.commands.kill(handle.pid))

    def test_a_running_command_can_be_connected_to(self):
        first = self.commands.run("sleep 1; echo heard by all", background=True)
        second = self.commands.connect(first.pid)
        self.assertEqual(second.wait().stdout, "heard by all\n")
        first.disconnect()

    def test_connecting_to_no_command_is_not_found(self):
        with self.assertRaises(NotFoundException):
            self.commands.connect(999_999)

    def test_stdin_is_sent_and_closed(self):
        handle = self.commands.run("cat", background=True, stdin=True)
        self.commands.send_stdin(handle.pid, "first\n")
        self.commands.send_stdin(handle.pid, "second\n")
        self.commands.close_stdin(handle.pid)
        self.assertEqual(handle.wait().stdout, "first\nsecond\n")

    def test_a_command_that_takes_too_long_is_ended(self):
        marker = "sleep 654.321"
        with self.assertRaises(TimeoutException):
            self.commands.run(marker, timeout=1)
        wait_until(
            lambda: not any(marker in " ".join(process.args) for process in self.commands.list()),
            10,
            "the timed-out command is gone",
        )

    def test_the_async_sdk_runs_commands_side_by_side(self):
        async def both():
            sandbox = await AsyncSandbox.connect(shared_sandbox().sandbox_id, timeout=600)
            return await asyncio.gather(*(sandbox.commands.run(f"echo {n}") for n in range(4)))

        results = asyncio.run(both())
        self.assertEqual([result.stdout for result in results], ["0\n", "1\n", "2\n", "3\n"])
