"""Limits of the package's size and dialect, which may fall and never rise: ``limits.json`` holds them.

A figure above its limit fails, and so does one more than 2 % below it, until the limit is lowered:
``python tests/test_limits.py`` writes today's figures, where they are lower.
"""

import argparse
import ast
import collections
import functools
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "cs336sys"
LIMITS = Path(__file__).parents[1] / "limits.json"

# Identifiers that point at a thing and do not name it.
VAGUE = frozenset(
    (
        *("one", "ones", "own", "found", "told", "known", "asked", "given", "held", "what", "such", "said"),
        *("here", "there", "made", "words", "otherwise", "apart", "again", "beside", "often", "less", "wrong", "taken"),
    )
)
# Settings whose names should be compared in one place, the setting's record.
SETTINGS = frozenset(
    (
        *("strategy", "mode", "kernels", "attention", "optimizer"),
        *("checkpoint", "compile", "precision", "state_dtype", "transport"),
    )
)
LONG_FUNCTION_LINES = 60
# A short file has few identifiers, so that a single vague one would weigh as much as ten elsewhere.
SHORTEST_FILE_LINES = 60
SLACK = 0.02


@dataclass(frozen=True)
class ModuleFigures:
    """What limits count in one module; ``mentioned`` are dotted names that may be modules of the package."""

    lines: int
    vague: int
    string_comparisons: int
    long_functions: int
    mentioned: frozenset[str]
    defined: frozenset[str]


@functools.cache
def figures_of_source(source: str) -> ModuleFigures:
    tree = ast.parse(source)
    vague = string_comparisons = long_functions = 0
    mentioned = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name):
                vague += name in VAGUE
            case ast.Compare():
                string_comparisons += compares_setting_with_string(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                long_functions += node.end_lineno - node.lineno >= LONG_FUNCTION_LINES
            case ast.ImportFrom(module=str(module), names=aliases):
                mentioned |= {module} | {f"{module}.{alias.name}" for alias in aliases}
            case ast.Import(names=aliases):
                mentioned |= {alias.name for alias in aliases}
            case ast.Constant(value=str(text)) if text.startswith("cs336sys.") and ":" in text:
                # A function that a worker process looks up by name.
                mentioned.add(text.partition(":")[0])
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return ModuleFigures(
        len(source.splitlines()), vague, string_comparisons, long_functions, frozenset(mentioned), frozenset(defined)
    )


def compares_setting_with_string(node: ast.Compare) -> bool:
    """Return whether this is like ``workload.mode == "flat"`` or ``mode in ("flat", "naive")``."""
    setting = node.left.attr if isinstance(node.left, ast.Attribute) else getattr(node.left, "id", None)
    if setting not in SETTINGS:
        return False
    if not any(isinstance(side, ast.Constant | ast.Tuple | ast.Set) for side in node.comparators):
        return False
    return any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in ast.walk(node))


def read_package() -> dict[str, str]:
    """Return the source of each module by its dotted name."""
    return {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def lines_reached(start: str, modules: dict[str, ModuleFigures]) -> int:
    reached, waiting = set(), [start]
    while waiting:
        name = waiting.pop()
        # The package's own face imports everything late.
        if name not in reached and name != "cs336sys":
            reached.add(name)
            waiting += modules[name].mentioned & modules.keys()
    return sum(modules[name].lines for name in reached)


def measure(sources: dict[str, str]) -> dict[str, int]:
    """Return the figures that have limits."""
    modules = {name: figures_of_source(source) for name, source in sources.items()}
    definitions = collections.Counter(name for module in modules.values() for name in module.defined)
    bench = "cs336sys.commands.bench.options"
    figures = {
        "lines": sum(module.lines for module in modules.values()),
        "vague identifiers": sum(module.vague for module in modules.values()),
        "vague identifiers in 1,000 lines of the worst file": max(
            1000 * module.vague // max(module.lines, SHORTEST_FILE_LINES) for module in modules.values()
        ),
        "comparisons of a setting with a string": sum(module.string_comparisons for module in modules.values()),
        "lines that commands/bench reaches": lines_reached(bench, modules),
        f"functions of {LONG_FUNCTION_LINES} lines": sum(module.long_functions for module in modules.values()),
        "names defined in several modules": sum(count > 1 for count in definitions.values()),
    }
    for name, module in modules.items():
        room = f"lines of {'.'.join(name.split('.')[:2])}"
        figures[room] = figures.get(room, 0) + module.lines
    return figures


def complaints(figures: dict[str, int], limits: dict[str, int]) -> list[str]:
    """Say which figures exceed their limits, lie more than 2 % below them, or have none."""
    too_many = [
        f"{name}: {figure}, the limit is {limits.get(name, 0)}"
        for name, figure in figures.items()
        if figure > limits.get(name, 0)
    ]
    too_few = [
        f"{name}: {figures.get(name, 0)} of {limit} allowed; lower the limit: python tests/test_limits.py"
        for name, limit in limits.items()
        if figures.get(name, 0) < (1 - SLACK) * limit
    ]
    return too_many + too_few


def test_no_figure_exceeds_its_limit():
    assert not complaints(measure(read_package()), json.loads(LIMITS.read_text()))


def test_limits_never_rise():
    """No limit is above that of any version of limits.json in the history of git; the file began in tests/.

    The lines of a room may rise where code moves between rooms; all rooms together may not.
    """
    git = ["git", "-C", str(LIMITS.parent)]
    limits = json.loads(LIMITS.read_text())
    for path in (LIMITS.name, f"tests/{LIMITS.name}"):
        log = subprocess.run(
            [*git, "log", "--diff-filter=AM", "--format=%H", "--", path], capture_output=True, text=True
        )
        if log.returncode or not log.stdout:
            pytest.skip("needs the history of git")
        for commit in log.stdout.split():
            older = json.loads(subprocess.check_output([*git, "show", f"{commit}:./{path}"], text=True))
            rising = {name for name in limits.keys() & older.keys() if limits[name] > older[name]}
            assert not {name for name in rising if not name.startswith("lines of ")}, commit


PLANTED = {
    "vague identifiers": "def count(found):\n    return len(found)\n",
    "comparisons of a setting with a string": "def is_flat(workload):\n    return workload.mode == 'flat'\n",
    "lines": "\n" * 100,
    "functions of 60 lines": "def long():\n" + "    print()\n" * 60,
    "names defined in several modules": "def measure_training():\n    pass\n\n\nclass Cell:\n    pass\n",
    "lines that commands/bench reaches": "import cs336sys.commands.report.document\n",
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_exceeds_a_limit(name):
    sources = read_package()
    before = measure(sources)
    after = measure({**sources, "cs336sys.errors": sources["cs336sys.errors"] + PLANTED[name]})
    assert any(complaint.startswith(f"{name}: ") for complaint in complaints(after, before))


if __name__ == "__main__":
    # Refuses arguments, and answers --help.
    argparse.ArgumentParser(description=__doc__).parse_args()
    old = json.loads(LIMITS.read_text()) if LIMITS.exists() else {}
    today = measure(read_package())
    LIMITS.write_text(
        json.dumps({name: min(figure, old.get(name, figure)) for name, figure in today.items()}, indent=2) + "\n"
    )
