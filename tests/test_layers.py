"""Imports go strictly down: this walks every import statement of the package and compares it with the layers."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "cs336sys"

# The rooms of each layer, lowest first; a module may import from its own room and from lower layers. A module that is
# named here is in another layer than its room.
LAYERS = (
    {"", "errors", "findings", "settings", "processes", "results", "accounting"},
    {"machine"},
    {"run.cells"},
    {"kernels", "parallel", "timing", "capture"},
    {"board", "allocations"},
    {"training"},
    {"parity"},
    {"tables"},
    {"command_line"},
    {"run"},
    {"commands"},
    {"cli"},
    {"__main__", "api"},
)

# Within commands/ the name of a file says what it may import.
OPTIONS = re.compile(r"commands\.(\w+\.options(\.\w+)?|account(\.subcommands)?|attn|flash|show|slurm)")
TABLES = re.compile(r"commands\.\w+\.((\w+_)?tables(\.\w+)?|page|snapshots)")

# Libraries, and a room of ours, that only the named modules (or rooms) may import.
RESERVED = {
    "typer": ("command_line", "run.sweep", OPTIONS, "cli", "api"),
    "rich.table": ("tables.terminal",),
    "tabulate": ("tables.render",),
    "matplotlib": ("tables", TABLES),
    "mlflow": ("run.tracking",),
    "wandb": ("run.tracking",),
    "cs336sys.board": ("board", "training.ranks.strategies"),
    "cs336_basics": ("training",),
}

# Commands do not import each other, but for what they share: attn and flash; flash and kernels; ddp and shard, whose
# cells tune measures on ranks; cells of bench, which it measures on one device; tables of captures, of nsys and trace.
SHARED_BY_COMMANDS = (
    *("attention", "own_kernels", "rank_training", "registry", "bench.measure"),
    *("trace.kernel_tables", "trace.tables"),
)
# The write-up shows cells of every command.
SHOWS_EVERY_COMMAND = ("commands.report",)
# Importing a wrapper must not load the accounting and the workloads that describe it, but for what it computes with.
DESCRIBES_PARALLEL = ("accounting", "settings")
LENT_TO_PARALLEL = ("accounting", "accounting.sharding", "accounting.sharding.partition")

# The two backends of attention share problem.py and plan.py. The first alone here looks across, to the second:
# Hopper's backward pass begins and ends with launches of the plain kernels.
BACKENDS = ("kernels.attention.triton", "kernels.attention.hopper")
ACROSS_BACKENDS = {("kernels.attention.hopper.plans", "kernels.attention.triton.plans")}


# Records name functions of higher layers, which are imported when a cell asks for them; so does the package's face.
RECORDS = ("settings.choices", "settings.strategies")
NAMES_HIGHER = ("", *RECORDS)
# Run in a process of its own.
STARTED_BY_NAME = {("machine.diagnosis.software", "kernels.attention.native_probe")}
_DOTTED = re.compile(r"cs336sys(\.\w+)+(:\w+)?")


def late_names(source: str) -> set[str]:
    """Names of modules, and of what is in them, in a module's texts: they are imported by name, late."""
    texts = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return {text.replace(":", ".") for text in texts if isinstance(text, str) and _DOTTED.fullmatch(text)}


def imports_of(source: str) -> set[str]:
    """Dotted names that a module imports, at any depth in its code; ``from a import b`` counts as ``a`` and ``a.b``."""
    names = {prefix for name in late_names(source) for prefix in (name, name.rpartition(".")[0])}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide their layer"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def layer_of(module: str) -> int:
    room = module if any(module in rooms for rooms in LAYERS) else module.split(".")[0]
    return next(number for number, rooms in enumerate(LAYERS) if room in rooms)


def is_within(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def is_among(module: str, modules: str | re.Pattern) -> bool:
    """Return whether a module is in a room, or matches the names of one."""
    return bool(modules.fullmatch(module)) if isinstance(modules, re.Pattern) else is_within(module, modules)


def sibling_in(room: str, module: str) -> str | None:
    """The module or folder directly in the room that this module is, or is in; None outside and for the room itself."""
    below = module.removeprefix(room + ".")
    return None if below == module else below.split(".")[0]


def violations(module: str, imported: set[str], modules: set[str]) -> list[str]:
    """What is wrong with ``module`` (dotted, without the package's name) importing these names."""
    wrong = []
    for name in imported:
        for library, allowed in RESERVED.items():
            if is_within(name, library) and not any(is_among(module, room) for room in allowed):
                wrong.append(f"{module} imports {library}, which only {', '.join(map(str, allowed))} may")
        own = name.removeprefix("cs336sys").removeprefix(".")
        if not is_within(name, "cs336sys") or own not in modules:
            continue
        is_started = any(module == starter and is_within(started, own) for starter, started in STARTED_BY_NAME)
        if layer_of(own) > layer_of(module) and module not in NAMES_HIGHER and not is_started:
            wrong.append(f"{module} imports {own} from a higher layer")
        describes = any(is_within(own, room) for room in DESCRIBES_PARALLEL)
        if is_within(module, "parallel") and describes and own not in LENT_TO_PARALLEL:
            wrong.append(f"{module} imports {own}: parallel/ takes partition.py alone from accounting")
        same_layer = layer_of(own) == layer_of(module) and layer_of(module) > 0
        if same_layer and own.split(".")[0] != module.split(".")[0]:
            wrong.append(f"{module} imports {own} from beside it")
        commands = {sibling_in("commands", module), sibling_in("commands", own)}
        shows_all = any(is_within(module, room) for room in SHOWS_EVERY_COMMAND) and TABLES.fullmatch(own)
        is_shared = shows_all or any(is_within(own, f"commands.{shared}") for shared in SHARED_BY_COMMANDS)
        is_folder = MODULES[own].name == "__init__.py"
        if len(commands) == 2 and None not in commands and not is_shared and not is_folder:
            wrong.append(f"{module} imports {own}, and commands share only {', '.join(SHARED_BY_COMMANDS)}")
        backends = [next((room for room in BACKENDS if is_within(one, room)), None) for one in (module, own)]
        if None not in backends and backends[0] != backends[1] and (module, own) not in ACROSS_BACKENDS:
            wrong.append(f"{module} imports {own} from the other backend: share problem.py and plan.py")
    is_plain = layer_of(module) == 0 or OPTIONS.fullmatch(module) or TABLES.fullmatch(module)
    if is_plain and any(is_within(name, "torch") for name in imported):
        wrong.append(f"{module} is plain data, options or tables, and imports torch")
    return wrong


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(path): path for path in PACKAGE.rglob("*.py")}


def test_modules_import_only_what_their_layer_may():
    modules = set(MODULES)
    found = [line for name, path in MODULES.items() for line in violations(name, imports_of(path.read_text()), modules)]
    assert found == []


@pytest.mark.parametrize("record", RECORDS)
def test_records_import_nothing_that_they_name_and_all_of_it_exists(record):
    source = MODULES[record].read_text()
    names = late_names(source)
    assert names
    for name in names:
        owner, _, attribute = name.removeprefix("cs336sys.").rpartition(".")
        module = attribute if not owner else name.removeprefix("cs336sys.")
        if module not in MODULES:
            assert attribute in defined_in(MODULES[owner]), name
            module = owner
        assert layer_of(module) <= layer_of("training"), name
    script = f"import sys, cs336sys.{record}; print([name for name in sys.modules if name in {sorted(names)}])"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"


def defined_in(path: Path) -> set[str]:
    """Names that a module defines or imports at its top level."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name for alias in aliases}
    return names


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("settings.sizes", "import torch"),
        ("parallel.ddp", "step = import_named('cs336sys.training.step.TrainStep')"),
        ("kernels.weighted_sum", "from cs336sys.timing.phases import time_phases"),
        ("timing.phases", "def f():\n    from cs336sys.training.step import TrainStep"),
        ("run.cells", "from cs336sys.run.sweep import run_sweep"),
        ("commands.bench.options", "from cs336sys.commands.compare.options import compare"),
        ("commands.bench.options", "from rich.table import Table"),
        ("commands.bench.tables", "def f():\n    import torch"),
        ("commands.bench.measure", "from matplotlib.figure import Figure"),
        ("commands.shard.options", "from cs336sys.board.transformer_block import choose_kept"),
        ("kernels.fuse", "import cs336sys.board"),
        ("kernels.attention.triton.plans", "from cs336sys.kernels.attention.hopper.plans import HopperForwardPlan"),
        ("kernels.attention.hopper.forward", "from cs336sys.kernels.attention.triton import tiles"),
        ("parallel.buckets", "from cs336sys.settings.parallel import ParallelWorkload"),
    ],
)
def test_a_wrong_import_is_found(module, source):
    assert module in MODULES
    assert violations(module, imports_of(source), set(MODULES))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("commands.tune.measure", "from cs336sys.commands.bench.measure import training_outcome"),
        ("commands.report.answer", "from cs336sys.commands.bench.tables import bench_tables"),
        ("commands.account.subcommands", "from cs336sys.command_line.options.reading import split_list"),
        ("kernels.attention.choice", "from cs336sys.kernels.attention.hopper import settings"),
        ("kernels.attention.hopper.plans", "from cs336sys.kernels.attention.triton.plans import BackwardPlan"),
    ],
)
def test_a_right_import_passes(module, source):
    assert violations(module, imports_of(source), set(MODULES)) == []


def circles(imported: dict[str, set[str]]) -> Iterator[str]:
    """Modules that import each other, at whatever depth of their code, along any path."""
    names, done = set(imported), set()

    def reached(module: str) -> set[str]:
        found, waiting = set(), [module]
        while waiting:
            new = imported[waiting.pop()] & names - found
            found |= new
            waiting += new
        return found

    for module in sorted(names):
        if module not in done and module in (after := reached(module)):
            done |= {other for other in after if module in reached(other)}
            yield f"{module} is in a circle of {', '.join(sorted(done & after))}"


def modules_of(path: Path) -> set[str]:
    """The modules of the package that one imports; names of a package's face count as the module that it is in."""
    names = {name.removeprefix("cs336sys.") for name in imports_of(path.read_text()) if is_within(name, "cs336sys")}
    # ``from a import b`` names ``a``, too: it is meant where ``b`` is no module.
    parents = {name.rpartition(".")[0] for name in names if name in MODULES}
    return {name for name in names if name in MODULES} - parents


def test_no_module_imports_one_that_imports_it():
    imported = {module: modules_of(path) - {module} for module, path in MODULES.items() if module not in NAMES_HIGHER}
    assert list(circles(imported)) == []


def test_a_circle_is_found():
    assert list(circles({"a": {"b"}, "b": {"c", "d"}, "c": {"b"}, "d": set()})) == ["b is in a circle of b, c"]


def test_wheel_has_every_file_that_is_no_python():
    """What pages, write-ups and compiled calls read: a file that no pattern names is missing once it is installed."""
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    packed = {
        path
        for package, patterns in settings["package-data"].items()
        for pattern in patterns
        for path in (PACKAGE.parent / package.replace(".", "/")).glob(pattern)
    }
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert files <= packed


HELP = (
    "import sys, importlib, cs336sys.cli as cli\n"
    "[importlib.import_module(cli.module_of(name)) for name in cli.COMMANDS]\n"
    "print([name for name in ('torch', 'triton', 'matplotlib', 'scipy', 'tabulate') if name in sys.modules])"
)
# ``bench`` measures by this module; what only some cells need is imported by them.
PLAIN_STEP = (
    "import sys, cs336sys.commands.bench.options, cs336sys.commands.bench.measure\n"
    "late = ('cs336sys.kernels', 'cs336sys.parallel', 'cs336sys.training.cuda_graphs', 'cs336sys.run.ranks')\n"
    "print([name for name in sys.modules if name.startswith((*late, 'triton'))])"
)


@pytest.mark.parametrize("script", [HELP, PLAIN_STEP], ids=["help", "plain step"])
def test_what_is_needed_later_is_imported_later(script):
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
