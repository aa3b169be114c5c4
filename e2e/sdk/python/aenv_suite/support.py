"""What the tests share: the template, and one sandbox for all that leave it as they found it.

A boot takes seconds under emulation, so only tests about the life of a sandbox make their own.
"""

import os
import time
import uuid
from typing import Callable, List, Optional, Tuple

from e2b import Sandbox

TEMPLATE = os.environ.get("AENV_TEMPLATE", "base")

_shared: Optional[Sandbox] = None
_at_the_end: List[Tuple] = []


def shared_sandbox() -> Sandbox:
    """The sandbox that tests of commands and files use; created at the first call."""
    global _shared
    if _shared is None:
        _shared = Sandbox.create(TEMPLATE, timeout=600)
    return _shared


def at_the_end(call: Callable, *args) -> None:
    """Has something that tests share given back when all are done."""
    _at_the_end.append((call, *args))


def close() -> None:
    """Ends the shared sandbox and gives back what tests have shared."""
    global _shared
    while _at_the_end:
        call, *args = _at_the_end.pop()
        call(*args)
    if _shared is not None:
        _shared.kill()
        _shared = None


def every_page(paginator) -> List:
    """All that a list has."""
    found = []
    while paginator.has_next:
        found.extend(paginator.next_items())
    return found


def fresh_name(prefix: str) -> str:
    """A name that no other test and no earlier run has used."""
    return f"{prefix}-{uuid.uuid4().hex[:8]}"


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Polls until the condition holds; fails with what was waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.1)
