"""Find whose ``cs336_basics`` Python would import, and whether it has what we call, without importing it."""

import ast
import contextlib
import functools
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cs336sys.errors import UsageError

PACKAGE = "cs336_basics"

# What is called of the package, by module.
NEEDED = {
    "model": (*("BasicsTransformerLM", "Embedding", "Linear", "RMSNorm", "scaled_dot_product_attention"),),
    "nn_utils": ("cross_entropy",),
    "optimizer": ("AdamW",),
}

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

    def require_needed(self) -> None:
        """Raise a UsageError that names what it lacks.

        What a module lacks is not looked for elsewhere: where an editable install of ours would add it, two packages
        would be mixed.
        """
        lacking = []
        for module, names in NEEDED.items():
            file = self.folder / f"{module}.py"
            if not file.is_file():
                lacking.append(f"module {module}")
                continue
            defined = _defined(file)
            if defined is not None:
                lacking += [f"{module}.{name}" for name in names if name not in defined]
        if lacking:
            raise UsageError(
                f"the cs336_basics in {self.folder.parent} is not of the shape that this program trains, it has no "
                f"{', '.join(lacking)}: take it off PYTHONPATH and give its model by --model, see docs/your_model.md"
            )


@contextlib.contextmanager
def telling_import_errors() -> Iterator[None]:
    """Within this, what a ``cs336_basics`` of the user's raises while it is imported is told in one sentence.

    Raises:
        UsageError: in place of that error; the sentence names its line.
    """
    try:
        yield
    except Exception as error:
        folder = first_folder()
        if folder is None or CoursePackage(folder, _MARK in (_defined(folder / "__init__.py") or ())).is_ours:
            raise
        frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        if isinstance(error, SyntaxError):
            frames.append((error.filename or "", error.lineno))
        package_frames = [(Path(name), line) for name, line in frames if Path(name).is_relative_to(folder)]
        if not package_frames:
            raise
        file, line = package_frames[-1]
        message = error.msg if isinstance(error, SyntaxError) else str(error).strip().partition("\n")[0]
        raise UsageError(
            f"the cs336_basics in {folder.parent} cannot be imported: {file.relative_to(folder)}, line {line}: "
            f"{type(error).__name__}: {message}; take it off PYTHONPATH, or correct it"
        ) from error


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
        package = CoursePackage(folder, is_ours=False)
        try:
            package.require_needed()
        except UsageError:
            package_paths = [entry for entry in sys.path if Path(entry) / PACKAGE == folder]
            sys.path[:] = [entry for entry in sys.path if entry not in package_paths]
        else:
            return


def _defined(file: Path) -> frozenset[str] | None:
    """The names that a module has when it is imported; None where that cannot be read off it."""
    try:
        return _defined_by(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


# Each workload of a sweep asks.
@functools.lru_cache(maxsize=16)
def _defined_by(source: bytes) -> frozenset[str] | None:
    names = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return None if "*" in names else frozenset(names)
