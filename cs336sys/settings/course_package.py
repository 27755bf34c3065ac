"""Find whose ``cs336_basics`` Python would import, and whether it has what we call, without importing it."""

import ast
import contextlib
import functools
import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cs336sys.errors import DEBUG_VARIABLE, UsageError, lines_of, summary_of

PACKAGE = "cs336_basics"

# The names that we use of the package, by module.
NEEDED = {
    "model": ("BasicsTransformerLM", "Embedding", "Linear", "RMSNorm", "scaled_dot_product_attention"),
    "nn_utils": ("cross_entropy",),
    "optimizer": ("AdamW",),
}

_PROGRAM = Path(__file__).parents[1]

_MARK = "MADE_FOR_CS336SYS"  # The name by which ours says that it is made for this program.


@dataclass(frozen=True)
class CoursePackage:
    """A package ``cs336_basics``: the folder of its modules, and whether it is the one that comes with this program."""

    folder: Path
    is_ours: bool

    @property
    def name(self) -> str:
        """Return ``ours``, or the folder that holds the package and the digest of its modules."""
        if self.is_ours:
            return "ours"
        total = hashlib.sha256()
        for file in sorted(self.folder.rglob("*.py")):
            total.update(f"{file.relative_to(self.folder).as_posix()}\0".encode() + file.read_bytes())
        return f"{self.folder.parent.name}/{self.folder.name} {total.hexdigest()[:12]}"

    def lacking(self) -> list[str]:
        """List the modules and names of :data:`NEEDED` that it lacks; raise a UsageError for one that is no Python."""
        lacking = []
        # Looked for in its folder alone: an editable install of ours may add modules, which would mix two packages.
        for module, names in NEEDED.items():
            file = self.folder / f"{module}.py"
            if not file.is_file():
                lacking.append(f"module {module}")
                continue
            try:
                defined = _defined_names(file.read_bytes(), str(file.absolute()))
            except (SyntaxError, ValueError) as error:  # A ValueError, for a null byte, has no line.
                raise _line_refusal(error, self.folder, file, getattr(error, "lineno", None) or 1) from None
            if defined is not None:  # Else import * may bring any of them.
                lacking += [f"{module}.{name}" for name in names if name not in defined]
        return lacking

    def require_needed(self) -> None:
        """Raise a UsageError that names what the package lacks, or the line that is no Python."""
        if lacking := self.lacking():
            raise UsageError(
                f"the cs336_basics in {self.folder.parent} is not of the shape that this program trains, it has no "
                f"{', '.join(lacking)}: take it off PYTHONPATH and give its model by --model "
                "(documentation: your_model)"
            )


@contextlib.contextmanager
def telling_import_errors() -> Iterator[None]:
    """Raise a UsageError that names the line, in place of any error that ``cs336_basics``, ours or not, raises here."""
    try:
        yield
    except Exception as error:
        place = line_in_package(error)
        if place is None:
            raise
        raise _line_refusal(error, *place) from (error if DEBUG_VARIABLE in os.environ else None)


def line_in_package(error: BaseException, before: Sequence[str] = ()) -> tuple[Path, Path, int] | None:
    """Return the folder of ``cs336_basics``, and its file and line that raised; None if this program or a compiler did.

    Python would search the folders ``before`` those of ``sys.path``.
    """
    folders = [folder.absolute() for folder in (first_folder(before), course_package().folder) if folder is not None]
    for file, line in reversed(lines_of(error)):
        for folder in folders:
            if file.is_relative_to(folder):
                return folder, file, line
        if file.is_relative_to(_PROGRAM) or {"_dynamo", "_inductor"} & set(file.parts):
            break
    return None


def _line_refusal(error: Exception, folder: Path, file: Path, line: int) -> UsageError:
    where = f"{file.relative_to(folder)}, line {line}"
    return UsageError(
        f"the cs336_basics in {folder.absolute().parent} fails: {where}: {summary_of(error)}; correct it, or take it "
        "off PYTHONPATH"
    )


def first_folder(before: Sequence[str] = ()) -> Path | None:
    """Return the first folder of the package on ``before`` and ``sys.path``; None if an import hook must find it.

    Python itself takes a folder with ``__init__.py`` before one without, wherever they are; we take the first.
    """
    folders = (Path(entry) / PACKAGE for entry in (*before, *sys.path))
    return next((folder for folder in folders if any(folder.glob("*.py")) or any(folder.glob("*/*.py"))), None)


def course_package() -> CoursePackage:
    """Return the package that an import would find, or raise a UsageError where there is none with modules."""
    folder = first_folder()
    if folder is None:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or spec.origin is None:
            raise UsageError(f"there is no package {PACKAGE}: install cs336sys from its wheel or its whole repository")
        folder = Path(spec.origin).parent
    is_ours = False  # Where its __init__.py cannot be read, or lacks the mark.
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        is_ours = _MARK in (_defined_names((folder / "__init__.py").read_bytes()) or ())
    return CoursePackage(folder, is_ours)


def set_aside_others() -> None:
    """Take folders off ``sys.path`` whose package this program cannot train, until it can, or there are no more.

    A user's model may lie next to such a package, and started by ``python -m`` there, Python would import that. The
    model's loading puts its folder on the path again.
    """
    while (folder := first_folder()) is not None:
        if not CoursePackage(folder, is_ours=False).lacking():  # Which does not depend on whose it is.
            return
        package_paths = [entry for entry in sys.path if Path(entry) / PACKAGE == folder]
        sys.path[:] = [entry for entry in sys.path if entry not in package_paths]


# Each workload of a sweep asks.
@functools.lru_cache(maxsize=16)
def _defined_names(source: bytes, file: str = "<unknown>") -> frozenset[str] | None:
    """Return the names that a module has when it is imported; None where ``import *`` hides some."""
    names = set()
    for node in ast.walk(ast.parse(source, file)):  # Nested ones, too: some are in an if or a try.
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return None if "*" in names else frozenset(names)
