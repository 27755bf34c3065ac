"""The problems that are arithmetic alone: the XXL model, ring collectives, when links bound parallel training."""

import re
from collections.abc import Callable, Sequence

from cs336sys.accounting.communication import ring_answers
from cs336sys.accounting.derivation import Derived
from cs336sys.accounting.hardware import peak_tflops
from cs336sys.accounting.parallelism import Layer, Mesh, parallelism_answers
from cs336sys.accounting.xxl import XXL, TpuMesh, batch_answers, memory_answers
from cs336sys.commands.account.tables.communication import parallel_tables
from cs336sys.commands.report.answer import Answer
from cs336sys.settings.sizes import SIZES

# The defaults of `account xxl` and `account parallel`, where the handout gives no number.
_TOKENS, _LAYER_TOKENS = 4 * 512, 131_072
_DEVICES, _LINK_BYTES_PER_S = 8, 450e9

# All devices along one axis; along two axes for 2D parallelism, so that both communicate.
_DATA_MESH = Mesh(fsdp=_DEVICES)
_MESHES = {"dp": _DATA_MESH, "fsdp": _DATA_MESH, "tp": Mesh(tp=_DEVICES), "fsdp-tp": Mesh(fsdp=4, tp=2)}


def _answer_of(
    question: str, derived: Sequence[Derived], block: str = "", **numbers: object
) -> Callable[[Answer], None]:
    """Return a function that answers ``PROBLEM (LETTER)`` by a table of its values, and a block with ``numbers``."""

    def answer_with_values(answer: Answer) -> None:
        table_name, _, _ = question.partition(" ")
        steps = _with_definitions([value for value in derived if value.question == question], derived)
        if block:
            answer.write(f"calculations.{block}", **numbers)
        answer.derive(steps, table=table_name, title=question)

    return answer_with_values


def _with_definitions(answers: Sequence[Derived], derived: Sequence[Derived]) -> list[Derived]:
    """Return the answers, and before them the values that no question asks for and that their formulas name."""
    chosen = list(answers)
    # Backwards, because a definition's formula may name earlier ones.
    for definition in reversed(derived[: derived.index(answers[0])] if answers else []):
        symbol = re.compile(rf"(?<!\w){re.escape(definition.symbol)}(?!\w)")
        is_named = any(symbol.search(other.expression.formula) for other in chosen)
        if definition.symbol and not definition.question and is_named:
            chosen.insert(0, definition)
    return chosen


def xxl(letter: str) -> Callable[[Answer], None]:
    """Return the function that answers this part of ``communication_accounting``."""
    # The numbers are the handout's; a link sends 9e10 bytes/s in each direction.
    mesh = TpuMesh(x=16, y=4, m_x=2, m_y=1, flops_per_s=4.6e14, bytes_per_s=2 * 9e10)
    if letter in "ab":  # Of memory; the other parts are of the batch.
        derived = memory_answers(XXL, _TOKENS, gpu_bytes=80e9, device_bytes=95e9)
    else:
        derived = batch_answers(XXL, mesh)
    # (c) needs no sentence.
    block = {"a": "xxl_tokens", "b": "xxl_tokens", "d": "what_lowers_the_batch"}.get(letter, "")
    return _answer_of(f"communication_accounting ({letter})", derived, block, tokens=_TOKENS)


ring = _answer_of("alternate_ring_all_reduce", ring_answers(1_000_000_000, _DEVICES, _LINK_BYTES_PER_S))


def _layer() -> Layer:
    """Return the layer that all parallel problems are computed for: one of 2.7b on H200s, as ``account parallel``."""
    tflops, size = peak_tflops("NVIDIA H200", "bf16"), SIZES["2.7b"]
    assert tflops is not None  # There is a datasheet of the H200.
    flops_per_s = tflops * 1e12
    return Layer(_LAYER_TOKENS, size.d_model, size.d_ff, flops_per_s, _LINK_BYTES_PER_S, element_bytes=2)


def parallel(problem: str, strategy: str, letters: str) -> list[Callable[[Answer], None]]:
    """Return the functions that answer these parts, the first with a sentence on the numbers put in."""
    layer, blocks = _layer(), {letters[0]: "layer"}
    derived = parallelism_answers(strategy, layer, _MESHES[strategy])
    return [_answer_of(f"{problem} ({letter})", derived, blocks.get(letter, ""), layer=layer) for letter in letters]


def tp_backward(answer: Answer) -> None:
    answer.tables += [table for table in parallel_tables(["tp"], _layer(), _DEVICES) if table.name == "tp_backward"]
