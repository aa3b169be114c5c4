"""The main job through the official E2B SDK: one JSON line on standard output for each step and its time.

Run by `cargo xtask demo`, which prints them as a table. Reads E2B_API_URL, E2B_SANDBOX_URL, E2B_API_KEY, AENV_TEMPLATE.
"""

import contextlib
import json
import os
import sys
import time

from e2b import Sandbox, SandboxQuery


@contextlib.contextmanager
def step(name):
    """Times the block; the list it hands out takes one sentence about the result."""
    result, start = [], time.perf_counter()
    yield result
    seconds = time.perf_counter() - start
    print(json.dumps({"step": name, "seconds": seconds, "result": "".join(result)}), flush=True)


def main():
    with step("sandbox created") as result:
        sandbox = Sandbox.create(os.environ["AENV_TEMPLATE"], timeout=300, metadata={"made-by": "demo"})
        result.append(sandbox.sandbox_id)
    try:
        for name in ("first command run", "second command run"):
            with step(name) as result:
                result.append(sandbox.commands.run("uname -sr; whoami").stdout.strip().replace("\n", ", "))
        with step("python run in the sandbox") as result:
            result.append(sandbox.commands.run("python3 -c 'print(sum(range(101)))'").stdout.strip())
        text = "written through the SDK\n" * 1000
        with step("file written") as result:
            result.append(sandbox.files.write("/home/user/notes.txt", text).path)
        with step("file read back") as result:
            back = sandbox.files.read("/home/user/notes.txt")
            assert back == text, "the file is not what was written"
            result.append(f"{len(back)} bytes, the same")
        with step("sandbox listed") as result:
            found = Sandbox.list(query=SandboxQuery(metadata={"made-by": "demo"})).next_items()
            assert sandbox.sandbox_id in [info.sandbox_id for info in found], "the sandbox is not listed"
            result.append(f"{len(found)} found by its metadata, {found[0].state.value}")
    finally:
        with step("sandbox killed") as result:
            killed = sandbox.kill()
            result.append("gone" if killed else "was not there")
    assert killed, "the sandbox was gone before it was killed"


if __name__ == "__main__":
    sys.exit(main())
