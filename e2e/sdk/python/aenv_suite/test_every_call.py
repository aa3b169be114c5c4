"""Every call of the SDK at least once, with both of its halves; what is refused is the exception that the SDK has for it."""

import asyncio
import io
import os
import sys
import time
import urllib.request
import uuid
from urllib.error import HTTPError

from e2b import (
    E2B,
    AuthenticationException,
    CommandExitException,
    FilesystemEventType,
    FileNotFoundException,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    Sandbox,
    SandboxException,
    SandboxNotFoundException,
    SandboxQuery,
    TimeoutException,
    get_signature,
)

from .both import Both, both_halves, done, load_halves
from .support import fresh_name

NOBODY = str(uuid.uuid4())


async def within(seconds, what, condition):
    """Polls until the condition, which may be one to wait for, holds."""
    deadline = time.monotonic() + seconds
    while not await done(condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        await asyncio.sleep(0.1)


async def pages(paginator):
    found = []
    while paginator.has_next:
        found += await done(paginator.next_items())
    return found


@both_halves
class Files(Both):
    async def asyncSetUp(self):
        self.sandbox = await self.shared()
        self.files = self.sandbox.files
        self.dir = f"/home/user/{fresh_name('every')}"
        await done(self.files.make_dir(self.dir))

    async def asyncTearDown(self):
        await done(self.files.remove(self.dir))

    async def test_what_is_written_in_any_form_is_read_in_any(self):
        path, data = f"{self.dir}/data", bytes(range(256)) * 400
        forms = {
            "text": ("grüße\n", {}),
            "bytes": (data, {}),
            "a file": (io.BytesIO(data), {}),
            "compressed": (data, {"gzip": True}),
            "as it is": (data, {"use_octet_stream": True}),
        }
        for form, (content, options) in forms.items():
            with self.subTest(form):
                written = await done(self.files.write(path, content, **options))
                self.assertEqual((written.name, written.path), ("data", path))
                expected = content.encode() if form == "text" else data
                self.assertEqual(bytes(await done(self.files.read(path, format="bytes"))), expected)
                self.assertEqual(bytes(await done(self.files.read(path, format="bytes", gzip=True))), expected)
        with self.subTest("read as a stream"):
            stream = await done(self.files.read(path, format="stream"))
            chunks = [chunk async for chunk in stream] if hasattr(stream, "__aiter__") else list(stream)
            self.assertEqual(b"".join(chunks), data)
        await done(self.files.write(path, "text"))
        self.assertEqual(await done(self.files.read(path)), "text")

    async def test_several_files_and_their_metadata(self):
        entries = [{"path": f"{self.dir}/{name}", "data": name} for name in "ab"]
        written = await done(self.files.write_files(entries, metadata={"made-by": "suite"}))
        self.assertEqual([(info.name, info.metadata) for info in written], [("a", {"made-by": "suite"}), ("b", {"made-by": "suite"})])
        info = await done(self.files.get_info(f"{self.dir}/a"))
        self.assertEqual((info.size, info.permissions, info.owner, info.metadata), (1, "-rw-r--r--", "user", {"made-by": "suite"}))
        self.assertEqual(await done(self.files.write_files([])), [])
        await done(self.files.write(f"{self.dir}/a", "again"))
        self.assertFalse((await done(self.files.get_info(f"{self.dir}/a"))).metadata)

    async def test_folders(self):
        self.assertTrue(await done(self.files.make_dir(f"{self.dir}/sub/deep")))
        self.assertFalse(await done(self.files.make_dir(f"{self.dir}/sub/deep")))
        await done(self.files.write(f"{self.dir}/sub/file", "x"))
        self.assertEqual((await done(self.files.rename(f"{self.dir}/sub/file", f"{self.dir}/moved"))).name, "moved")
        self.assertEqual({entry.name for entry in await done(self.files.list(self.dir, depth=2))}, {"sub", "deep", "moved"})
        self.assertTrue(await done(self.files.exists(f"{self.dir}/moved")))
        await done(self.files.remove(f"{self.dir}/moved"))
        self.assertFalse(await done(self.files.exists(f"{self.dir}/moved")))

    async def test_what_happens_in_a_folder_is_watched(self):
        events = []
        if self.Sandbox is Sandbox:
            watch = self.files.watch_dir(self.dir, recursive=True, include_entry=True)
            news = lambda: events.extend(watch.get_new_events()) or events
        else:
            watch = await self.files.watch_dir(self.dir, on_event=events.append, recursive=True, include_entry=True)
            news = lambda: events
        kinds = lambda name: [event.type for event in news() if event.name == name]
        await done(self.files.write(f"{self.dir}/seen", "x"))
        await within(10, "the write", lambda: FilesystemEventType.WRITE in kinds("seen"))
        await done(self.files.rename(f"{self.dir}/seen", f"{self.dir}/moved"))
        await done(self.files.remove(f"{self.dir}/moved"))
        await within(10, "the last event", lambda: FilesystemEventType.REMOVE in kinds("moved"))
        first = [FilesystemEventType.CREATE, FilesystemEventType.CHMOD, FilesystemEventType.WRITE, FilesystemEventType.RENAME]
        self.assertEqual(kinds("seen"), first)
        self.assertEqual(next(event.entry.path for event in events if event.type == FilesystemEventType.WRITE), f"{self.dir}/seen")
        await done(watch.stop())
        if self.Sandbox is Sandbox:
            await self.assert_raises(SandboxException, watch.get_new_events)

    async def test_what_is_not_there_is_not_found(self):
        missing = f"{self.dir}/missing"
        for call in (self.files.read, self.files.list, self.files.get_info):
            await self.assert_raises(FileNotFoundException, call, missing)
        await self.assert_raises(FileNotFoundException, self.files.rename, missing, f"{self.dir}/other")
        watch = [missing] if self.Sandbox is Sandbox else [missing, print]
        await self.assert_raises(FileNotFoundException, self.files.watch_dir, *watch)

    async def test_what_makes_no_sense_is_refused(self):
        await self.assert_raises(InvalidArgumentException, self.files.read, self.dir)
        await self.assert_raises(InvalidArgumentException, self.files.write, self.dir, "a folder")
        await self.assert_raises(InvalidArgumentException, self.files.list, self.dir, depth=0)
        await self.assert_raises(AuthenticationException, self.files.read, self.dir, user="nobody-knows")
        await self.assert_raises(AuthenticationException, self.files.list, self.dir, user="nobody-knows")

    async def test_links_to_files_are_signed(self):
        def ask(url, data=None):
            headers = {"E2b-Sandbox-Id": self.sandbox.sandbox_id, "E2b-Sandbox-Port": "49983"}
            headers |= {"Content-Type": "application/octet-stream"} if data else {}
            return urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=30).read()

        path = f"{self.dir}/linked"
        ask(self.sandbox.upload_url(path), b"through a link")
        self.assertEqual(ask(self.sandbox.download_url(path, use_signature_expiration=300)), b"through a link")
        self.assertTrue(get_signature(path, "read", "", "token")["signature"].startswith("v1_"))
        with self.assertRaises(HTTPError) as caught:
            ask(self.sandbox.download_url(path).replace("signature=v1_", "signature=v1_A"))
        self.assertEqual(caught.exception.code, 401)
        with self.assertRaises(HTTPError) as caught:
            ask(self.sandbox.download_url(path, use_signature_expiration=-10))
        self.assertEqual(caught.exception.code, 401)
        self.assertIn(b"signature is already expired", caught.exception.read())


@both_halves
class Commands(Both):
    async def asyncSetUp(self):
        self.sandbox = await self.shared()
        self.commands = self.sandbox.commands

    async def pids(self):
        return [process.pid for process in await done(self.commands.list())]

    async def test_run_in_the_foreground(self):
        seen = []
        options = {"envs": {"A": "1"}, "cwd": "/usr", "user": "root", "on_stdout": seen.append, "on_stderr": seen.append}
        result = await done(self.commands.run("echo $A $PWD $(id -un); echo err >&2", **options))
        self.assertEqual((result.stdout, result.stderr, result.exit_code), ("1 /usr root\n", "err\n", 0))
        self.assertEqual(sorted(seen), ["1 /usr root\n", "err\n"])
        failed = await self.assert_raises(CommandExitException, self.commands.run, "echo why >&2; exit 3")
        self.assertEqual((failed.exit_code, failed.stderr, failed.error), (3, "why\n", "exit status 3"))

    async def test_input_through_the_handle_and_by_pid(self):
        handle = await done(self.commands.run("cat", background=True, stdin=True))
        self.assertIn(handle.pid, await self.pids())
        await done(handle.send_stdin("by handle\n"))
        await done(self.commands.send_stdin(handle.pid, b"by pid\n"))
        await done(handle.close_stdin())
        self.assertEqual((await done(handle.wait())).stdout, "by handle\nby pid\n")
        other = await done(self.commands.run("cat", background=True, stdin=True))
        await done(self.commands.close_stdin(other.pid))
        self.assertEqual((await done(other.wait())).exit_code, 0)

    async def test_input_as_a_stream(self):
        if not hasattr(self.commands, "stream_input"):
            self.skipTest("this SDK has no commands.stream_input")
        handle = await done(self.commands.run("head -n 3", background=True, stdin=True))
        lines = ["one\n", b"two\n", "three\n"]
        if self.Sandbox is Sandbox:
            self.commands.stream_input(handle.pid, lines)
        else:
            stream = self.commands.stream_input(handle.pid)
            for line in lines:
                await stream.send(line)
            await stream.close()
            await self.assert_raises(SandboxException, stream.send, "too late")
        self.assertEqual((await done(handle.wait())).stdout, "one\ntwo\nthree\n")

    async def test_what_runs_is_connected_to_and_killed(self):
        handle = await done(self.commands.run("sleep 600", background=True))
        again = await done(self.commands.connect(handle.pid))
        await done(handle.disconnect())
        self.assertIn(handle.pid, await self.pids())
        self.assertTrue(await done(again.kill()))
        await self.assert_raises(CommandExitException, again.wait)
        self.assertFalse(await done(self.commands.kill(handle.pid)))
        third = await done(self.commands.run("sleep 600", background=True))
        self.assertTrue(await done(self.commands.kill(third.pid)))
        await self.assert_raises(CommandExitException, third.wait)

    async def test_what_is_refused_is_an_exception_of_its_kind(self):
        await self.assert_raises(TimeoutException, self.commands.run, "sleep 60", timeout=0.5)
        await self.assert_raises(InvalidArgumentException, self.commands.run, "true", cwd="/no/such/folder")
        await self.assert_raises(AuthenticationException, self.commands.run, "true", user="nobody-knows")
        for call, args in [
            (self.commands.connect, ()),
            (self.commands.send_stdin, ("x",)),
            (self.commands.close_stdin, ()),
        ]:
            await self.assert_raises(NotFoundException, call, 999_999, *args)
        self.assertFalse(await done(self.commands.kill(999_999)))


@both_halves
class Terminals(Both):
    async def test_a_terminal_has_a_size_and_takes_input(self):
        pty, seen = (await self.shared()).pty, bytearray()
        options = {"envs": {"MARK": "here"}, "cwd": "/usr", "user": "root", "timeout": 120}
        if self.Sandbox is Sandbox:
            terminal = pty.create(PtySize(rows=20, cols=77), **options)
        else:
            terminal = await pty.create(PtySize(rows=20, cols=77), on_data=seen.extend, **options)
        await done(pty.send_stdin(terminal.pid, b"stty size; echo $MARK $PWD $(id -un) $TERM\n"))
        await done(pty.resize(terminal.pid, PtySize(rows=30, cols=99)))
        if hasattr(pty, "stream_input"):
            if self.Sandbox is Sandbox:
                pty.stream_input(terminal.pid, [b"stty si", b"ze\n"])
            else:
                stream = pty.stream_input(terminal.pid)
                await stream.send(b"stty size\n")
                await stream.close()
        else:
            await done(pty.send_stdin(terminal.pid, b"stty size\n"))
        await done(pty.send_stdin(terminal.pid, b"exit 5\n"))
        with self.assertRaises(CommandExitException) as caught:
            await done(terminal.wait(on_pty=seen.extend) if self.Sandbox is Sandbox else terminal.wait())
        self.assertEqual(caught.exception.exit_code, 5)
        text = seen.decode()
        self.assertIn("here /usr root xterm-256color", text)
        self.assertIn("30 99", text)

    async def test_a_terminal_is_connected_to_and_killed(self):
        pty = (await self.shared()).pty
        size = PtySize(rows=20, cols=80)
        ignored = {} if self.Sandbox is Sandbox else {"on_data": lambda _data: None}
        terminal = await done(pty.create(size, **ignored))
        again = await done(pty.connect(terminal.pid, **ignored))
        self.assertEqual(again.pid, terminal.pid)
        self.assertTrue(await done(pty.kill(terminal.pid)))
        await self.assert_raises(CommandExitException, again.wait)
        self.assertFalse(await done(pty.kill(terminal.pid)))
        await self.assert_raises(NotFoundException, pty.connect, 999_999, **ignored)
        await self.assert_raises(NotFoundException, pty.resize, 999_999, size)
        await self.assert_raises(NotFoundException, pty.send_stdin, 999_999, b"x")


@both_halves
class Life(Both):
    async def test_a_whole_life(self):
        tag = {"suite": fresh_name("life")}
        sandbox = await self.create(metadata=tag, envs={"COLOR": "green"})
        listed = lambda: pages(self.Sandbox.list(query=SandboxQuery(metadata=tag), limit=1))
        with self.subTest("it is there"):
            self.assertTrue(await done(sandbox.is_running()))
            self.assertEqual([info.sandbox_id for info in await listed()], [sandbox.sandbox_id])
            info = await done(sandbox.get_info())
            self.assertEqual((info.metadata, info.sandbox_id), (tag, sandbox.sandbox_id))
            self.assertEqual((await done(self.Sandbox.get_info(sandbox.sandbox_id))).started_at, info.started_at)
        with self.subTest("its end is moved"):
            await done(sandbox.set_timeout(900))
            later = (await done(sandbox.get_info())).end_at
            self.assertGreater(later, info.end_at)
            await done(self.Sandbox.connect(sandbox.sandbox_id, timeout=60))
            self.assertEqual((await done(sandbox.get_info())).end_at, later)
        with self.subTest("metrics"):
            await within(30, "a first sample", lambda: sandbox.get_metrics())
            self.assertGreater((await done(self.Sandbox.get_metrics(sandbox.sandbox_id)))[-1].mem_total, 0)
        with self.subTest("hosts and the gateway's token"):
            self.assertTrue(sandbox.get_host(3000).startswith(f"3000-{sandbox.sandbox_id}."))
            self.assertEqual(sandbox.get_mcp_url(), f"https://{sandbox.get_host(50005)}/mcp")
            await done(sandbox.files.write("/etc/mcp-gateway/.token", "secret", user="root"))
            self.assertEqual(await done(sandbox.get_mcp_token()), "secret")
        with self.subTest("snapshot and fork"):
            name = fresh_name("every")
            snapshot = await done(sandbox.create_snapshot(name=name))
            self.assertIn(snapshot, await pages(sandbox.list_snapshots(limit=1)))
            self.assertEqual(await pages(self.Sandbox.list_snapshots(name=name)), [snapshot])
            (child,) = await done(sandbox.fork(timeout=60))
            self.assertNotEqual(child.sandbox_id, sandbox.sandbox_id)
            self.assertEqual((await done(child.commands.run("echo $COLOR"))).stdout, "green\n")
            self.assertTrue(await done(child.kill()))
            self.assertTrue(await done(self.Sandbox.delete_snapshot(snapshot.snapshot_id)))
            self.assertFalse(await done(self.Sandbox.delete_snapshot(snapshot.snapshot_id)))
        with self.subTest("pause and connect"):
            self.assertTrue(await done(sandbox.pause()))
            self.assertFalse(await done(sandbox.is_running()))
            again = await done(sandbox.connect(timeout=120))
            self.assertTrue(await done(again.is_running()))
            self.assertTrue(await done(sandbox.beta_pause()))
        with self.subTest("the end"):
            self.assertTrue(await done(sandbox.kill()))
            self.assertFalse(await done(self.Sandbox.kill(sandbox.sandbox_id)))
            self.assertEqual(await listed(), [])

    async def test_nobody_is_not_found(self):
        for call, args in [
            (self.Sandbox.get_info, ()),
            (self.Sandbox.connect, ()),
            (self.Sandbox.set_timeout, (10,)),
            (self.Sandbox.get_metrics, ()),
            (self.Sandbox.pause, ()),
            (self.Sandbox.create_snapshot, ()),
            (self.Sandbox.fork, ()),
        ]:
            with self.subTest(call.__name__):
                await self.assert_raises(SandboxNotFoundException, call, NOBODY, *args)
        self.assertFalse(await done(self.Sandbox.kill(NOBODY)))
        self.assertFalse(await done(self.Sandbox.delete_snapshot(NOBODY)))

    async def test_what_runs_in_a_killed_sandbox_ends_with_it(self):
        sandbox = await self.create()
        handle = await done(sandbox.commands.run("sleep 600", background=True))
        await done(sandbox.kill())
        ended = await self.assert_raises(TimeoutException, handle.wait)
        self.assertIn("sandbox was killed or reached its end of life", str(ended))
        await self.assert_raises(TimeoutException, sandbox.commands.run, "true")
        await self.assert_raises(TimeoutException, sandbox.files.read, "/etc/hostname")

    async def test_rules_for_outgoing_traffic_are_replaced(self):
        sandbox = await self.shared()
        await done(sandbox.update_network({"deny_out": ["0.0.0.0/0"]}))
        await done(self.Sandbox.update_network(sandbox.sandbox_id, {}))
        await self.assert_raises(SandboxNotFoundException, self.Sandbox.update_network, NOBODY, {})

    async def test_a_client_has_settings_of_its_own(self):
        bound = getattr(E2B(api_key="e2b_" + "0" * 40), self.Sandbox.__name__)
        await self.assert_raises(AuthenticationException, bound.get_info, NOBODY)
        await self.assert_raises(AuthenticationException, bound.list().next_items)
        bound = getattr(E2B(api_key=os.environ["E2B_API_KEY"]), self.Sandbox.__name__)
        await self.assert_raises(SandboxNotFoundException, bound.get_info, NOBODY)


load_tests = load_halves(sys.modules[__name__])
