"""Which cells the problem is answered from, and what they are called."""

from cs336sys.report.course.evidence import PLAIN, Evidence, Found
from cs336sys.report.course.target import Handout
from cs336sys.results import Cell

# The model that both handouts ask about.
SIZE = "2.7b"

_WITHOUT_MODE = {name: values for name, values in PLAIN.items() if name != "mode"}


def recorded(evidence: Evidence, handout: Handout, **settings) -> list[Found]:
    """Plain steps of the model at the handout's contexts, by ``memprof``."""
    # Where the longest that a handout asks for does not fit, shorter ones say what does.
    wanted = {"size": (SIZE,), "context": {*handout.memory_contexts, 128, 256, 512}}
    return evidence.find("memprof", wanted, **_WITHOUT_MODE, **{"checkpointing": ("none",), **settings})


def cells_of(found: list[Found]) -> list[Cell]:
    return [cell for group in found for cell in group.cells]


def context_of(cell: Cell) -> int:
    return cell.configuration["context"]


def step_words(cell: Cell) -> str:
    """``a training step of 2.7b at context 2048 in fp32``."""
    names = cell.configuration
    mode = {"forward": "a forward pass", "train": "a training step"}.get(names["mode"], names["mode"])
    return f"{mode} of {names['size']} at context {names['context']} in {names['precision']}"
