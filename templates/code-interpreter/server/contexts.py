"""Contexts: kernels that keep what their code has defined, each doing one execution at a time.

        execute ──▶ lock ──▶ (global variables, once) ──▶ (variables of this call) ──▶ code ──▶ lines
                     ▲                                                                   │
                     └────────── (variables back) ◀── idle · dead · restarted · hung up ─┘

A client that hangs up interrupts its code, and the next execution waits until the kernel has noticed. A kernel that ends
by itself is started again, without what it knew.
"""

import asyncio
import os
import queue
import time
import uuid
from typing import Any, AsyncIterator, Awaitable, Callable, Dict, List, Optional

from jupyter_client.manager import AsyncKernelManager

import languages
import output

HOME = os.environ.get("CODE_INTERPRETER_HOME", "/home/user")
# Under emulation a kernel takes half a minute, and more when several start at once.
START_SECONDS = 180
# After as long without a line a client is told that we are there.
KEEPALIVE_SECONDS = 5
# How soon an end or a restart of the kernel is noticed.
POLL_SECONDS = 0.5

Variables = Dict[str, Optional[str]]


class NoSuchLanguage(Exception):
    pass


class Context:
    """One kernel. Made by `Contexts`."""

    def __init__(self, language: str, cwd: str):
        self.id = str(uuid.uuid4())
        self.language = language
        self.cwd = cwd
        self._lock = asyncio.Lock()
        self._manager = AsyncKernelManager(kernel_name=languages.KERNELS[language])
        self._client: Any = None
        self._globals: Optional[Dict[str, str]] = None
        # Counted, so that an execution sees that it happened in between.
        self._restarts = 0

    def describe(self) -> Dict[str, str]:
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    async def start(self) -> None:
        await self._manager.start_kernel(cwd=self.cwd)
        await self._connect()

    async def _connect(self) -> None:
        if self._client is not None:
            self._client.stop_channels()
        self._client = self._manager.client()
        self._client.start_channels()
        await self._client.wait_for_ready(timeout=START_SECONDS)
        self._globals = None

    async def warm_up(self) -> None:
        async with self._lock:
            await self._quietly(languages.WARM_UP.get(self.language, ""))

    async def restart(self) -> None:
        """A running execution ends with an error."""
        self._restarts += 1
        await self._manager.restart_kernel(now=True)
        await self._connect()

    async def close(self) -> None:
        self._restarts += 1
        if self._client is not None:
            self._client.stop_channels()
        await self._manager.shutdown_kernel(now=True)

    async def execute(
        self, code: str, variables: Optional[Dict[str, str]], find_globals: Callable[[], Awaitable[Optional[Dict[str, str]]]]
    ) -> AsyncIterator[Dict[str, Any]]:
        """Lines of the stream, the closing one left out. Closed early, it interrupts the code."""
        while not await self._locked(KEEPALIVE_SECONDS):
            yield {"type": "keepalive"}
        restarts = self._restarts
        message, is_done = None, False
        try:
            if self._globals is None:
                found = await find_globals()
                await self._quietly(languages.FRESH_RANDOMNESS.get(self.language, ""))
                await self._set(dict(found or {}))
                # Asked again next time, if nobody said.
                self._globals = found
            await self._set(dict(variables or {}))
            message = self._client.execute(code, store_history=True, allow_stdin=False)
            async for line in self._follow(message, restarts):
                yield line
            is_done = True
        finally:
            # Not waited for: the answer is complete, or nobody is there for it.
            asyncio.get_running_loop().create_task(self._after(message, is_done, restarts, variables or {}))

    async def _locked(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._lock.acquire(), seconds)
        except TimeoutError:
            return False
        return True

    async def _follow(self, message: str, restarts: int) -> AsyncIterator[Dict[str, Any]]:
        last_line = time.monotonic()
        while True:
            if self._restarts != restarts:
                yield output.error("ContextRestarting", "Context was restarted while the code was running")
                return
            said = await self._said(POLL_SECONDS)
            if said is None:
                if not await self._manager.is_alive():
                    yield output.error("UnexpectedEndOfExecution", "The kernel ended before the code did")
                    return
                if time.monotonic() - last_line >= KEEPALIVE_SECONDS:
                    last_line = time.monotonic()
                    yield {"type": "keepalive"}
                continue
            if said["parent_header"].get("msg_id") != message:
                continue
            if said["msg_type"] == "status" and said["content"]["execution_state"] == "idle":
                if await self._reply_status(message) == "aborted":
                    yield output.error("ExecutionAborted", "The kernel did not run the code")
                return
            line = output.line_of(said)
            if line is not None:
                last_line = time.monotonic()
                yield line

    async def _said(self, seconds: float) -> Optional[Dict[str, Any]]:
        client = self._client
        try:
            return await client.get_iopub_msg(timeout=seconds)
        except queue.Empty:
            return None
        except (Exception, asyncio.CancelledError):
            # A restart closes the channels under who listens, which is no end of ours.
            if client is self._client and client.channels_running or asyncio.current_task().cancelling():
                raise
            await asyncio.sleep(seconds)
            return None

    async def _reply_status(self, message: str) -> Optional[str]:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            try:
                reply = await self._client.get_shell_msg(timeout=1)
            except queue.Empty:
                continue
            if reply["parent_header"].get("msg_id") == message:
                return reply["content"]["status"]
        return None

    async def _after(self, message: Optional[str], is_done: bool, restarts: int, variables: Dict[str, str]) -> None:
        """Leaves the kernel as the next execution is to find it, and lets that begin."""
        try:
            if message is not None and not is_done and self._restarts == restarts:
                await self._manager.interrupt_kernel()
                async for _line in self._follow(message, restarts):
                    pass
            if self._restarts != restarts:
                return
            if not await self._manager.is_alive():
                await self.restart()
                return
            known = self._globals or {}
            await self._set({name: known.get(name) for name in variables})
        finally:
            self._lock.release()

    async def _set(self, variables: Variables) -> None:
        if variables:
            await self._quietly(languages.environment_code(self.language, variables))

    async def _quietly(self, code: str) -> None:
        """Runs code of ours: nobody sees it, and executions are not counted."""
        if not code:
            return
        message = self._client.execute(code, silent=True, store_history=False, allow_stdin=False)
        async for _line in self._follow(message, self._restarts):
            pass


class Contexts:
    """All contexts; one of each language is that of who names none."""

    def __init__(self) -> None:
        self._all: Dict[str, Context] = {}
        self._defaults: Dict[str, "asyncio.Task[Context]"] = {}

    def list(self) -> List[Context]:
        return list(self._all.values())

    def get(self, id: str) -> Optional[Context]:
        return self._all.get(id)

    async def create(self, language: str, cwd: str = HOME) -> Context:
        if language not in languages.KERNELS:
            raise NoSuchLanguage(f"Language {language} is not available in this template")
        context = Context(language, cwd)
        try:
            await context.start()
        except BaseException:
            await context.close()
            raise
        self._all[context.id] = context
        return context

    async def of_language(self, language: str) -> Context:
        """That of who names no context: made once, however many ask for it."""
        making = self._defaults.get(language)
        if making is None:
            making = asyncio.get_running_loop().create_task(self.create(language))
            self._defaults[language] = making
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._defaults.pop(language, None)
            raise

    async def remove(self, context: Context) -> None:
        del self._all[context.id]
        for language, making in list(self._defaults.items()):
            if making.done() and not making.cancelled() and making.exception() is None and making.result() is context:
                del self._defaults[language]
        await context.close()

    async def close(self) -> None:
        for context in self.list():
            await self.remove(context)
