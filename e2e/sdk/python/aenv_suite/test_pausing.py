"""Pausing, resuming, snapshots and forks."""

import asyncio
import unittest
import uuid

from e2b import AsyncSandbox, InvalidArgumentException, Sandbox, SandboxNotFoundException, SandboxQuery, SandboxState

from .support import TEMPLATE, every_page, fresh_name, wait_until

BOOT_ID = "/proc/sys/kernel/random/boot_id"
# Counts in its own memory, so that what is read proves that the memory went on.
COUNT = "n=0; while :; do n=$((n+1)); echo $n > /tmp/count.new; mv /tmp/count.new /tmp/count; sleep 0.2; done"


class Machine(unittest.TestCase):
    """What these tests ask of sandboxes; each test makes its own."""

    def create(self, **options):
        sandbox = Sandbox.create(options.pop("template", TEMPLATE), timeout=options.pop("timeout", 300), **options)
        self.addCleanup(Sandbox.kill, sandbox.sandbox_id)
        return sandbox

    def start_counting(self, sandbox):
        handle = sandbox.commands.run(COUNT, background=True, timeout=0)
        handle.disconnect()
        self.assert_counts(sandbox)
        return handle.pid

    def count(self, sandbox):
        if not sandbox.files.exists("/tmp/count"):
            return 0
        return int(sandbox.files.read("/tmp/count"))

    def assert_counts(self, sandbox):
        before = self.count(sandbox)
        wait_until(lambda: self.count(sandbox) > before, 20, "it goes on counting")

    def boot_id(self, sandbox):
        return sandbox.commands.run(f"cat {BOOT_ID}").stdout

    def assert_paused(self, sandbox):
        self.assertEqual(sandbox.get_info().state, SandboxState.PAUSED)
        self.assertFalse(sandbox.is_running())

    def wait_paused(self, sandbox):
        state = lambda: Sandbox.get_info(sandbox.sandbox_id).state
        wait_until(lambda: state() == SandboxState.PAUSED, 30, "its deadline pauses it")


class Pause(Machine):
    def test_what_is_paused_goes_on_where_it_was(self):
        sandbox = self.create(envs={"COLOR": "green"})
        sandbox.files.write("/home/user/kept", "on disk")
        sandbox.files.write("/dev/shm/kept", "in memory")
        counter, boot = self.start_counting(sandbox), self.boot_id(sandbox)
        self.assertTrue(sandbox.pause())
        with self.subTest("it is paused, and a second pause changes nothing"):
            self.assert_paused(sandbox)
            self.assertFalse(sandbox.pause())
            self.assertFalse(Sandbox.pause(sandbox.sandbox_id))
        with self.subTest("it cannot be given time"):
            with self.assertRaises(SandboxNotFoundException):
                sandbox.set_timeout(100)
            self.assert_paused(sandbox)
        again = Sandbox.connect(sandbox.sandbox_id, timeout=300)
        with self.subTest("it is the same sandbox with the same access"):
            self.assertEqual(again.sandbox_id, sandbox.sandbox_id)
            self.assertTrue(again.is_running())
            self.assertTrue(sandbox.is_running())
            self.assertEqual(sandbox.files.read("/home/user/kept"), "on disk")
            self.assertEqual(again.get_info().state, SandboxState.RUNNING)
        with self.subTest("its memory, processes and settings are there"):
            self.assertEqual(again.files.read("/dev/shm/kept"), "in memory")
            self.assertIn(counter, [process.pid for process in again.commands.list()])
            self.assert_counts(again)
            self.assertEqual(self.boot_id(again), boot)
            self.assertEqual(again.commands.run("echo $COLOR").stdout, "green\n")
        with self.subTest("the process that was started before can be connected to and killed"):
            self.assertTrue(again.commands.kill(counter))
        with self.subTest("it can be paused again"):
            self.assertTrue(again.pause())
            self.assertTrue(again.connect().is_running())

    def test_paused_sandboxes_are_listed_as_such(self):
        tag = {"suite": fresh_name("tag")}
        paused, running = self.create(metadata=tag), self.create(metadata=tag)
        self.assertTrue(paused.pause())

        def ids(*states):
            query = SandboxQuery(metadata=tag, state=list(states) or None)
            return {info.sandbox_id for info in every_page(Sandbox.list(query=query, limit=1))}

        self.assertEqual(ids(SandboxState.PAUSED), {paused.sandbox_id})
        self.assertEqual(ids(SandboxState.RUNNING), {running.sandbox_id})
        self.assertEqual(ids(), {paused.sandbox_id, running.sandbox_id})
        self.assertEqual(ids(SandboxState.PAUSED, SandboxState.RUNNING), {paused.sandbox_id, running.sandbox_id})

    def test_a_pause_of_the_files_alone_boots(self):
        for options in ({"mode": "filesystem"}, {"keep_memory": False}):
            with self.subTest(options):
                sandbox = self.create()
                boot = self.boot_id(sandbox)
                sandbox.files.write("/home/user/kept", "on disk")
                self.start_counting(sandbox)
                self.assertTrue(sandbox.pause(**options))
                self.assert_paused(sandbox)
                sandbox.connect()
                self.assertEqual(sandbox.files.read("/home/user/kept"), "on disk")
                self.assertNotEqual(self.boot_id(sandbox), boot)
                self.assertEqual(sandbox.commands.list(), [])

    def test_connect_can_leave_the_memory_and_boot(self):
        sandbox = self.create()
        boot = self.boot_id(sandbox)
        sandbox.files.write("/home/user/kept", "on disk")
        sandbox.commands.run("sync")
        self.assertTrue(sandbox.pause())
        sandbox.connect(on_resume="reboot")
        self.assertEqual(sandbox.files.read("/home/user/kept"), "on disk")
        self.assertNotEqual(self.boot_id(sandbox), boot)

    def test_a_healthy_guest_can_be_demanded(self):
        sandbox = self.create()
        self.assertTrue(sandbox.pause(strict=True))
        self.assert_paused(sandbox)

    def test_a_paused_sandbox_can_be_killed(self):
        sandbox = self.create()
        self.assertTrue(sandbox.pause())
        self.assertTrue(sandbox.kill())
        self.assertFalse(sandbox.kill())
        for call in (sandbox.get_info, sandbox.pause, sandbox.connect):
            with self.assertRaises(SandboxNotFoundException):
                call()

    def test_connect_never_shortens_a_life(self):
        sandbox = self.create(timeout=600)
        end = sandbox.get_info().end_at
        sandbox.connect(timeout=60)
        self.assertEqual(sandbox.get_info().end_at, end)
        sandbox.connect(timeout=900)
        self.assertGreater(sandbox.get_info().end_at, end)

    def test_pausing_nobody_is_not_found(self):
        nobody = str(uuid.uuid4())
        for call in (Sandbox.pause, Sandbox.fork, Sandbox.create_snapshot):
            with self.assertRaises(SandboxNotFoundException):
                call(nobody)


class Deadline(Machine):
    def test_a_deadline_can_pause(self):
        sandbox = self.create(lifecycle={"on_timeout": "pause"})
        self.assertEqual(sandbox.get_info().lifecycle, {"on_timeout": "pause", "auto_resume": False})
        self.start_counting(sandbox)
        sandbox.set_timeout(0)
        self.wait_paused(sandbox)
        with self.subTest("traffic does not resume it"):
            self.assertFalse(sandbox.is_running())
            self.assert_paused(sandbox)
        sandbox.connect()
        self.assert_counts(sandbox)
        with self.subTest("its next deadline pauses it as well"):
            sandbox.set_timeout(0)
            self.wait_paused(sandbox)

    def test_a_deadline_can_keep_the_files_alone(self):
        sandbox = self.create(lifecycle={"on_timeout": {"action": "pause", "mode": "filesystem"}})
        boot = self.boot_id(sandbox)
        sandbox.files.write("/home/user/kept", "on disk")
        sandbox.set_timeout(0)
        self.wait_paused(sandbox)
        sandbox.connect()
        self.assertEqual(sandbox.files.read("/home/user/kept"), "on disk")
        self.assertNotEqual(self.boot_id(sandbox), boot)

    def test_a_command_resumes_what_was_made_so(self):
        sandbox = self.create(lifecycle={"on_timeout": "pause", "auto_resume": True})
        self.assertEqual(sandbox.get_info().lifecycle, {"on_timeout": "pause", "auto_resume": True})
        self.start_counting(sandbox)
        sandbox.set_timeout(0)
        self.wait_paused(sandbox)
        self.assertEqual(sandbox.commands.run("echo awake").stdout, "awake\n")
        self.assertEqual(sandbox.get_info().state, SandboxState.RUNNING)
        self.assert_counts(sandbox)
        with self.subTest("also after a pause on request"):
            self.assertTrue(sandbox.pause())
            self.assertGreater(self.count(sandbox), 0)
            self.assertEqual(sandbox.get_info().state, SandboxState.RUNNING)

    def test_a_deadline_can_kill(self):
        sandbox = self.create(lifecycle={"on_timeout": "kill"})
        self.assertEqual(sandbox.get_info().lifecycle, {"on_timeout": "kill", "auto_resume": False})
        sandbox.set_timeout(0)
        wait_until(lambda: not Sandbox.kill(sandbox.sandbox_id), 30, "its deadline killed it")


class Snapshots(Machine):
    def snapshot(self, sandbox, **options):
        info = sandbox.create_snapshot(**options)
        self.addCleanup(Sandbox.delete_snapshot, info.snapshot_id)
        return info

    def test_a_snapshot_starts_sandboxes_and_outlives_its_own(self):
        source = self.create(envs={"COLOR": "green"})
        source.files.write("/home/user/kept", "before")
        counter = self.start_counting(source)
        snapshot = self.snapshot(source)
        self.assertEqual(source.get_info().state, SandboxState.RUNNING)
        self.assert_counts(source)
        source.files.write("/home/user/kept", "after")
        first, second = self.create(template=snapshot.snapshot_id), self.create(template=snapshot.snapshot_id)
        self.assertEqual(len({source.sandbox_id, first.sandbox_id, second.sandbox_id}), 3)
        first.files.write("/home/user/own", "of the first")
        for sandbox in (first, second):
            self.assertEqual(sandbox.files.read("/home/user/kept"), "before")
            self.assertIn(counter, [process.pid for process in sandbox.commands.list()])
            self.assert_counts(sandbox)
            self.assertEqual(sandbox.commands.run("echo $COLOR").stdout, "green\n")
        self.assertFalse(second.files.exists("/home/user/own"))
        self.assertTrue(source.kill())
        with self.subTest("it is there without its sandbox"):
            third = self.create(template=snapshot.snapshot_id)
            self.assertEqual(third.files.read("/home/user/kept"), "before")
            of_source = every_page(Sandbox.list_snapshots(sandbox_id=source.sandbox_id))
            self.assertEqual([info.snapshot_id for info in of_source], [snapshot.snapshot_id])
        with self.subTest("it is deleted once, and what came from it runs on"):
            self.assertTrue(Sandbox.delete_snapshot(snapshot.snapshot_id))
            self.assertFalse(Sandbox.delete_snapshot(snapshot.snapshot_id))
            self.assertEqual(every_page(Sandbox.list_snapshots(sandbox_id=source.sandbox_id)), [])
            self.assert_counts(third)
            self.assertTrue(third.pause())
            self.assert_counts(third.connect())

    def test_snapshots_are_listed_page_by_page(self):
        sandbox, other = self.create(), self.create()
        taken = [self.snapshot(sandbox).snapshot_id for _ in range(3)]
        elsewhere = self.snapshot(other).snapshot_id
        ids = lambda paginator: [info.snapshot_id for info in every_page(paginator)]
        newest_first = taken[::-1]
        self.assertEqual(ids(sandbox.list_snapshots()), newest_first)
        self.assertEqual(ids(sandbox.list_snapshots(limit=1)), newest_first)
        everything = ids(Sandbox.list_snapshots(limit=2))
        self.assertEqual(len(everything), len(set(everything)))
        self.assertLessEqual({*taken, elsewhere}, set(everything))

    def test_a_name_finds_its_snapshot(self):
        sandbox, name = self.create(), fresh_name("prepared")
        sandbox.files.write("/home/user/kept", "by name")
        snapshot = self.snapshot(sandbox, name=name)
        self.assertTrue(any(name in full for full in snapshot.names), snapshot.names)
        self.assertEqual(every_page(Sandbox.list_snapshots(name=name)), [snapshot])
        self.assertEqual(every_page(Sandbox.list_snapshots(name=f"{name}-not")), [])
        self.assertEqual(self.create(template=name).files.read("/home/user/kept"), "by name")

    def test_deleting_no_snapshot_is_false(self):
        self.assertFalse(Sandbox.delete_snapshot(str(uuid.uuid4())))


class Forks(Machine):
    def test_forks_are_alike_and_apart(self):
        source = self.create()
        source.files.write("/home/user/kept", "shared")
        self.start_counting(source)
        end = source.get_info().end_at
        children = source.fork(count=3, timeout=120)
        for child in children:
            self.assertIsInstance(child, Sandbox)
            self.addCleanup(child.kill)
        self.assertEqual(len({source.sandbox_id, *(child.sandbox_id for child in children)}), 4)
        self.assertEqual(source.get_info().end_at, end)
        seen = set()
        for child in children:
            self.assertEqual(child.files.read("/home/user/kept"), "shared")
            child.files.write("/home/user/kept", "own")
            self.assert_counts(child)
            seen.add(child.commands.run("head -c 16 /dev/urandom | od -An -tx1").stdout)
        self.assertEqual(len(seen), 3)
        self.assertEqual(source.files.read("/home/user/kept"), "shared")
        self.assert_counts(source)
        with self.subTest("one fork of a fork"):
            (grandchild,) = Sandbox.fork(children[0].sandbox_id)
            self.addCleanup(grandchild.kill)
            self.assertEqual(grandchild.files.read("/home/user/kept"), "own")

    def test_more_than_the_sdk_allows_is_refused_by_it(self):
        with self.assertRaises(InvalidArgumentException):
            Sandbox.fork(str(uuid.uuid4()), count=21)


class AsyncPausing(unittest.TestCase):
    def test_pause_connect_snapshot_and_fork(self):
        async def story():
            sandbox = await AsyncSandbox.create(TEMPLATE, timeout=300)
            alive = [sandbox]
            try:
                await sandbox.files.write("/dev/shm/kept", "in memory")
                self.assertTrue(await sandbox.pause())
                self.assertFalse(await sandbox.pause())
                self.assertFalse(await sandbox.is_running())
                again = await AsyncSandbox.connect(sandbox.sandbox_id, timeout=300)
                self.assertEqual(await again.files.read("/dev/shm/kept"), "in memory")
                snapshot = await again.create_snapshot()
                paginator = AsyncSandbox.list_snapshots(sandbox_id=sandbox.sandbox_id)
                self.assertEqual(await paginator.next_items(), [snapshot])
                alive += await asyncio.gather(*(AsyncSandbox.create(snapshot.snapshot_id, timeout=300) for _ in range(2)))
                alive += await again.fork(count=2, timeout=300)
                kept = await asyncio.gather(*(each.files.read("/dev/shm/kept") for each in alive))
                self.assertEqual(kept, ["in memory"] * 5)
                self.assertTrue(await AsyncSandbox.delete_snapshot(snapshot.snapshot_id))
                self.assertFalse(await AsyncSandbox.delete_snapshot(snapshot.snapshot_id))
            finally:
                killed = await asyncio.gather(*(each.kill() for each in alive))
            self.assertEqual(killed, [True] * len(alive))

        asyncio.run(story())
