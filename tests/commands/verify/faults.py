"""A catalogue of mistakes in parallel training, each planted in a wrap that is right without it."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

FOLDER = Path(__file__).parent
DATA, SHARDED, LAYERS = (f"{FOLDER}/{name}_faults.py" for name in ("data", "sharded", "layer"))

# Where such mistakes were found: issues of public repositories, or the class of mistakes that their reviews name.
MEAN = "a missing or double mean: the ratio is the number of ranks, or its inverse"
LEFT_OUT = "a parameter left out of a bucket, a unit or an optimizer"
COMPOSED = "NVIDIA/Megatron-LM#7452: silently wrong gradients in compositions of parallelism"
CONTEXT = "NVIDIA/Megatron-LM#1464: dQ, dK, dV wrong under context parallelism"
GROUP = "ByteDance-Seed/VeOmni#1115: gradients summed over the data ranks alone under sequence parallelism"
RESUMED = "pytorch/torchtitan#1136: training differs after resuming"
EARLY = "a bucket sent before its last gradient"
STALE = "a stale gather"
REPLICATED = "a replicated part that is not averaged"
LOCAL_NORM = "clipping by a local norm"
SEEDS = "dropout seeds of ranks"
BUFFER = "a buffer that is not broadcast"
RACE = "pytorch's FSDP2 tests: delays of 100 ms at four places"
MISMATCH = "gradients ready in another order, or unused, on one rank"


@dataclass(frozen=True)
class Fault:
    """A wrap with a mistake.

    Attributes:
        wrap: ``FILE.py:NAME``.
        cases: in which it shows, next to the plain step.
        causes: what a right diagnosis says.
        source: where it was found.
        is_quick: whether the default suite has it.
    """

    wrap: str
    cases: tuple[str, ...]
    causes: tuple[str, ...]
    source: str
    mesh: str = "data"
    world_size: int = 2
    model: str | None = None
    is_quick: bool = False

    @property
    def name(self) -> str:
        return self.wrap.rpartition(":")[2]


def _fault(file, name, causes, source, cases=(), mesh="data", **settings):
    return Fault(f"{file}:{name}", tuple(cases), tuple(causes.split(",")), source, mesh, **settings)


def _layers(name, causes, source, mesh, cases=(), **settings):
    return _fault(LAYERS, name, causes, source, cases, mesh, **settings)


_data, _sharded = partial(_fault, DATA), partial(_fault, SHARDED)


FAULTS = (
    _data("Summed", "not averaged", MEAN, is_quick=True),
    _data("AveragedTwice", "averaged twice", MEAN),
    _data("DividedAlone", "not synchronized", MEAN),
    _data("nothing_sent", "not synchronized", REPLICATED),
    _data("NormsLeftOut", "not synchronized", LEFT_OUT),
    _data("LastRanksGradient", "one rank's", REPLICATED, is_quick=True),
    _data("NotWaited", "not waited for,race", RACE),
    _data("OneStepLate", "stale gradient", STALE, is_quick=True),
    _data("SentBeforeComplete", "not synchronized,not waited for,too early", EARLY),
    _data("LastLeftOut", "not synchronized", LEFT_OUT),
    _data("FirstRanksGradient", "one rank's", REPLICATED),
    _data("InputsReversed", "wrong inputs", "a sampler that is not told its rank"),
    _data("SwappedInBucket", "mixed up", COMPOSED),
    _data("AddedAtEachMicroBatch", "accumulation", MEAN, ["accumulation"]),
    _data("NeverInEvaluation", "evaluation", COMPOSED, ["evaluation"]),
    _data("GradientsKept", "stale gradient", STALE),
    _data("WithoutOptimizerState", "resume", RESUMED, ["save"], is_quick=True),
    _data("UnusedCounted", "unused", MISMATCH, ["unused"]),
    _data("UnusedNotSent", "hang,died,unused", MISMATCH, ["unused"]),
    _data("unfreezes", "frozen", COMPOSED, ["frozen"]),
    _data("NotBroadcast", "not broadcast", BUFFER, ["start"], is_quick=True),
    _data("BuffersNotBroadcast", "not broadcast", BUFFER, ["start"], model=f"{DATA}:buffered"),
    _data("same_masks", "dropout", SEEDS, ["dropout"], model=f"{DATA}:dropping"),
    _data("half_of_the_ranks", "rank left out", REPLICATED, world_size=4),
    _data("CountedCalls", "checkpoint", COMPOSED, ["checkpoint"]),
    _data("WaitsBySleeping", "race,not waited for", RACE, ["late"]),
    _data("optimizer_of_half", "left out", LEFT_OUT),
    _data("FewerCollectivesOnOne", "hang,died,not synchronized", MISMATCH),
    _data("OtherOrderOnOne", "hang,died,mixed up", MISMATCH),
    _data("rank_dies", "died", MISMATCH),
    _data("raises", "raises", MISMATCH),
    _sharded("fsdp_summed", "not averaged", MEAN),
    _sharded("fsdp_divided_twice", "averaged twice", MEAN),
    _sharded("fsdp_never_sent", "left out", COMPOSED),
    _sharded("fsdp_head_ignored", "not synchronized", LEFT_OUT),
    _sharded("fsdp_blocks_alone", "not synchronized", LEFT_OUT, is_quick=True),
    _sharded("ZeroNotSent", "not sent", STALE, is_quick=True),
    _sharded("ZeroSentByNext", "not sent,left out", STALE),
    _sharded("ZeroClipsOwn", "clipping", LOCAL_NORM, ["clipping"], is_quick=True),
    _sharded("flat_other_slice", "optimizer,mixed up", "another rank's slice on load or update"),
    _sharded("flat_off_by_one", "optimizer,mixed up", "another rank's slice on load or update"),
    _sharded("flat_weights_late", "stale weights", STALE, is_quick=True),
    _layers("tensor_not_added", "partial sum", COMPOSED, "tensor", is_quick=True),
    _layers("tensor_gradient_not_added", "partial sum", COMPOSED, "tensor", is_quick=True),
    _layers("tensor_gradient_added_twice", "scaled", COMPOSED, "tensor", is_quick=True),
    _layers("tensor_averaged", "partial sum,scaled,forward", COMPOSED, "tensor"),
    _layers("tensor_rows_of_next", "wrong slices", "another rank's slice on load or update", "tensor"),
    _layers("tensor_first_slices", "wrong slices", "another rank's slice on load or update", "tensor"),
    _layers("tensor_residual_in_sum", "forward", COMPOSED, "tensor"),
    _layers("context_keys_not_gathered", "forward", CONTEXT, "context"),
    _layers("context_order_reversed", "forward", CONTEXT, "context"),
    _layers("context_gradient_not_given", "partial sum", CONTEXT, "context", is_quick=True),
    _layers("context_not_averaged", "partial sum,not synchronized", GROUP, "context"),
    _layers("context_summed", "not averaged", CONTEXT, "context"),
    _layers("context_own_slice_of_next", "forward", CONTEXT, "context"),
    _layers("pipeline_without_gradient", "left out,partial sum", COMPOSED, "pipeline"),
    _layers("pipeline_gradient_halved", "averaged twice,scaled", COMPOSED, "pipeline"),
    _layers("pipeline_block_left_out", "forward,left out", COMPOSED, "pipeline"),
)

# Right ones, with the cases that they are made for: slices cut by hand have no norm of torch's, stages no tied weights,
# and the flat trainer neither counts sequences nor saves.
_ALL = ("step", "clipping", "uneven", "tied", "save")
_BY_HAND = ("step", "uneven", "save")
RIGHT = (
    (f"{DATA}:right", "data", _ALL),
    (f"{DATA}:right_trainer", "data", _ALL),
    (f"{DATA}:right_holder", "data", ("step", "save")),
    (f"{SHARDED}:right_fsdp", "data", _ALL),
    (f"{SHARDED}:right_zero", "data", ("step", "clipping", "uneven", "tied")),
    (f"{SHARDED}:right_flat", "data", ("step", "tied")),
    (f"{LAYERS}:right_tensor", "tensor", _BY_HAND),
    (f"{LAYERS}:right_context", "context", _ALL),
    (f"{LAYERS}:right_pipeline", "pipeline", _BY_HAND),
)

# Right ones in a lower precision.
LESS_PRECISE = (
    (f"{DATA}:SentInBf16", "bfloat16", ("step", "save-ranks")),
    (f"{SHARDED}:fsdp_reduces_in_bf16", "bfloat16", ("step",)),
    (f"{DATA}:updated_in_float32", "float32", ("step",)),
)

# What the default suite has of both.
REPRESENTATIVE = {f"right{kind}" for kind in ("", "_holder", "_fsdp", "_tensor", "_context", "_pipeline")}
REPRESENTATIVE |= {"SentInBf16", "updated_in_float32"}
