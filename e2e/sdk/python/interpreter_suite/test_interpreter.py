"""run_code and contexts, as the SDK's users have them. Kernels start slowly under emulation: tests share one sandbox."""

import asyncio
import os
import threading
import time
import unittest
import uuid

from e2b import NotFoundException, TimeoutException
from e2b_code_interpreter import AsyncSandbox, Context, Sandbox
from e2b_code_interpreter.charts import BarChart, LineChart

TEMPLATE = os.environ.get("AENV_INTERPRETER_TEMPLATE", "code-interpreter-v1")

_shared = None


def shared() -> Sandbox:
    global _shared
    if _shared is None:
        _shared = Sandbox.create(TEMPLATE, timeout=1800, envs={"GLOBAL": "of the sandbox"})
    return _shared


def close():
    if _shared is not None:
        _shared.kill()


class Interpreter(unittest.TestCase):
    def setUp(self):
        self.sandbox = shared()

    def text(self, code, **options):
        execution = self.sandbox.run_code(code, **options)
        self.assertIsNone(execution.error, execution.error)
        return execution.text

    def test_sample_what_was_defined_is_there_later(self):
        self.text("kept = 20")
        first = self.sandbox.run_code("print('out'); kept + 1")
        self.assertEqual((first.text, first.logs.stdout, first.error), ("21", ["out\n"], None))
        self.assertEqual(self.sandbox.run_code("'text'").execution_count, first.execution_count + 1)

    def test_sample_javascript_is_spoken_too(self):
        self.text("const kept = await Promise.resolve(30)", language="javascript")
        self.assertEqual(self.text("kept + 1", language="js"), "31")

    def test_other_languages(self):
        self.assertEqual(self.text("const n: number = 2; n * 2", language="typescript"), "4")
        self.assertEqual(self.sandbox.run_code("echo $((6 * 7))", language="bash").logs.stdout, ["42\n"])

    def test_output_is_handed_over_as_it_comes(self):
        lines, errors, results = [], [], []
        self.sandbox.run_code(
            "import sys\nprint('out')\nprint('err', file=sys.stderr)\n3",
            on_stdout=lines.append,
            on_stderr=errors.append,
            on_result=results.append,
        )
        self.assertEqual((lines[0].line, errors[0].line, results[0].text), ("out\n", "err\n", "3"))

    def test_an_error_is_a_result(self):
        seen = []
        execution = self.sandbox.run_code("1/0", on_error=seen.append)
        self.assertEqual((execution.error.name, execution.error.value), ("ZeroDivisionError", "division by zero"))
        self.assertIn("ZeroDivisionError", execution.error.traceback)
        self.assertEqual(seen[0].name, "ZeroDivisionError")
        thrown = self.sandbox.run_code("throw new TypeError('no')", language="js").error
        self.assertEqual((thrown.name, thrown.value), ("TypeError", "no"))

    def test_figures_are_pictures_and_charts(self):
        code = "import matplotlib.pyplot as plt\nplt.{}\nplt.title('Title')\nplt.xlabel('x')\nplt.show()"
        (bars,) = self.sandbox.run_code(code.format("bar(['a', 'b'], [1, 2])")).results
        self.assertTrue(bars.png.startswith("iVBOR"))
        self.assertIsInstance(bars.chart, BarChart)
        self.assertEqual([(bar.label, float(bar.value)) for bar in bars.chart.elements], [("a", 1), ("b", 2)])
        (line,) = self.sandbox.run_code(code.format("plot([1, 2], [3, 4], label='L')")).results
        self.assertIsInstance(line.chart, LineChart)
        self.assertEqual((line.chart.title, line.chart.x_label, line.chart.elements[0].label), ("Title", "x", "L"))

    def test_data_frames_are_tables_and_data(self):
        (frame,) = self.sandbox.run_code("import pandas as pd; pd.DataFrame({'n': [1, 2]})").results
        self.assertEqual(frame.data, {"n": [1, 2]})
        self.assertIn("<table", frame.html)

    def test_variables_are_the_sandboxs_and_the_calls(self):
        read = "import os; os.environ.get('GLOBAL')"
        self.assertEqual(self.text(read), "of the sandbox")
        self.assertEqual(self.text(read, envs={"GLOBAL": "of the call"}), "of the call")
        self.assertEqual(self.text(read), "of the sandbox")
        self.assertEqual(self.text("process.env.GLOBAL", language="js"), "of the sandbox")
        self.assertEqual(self.text("process.env.OWN", language="js", envs={"OWN": "1"}), "1")

    def test_contexts_are_apart_and_come_and_go(self):
        context = self.sandbox.create_code_context(cwd="/tmp")
        self.assertEqual((context.language, context.cwd), ("python", "/tmp"))
        self.text("mine = 1")
        self.assertEqual(self.text("import os; os.getcwd()", context=context), "/tmp")
        self.assertEqual(self.sandbox.run_code("mine", context=context).error.name, "NameError")
        self.text("theirs = 2", context=context)
        self.assertIn(context.id, [each.id for each in self.sandbox.list_code_contexts()])
        self.sandbox.restart_code_context(context)
        self.assertEqual(self.sandbox.run_code("theirs", context=context).error.name, "NameError")
        self.sandbox.remove_code_context(context)
        self.assertNotIn(context.id, [each.id for each in self.sandbox.list_code_contexts()])
        nobody = Context(str(uuid.uuid4()), "python", "/")
        for call in (self.sandbox.remove_code_context, self.sandbox.restart_code_context):
            with self.assertRaises(NotFoundException):
                call(nobody)
        with self.assertRaises(NotFoundException):
            self.sandbox.run_code("1", context=nobody)

    def test_code_that_takes_too_long_is_interrupted(self):
        with self.assertRaises(TimeoutException):
            self.sandbox.run_code("import time\nwhile True: time.sleep(0.1)", timeout=3)
        started = time.monotonic()
        self.assertEqual(self.text("1 + 1"), "2")
        self.assertLess(time.monotonic() - started, 30)

    def test_a_kernel_that_ends_is_told(self):
        context = self.sandbox.create_code_context()
        ended = self.sandbox.run_code("import os; os._exit(1)", context=context)
        self.assertEqual(ended.error.name, "UnexpectedEndOfExecution")
        self.assertEqual(self.text("1 + 1", context=context), "2")
        self.sandbox.remove_code_context(context)

    def test_sandboxes_of_one_template_are_not_alike(self):
        def drawn(sandbox):
            return sandbox.run_code("import random; random.random()").text

        other = Sandbox.create(TEMPLATE, timeout=300)
        try:
            third = Sandbox.create(TEMPLATE, timeout=300)
            try:
                self.assertNotEqual(drawn(other), drawn(third))
            finally:
                third.kill()
        finally:
            other.kill()

    def test_code_in_a_killed_sandbox_ends_with_it(self):
        sandbox = Sandbox.create(TEMPLATE, timeout=300)
        killing = threading.Timer(4, sandbox.kill)
        killing.start()
        with self.assertRaises(TimeoutException):
            sandbox.run_code("import time; time.sleep(120)")
        killing.join()

    def test_a_pause_keeps_what_was_defined(self):
        self.text("paused = 7")
        self.assertTrue(self.sandbox.pause())
        self.sandbox.connect(timeout=1800)
        self.assertEqual(self.text("paused"), "7")

    def test_sample_the_async_half(self):
        async def story():
            sandbox = await AsyncSandbox.connect(self.sandbox.sandbox_id, timeout=1800)
            await sandbox.run_code("asynchronous = 5")
            both = await asyncio.gather(
                sandbox.run_code("asynchronous + 1"), sandbox.run_code("await Promise.resolve(8)", language="js")
            )
            self.assertEqual([execution.text for execution in both], ["6", "8"])
            context = await sandbox.create_code_context()
            self.assertEqual((await sandbox.run_code("1 + 1", context=context)).text, "2")
            self.assertIn(context.id, [each.id for each in await sandbox.list_code_contexts()])
            await sandbox.restart_code_context(context)
            await sandbox.remove_code_context(context)

        asyncio.run(story())
