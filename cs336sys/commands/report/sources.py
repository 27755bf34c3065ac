"""Which files a write-up is made from: results, and what pytest says of the course's tests."""

import glob
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from cs336sys.bounded_files import MIB, read_chunks
from cs336sys.commands.invocation.faults import say
from cs336sys.errors import UsageError
from cs336sys.printable import printable
from cs336sys.results import Results, passed_over_words, read_results

# What is looked for in folders, and taken of a pattern's matches.
_RESULTS = ("*.jsonl", "*.jsonl.gz", "*.xml")

# The course's tests, of which there are dozens, take 20 KB.
_TESTS_BYTES = 16 * MIB

# Files that an error names one by one.
_NAMED = 5


def source_files(names: Sequence[str]) -> list[Path]:
    """Files as given, those that a pattern matches, and the results in a folder.

    Raises:
        UsageError: nothing is there.
    """
    files: list[Path] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            found = sorted(one for pattern in _RESULTS for one in path.glob(pattern))
        elif path.exists() or not glob.has_magic(name):
            found = [path]
        else:
            found = sorted(path for path in map(Path, glob.glob(name)) if any(map(path.match, _RESULTS)))
        if not found:
            raise UsageError(f"--from {name}: no results file is there; give what --save has written")
        files += found
    return list(dict.fromkeys(files))


def read_sources(files: Sequence[Path]) -> tuple[list[Results], dict[str, str], list[str]]:
    """The results, the outcomes of tests by their names, and why files could not be read.

    Raises:
        UsageError: none of the files can be read, or none holds either.
    """
    results: list[Results] = []
    tests: dict[str, str] = {}
    unread: list[str] = []
    for path in files:
        try:
            if path.suffix != ".xml":
                results.append(read_results(path))
                for sentence in passed_over_words(results[-1]):
                    say(f"warning: {path}: {sentence}")
                continue
            outcomes = _outcomes(path)
        except UsageError as error:
            unread.append(str(error))
            continue
        contradicted = [name for name in outcomes if tests.get(name, outcomes[name]) != outcomes[name]]
        if contradicted:
            listed = ", ".join(contradicted)
            say(f"warning: {path}: says otherwise of {listed} than a file before it; the later one counts")
        tests |= outcomes
    if unread and not results and not tests:
        raise UsageError(
            "; ".join(unread[:_NAMED]) + (f"; and {more} more" if (more := len(unread) - _NAMED) > 0 else "")
        )
    return results, tests, unread


def _outcomes(path: Path) -> dict[str, str]:
    """``passed``, ``failed`` or ``skipped`` by test, of a file that ``pytest --junitxml`` has written."""
    try:
        cases = list(ElementTree.fromstring(b"".join(read_chunks(path, _TESTS_BYTES))).iter("testcase"))
    except (OSError, ValueError, LookupError, ElementTree.ParseError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"cannot read the tests' outcomes from {path}: {error}") from error
    if not cases:
        raise UsageError(f"{path} holds no test's outcome: it should be a file written by pytest --junitxml")
    outcomes = {}
    for case in cases:
        kinds = {child.tag for child in case}
        failed = bool(kinds & {"failure", "error"})
        outcomes[printable(case.get("name", ""))] = (
            "failed" if failed else "skipped" if "skipped" in kinds else "passed"
        )
    return outcomes
