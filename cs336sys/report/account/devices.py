"""The tables of ``account parallel`` and ``account xxl``."""

from collections.abc import Sequence

from cs336sys.accounting.answers.parallelism import TP_BACKWARD, Mesh, parallelism_answers
from cs336sys.accounting.answers.xxl import batch_answers, memory_answers
from cs336sys.accounting.derivation import number_of
from cs336sys.accounting.parallelism import (
    PASSES,
    Layer,
    best_whole_mesh,
    communication_s,
    layer_flops,
    most_devices,
)
from cs336sys.accounting.xxl import FeedForwardStack, TpuMesh
from cs336sys.report.account.answers import answers_table
from cs336sys.report.numbers import Value
from cs336sys.report.tables import Column, Table

_TITLES = {
    "dp": "Data parallel",
    "fsdp": "Fully sharded data parallel",
    "tp": "Tensor parallel",
    "fsdp-tp": "FSDP and TP on a mesh",
}
_SETTING = (
    "Assumed: one SwiGLU layer, matrix products alone; ring collectives without latency; B counts tokens, and weights, "
    "gradients and activations all have {bytes} bytes an element (--dtype)."
)
_OVERLAP = (
    "Assumed: communication overlaps with computing, so the layer is communication-bound where K > T; the largest "
    "numbers of devices need not be whole."
)


def parallel_tables(strategies: Sequence[str], layer: Layer, devices: int, mesh: Mesh | None = None) -> list[Table]:
    """A table of answers for each strategy, and one that compares them.

    Args:
        devices: of dp, fsdp and tp, and of the fastest mesh.
        mesh: of fsdp-tp in the place of the fastest one.
    """
    tables, summary = [], []
    for strategy in strategies:
        chosen = _mesh(strategy, layer, devices, mesh)
        answers = parallelism_answers(strategy, layer, chosen)
        count = f"{chosen.fsdp} x {chosen.tp} devices" if strategy == "fsdp-tp" else f"{chosen.devices} devices"
        title = f"{_TITLES[strategy]}: B {layer.batch}, D {layer.d_model}, D_FF {layer.d_ff}, {count}"
        notes = (_SETTING.format(bytes=layer.element_bytes), _OVERLAP)
        tables.append(answers_table(strategy, title, answers, notes))
        if strategy == "tp":
            tables.append(_tp_backward())
        summary.append(_summary_row(strategy, layer, chosen))
    return [*tables, _summary(summary)] if len(summary) > 1 else tables


def _mesh(strategy: str, layer: Layer, devices: int, mesh: Mesh | None) -> Mesh:
    if strategy == "fsdp-tp":
        # The fastest forward pass, axes sharing the network as they do on one kind of links.
        return mesh or Mesh(*best_whole_mesh(layer, devices, "forward", overlapped=False))
    return Mesh(tp=devices) if strategy == "tp" else Mesh(fsdp=devices)


def _tp_backward() -> Table:
    columns = (Column("equation", "equation"), Column("shape", "shape"), Column("reason", "because"))
    rows = [dict(zip(("equation", "shape", "reason"), row, strict=True)) for row in TP_BACKWARD]
    title = "tp_calcs (a): the backward pass of tensor parallelism, on device i, given dy"
    return Table(
        "tp_backward", title, columns, rows, ("* multiplies element by element; everything else by matrices.",)
    )


def _summary_row(strategy: str, layer: Layer, mesh: Mesh) -> dict[str, Value]:
    devices = f"{mesh.fsdp} x {mesh.tp}" if strategy == "fsdp-tp" else str(mesh.devices)
    row: dict[str, Value] = {"strategy": strategy, "devices": devices}
    for which in PASSES:
        computing_s = number_of(layer_flops(layer, which, fsdp=mesh.fsdp, tp=mesh.tp) / layer.flops_per_s)
        seconds = number_of(communication_s(strategy, layer, which, fsdp=mesh.fsdp, tp=mesh.tp, overlapped=False))
        row |= {
            f"{which}_computing_ms": computing_s * 1e3,
            f"{which}_communication_ms": seconds * 1e3,
            f"{which}_bound": "communication" if seconds > computing_s else "computing",
            f"{which}_most_devices": number_of(most_devices(strategy, layer, which, overlapped=False)),
        }
    return row


def _summary(rows: Sequence[dict[str, Value]]) -> Table:
    columns = [Column("strategy", "strategy"), Column("devices", "devices")]
    for which in PASSES:
        columns += [
            Column(f"{which}_computing_ms", f"{which} computing", "ms"),
            Column(f"{which}_communication_ms", f"{which} communication", "ms"),
            Column(f"{which}_bound", f"{which} bound by"),
            Column(f"{which}_most_devices", f"{which} most devices", "value"),
        ]
    notes = ("fsdp-tp: its axes share the network. dp communicates in the backward pass alone.",)
    return Table("strategies", "The strategies beside each other", columns, rows, notes)


def xxl_tables(
    stack: FeedForwardStack,
    tokens: int,
    gpu_bytes: float,
    device_bytes: float,
    mesh: TpuMesh,
    *,
    weight_copies: bool = False,
) -> list[Table]:
    """The two tables of problem ``communication_accounting``: memory, and the batch."""
    shape = f"D {stack.d_model}, F {stack.d_ff}, {stack.num_blocks} blocks"
    copies = (
        "a bf16 copy of every weight is counted too (--weight-copies)"
        if weight_copies
        else "bf16 copies of the weights are not counted (--weight-copies counts them)"
    )
    memory_notes = (
        f"Assumed: the handout names no batch for (a) and (b); here it is {tokens} tokens on each device (--tokens).",
        f"Assumed: saved for backward is the input of each linear layer; {copies}. Buffers for bf16 gradients on their "
        "way are not counted.",
        "1 GB is 1e9 bytes.",
    )
    batch_notes = (
        "Assumed: a batch counts tokens; the forward pass alone; collectives take their bytes over the bandwidth, "
        "without the factor (n - 1) / n, as in the book.",
        "The backward pass communicates and computes twice as much along FSDP, and has the same bound.",
    )
    memory = memory_answers(stack, tokens, gpu_bytes, device_bytes, weight_copies=weight_copies)
    mesh_title = f"X {mesh.x}, Y {mesh.y}, M_X {mesh.m_x}, M_Y {mesh.m_y}"
    return [
        answers_table("memory", f"Memory: {shape}", memory, memory_notes),
        answers_table("batch", f"Compute-bound batch: {mesh_title}", batch_answers(stack, mesh), batch_notes),
    ]
