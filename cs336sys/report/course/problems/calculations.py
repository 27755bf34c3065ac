"""The problems that are arithmetic alone: the XXL model, ring collectives, when links bound parallel training."""

import re
from collections.abc import Callable, Sequence

from cs336sys.accounting.communication import ring_answers
from cs336sys.accounting.derivation import Derived
from cs336sys.accounting.hardware import peak_tflops
from cs336sys.accounting.parallelism import TP_BACKWARD, Layer, Mesh, parallelism_answers
from cs336sys.accounting.xxl import XXL, TpuMesh, batch_answers, memory_answers
from cs336sys.report.account.answers import answers_table
from cs336sys.report.course.evidence import Evidence
from cs336sys.report.course.problem import Answer, Handout, Part, Problem, arithmetic
from cs336sys.report.course.words import derived_sentence
from cs336sys.report.table import Column, Table
from cs336sys.sizes import SIZES

# As `account xxl` and `account parallel` have them, where the handout gives no number.
_TOKENS = 4 * 512
_LAYER_TOKENS, _DEVICES, _LINK_BYTES_PER_S = 131_072, 8, 450e9

# Of two axes, so that both communicate.
_MESH = Mesh(fsdp=4, tp=2)

Answers = Callable[[], Sequence[Derived]]


def _part(letter: str, problem: str, answers: Answers, command: Sequence[str], *before: str) -> Part:
    """One lettered part: the derived values that are marked as its answers, as sentences and as a table."""

    def answer(evidence: Evidence, handout: Handout) -> Answer:
        derived = answers()
        wanted = f"{problem} ({letter})" if letter else problem
        mine = _with_definitions([one for one in derived if one.question == wanted], derived)
        table = answers_table(problem, f"{problem}: all steps", mine)
        return Answer([*before, *map(derived_sentence, mine)], [table])

    return Part(letter, answer, lambda target: arithmetic(*command))


def _with_definitions(answers: Sequence[Derived], derived: Sequence[Derived]) -> list[Derived]:
    """The answers, and before them what no question asks for and their formulas name."""
    chosen = list(answers)
    for one in reversed(derived[: derived.index(answers[0])] if answers else []):
        named = re.compile(rf"(?<!\w){re.escape(one.symbol)}(?!\w)")
        if one.symbol and not one.question and any(named.search(other.expression.formula) for other in chosen):
            chosen.insert(0, one)
    return chosen


def _xxl_memory() -> list[Derived]:
    return memory_answers(XXL, _TOKENS, 80e9, 95e9)


def _xxl_batch() -> list[Derived]:
    return batch_answers(XXL, TpuMesh(16, 4, 2, 1, 4.6e14, 2 * 9e10))


_XXL = ("account", "xxl")
_ASSUMED = f"The handout names no batch for this; assumed are {_TOKENS} tokens on each device."
COMMUNICATION_ACCOUNTING = Problem(
    "communication_accounting",
    "Communication accounting",
    (
        _part("a", "communication_accounting", _xxl_memory, _XXL, _ASSUMED),
        _part("b", "communication_accounting", _xxl_memory, _XXL, _ASSUMED),
        _part("c", "communication_accounting", _xxl_batch, _XXL),
        _part("d", "communication_accounting", _xxl_batch, _XXL, "What lowers the batch, each alone:"),
    ),
)


def _rings() -> list[Derived]:
    return ring_answers(1_000_000_000, _DEVICES, _LINK_BYTES_PER_S)


ALTERNATE_RING_ALL_REDUCE = Problem(
    "alternate_ring_all_reduce",
    "An alternate ring all-reduce",
    (_part("", "alternate_ring_all_reduce", _rings, ("account", "collectives")),),
)


def _layer() -> Layer:
    peak = peak_tflops("NVIDIA H200", "bf16")
    assert peak is not None
    size = SIZES["2.7b"]
    return Layer(_LAYER_TOKENS, size.d_model, size.d_ff, peak * 1e12, _LINK_BYTES_PER_S, 2)


def _numbers() -> str:
    layer = _layer()
    return (
        f"The numbers put in are those of a layer of 2.7b (D = {layer.d_model:,}, D_FF = {layer.d_ff:,}) with "
        f"B = {layer.batch:,} tokens, on H200s in bf16: C = {layer.flops_per_s / 1e12:.4g} TFLOP/s, "
        f"W = {layer.bytes_per_s / 1e9:g} GB/s."
    )


def _parallel(strategy: str) -> Answers:
    def answers() -> list[Derived]:
        layer = _layer()
        mesh = Mesh(fsdp=_DEVICES)
        if strategy == "tp":
            mesh = Mesh(tp=_DEVICES)
        elif strategy == "fsdp-tp":
            mesh = _MESH
        return parallelism_answers(strategy, layer, mesh)

    return answers


def _calculations(problem: str, title: str, strategy: str, letters: str) -> Problem:
    mesh = ("--mesh", f"{_MESH.fsdp}x{_MESH.tp}") if strategy == "fsdp-tp" else ()
    command = ("account", "parallel", "--strategy", strategy, *mesh)
    parts = [
        _part(letter, problem, _parallel(strategy), command, *([_numbers()] if letter == letters[0] else []))
        for letter in letters
    ]
    return Problem(problem, title, parts)


def _tp_backward(evidence: Evidence, handout: Handout) -> Answer:
    columns = (Column("equation", "equation"), Column("shape", "shape"), Column("reason", "because"))
    rows = [dict(zip(("equation", "shape", "reason"), row, strict=True)) for row in TP_BACKWARD]
    collective = [row for row in TP_BACKWARD if "all-reduce" in row[0]]
    sentences = [
        f"On device i, given dy, in {len(rows)} steps, of which {len(collective)} communicates: {collective[0][0]}.",
    ]
    return Answer(sentences, [Table("tp_backward", "the backward pass of tensor parallelism", columns, rows)])


DATA_PARALLEL_CALCS = _calculations("data_parallel_calcs", "Data parallel calculations", "dp", "abc")
FSDP_CALCS = _calculations("fsdp_calcs", "Fully sharded data parallel calculations", "fsdp", "abc")
_TP = _calculations("tp_calcs", "Tensor parallel calculations", "tp", "bcd")
TP_CALCS = Problem(
    "tp_calcs",
    _TP.title,
    (
        Part("a", _tp_backward, lambda target: arithmetic("account", "parallel", "--strategy", "tp")),
        *_TP.parts,
    ),
)
FSDP_TP_CALCS = _calculations("fsdp_tp_calcs", "2D parallelism calculations", "fsdp-tp", "abcd")
