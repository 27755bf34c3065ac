"""Functions of the user that stand in for a part of ours, named on the command line. Plain data, no torch.

``FILE.py:NAME`` names one in a file, ``package.module:NAME`` one in a module that can be imported, and ``here:NAME`` an
object that this process alone has: one of a notebook, or a closure.
"""

import ast
import hashlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cs336sys.errors import UsageError

# Objects by their ``here:NAME``, which they have for as long as this process lives.
_objects: dict[str, Callable[..., Any]] = {}

TO_FILE = "write a function that builds it at module level of a file and give 'FILE.py:NAME', or the function"


def is_user_code(value: str | None) -> bool:
    """Return whether an option's value names a function of the user, not one of our choices."""
    return value is not None and ":" in value


def name_object(value: Callable[..., Any]) -> str:
    """Return the name, ``here:NAME``, of an object of this process: the same each time."""
    for reference, earlier in _objects.items():
        if earlier is value:
            return reference
    name = getattr(value, "__name__", type(value).__name__)
    reference = f"here:{name if name.isidentifier() else 'object'}_{len(_objects) + 1}"
    _objects[reference] = value
    return reference


def named_object(reference: str) -> Callable[..., Any] | None:
    """Return the object of this process that :func:`name_object` has named so; None for a function in a file."""
    return _objects.get(reference)


def split_reference(reference: str) -> tuple[str, str]:
    """Split a reference into file or module, and the name in it, or raise a UsageError for another form."""
    where, _, name = reference.rpartition(":")
    if not where or not name.isidentifier() or not (is_file(where) or all(map(str.isidentifier, where.split(".")))):
        raise UsageError(f"'{reference}' names no function: write FILE.py:NAME or package.module:NAME")
    return where, name


def is_file(where: str) -> bool:
    return where.endswith(".py")


def source_file(reference: str) -> Path:
    """Return the file that a reference names, of which nothing is run, or raise a UsageError where there is none.

    For an object of this process, it is the file that tracebacks name, which for a notebook's cell does not exist.
    """
    where, _ = split_reference(reference)
    if reference in _objects:
        code = getattr(_objects[reference], "__code__", None)
        return Path(reference if code is None else code.co_filename)
    if is_file(where):
        if not Path(where).is_file():
            raise UsageError(f"'{reference}': there is no file {where}")
        return Path(where)
    first, *rest = where.split(".")
    spec = importlib.util.find_spec(first)  # Of the whole name, it would import the packages around the module.
    if spec is None:
        raise UsageError(f"'{reference}': there is no module {first}; a file is named with its ending, {first}.py")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not rest and spec.origin is not None and Path(spec.origin).is_file():
        return Path(spec.origin)
    for folder in folders:
        for file in (folder.joinpath(*rest).with_suffix(".py"), folder.joinpath(*rest, "__init__.py")):
            if file.is_file():
                return file
    raise UsageError(f"'{reference}': there is no module {where}")


def digest(references: list[str]) -> str:
    """Return 12 hexadecimal digits of the files that these name, and of what they import from their own folders.

    What they import from elsewhere does not count: packages that are installed, folders put on ``sys.path``.
    """
    total = hashlib.sha256()
    for reference in sorted(set(references) & _objects.keys()):
        total.update(f"{reference} {_objects[reference]!r}\0".encode())  # By its address, mostly: it may have no file.
    references = [reference for reference in references if reference not in _objects]
    for file in sorted({source for reference in references for source in _sources(source_file(reference).resolve())}):
        total.update(f"{file.name}\0".encode() + file.read_bytes() + b"\0")
    return total.hexdigest()[:12]


def _sources(file: Path) -> set[Path]:
    """Return a file, and those next to or below it that it and they import; an installed package's file alone."""
    if "site-packages" in file.parts:
        return {file}
    sources, waiting = {file}, [file]
    while waiting:
        imported = set(_imported_files(waiting.pop(), file.parent)) - sources
        sources |= imported
        waiting += imported
    return sources


def _imported_files(file: Path, folder: Path) -> Iterator[Path]:
    """Yield the files that a file imports from a folder, or relative to itself; of one that is no Python, none."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        names: list[str] = []
        start = folder
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:  # A dot is the file's folder, and each further dot the folder above.
                start = file.parents[min(node.level, len(file.parents)) - 1]
            module = node.module or ""
            # What is imported from a package may be a module of it.
            names = [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]
        for name in filter(None, names):
            path = start.joinpath(*name.split("."))
            for candidate in (path.with_suffix(".py"), path / "__init__.py"):
                if candidate.is_file():
                    yield candidate.resolve()
