"""Which files a write-up is made from: results, and what pytest says of the course's tests."""

import glob
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from cs336sys.commands.invocation.faults import say
from cs336sys.errors import UsageError
from cs336sys.results import Results, read_results

# What is looked for in folders, and taken of a pattern's matches.
_RESULTS = ("*.jsonl", "*.jsonl.gz", "*.xml")


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


def read_sources(files: Sequence[Path]) -> tuple[list[Results], dict[str, str]]:
    """The results, and the outcomes of tests by their names.

    Raises:
        UsageError: a file cannot be read, or holds neither.
    """
    results: list[Results] = []
    tests: dict[str, str] = {}
    for path in files:
        if path.suffix == ".xml":
            outcomes = _outcomes(path)
            contradicted = [name for name in outcomes if tests.get(name, outcomes[name]) != outcomes[name]]
            if contradicted:
                listed = ", ".join(contradicted)
                say(f"warning: {path}: says otherwise of {listed} than a file before it; the later one counts")
            tests |= outcomes
            continue
        read = read_results(path)
        if read.passed_over:
            lines = "1 line is" if read.passed_over == 1 else f"{read.passed_over} lines are"
            say(f"warning: {path}: {lines} cut or no record of results, and passed over")
        results.append(read)
    return results, tests


def _outcomes(path: Path) -> dict[str, str]:
    """``passed``, ``failed`` or ``skipped`` by test, of a file that ``pytest --junitxml`` has written."""
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError) as error:
        raise UsageError(f"cannot read the tests' outcomes from {path}: {error}") from error
    if not cases:
        raise UsageError(f"{path} holds no test's outcome: it should be a file written by pytest --junitxml")
    outcomes = {}
    for case in cases:
        kinds = {child.tag for child in case}
        failed = bool(kinds & {"failure", "error"})
        outcomes[case.get("name", "")] = "failed" if failed else "skipped" if "skipped" in kinds else "passed"
    return outcomes
