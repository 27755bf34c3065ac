"""The problems that are arithmetic alone: the XXL model, ring collectives, when links bound parallel training."""

import re
from collections.abc import Callable, Sequence

from cs336sys.accounting.communication import ring_answers
from cs336sys.accounting.derivation import Derived
from cs336sys.accounting.hardware import peak_tflops
from cs336sys.accounting.parallelism import TP_BACKWARD, Layer, Mesh, parallelism_answers
from cs336sys.accounting.xxl import XXL, TpuMesh, batch_answers, memory_answers
from cs336sys.report.course.answer import Answer, plain_table
from cs336sys.sizes import SIZES

# As `account xxl` and `account parallel` have them, where the handout gives no number.
_TOKENS = 4 * 512
_LAYER_TOKENS, _DEVICES, _LINK_BYTES_PER_S = 131_072, 8, 450e9

# For 2D parallelism of two axes, so that both communicate.
_MESHES = {
    "dp": Mesh(fsdp=_DEVICES),
    "fsdp": Mesh(fsdp=_DEVICES),
    "tp": Mesh(tp=_DEVICES),
    "fsdp-tp": Mesh(fsdp=4, tp=2),
}


def _answer_of(
    question: str, derive: Callable[[], Sequence[Derived]], *before: str, **numbers: object
) -> Callable[[Answer], None]:
    """The derived values that are marked as a part's answers, as sentences and as a table, after a block of numbers."""

    def answered(answer: Answer) -> None:
        derived = derive()
        steps = _with_definitions([value for value in derived if value.question == question], derived)
        for name in before:
            answer.write(f"calculations.{name}", **{"tokens": None, "layer": None, **numbers})
        problem = question.partition(" ")[0]
        answer.derive(steps, problem, f"{problem}: all steps", say=steps)

    return answered


def _with_definitions(answers: Sequence[Derived], derived: Sequence[Derived]) -> list[Derived]:
    """The answers, and before them what no question asks for and their formulas name."""
    chosen = list(answers)
    for definition in reversed(derived[: derived.index(answers[0])] if answers else []):
        named = re.compile(rf"(?<!\w){re.escape(definition.symbol)}(?!\w)")
        is_named = any(named.search(other.expression.formula) for other in chosen)
        if definition.symbol and not definition.question and is_named:
            chosen.insert(0, definition)
    return chosen


def xxl(letter: str) -> Callable[[Answer], None]:
    before = {"a": ["numbers"], "b": ["numbers"], "d": ["what_lowers_the_batch"]}.get(letter, [])

    def derived() -> list[Derived]:
        if letter in "ab":
            return memory_answers(XXL, _TOKENS, 80e9, 95e9)
        return batch_answers(XXL, TpuMesh(16, 4, 2, 1, 4.6e14, 2 * 9e10))

    return _answer_of(f"communication_accounting ({letter})", derived, *before, tokens=_TOKENS)


ring = _answer_of("alternate_ring_all_reduce", lambda: ring_answers(1_000_000_000, _DEVICES, _LINK_BYTES_PER_S))


def parallel(problem: str, strategy: str, letters: str) -> list[Callable[[Answer], None]]:
    """The answers of these parts, the first with the numbers put in."""
    peak, size = peak_tflops("NVIDIA H200", "bf16"), SIZES["2.7b"]
    assert peak is not None
    layer = Layer(_LAYER_TOKENS, size.d_model, size.d_ff, peak * 1e12, _LINK_BYTES_PER_S, 2)

    def derived() -> list[Derived]:
        return parallelism_answers(strategy, layer, _MESHES[strategy])

    before = {letters[0]: ["numbers"]}
    return [_answer_of(f"{problem} ({each})", derived, *before.get(each, ()), layer=layer) for each in letters]


def tp_backward(answer: Answer) -> None:
    headers = {"equation": "equation", "shape": "shape", "reason": "because"}
    rows = [dict(zip(headers, row, strict=True)) for row in TP_BACKWARD]
    answer.tables.append(plain_table("tp_backward", "the backward pass of tensor parallelism", headers, rows))
    collectives = [row["equation"] for row in rows if "all-reduce" in row["equation"]]
    answer.write("calculations.tp_backward", steps=len(rows), collectives=collectives)
