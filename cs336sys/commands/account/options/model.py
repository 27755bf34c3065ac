"""``account memory``, ``activations``, ``flops`` and ``attention``: what one model needs on a device."""

from itertools import product
from pathlib import Path
from typing import Annotated

from cs336sys.accounting.sharding.step import OWN_SHARDING_STRATEGIES
from cs336sys.command_line.options import training as options
from cs336sys.command_line.options.output import OutputOptions
from cs336sys.command_line.options.reading import choice, setting, writes_file
from cs336sys.settings.sizes import ELEMENT_BYTES, MOST_RANKS, PRECISIONS
from cs336sys.settings.training import ATTENTION, MODES

_IMPLEMENTATIONS = ("eager", "flash")


def memory(
    model: options.SizeOptions = options.SizeOptions(["xl"]),
    world_size: Annotated[list[int], setting(help="Numbers of ranks.", min=1, max=MOST_RANKS)] = [2],
    strategy: Annotated[list[str], choice(OWN_SHARDING_STRATEGIES)] = list(OWN_SHARDING_STRATEGIES),
    mode: Annotated[list[str], choice(MODES)] = ["train"],
    precision: options.PrecisionOptions = options.PrecisionOptions(),
    parameter_dtype: Annotated[
        str, choice(PRECISIONS, "Of parameters and gradients; bf16 and fp16 have fp32 masters.")
    ] = "fp32",
    attention: Annotated[str, choice(ATTENTION)] = "reference",
    plot: Annotated[Path | None, writes_file(help="Also draw the peaks to this picture file.")] = None,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Memory of a rank by component, at the handout's three times and at its peak, for each way of sharing out state.

    cs336sys account memory --size xl,2.7b --world-size 2 --strategy none,optimizer,optimizer-flat,fsdp

    cs336sys account memory --size 2.7b --context 128,2048 --world-size 1 --strategy none --mode forward,train
    """
    from cs336sys.accounting.sharding.step import ShardedStep
    from cs336sys.commands.account.tables.model import plot_rank_memory, rank_memory_tables

    parameter_bytes = ELEMENT_BYTES[parameter_dtype]
    output.check(plot=plot)
    steps = []
    for size, dtype, passes, ranks, name in product(model.sizes(), precision.precisions(), mode, world_size, strategy):
        computed = dtype or size.precision  # The size's own, unless another is asked for.
        steps.append(ShardedStep(name, size, ranks, computed, attention, mode=passes, parameter_bytes=parameter_bytes))
    output.emit(rank_memory_tables(steps))
    if plot is not None:
        plot_rank_memory(steps, plot)


def activations(
    model: options.SizeOptions = options.SizeOptions(["2.7b"]),
    precision: Annotated[str, choice(PRECISIONS, f"{', '.join(PRECISIONS)} (autocast).")] = "fp32",
    attention: Annotated[str, choice(ATTENTION)] = "reference",
    output: OutputOptions = OutputOptions(),
) -> None:
    """The largest tensors of a forward pass, what one block saves for backward, and the gradients it produces there.

    cs336sys account activations --size 2.7b --context 128,512,2048
    """
    from cs336sys.commands.account.tables.model import activations_tables

    output.check()
    output.emit(activations_tables(model.sizes(), precision, attention))


def flops(model: options.SizeOptions = options.SizeOptions(["2.7b"]), output: OutputOptions = OutputOptions()) -> None:
    """FLOPs of a forward pass by component, softmax against the products of attention, and what AdamW moves.

    cs336sys account flops --size small,2.7b --context 1024
    """
    from cs336sys.commands.account.tables.model import flops_tables

    output.check()
    output.emit(flops_tables(model.sizes()))


def attention(
    batch_size: Annotated[int, setting(help="Batch size times heads.", min=1)] = 8,
    head_dim: Annotated[list[int], setting(help="Head dimensions.", min=1)] = [16, 32, 64, 128],
    context: Annotated[list[int], setting(help="Sequence lengths.", min=1)] = [256, 1024, 4096, 8192, 16384],
    dtype: Annotated[str, choice(PRECISIONS)] = "fp32",
    causal: Annotated[bool, setting("--causal/--full", help="Causal mask, or none.")] = False,
    implementation: Annotated[list[str], choice(_IMPLEMENTATIONS)] = list(_IMPLEMENTATIONS),
    capacity_gib: Annotated[float, setting(help="Memory of the GPU.", min=1e-3, max=1e6)] = 80.0,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Memory of attention alone over the handout's grid, its growth, and the smallest shape that does not fit.

    cs336sys account attention --capacity-gib 24 --causal
    """
    from cs336sys.commands.account.tables.model import attention_tables

    output.check()
    capacity = capacity_gib * 2**30
    output.emit(attention_tables(batch_size, context, head_dim, dtype, implementation, capacity, causal=causal))
