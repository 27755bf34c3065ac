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

# What is called of the package, by module.
NEEDED = {
    "model": (*("BasicsTransformerLM", "Embedding", "Linear", "RMSNorm", "scaled_dot_product_attention"),),
    "nn_utils": ("cross_entropy",),
    "optimizer": ("AdamW",),
}

_PROGRAM = Path(__file__).parents[1]

# The name by which ours says that it is made for this program.
_MARK = "MADE_FOR_CS336SYS"


@dataclass(frozen=True)
class CoursePackage:
    """A package ``cs336_basics``.

    Attributes:
        folder: of its modules.
        is_ours: whether it is the one that comes with this program.
    """

    folder: Path
    is_ours: bool

    @property
    def name(self) -> str:
        """``ours``, or the folder that holds it and the digest of its modules."""
        if self.is_ours:
            return "ours"
        total = hashlib.sha256()
        for file in sorted(self.folder.rglob("*.py")):
            total.update(f"{file.relative_to(self.folder).as_posix()}\0".encode() + file.read_bytes())
        return f"{self.folder.parent.name}/{self.folder.name} {total.hexdigest()[:12]}"

    def lacking(self) -> list[str]:
        """List what is called of the package and not in it; raise a UsageError for a module that is no Python."""
        lacking = []
        # Not looked for elsewhere: where an editable install of ours would add it, two packages would be mixed.
        for module, names in NEEDED.items():
            file = self.folder / f"{module}.py"
            if not file.is_file():
                lacking.append(f"module {module}")
                continue
            try:
                defined = _defined_by(file.read_bytes(), str(file.absolute()))
            except (SyntaxError, ValueError) as error:
                raise _line_refusal(error, self.folder, file, getattr(error, "lineno", None) or 1) from None
            if defined is not None:
                lacking += [f"{module}.{name}" for name in names if name not in defined]
        return lacking

    def require_needed(self) -> None:
        """Raise a UsageError that names what it lacks, or the line that is no Python."""
        if lacking := self.lacking():
            raise UsageError(
                f"the cs336_basics in {self.folder.parent} is not of the shape that this program trains, it has no "
                f"{', '.join(lacking)}: take it off PYTHONPATH and give its model by --model "
                "(documentation: your_model)"
            )


@contextlib.contextmanager
def telling_import_errors() -> Iterator[None]:
    """Within this, what ``cs336_basics`` raises, ours or the user's, is told in one sentence.

    Raises:
        UsageError: in place of that error; the sentence names its line.
    """
    try:
        yield
    except Exception as error:
        place = line_in_package(error)
        if place is None:
            raise
        raise _line_refusal(error, *place) from (error if DEBUG_VARIABLE in os.environ else None)


def line_in_package(error: BaseException, before: Sequence[str] = ()) -> tuple[Path, Path, int] | None:
    """Return the folder of ``cs336_basics``, and its file and line that raised; None if this program or a compiler did.

    Args:
        before: folders that are looked at before those of ``sys.path``.
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
    """The first folder on ``sys.path`` with such a package, also one without ``__init__.py``; None if it is elsewhere.

    Python itself takes a package with that file before one without, wherever they are.

    Args:
        before: folders that are looked at before those of ``sys.path``.
    """
    folders = (Path(entry) / PACKAGE for entry in (*before, *sys.path))
    return next((folder for folder in folders if any(folder.glob("*.py")) or any(folder.glob("*/*.py"))), None)


def course_package() -> CoursePackage:
    """The package that an import would find.

    Raises:
        UsageError: there is none, or it is no folder of modules.
    """
    folder = first_folder()
    if folder is None:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or spec.origin is None:
            raise UsageError(f"there is no package {PACKAGE}: install cs336sys from its wheel or its whole repository")
        folder = Path(spec.origin).parent
    return CoursePackage(folder, _MARK in (_defined(folder / "__init__.py") or ()))


def set_aside_others() -> None:
    """Take folders off ``sys.path`` whose package this program cannot train, until ours comes first.

    For a model of the user's, which may lie next to a package of the user's, as of ``python -m`` in its folder. What
    is loaded for it finds that package again.
    """
    while (folder := first_folder()) is not None:
        if not CoursePackage(folder, is_ours=False).lacking():
            return
        package_paths = [entry for entry in sys.path if Path(entry) / PACKAGE == folder]
        sys.path[:] = [entry for entry in sys.path if entry not in package_paths]


def _defined(file: Path) -> frozenset[str] | None:
    """The names that a module has when it is imported; None where that cannot be read off it."""
    try:
        return _defined_by(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


# Each workload of a sweep asks.
@functools.lru_cache(maxsize=16)
def _defined_by(source: bytes, name: str = "<unknown>") -> frozenset[str] | None:
    names = set()
    tree = ast.parse(source, name)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return None if "*" in names else frozenset(names)
