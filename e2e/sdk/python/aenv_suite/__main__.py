"""Runs every test module and ends with `N passed, N failed, N skipped`, also into the file named by --report.

The last test is that every public call of the SDK was made by one before, or is excluded with a reason.
"""

import argparse
import importlib.metadata
import json
import logging
import pathlib
import sys
import unittest

from . import support, surface


class Result(unittest.TextTestResult):
    """Notes what became of each test, and of the SDK calls that it made."""

    recorder = surface.Recorder()

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.calls = {}
        self.outcomes = {}
        self.reasons = {}

    def startTest(self, test):
        super().startTest(test)
        self.outcomes[test.id()] = "passed"

    def stopTest(self, test):
        super().stopTest(test)
        # Calls of a class's preparation are taken for those of its first test.
        for name in self.recorder.take():
            outcomes = self.calls.setdefault(name, {"passed": 0, "failed": 0, "skipped": 0})
            outcomes[self.outcomes[test.id()]] += 1

    def addError(self, test, error):
        super().addError(test, error)
        self.outcomes[test.id()] = "failed"

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.outcomes[test.id()] = "failed"

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self.outcomes[test.id()] = "failed"

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        test = getattr(test, "test_case", test)
        self.reasons[test.id()] = reason
        if self.outcomes.get(test.id()) != "failed":
            self.outcomes[test.id()] = "skipped"


class Surface(unittest.TestCase):
    """Not found by the loader: it looks at what the others did."""

    result = None

    def test_every_public_call_of_the_sdk_was_made_or_is_excluded(self):
        public = set(surface.public_calls())
        self.assertEqual(surface.unknown_classes(), [], "say in surface.py what these are")
        missing = sorted(name for name in public - set(self.result.calls) if not surface.is_excluded(name))
        self.assertEqual(missing, [], "no test makes these calls")
        stale = sorted(name for name in self.result.calls if name in surface.EXCLUDED)
        self.assertEqual(stale, [], "excluded, and made all the same")


def main() -> int:
    parser = argparse.ArgumentParser(prog="aenv_suite")
    parser.add_argument("--report", type=pathlib.Path, help="file for the closing line")
    parser.add_argument("--calls", type=pathlib.Path, help="file for what became of each call, as JSON")
    parser.add_argument("-k", dest="filter", action="append", help="only tests whose name contains this")
    options = parser.parse_args()

    loader = unittest.TestLoader()
    if options.filter:
        loader.testNamePatterns = [f"*{part}*" for part in options.filter]
    here = pathlib.Path(__file__).parent
    suite = loader.discover(str(here), top_level_dir=str(here.parent))
    runner = unittest.TextTestRunner(stream=sys.stdout, verbosity=2, resultclass=Result)
    result = Surface.result = runner._makeResult()
    runner._makeResult = lambda: result
    if not options.filter:
        suite.addTest(Surface("test_every_public_call_of_the_sdk_was_made_or_is_excluded"))
    # Stories of the synchronous half block the loop, and may.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    Result.recorder.start()
    try:
        runner.run(suite)
    finally:
        Result.recorder.stop()
        support.close()

    failed = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    skipped = len(result.skipped)
    # An error while loading a module or setting a class up is no test that ran, but it is a failure.
    passed = max(result.testsRun - failed - skipped, 0)
    line = f"{passed} passed, {failed} failed, {skipped} skipped"
    if options.report:
        options.report.write_text(line + "\n")
    if options.calls:
        about = {
            "packages": {"e2b": importlib.metadata.version("e2b")},
            "excluded": surface.EXCLUDED,
            "calls": {name: result.calls.get(name, {}) for name in surface.public_calls()},
            "skipped": result.reasons,
        }
        options.calls.write_text(json.dumps(about, indent=1, sort_keys=True) + "\n")
    print(line)
    return 0 if failed == 0 and passed > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
