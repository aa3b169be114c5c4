"""The server on the machine that runs the tests: kernels without a guest. Needs what `requirements.txt` names.

    python -m unittest discover templates/code-interpreter/tests
"""

import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer

HERE = pathlib.Path(__file__).resolve().parent.parent


class Envd(BaseHTTPRequestHandler):
    """The part of the guest's agent that the server asks."""

    def do_GET(self):
        allowed = self.headers.get("X-Access-Token") == "token" and self.path == "/envs"
        self.send_response(200 if allowed else 401)
        self.end_headers()
        self.wfile.write(json.dumps({"GLOBAL": "of the sandbox"} if allowed else {}).encode())

    def log_message(self, *_):
        pass


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Server(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        envd = HTTPServer(("127.0.0.1", 0), Envd)
        threading.Thread(target=envd.serve_forever, daemon=True).start()
        cls.addClassCleanup(envd.server_close)
        cls.addClassCleanup(envd.shutdown)
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        # The specifications name where the template has the kernels.
        for spec in HERE.glob("jupyter/kernels/*/kernel.json"):
            at = pathlib.Path(folder.name, "kernels", spec.parent.name)
            at.mkdir(parents=True)
            (at / spec.name).write_text(spec.read_text().replace("/opt/code-interpreter", str(HERE)))
        cls.port = free_port()
        env = os.environ | {
            "JUPYTER_PATH": folder.name,
            "CODE_INTERPRETER_PORT": str(cls.port),
            "CODE_INTERPRETER_HOME": folder.name,
            "ENVD_URL": f"http://127.0.0.1:{envd.server_port}",
            "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        server = subprocess.Popen([sys.executable, str(HERE / "server/main.py")], env=env)
        cls.addClassCleanup(server.wait)
        cls.addClassCleanup(server.terminate)
        deadline = time.monotonic() + 120
        while True:
            try:
                cls.ask("GET", "/health")
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise

    @classmethod
    def open(cls, method, path, value=None, timeout=60):
        data = None if value is None else json.dumps(value).encode()
        headers = {"Content-Type": "application/json", "X-Access-Token": "token"}
        request = urllib.request.Request(f"http://127.0.0.1:{cls.port}{path}", data, headers, method=method)
        return urllib.request.urlopen(request, timeout=timeout)

    @classmethod
    def ask(cls, method, path, value=None):
        with cls.open(method, path, value) as answer:
            return json.load(answer)

    def run_code(self, code, **options):
        with self.open("POST", "/execute", {"code": code, **options}) as answer:
            lines = [json.loads(line) for line in answer]
        self.assertEqual(lines[-1], {"type": "end_of_execution"})
        return lines[:-1]

    def shown(self, code, **options):
        lines = self.run_code(code, **options)
        return [line.get("text", line.get("value")) for line in lines if line["type"] not in ("number_of_executions", "keepalive")]

    def assert_status(self, status, message, method, path, value=None):
        with self.assertRaises(urllib.error.HTTPError) as caught:
            self.open(method, path, value)
        self.assertEqual((caught.exception.code, caught.exception.read().decode()), (status, message))

    def test_what_was_defined_is_there_later(self):
        self.run_code("kept = 20")
        self.assertEqual(self.shown("print('out')\nkept + 1"), ["out\n", "21"])
        for language in ("js", "javascript"):
            self.assertEqual(self.shown("const kept = 30; kept + 1", language=language), ["31"])
        self.assertEqual(self.shown("interface P { n: number }\nconst p: P = { n: 2 }; p.n", language="ts"), ["2"])
        self.run_code("kept=40", language="bash")
        self.assertEqual(self.shown("echo $kept", language="bash"), ["40\n"])

    def test_an_error_has_name_value_and_traceback(self):
        (error,) = [line for line in self.run_code("1/0") if line["type"] == "error"]
        self.assertEqual((error["name"], error["value"]), ("ZeroDivisionError", "division by zero"))
        self.assertIn("line 1", error["traceback"])
        (error,) = [line for line in self.run_code("throw new TypeError('no')", language="js") if line["type"] == "error"]
        self.assertEqual((error["name"], error["value"]), ("TypeError", "no"))

    def test_javascript_is_what_people_write(self):
        for code, text in [
            ("import { join as j } from 'path'\nj('a', 'b')", "a/b"),
            ("await Promise.resolve({ a: [1] })", "{ a: [ 1 ] }"),
            ("class A { b = 1 }; new A()", "A { b: 1 }"),
            ("class A { b = 2 }; new A()", "A { b: 2 }"),
            ("{ a: 1 }", "{ a: 1 }"),
            ("`\nconst not = code\n`.length", "18"),
        ]:
            self.assertEqual(self.shown(code, language="js"), [text], code)

    def test_variables_are_the_sandboxs_and_the_calls(self):
        read = {"python": "import os; print(os.environ.get('{}'))", "js": "console.log(process.env.{} ?? 'None')", "bash": "echo ${{{}-None}}"}
        for language, code in read.items():
            with self.subTest(language):
                ask = lambda name, **options: self.shown(code.format(name), language=language, **options)
                self.assertEqual(ask("GLOBAL"), ["of the sandbox\n"])
                self.assertEqual(ask("GLOBAL", env_vars={"GLOBAL": "of the call"}), ["of the call\n"])
                self.assertEqual(ask("GLOBAL"), ["of the sandbox\n"])
                self.assertEqual(ask("OWN", env_vars={"OWN": "it's \"quoted\""}), ["it's \"quoted\"\n"])
                self.assertEqual(ask("OWN"), ["None\n"])

    def test_contexts_are_made_listed_restarted_and_removed(self):
        context = self.ask("POST", "/contexts", {"language": "python", "cwd": "/tmp"})
        self.assertEqual((context["language"], context["cwd"]), ("python", "/tmp"))
        path = f"/contexts/{context['id']}"
        self.assertIn(context, self.ask("GET", "/contexts"))
        self.assertEqual(self.shown("import os; mine = 1; os.getcwd()", context_id=context["id"]), ["/tmp"])
        self.assertIsNone(self.ask("POST", f"{path}/restart"))
        self.assertEqual(self.shown("mine", context_id=context["id"]), ["name 'mine' is not defined"])
        self.assertIsNone(self.ask("DELETE", path))
        self.assertNotIn(context, self.ask("GET", "/contexts"))
        gone = f"Context {context['id']} not found"
        self.assert_status(404, gone, "DELETE", path)
        self.assert_status(404, gone, "POST", f"{path}/restart")
        self.assert_status(404, gone, "POST", "/execute", {"code": "1", "context_id": context["id"]})

    def test_what_makes_no_sense_is_refused(self):
        both = {"code": "1", "context_id": "x", "language": "python"}
        self.assert_status(400, "Only one of context_id or language can be provided", "POST", "/execute", both)
        self.assert_status(422, "code: is missing", "POST", "/execute", {})
        self.assert_status(500, "Language cobol is not available in this template", "POST", "/contexts", {"language": "cobol"})
        nowhere = "[Errno 2] No such file or directory: '/no/such'"
        self.assert_status(500, nowhere, "POST", "/contexts", {"cwd": "/no/such"})

    def test_a_client_that_hangs_up_interrupts_its_code(self):
        for language, endless in [("python", "import time\nwhile True: time.sleep(0.1)"), ("js", "while (true) {}"), ("bash", "sleep 600")]:
            with self.subTest(language):
                answer = self.open("POST", "/execute", {"code": endless, "language": language})
                answer.readline()
                answer.close()
                code = {"python": "print('free')", "js": "console.log('free')", "bash": "echo free"}[language]
                self.assertEqual(self.shown(code, language=language), ["free\n"])

    def test_silence_is_filled(self):
        self.assertIn({"type": "keepalive"}, self.run_code("import time; time.sleep(6)"))

    def test_a_kernel_that_ends_is_told_and_started_again(self):
        for language, code in [("python", "import os; os._exit(1)"), ("js", "process.exit(1)")]:
            with self.subTest(language):
                context = self.ask("POST", "/contexts", {"language": language})
                error = self.run_code(code, context_id=context["id"])[-1]
                self.assertEqual(error["name"], "UnexpectedEndOfExecution")
                self.assertEqual(self.shown("1 + 1", context_id=context["id"]), ["2"])
                self.ask("DELETE", f"/contexts/{context['id']}")

    def test_a_restart_ends_what_runs(self):
        context = self.ask("POST", "/contexts", {})
        answer = self.open("POST", "/execute", {"code": "import time; time.sleep(600)", "context_id": context["id"]})
        answer.readline()
        self.ask("POST", f"/contexts/{context['id']}/restart")
        lines = [json.loads(line) for line in answer]
        self.assertEqual([line.get("name") for line in lines if line["type"] == "error"], ["ContextRestarting"], lines)
        self.ask("DELETE", f"/contexts/{context['id']}")

    def test_data_frames_and_figures_are_data_too(self):
        frame = "import pandas as pd\npd.DataFrame({'n': [1, 2], 'at': pd.to_datetime(['2026-01-02', None])})"
        (result,) = [line for line in self.run_code(frame) if line["type"] == "result"]
        self.assertEqual(result["data"], {"n": [1, 2], "at": ["2026-01-02T00:00:00", None]})
        self.assertIn("<table", result["html"])
        figure = "import matplotlib.pyplot as plt\nplt.bar(['a', 'b'], [1, 2])\nplt.title('Bars')\nplt.show()"
        (result,) = [line for line in self.run_code(figure) if line["type"] == "result"]
        self.assertTrue(result["png"].startswith("iVBOR"))
        self.assertFalse(result["is_main_result"])
        self.assertEqual((result["chart"]["type"], result["chart"]["title"]), ("bar", "Bars"))


if __name__ == "__main__":
    unittest.main()
