"""``account step``: how long a training step should take, from work and measured rates."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

from cs336sys.accounting.step_time.prediction import PREDICTED_STRATEGIES
from cs336sys.accounting.step_time.rates import GPUS
from cs336sys.command_line.options import training as options
from cs336sys.command_line.options.output import OutputOptions
from cs336sys.command_line.options.reading import among, choice, reads_file, setting
from cs336sys.errors import UsageError
from cs336sys.settings.sizes import PRECISIONS
from cs336sys.settings.training import Workload


@dataclass(frozen=True)
class PlacementOptions:
    """How a step is cut and shared, and what it runs on."""

    checkpoint: Annotated[
        str,
        setting(
            help="none, block, every=K, nested, keep=N (fused kernels).",
            autocompletion=among(("none", "block", "every=", "nested", "keep=")),
        ),
    ] = "none"
    accumulation: Annotated[int, setting(help="Micro-batches of a step.", min=1)] = 1
    world_size: Annotated[int, setting(help="Ranks, each with a batch of its own.", min=1)] = 1
    strategy: Annotated[
        str | None,
        choice(
            PREDICTED_STRATEGIES, "bucketed, optimizer, optimizer-flat, fsdp, ... Default: bucketed with several ranks."
        ),
    ] = None
    gradient_dtype: Annotated[str, choice(PRECISIONS, "What buckets are sent in.")] = "fp32"
    gpu: Annotated[
        str | None, choice(GPUS, f"{', '.join(GPUS)}, or as torch names it. Default: --rates', or h200.", parser=str)
    ] = None
    rates: Annotated[Path | None, reads_file(help="Rates of your GPU, from doctor --ceilings.")] = None
    launch_us: Annotated[
        float | None, setting(help="CPU microseconds of a kernel launch. Default: usual.", min=0, max=1e4)
    ] = None


def step(
    model: options.SizeOptions = options.SizeOptions(["2.7b"]),
    precision: options.PrecisionOptions = options.PrecisionOptions(["bf16"]),
    implementation: options.ImplementationOptions = options.ImplementationOptions(),
    placement: PlacementOptions = PlacementOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Predict a training step term by term: work over measured rates, launches, exposed communication; and the error.

    cs336sys account step --size 2.7b --gpu h100 --world-size 8

    cs336sys account step --size xl --compile off,block --attention flash --optimizer fused --cuda-graph off,on
    """
    from cs336sys.accounting.step_time.choice import refusal
    from cs336sys.accounting.step_time.prediction import StepConfiguration
    from cs336sys.accounting.step_time.rates import h200_rates, rates_of, read_rates
    from cs336sys.commands.account.tables.step import step_tables

    strategy, world_size = placement.strategy, placement.world_size
    if strategy is not None and world_size == 1:
        raise UsageError(f"--strategy {strategy}: one rank shares nothing; add --world-size")
    measured = h200_rates() if placement.rates is None else read_rates(placement.rates)
    gpu_rates = measured if placement.gpu is None else rates_of(placement.gpu, measured)
    output.check()
    sharing = strategy or ("bucketed" if world_size > 1 else None)  # Among ranks; as the option's default says.
    configurations = []
    for size, dtype, settings in product(model.sizes(), precision.precisions(), implementation.implementations()):
        training = Workload(size, "train", dtype or size.precision, **settings)  # None: the size's.
        checkpointing, accumulation = placement.checkpoint, placement.accumulation
        gradient_dtype = placement.gradient_dtype
        configuration = StepConfiguration(training, checkpointing, accumulation, sharing, world_size, gradient_dtype)
        if (reason := refusal(configuration)) is not None:
            raise UsageError(reason)
        configurations.append(configuration)
    launch_us = placement.launch_us
    output.emit(step_tables(configurations, gpu_rates, None if launch_us is None else launch_us / 1e6))
