"""``account step``: how long a training step should take, from work and measured rates."""

from itertools import product
from pathlib import Path
from typing import Annotated

from cs336sys.accounting.step_time.prediction import PREDICTED_STRATEGIES
from cs336sys.accounting.step_time.rates import GPUS
from cs336sys.commands.account import choice
from cs336sys.commands.options import training as options
from cs336sys.commands.options.effects import reads_file, setting
from cs336sys.commands.options.output import OutputOptions
from cs336sys.commands.options.reading import among
from cs336sys.errors import UsageError
from cs336sys.sizes import PRECISIONS

GpuOption = Annotated[str | None, choice(GPUS, f"{', '.join(GPUS)}, or as torch names it. Default: --rates', or h200.")]
RatesOption = Annotated[Path | None, reads_file(help="Of your GPU: doctor --ceilings.")]
LaunchOption = Annotated[
    float | None, setting(help="CPU time of a launch. Default: of the usual host.", min=0, max=1e4)
]


def step(
    model: options.SizeOptions = options.SizeOptions(["2.7b"]),
    precision: options.PrecisionOptions = options.PrecisionOptions(["bf16"]),
    implementation: options.ImplementationOptions = options.ImplementationOptions(),
    checkpoint: Annotated[
        str,
        setting(
            help="none, block, every=K, nested, keep=N (fused kernels).",
            autocompletion=among(("none", "block", "every=", "nested", "keep=")),
        ),
    ] = "none",
    accumulation: Annotated[int, setting(help="Micro-batches of a step.", min=1)] = 1,
    world_size: Annotated[int, setting(help="Ranks, each with a batch of its own.", min=1)] = 1,
    strategy: Annotated[
        str | None,
        setting(
            help="bucketed, optimizer, optimizer-flat, fsdp, ... Default: bucketed with several ranks.",
            autocompletion=among(PREDICTED_STRATEGIES),
        ),
    ] = None,
    gradient_dtype: Annotated[str, choice(PRECISIONS, "What buckets are sent in.")] = "fp32",
    gpu: GpuOption = None,
    rates: RatesOption = None,
    launch_us: LaunchOption = None,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Predict a training step term by term: work over measured rates, launches, exposed communication; and the error.

    cs336sys account step --size 2.7b --gpu h100 --world-size 8

    cs336sys account step --size xl --compile off,block --attention flash --optimizer fused --cuda-graph off,on
    """
    from cs336sys.accounting.step_time.prediction import StepConfiguration
    from cs336sys.accounting.step_time.rates import h200_rates, rates_of, read_rates
    from cs336sys.accounting.step_time.space import refusal
    from cs336sys.commands.options.reading import check_choice
    from cs336sys.report.account.step import step_tables
    from cs336sys.workload import Workload

    if strategy is not None:
        check_choice(strategy, "--strategy", PREDICTED_STRATEGIES)
        if world_size == 1:
            raise UsageError(f"--strategy {strategy}: one rank shares nothing; add --world-size")
    check_choice(gradient_dtype, "--gradient-dtype", PRECISIONS)
    measured = h200_rates() if rates is None else read_rates(rates)
    gpu_rates = measured if gpu is None else rates_of(gpu, measured)
    output.check()
    choices = product(
        model.sizes(),
        precision.precisions(),
        implementation.compile,
        implementation.attention,
        implementation.kernels,
        implementation.optimizers(),
        implementation.cuda_graph,
    )
    configurations = []
    for size, dtype, compile, attention, kernels, (optimizer, state_dtype, update), cuda_graph in choices:
        training = Workload(
            size,
            "train",
            dtype or size.precision,
            compile,
            attention,
            optimizer,
            cuda_graph,
            kernels,
            state_dtype,
            update,
        )
        shared = strategy or ("bucketed" if world_size > 1 else None)
        configuration = StepConfiguration(training, checkpoint, accumulation, shared, world_size, gradient_dtype)
        reason = refusal(configuration)
        if reason is not None:
            raise UsageError(reason)
        configurations.append(configuration)
    output.emit(step_tables(configurations, gpu_rates, None if launch_us is None else launch_us / 1e6))
