"""Every column of every table is explained in docs/columns.md, and nothing else is.

The page is written by hand, not generated from the tables: 300 rows explain the 600 names of 710 columns, several at
once by one formula, in the order in which a reader needs them. A text at each column would say most of them twice.
"""

import ast
import functools
import os
import re
from dataclasses import MISSING
from pathlib import Path

from cs336sys.settings.fields import Configured
from cs336sys.settings.operations import AttentionWorkload, CollectiveWorkload, KernelWorkload
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.profiling import LossWorkload, MemoryWorkload, ProfileWorkload

ROOT = Path(__file__).resolve().parents[2]

# In which sections a file's columns are explained, next to those that all files share.
SHARED = ("Cells",)
SECTIONS = {
    "commands/allreduce/tables.py": ("allreduce",),
    "commands/attention/tables.py": ("flash and attn",),
    "commands/bench/tables.py": ("bench",),
    "commands/compare/tables.py": ("compare",),
    "commands/ddp/tables.py": ("ddp",),
    "commands/kernels/tables.py": ("kernels",),
    "commands/losses/tables.py": ("losses",),
    "commands/precision/options.py": ("precision",),
    "commands/rank_training/tables.py": ("Speed and memory by ranks", "ddp", "shard"),
    "commands/shard/tables.py": ("shard", "shard --board", "ddp"),
    "tables/titles.py": ("bench",),
    "commands/tune/tables.py": ("tune", "account", "bench"),
    "commands/verify/tables.py": ("verify", "ddp", "bench"),
    "commands/account/": ("account",),
    "commands/memprof/": ("memprof", "bench"),
    "tables/predictions.py": ("account",),
    "commands/trace/kernel_tables.py": ("nsys", "trace"),
    "commands/trace/": ("trace",),
    "commands/nsys/": ("nsys",),
    "commands/doctor/options.py": ("doctor and report --dry-run",),
    "commands/report/handouts.py": ("doctor and report --dry-run",),
}
# Built from other tables' columns, from settings, or from names that the user's files have.
COMPUTED = {
    "commands/compare/tables.py": 1,
    "commands/report/answer.py": 1,
    "commands/trace/kernel_tables.py": 1,
    "commands/trace/tables.py": 1,
    "tables/table.py": 1,
    "tables/saved.py": 1,
    "tables/titles.py": 2,
}
# Tables of settings, by the words that begin them; those of cells that train stand in the first alone.
KINDS = {
    "cells that train": (LossWorkload, ProfileWorkload, MemoryWorkload),
    "kernels": (KernelWorkload,),
    "flash and attn": (AttentionWorkload,),
    "allreduce": (CollectiveWorkload,),
    "ddp and shard": (ParallelWorkload,),
}
END = "<!-- end -->"


def settings_rows(kinds: tuple[type[Configured], ...]) -> str:
    """Return a table of settings, a row a field that has an option."""
    trained = {} if MemoryWorkload in kinds else MemoryWorkload.settings()
    rows = ["| setting | default | |", "|---|---|---|"]
    for name, member in (item for kind in kinds for item in kind.settings().items()):
        value = member.default if member.option_default is None else member.option_default
        default = {"None": "", str(MISSING): "", "True": "yes", "False": "no"}.get(str(value), value)
        default = f"{value:g}" if isinstance(value, float) else default
        text = (member.help or ", ".join(member.choices)).removesuffix(" Default: by size.")
        row = f"| `{name}` | {'by size' if member.is_by_size else member.shown_default or default} | {text} |"
        if text and row not in rows and trained.get(name) != member:
            rows.append(row)
    return "\n".join(rows)


def test_tables_of_settings_are_those_of_their_fields():
    path = ROOT / "docs/columns.md"
    text = path.read_text()
    for words, kinds in KINDS.items():
        marker = f"<!-- settings of {words}: CS336SYS_WRITE_DOCS=1 pytest tests/tables/test_columns.py -k settings -->"
        before, _, rest = text.partition(marker)
        text = f"{before}{marker}\n{settings_rows(kinds)}\n{END}{rest.partition(END)[2]}"
    if os.environ.get("CS336SYS_WRITE_DOCS"):
        path.write_text(text)
    assert path.read_text() == text


def explained() -> dict[str, set[str]]:
    """Names in the first column of the page's tables, by section."""
    sections: dict[str, set[str]] = {}
    for part in re.split(r"^## ", (ROOT / "docs/columns.md").read_text(), flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        rows = [line.split("|")[1] for line in body.splitlines() if line.startswith("| ")]
        sections[heading.replace("`", "")] = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    return sections


@functools.cache
def columns() -> list[tuple[str, str | None, int]]:
    """File, pattern of the key and line of each column that the package makes; None for a key that is computed."""
    found: list[tuple[str, str | None, int]] = []
    for path in sorted((ROOT / "cs336sys").rglob("*.py")):
        text, file = path.read_text(), path.relative_to(ROOT / "cs336sys").as_posix()
        for node in ast.walk(ast.parse(text)) if "Column(" in text or "named_columns(" in text else ():
            function = getattr(node.func, "id", None) if isinstance(node, ast.Call) else None
            if function == "named_columns":
                named = [keyword.arg for keyword in node.keywords if keyword.arg != "spread"]
                keys = [pattern_of(getattr(getattr(key, "value", None), "elt", key)) for key in node.args]
                found += [(file, key, node.lineno) for key in (*keys, *named)]
            elif function == "Column":
                found.append((file, pattern_of(node.args[0]), node.lineno))
    return found


def pattern_of(key: ast.expr) -> str | None:
    if isinstance(key, ast.Constant):
        return str(key.value)
    if isinstance(key, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else r"\w+" for part in key.values)
    return None


def sections_of(file: str) -> tuple[str, ...]:
    return next((names for start, names in SECTIONS.items() if file.startswith(start)), ())


def test_every_column_is_explained_in_its_section():
    by_section = explained()
    unexplained, computed = [], {}
    for file, key, line in columns():
        if key is None:
            computed[file] = computed.get(file, 0) + 1
        elif not any(
            re.fullmatch(key, name) for section in (*SHARED, *sections_of(file)) for name in by_section[section]
        ):
            unexplained.append(f"{file}:{line} {key}")
    assert unexplained == []
    assert computed == COMPUTED


def test_every_explained_column_is_in_the_code():
    keys = [key for _, key, _ in columns() if key is not None]
    # Parts of keys that a table puts together, and names of sub-commands and saved columns.
    paths = (path for kind in ("*.py", "*.jinja") for path in (ROOT / "cs336sys").rglob(kind))
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in paths)))
    names = set().union(*explained().values())
    assert sorted(name for name in names - words if not any(re.fullmatch(key, name) for key in keys)) == []
