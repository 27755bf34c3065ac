"""``account activations``, ``flops`` and ``attention``: what one model needs on one device."""

from typing import Annotated

from cs336sys.commands.options import training as options
from cs336sys.commands.options.effects import setting
from cs336sys.commands.options.output import OutputOptions
from cs336sys.commands.options.reading import choice
from cs336sys.sizes import PRECISIONS
from cs336sys.workload import ATTENTION

_IMPLEMENTATIONS = ("eager", "flash")


def activations(
    model: options.SizeOptions = options.SizeOptions(["2.7b"]),
    precision: Annotated[str, choice(PRECISIONS, f"{', '.join(PRECISIONS)} (autocast).")] = "fp32",
    attention: Annotated[str, choice(ATTENTION)] = "reference",
    output: OutputOptions = OutputOptions(),
) -> None:
    """The largest tensors of a forward pass, what one block saves for backward, and the gradients it produces there.

    cs336sys account activations --size 2.7b --context 128,512,2048
    """
    from cs336sys.report.account.model import activations_tables

    output.check()
    output.emit(activations_tables(model.sizes(), precision, attention))


def flops(model: options.SizeOptions = options.SizeOptions(["2.7b"]), output: OutputOptions = OutputOptions()) -> None:
    """FLOPs of a forward pass by component, softmax against the products of attention, and what AdamW moves.

    cs336sys account flops --size small,2.7b --context 1024
    """
    from cs336sys.report.account.model import flops_tables

    output.check()
    output.emit(flops_tables(model.sizes()))


def attention(
    batch_size: Annotated[int, setting(help="Batch size times heads.", min=1)] = 8,
    head_dim: Annotated[list[int], setting(help="Head dimensions.", min=1)] = [16, 32, 64, 128],
    context: Annotated[list[int], setting(help="Sequence lengths.", min=1)] = [256, 1024, 4096, 8192, 16384],
    dtype: Annotated[str, choice(PRECISIONS)] = "fp32",
    causal: Annotated[bool, setting("--causal/--full", help="Mask what follows a query, or nothing.")] = False,
    implementation: Annotated[list[str], choice(_IMPLEMENTATIONS)] = list(_IMPLEMENTATIONS),
    capacity_gib: Annotated[float, setting(help="Memory of the GPU.", min=1e-3, max=1e6)] = 80.0,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Memory of attention alone over the handout's grid, its growth, and the smallest shape that does not fit.

    cs336sys account attention --capacity-gib 24 --causal
    """
    from cs336sys.report.account.model import attention_tables

    output.check()
    capacity = capacity_gib * 2**30
    output.emit(attention_tables(batch_size, context, head_dim, dtype, implementation, capacity, causal=causal))
