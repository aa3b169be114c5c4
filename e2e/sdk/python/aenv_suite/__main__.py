"""Runs every test module and ends with `N passed, N failed, N skipped`, also into the file named by --report."""

import argparse
import pathlib
import sys
import unittest

from . import support


def main() -> int:
    parser = argparse.ArgumentParser(prog="aenv_suite")
    parser.add_argument("--report", type=pathlib.Path, help="file for the closing line")
    parser.add_argument("-k", dest="filter", action="append", help="only tests whose name contains this")
    options = parser.parse_args()

    loader = unittest.TestLoader()
    if options.filter:
        loader.testNamePatterns = [f"*{part}*" for part in options.filter]
    here = pathlib.Path(__file__).parent
    suite = loader.discover(str(here), top_level_dir=str(here.parent))
    try:
        result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(suite)
    finally:
        support.close()

    failed = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    skipped = len(result.skipped)
    # An error while loading a module or setting a class up is no test that ran, but it is a failure.
    passed = max(result.testsRun - failed - skipped, 0)
    line = f"{passed} passed, {failed} failed, {skipped} skipped"
    if options.report:
        options.report.write_text(line + "\n")
    print(line)
    return 0 if failed == 0 and passed > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
