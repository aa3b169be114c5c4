"""The SDK's public calls, found by looking at it, and which of them a test made.

A call has a name as a user of the SDK would say it: `Sandbox.files.read`, `AsyncTemplate.build`. The SDK stays as it is:
calls are seen by Python's profiling hook, which looks for the code of the SDK's public functions.
"""

import sys
import threading
from types import CodeType, FunctionType
from typing import Dict, Iterator, List, Set, Tuple

import e2b
from e2b.sandbox_async.commands.command import Commands as AsyncCommands
from e2b.sandbox_async.commands.pty import Pty as AsyncPty
from e2b.sandbox_async.filesystem.filesystem import Filesystem as AsyncFilesystem
from e2b.sandbox_async.git import Git as AsyncGit
from e2b.sandbox_sync.commands.command import Commands
from e2b.sandbox_sync.commands.pty import Pty
from e2b.sandbox_sync.filesystem.filesystem import Filesystem
from e2b.template.main import TemplateBuilder

CLASSES = {
    "Sandbox": e2b.Sandbox,
    "Sandbox.commands": Commands,
    "Sandbox.files": Filesystem,
    "Sandbox.pty": Pty,
    "Sandbox.git": e2b.Git,
    "CommandHandle": e2b.CommandHandle,
    "WatchHandle": e2b.WatchHandle,
    "SandboxPaginator": e2b.SandboxPaginator,
    "SnapshotPaginator": e2b.SnapshotPaginator,
    "Template": e2b.Template,
    "TemplateBuilder": TemplateBuilder,
    "ReadyCmd": e2b.ReadyCmd,
    "AsyncSandbox": e2b.AsyncSandbox,
    "AsyncSandbox.commands": AsyncCommands,
    "AsyncSandbox.files": AsyncFilesystem,
    "AsyncSandbox.pty": AsyncPty,
    "AsyncSandbox.git": AsyncGit,
    "AsyncCommandHandle": e2b.AsyncCommandHandle,
    "AsyncWatchHandle": e2b.AsyncWatchHandle,
    "AsyncSandboxPaginator": e2b.AsyncSandboxPaginator,
    "AsyncSnapshotPaginator": e2b.AsyncSnapshotPaginator,
    "AsyncTemplate": e2b.AsyncTemplate,
}
# Newer than the oldest SDK that the suite runs with.
if hasattr(e2b, "AsyncCommandInputHandle"):
    CLASSES["AsyncCommandInputHandle"] = e2b.AsyncCommandInputHandle

FUNCTIONS = ["get_signature", "wait_for_file", "wait_for_port", "wait_for_process", "wait_for_timeout", "wait_for_url"]

# Public, and not called by the suite: the name, or what names begin with up to the star, and why.
EXCLUDED = {
    "Volume.*": "volumes are not served by this version",
    "AsyncVolume.*": "volumes are not served by this version",
    "Secret.*": "secrets are a resource of E2B's cloud",
    "AsyncSecret.*": "secrets are a resource of E2B's cloud",
}

# Classes with public functions that send nothing to a server.
NOT_CALLS = {
    "ApiClient": "the SDK's own HTTP client",
    "ConnectionConfig": "the SDK's own settings",
    "VolumeConnectionConfig": "the SDK's own settings",
    "E2B": "binds settings to the classes above",
    "EntryInfo": "data",
    "WriteInfo": "data",
    "TemplateBase": "what Template and AsyncTemplate share",
    "SecretPaginator": EXCLUDED["Secret.*"],
    "AsyncSecretPaginator": EXCLUDED["Secret.*"],
}


def is_excluded(name: str) -> bool:
    return name in EXCLUDED or f"{name.split('.')[0]}.*" in EXCLUDED


def _functions(cls: type, name: str) -> Iterator[FunctionType]:
    """What may run when `cls.name` is called."""
    raw = next(vars(base)[name] for base in cls.__mro__ if name in vars(base))
    if isinstance(raw, (classmethod, staticmethod)):
        raw = raw.__func__
    # The SDK's own: one function for instances, another for the class.
    of_class = getattr(raw, "class_method_name", None)
    if of_class:
        yield from _functions(cls, of_class)
        raw = raw.method
    while isinstance(raw, FunctionType):
        yield raw
        raw = getattr(raw, "__wrapped__", None)


def _public(cls: type) -> List[str]:
    return [name for name in dir(cls) if not name.startswith("_") and any(_functions(cls, name))]


def public_calls() -> Dict[str, List[Tuple[CodeType, type]]]:
    """Every public call with the code that it runs and the class that it is of."""
    calls = {}
    for label, cls in CLASSES.items():
        for name in _public(cls):
            calls[f"{label}.{name}"] = [(function.__code__, cls) for function in _functions(cls, name)]
    for name in FUNCTIONS:
        calls[name] = [(getattr(e2b, name).__code__, object)]
    return calls


def unknown_classes() -> List[str]:
    """Classes that the SDK exports, with public functions, about which nothing is said here."""
    known = set(CLASSES.values())
    found = []
    for name in e2b.__all__:
        cls = getattr(e2b, name)
        is_class = isinstance(cls, type) and cls.__module__.startswith("e2b.") and cls not in known
        if not is_class or issubclass(cls, (BaseException, str, dict)) or name in NOT_CALLS or is_excluded(f"{name}.x"):
            continue
        if _public(cls):
            found.append(name)
    return found


class Recorder:
    """Notes which public calls are made."""

    def __init__(self):
        self.made: Set[str] = set()
        self._by_code: Dict[CodeType, List[Tuple[str, type]]] = {}
        for name, runs in public_calls().items():
            for code, cls in runs:
                self._by_code.setdefault(code, []).append((name, cls))

    def start(self):
        threading.setprofile(self._event)
        sys.setprofile(self._event)

    def stop(self):
        sys.setprofile(None)
        threading.setprofile(None)

    def take(self) -> Set[str]:
        """What was made since the last time."""
        made, self.made = self.made, set()
        return made

    def _event(self, frame, event, _argument):
        if event != "call" or frame.f_code not in self._by_code:
            return
        names = self._by_code[frame.f_code]
        if len(names) == 1:
            self.made.add(names[0][0])
            return
        # Shared by several classes: the receiver tells which.
        receiver = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
        receiver = receiver if isinstance(receiver, type) else type(receiver)
        # Or it has none, and may be either's.
        self.made.update([name for name, cls in names if issubclass(receiver, cls)] or [name for name, _ in names])
