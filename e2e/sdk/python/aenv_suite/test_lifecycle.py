"""Creating, finding and ending sandboxes."""

import datetime
import unittest

from e2b import Sandbox, SandboxNotFoundException, SandboxQuery, SandboxState

from .support import TEMPLATE, every_page, fresh_name, shared_sandbox, wait_until


def listed(query=None):
    return every_page(Sandbox.list(query=query))


class OneSandbox(unittest.TestCase):
    """Questions to a sandbox that goes on running."""

    def test_it_is_running_and_known(self):
        sandbox = shared_sandbox()
        self.assertTrue(sandbox.is_running())
        info = sandbox.get_info()
        self.assertEqual(info.sandbox_id, sandbox.sandbox_id)
        self.assertEqual(info.state, SandboxState.RUNNING)
        self.assertGreater(info.memory_mb, 0)
        self.assertGreater(info.cpu_count, 0)

    def test_set_timeout_moves_the_end(self):
        sandbox = shared_sandbox()
        sandbox.set_timeout(900)
        left = sandbox.get_info().end_at - datetime.datetime.now(datetime.timezone.utc)
        self.assertAlmostEqual(left.total_seconds(), 900, delta=60)

    def test_connect_reaches_the_same_machine(self):
        sandbox = shared_sandbox()
        sandbox.files.write("/tmp/marker", "here")
        again = Sandbox.connect(sandbox.sandbox_id, timeout=900)
        self.assertEqual(again.files.read("/tmp/marker"), "here")
        self.assertEqual(again.sandbox_id, sandbox.sandbox_id)


class LifeAndDeath(unittest.TestCase):
    def test_from_creation_to_kill(self):
        tag = fresh_name("tag")
        metadata = {"suite": tag, "with space & sign": "a=b&c%"}
        sandbox = Sandbox.create(TEMPLATE, timeout=120, metadata=metadata, envs={"COLOR": "green"})
        try:
            with self.subTest("environment variables of the sandbox reach its commands"):
                self.assertEqual(sandbox.commands.run("echo $COLOR").stdout, "green\n")
                self.assertEqual(sandbox.commands.run("echo $COLOR", envs={"COLOR": "red"}).stdout, "red\n")
            with self.subTest("it is found by its metadata, and only it"):
                found = listed(SandboxQuery(metadata={"suite": tag}))
                self.assertEqual([info.sandbox_id for info in found], [sandbox.sandbox_id])
                self.assertEqual(found[0].metadata, metadata)
                self.assertEqual(found[0].name, TEMPLATE)
            with self.subTest("metadata with reserved characters can be asked for"):
                found = listed(SandboxQuery(metadata=metadata))
                self.assertEqual([info.sandbox_id for info in found], [sandbox.sandbox_id])
            with self.subTest("other metadata does not find it"):
                self.assertEqual(listed(SandboxQuery(metadata={"suite": "other"})), [])
            with self.subTest("it is listed among the running ones, not among the paused"):
                ids = lambda state: [info.sandbox_id for info in listed(SandboxQuery(state=[state]))]
                self.assertIn(sandbox.sandbox_id, ids(SandboxState.RUNNING))
                self.assertNotIn(sandbox.sandbox_id, ids(SandboxState.PAUSED))
        finally:
            killed = sandbox.kill()
        self.assertTrue(killed)
        self.assertFalse(sandbox.is_running())
        self.assertFalse(Sandbox.kill(sandbox.sandbox_id))
        with self.assertRaises(SandboxNotFoundException):
            Sandbox.get_info(sandbox.sandbox_id)
        self.assertEqual(listed(SandboxQuery(metadata={"suite": tag})), [])

    def test_a_sandbox_ends_when_its_time_is_up(self):
        sandbox = Sandbox.create(TEMPLATE, timeout=120)
        self.addCleanup(sandbox.kill)
        sandbox.set_timeout(1)
        wait_until(lambda: not sandbox.is_running(), 20, "the sandbox ended")

    def test_leaving_a_with_block_kills(self):
        with Sandbox.create(TEMPLATE, timeout=120) as sandbox:
            self.assertEqual(sandbox.commands.run("echo hi").stdout, "hi\n")
        self.assertFalse(Sandbox.kill(sandbox.sandbox_id))
