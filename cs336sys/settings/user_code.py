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

HERE = "here"

# Those that have a name for as long as this process lives.
_objects: dict[str, Callable[..., Any]] = {}

TO_FILE = "write a function that builds it at module level of a file and give 'FILE.py:NAME', or the function"


def is_user_code(value: str | None) -> bool:
    """Return whether an option's value names a function of the user, and is none of our names."""
    return value is not None and ":" in value


def name_object(value: Callable[..., Any]) -> str:
    """Return the name, ``here:NAME``, of an object of this process: the same each time."""
    for reference, earlier in _objects.items():
        if earlier is value:
            return reference
    name = getattr(value, "__name__", type(value).__name__)
    reference = f"{HERE}:{name if name.isidentifier() else 'object'}_{len(_objects) + 1}"
    _objects[reference] = value
    return reference


def named_object(reference: str) -> Callable[..., Any] | None:
    """Return the object of this process that :func:`name_object` has named so; None for what is in a file."""
    return _objects.get(reference)


def split_reference(reference: str) -> tuple[str, str]:
    """File or module, and the name in it.

    Raises:
        UsageError: it is neither form.
    """
    where, _, name = reference.rpartition(":")
    if not where or not name.isidentifier() or not (is_file(where) or all(map(str.isidentifier, where.split(".")))):
        raise UsageError(f"'{reference}' names no function: write FILE.py:NAME or package.module:NAME")
    return where, name


def is_file(where: str) -> bool:
    return where.endswith(".py")


def source_file(reference: str) -> Path:
    """The file that a reference names; nothing of it is run.

    Raises:
        UsageError: there is none.
    """
    where, _ = split_reference(reference)
    if (code_object := _objects.get(reference)) is not None:
        # As Python names it in a traceback; a notebook's cell has no such file.
        code = getattr(code_object, "__code__", None)
        return Path(reference if code is None else code.co_filename)
    if is_file(where):
        if not Path(where).is_file():
            raise UsageError(f"'{reference}': there is no file {where}")
        return Path(where)
    first, *rest = where.split(".")
    spec = importlib.util.find_spec(first)
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


def read_reference(text: str) -> str:
    """Return an option's value, which names a function in a file or module that is there.

    Raises:
        UsageError: it names none.
    """
    source_file(text)
    return text


def digest(references: list[str]) -> str:
    """The files that these name, and what they import from their own folders, as 12 hexadecimal digits.

    What they import from elsewhere does not count: packages that are installed, folders put on ``sys.path``.
    """
    total = hashlib.sha256()
    for reference in sorted(set(references) & _objects.keys()):
        total.update(f"{reference} {_objects[reference]!r}\0".encode())
    references = [reference for reference in references if reference not in _objects]
    for file in sorted({source for reference in references for source in _sources(source_file(reference).resolve())}):
        total.update(f"{file.name}\0".encode() + file.read_bytes() + b"\0")
    return total.hexdigest()[:12]


def _sources(file: Path) -> set[Path]:
    """A file and those next to or below it that it imports, and they in turn; of an installed package itself alone."""
    if "site-packages" in file.parts:
        return {file}
    sources, waiting = {file}, [file]
    while waiting:
        for imported in _imported(waiting.pop(), file.parent):
            if imported not in sources:
                sources.add(imported)
                waiting.append(imported)
    return sources


def _imported(file: Path, folder: Path) -> Iterator[Path]:
    """Yield the files that a file imports from a folder, or relative to itself."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        # Whoever imports it says so.
        return
    for node in ast.walk(tree):
        names: list[str] = []
        start = folder
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            for _ in range(node.level):
                start = file.parent if start is folder else start.parent
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]
        for name in filter(None, names):
            path = start.joinpath(*name.split("."))
            for candidate in (path.with_suffix(".py"), path / "__init__.py"):
                if candidate.is_file():
                    yield candidate.resolve()
