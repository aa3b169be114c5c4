"""The guest agent, measured through the official SDK: one JSON object on standard output.

Run by `cargo xtask bench envd`, which holds the rows against their bounds. Reads BENCH_ENVD (where the agent listens),
BENCH_ENVD_PID, BENCH_PEER (an nginx that takes PUT) and BENCH_SCRATCH (a folder that goes). Arguments: only these rows.
"""

import base64
import http.client
import json
import os
import platform
import statistics
import struct
import sys
import time
import urllib.parse

import httpx
from e2b import Sandbox

ENVD, PEER, SCRATCH = (os.environ[name] for name in ("BENCH_ENVD", "BENCH_PEER", "BENCH_SCRATCH"))
PID = int(os.environ["BENCH_ENVD_PID"])

FILES = 10_000
KIB = b"x" * 1024
STREAMED = 1 << 30


def row(name, unit, samples, peer=None, ratio=None):
    ordered = sorted(samples)
    p95 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]
    return {"name": name, "unit": unit, "n": len(ordered), "min": ordered[0], "p50": statistics.median(ordered), "p95": p95,
            "peer": peer, "ratio": ratio}


def resident_mib(field):
    with open(f"/proc/{PID}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) / 1024


def exec_true(sandbox):
    """In a login shell, as the SDK runs it; of a user without a home, whose profile would be this host's own."""
    times = []
    for _ in range(230):
        start = time.perf_counter()
        sandbox.commands.run("true", user="nobody")
        times.append((time.perf_counter() - start) * 1e3)
    return [row("exec_true", "ms", times[30:])]


def stream(length):
    """Streams so many bytes of a command's output, as the SDKs ask for them; gives the seconds and the agent's growth."""
    command = {"process": {"cmd": "/usr/bin/head", "args": ["-c", str(length), "/dev/zero"]}, "stdin": False}
    message = json.dumps(command).encode()
    address = urllib.parse.urlsplit(ENVD)
    connection = http.client.HTTPConnection(address.hostname, address.port)
    before = resident_mib("VmRSS:")
    most, received, start = before, 0, time.perf_counter()
    credentials = base64.b64encode(b"root:").decode()
    connection.request("POST", "/process.Process/Start", b"\0" + struct.pack(">I", len(message)) + message,
                       {"content-type": "application/connect+json", "connect-protocol-version": "1",
                        "authorization": f"Basic {credentials}"})
    answer = connection.getresponse()
    while piece := answer.read(1 << 20):
        received += len(piece)
        most = max(most, resident_mib("VmRSS:"))
    seconds = time.perf_counter() - start
    connection.close()
    assert received > length * 4 / 3, f"{received} bytes of base64 and its messages for {length}"
    return seconds, most - before


def stdout(_sandbox):
    stream(STREAMED // 16)
    streamed = [stream(STREAMED) for _ in range(3)]
    speeds = [STREAMED / seconds / 1e6 for seconds, _ in streamed]
    return [row("stdout", "MB/s", speeds, 100.0, statistics.median(speeds) / 100),
            row("stdout_rss", "MiB", [growth for _, growth in streamed])]


def files_10k(sandbox):
    """Into one directory each, file by file, one connection."""
    ours, theirs = [], []
    for attempt in range(3):
        start = time.perf_counter()
        for number in range(FILES):
            sandbox.files.write(f"{SCRATCH}/ours-{attempt}/{number}", KIB, user="root")
        ours.append(time.perf_counter() - start)
        with httpx.Client() as client:
            start = time.perf_counter()
            for number in range(FILES):
                client.put(f"{PEER}/theirs-{attempt}/{number}", content=KIB).raise_for_status()
            theirs.append(time.perf_counter() - start)
    peer = statistics.median(theirs)
    return [row("files_10k", "s", ours, peer, statistics.median(ours) / peer)]


def watch_10k(sandbox):
    directory = f"{SCRATCH}/watched"
    os.mkdir(directory)
    watch = sandbox.files.watch_dir(directory, user="root")
    seen, told, start = set(), False, time.perf_counter()
    for number in range(FILES):
        with open(f"{directory}/{number}", "w"):
            pass
    deadline = time.monotonic() + 60
    while len(seen) < FILES and not told and time.monotonic() < deadline:
        try:
            seen.update(event.name for event in watch.get_new_events() if event.type.value == "create")
        except Exception as error:  # what it says is the point
            told = "overflow" in str(error).lower()
            if not told:
                raise
    seconds = time.perf_counter() - start
    watch.stop()
    return [row("watch_10k", "s", [seconds], FILES, 1.0 if told else len(seen) / FILES)]


ROWS = {"exec_true": exec_true, "stdout": stdout, "stdout_rss": stdout, "files_10k": files_10k, "watch_10k": watch_10k}


def main():
    wanted = sys.argv[1:] or list(ROWS)
    sandbox = Sandbox.create(debug=True, sandbox_url=ENVD)
    measures = dict.fromkeys(ROWS[name] for name in wanted)
    rows = [measured for measure in measures for measured in measure(sandbox) if measured["name"] in wanted]
    print(json.dumps({"host": {"machine": platform.machine(), "cores": os.cpu_count()}, "rows": rows}))


if __name__ == "__main__":
    main()
