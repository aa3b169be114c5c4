"""Runs the suite and ends with `N passed, N failed, N skipped`; `--report` and `--calls` as in the other suite."""

import argparse
import importlib.metadata
import json
import pathlib
import sys
import unittest

from e2b_code_interpreter import AsyncSandbox, Sandbox

from . import test_interpreter

CALLS = ["run_code", "create_code_context", "list_code_contexts", "restart_code_context", "remove_code_context"]


def undeclared():
    """Public functions of the SDK's classes beyond those of the base SDK that the suite does not know."""
    own = lambda cls: {name for name, value in vars(cls).items() if callable(value) and not name.startswith("_")}
    return sorted((own(Sandbox) | own(AsyncSandbox)) - set(CALLS))


def main() -> int:
    parser = argparse.ArgumentParser(prog="interpreter_suite")
    parser.add_argument("--report", type=pathlib.Path, help="file for the closing line")
    parser.add_argument("--calls", type=pathlib.Path, help="file for what became of each call, as JSON")
    parser.add_argument("-k", dest="filter", action="append", help="only tests whose name contains this")
    options = parser.parse_args()
    loader = unittest.TestLoader()
    if options.filter:
        loader.testNamePatterns = [f"*{part}*" for part in options.filter]
    suite = loader.loadTestsFromModule(test_interpreter)
    try:
        result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(suite)
    finally:
        test_interpreter.close()
    failed = len(result.failures) + len(result.errors)
    skipped = len(result.skipped)
    passed = max(result.testsRun - failed - skipped, 0)
    if undeclared():
        print(f"no test makes these calls: {undeclared()}")
        failed += 1
    line = f"{passed} passed, {failed} failed, {skipped} skipped"
    if options.report:
        options.report.write_text(line + "\n")
    if options.calls:
        # Every test makes most of them: they go well together or not at all.
        outcome = {"failed": 1} if failed else {"passed": passed}
        calls = {f"{cls} (code interpreter).{name}": outcome for cls in ("Sandbox", "AsyncSandbox") for name in CALLS}
        packages = {"e2b-code-interpreter": importlib.metadata.version("e2b-code-interpreter")}
        options.calls.write_text(json.dumps({"packages": packages, "calls": calls}, indent=1) + "\n")
    print(line)
    return 0 if failed == 0 and passed > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
