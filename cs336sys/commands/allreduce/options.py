"""``cs336sys allreduce``: what communication costs on this machine's links."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cs336sys.command_line.options.output import OutputOptions, SweepOptions
from cs336sys.command_line.options.reading import byte_count, setting, split_list, writes_file
from cs336sys.command_line.options.training import DeviceOption, DryRunOption, OptionGroup, setting_options
from cs336sys.errors import UsageError
from cs336sys.processes import is_first_rank
from cs336sys.run.ranks import choose_world_sizes
from cs336sys.run.sweep import run_sweep, show_plan
from cs336sys.settings.operations import BACKEND_DEVICES, CollectiveWorkload

# From sizes that latency decides to those that bandwidth decides; 1 MB to 1 GB are the handout's. Gloo's take seconds.
DEFAULT_MESSAGES = {"gloo": "1KB,10KB,100KB,1MB,10MB", "nccl": "1KB,10KB,100KB,1MB,10MB,100MB,1GB"}

# Most sizes of a range; from 1 byte to 1e18 by a factor of 1.05 there are 850.
_MOST_SIZES = 1000


@setting_options(
    CollectiveWorkload,
    *("backend", "collective", "message", "factor", "world_size", "dtype", "warmup", "iterations", "timeout_s"),
)
class CollectiveOptions(OptionGroup):
    """Collectives, ranks and messages, and how often each is timed."""

    collective, world_size, dtype = ("all_reduce",), (), ("fp32",)
    message: Annotated[
        Sequence[str], setting(help="Sizes of the whole array: 1MB (1e6 bytes), 1MiB (2^20), 8B:1GB.", parser=str)
    ] = ()
    factor: Annotated[float, setting(help="From one size of a range FROM:TO to the next.")] = 2.0

    def workloads(self, device: str) -> list[CollectiveWorkload]:
        """Return a cell for each backend, number of ranks, dtype, collective and size.

        Raises:
            UsageError: a size cannot be read, or a backend does not communicate tensors of the device.
        """
        world_sizes = choose_world_sizes(self.world_size)
        # Read before _backends imports torch, which takes seconds.
        messages = message_sizes(self.message, self.factor) if self.message else []
        backends = _backends(self.backend, device)
        messages = messages or message_sizes([DEFAULT_MESSAGES["nccl" if "nccl" in backends else "gloo"]], self.factor)
        # Backend and world size outermost: for each of them ranks are started.
        order = "backend", "world_size", "dtype", "collective"
        cells = self.combinations(
            CollectiveWorkload, *order, backend=backends, world_size=world_sizes, message_bytes=messages
        )
        return [CollectiveWorkload(**cell) for cell in cells]


def allreduce(
    timed: CollectiveOptions = CollectiveOptions(),
    device: DeviceOption = "auto",
    plot: Annotated[Path | None, writes_file(help="Draw time and bandwidth.")] = None,
    dry_run: DryRunOption = False,
    sweeping: SweepOptions = SweepOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Check and time collective operations: time, algorithm and bus bandwidth, and a fit of latency and bandwidth.

    cs336sys allreduce --backend gloo,nccl --message 1MB,10MB,100MB,1GB --world-size 2,4,6 --plot allreduce.png

    cs336sys allreduce --message 8B:1GB --factor 4 --collective all_reduce,all_gather,reduce_scatter,broadcast

    torchrun --nnodes 2 ... -m cs336sys allreduce
    """
    from cs336sys.commands.allreduce.tables import allreduce_plan, allreduce_tables, plot_collectives

    if is_first_rank():  # It alone writes.
        output.check(plot=plot)
    workloads = timed.workloads(device)
    if dry_run:  # The plan compares nothing with the memory of the device, its argument.
        show_plan(
            "allreduce", lambda _: allreduce_plan(workloads), sweeping, output, device, across_ranks=True, plot=plot
        )
        return
    measure = "cs336sys.commands.allreduce.measure:measure_collective"
    configurations = [workload.configuration() for workload in workloads]
    output.check_selection("allreduce", allreduce_tables)
    run_sweep("allreduce", measure, configurations, sweeping, across_ranks=True).report(
        allreduce_tables, output, (plot, plot_collectives)
    )


def message_sizes(values: Sequence[str], factor: float) -> list[int]:
    """Read the sizes of ``--message``, in bytes; ``8B:1KB`` is a range from 8 bytes up, each ``factor`` times the last.

    Raises:
        UsageError: a value is no size or range, or the factor is not more than 1.
    """
    if factor <= 1:
        raise UsageError(f"--factor {factor:g}: must be more than 1")

    def read_range(text: str) -> tuple[int, ...]:
        """Read one size, or the sizes of a range."""
        first, colon, last = text.partition(":")
        smallest = byte_count(first)
        if not colon:
            return (smallest,)
        largest = byte_count(last)
        if smallest > largest:
            raise UsageError("a range begins with its smallest size")
        # Rounded down, but for the error of the logarithms.
        count = int(math.log(largest / smallest) / math.log(factor) + 1e-9) + 1
        if count > _MOST_SIZES:
            raise UsageError(f"has {count:,} sizes by --factor {factor!r}: must be at most {_MOST_SIZES}, choose 2")
        return tuple(round(smallest * factor**step) for step in range(count))

    ranges = split_list(values, "--message", read_range)
    return list(dict.fromkeys(size for sizes in ranges for size in sizes))


def _backends(chosen: Sequence[str], device: str) -> Sequence[str]:
    """Return the chosen backends, which must be for the device, or without any the one for the device."""
    for backend in chosen:
        if device not in ("auto", BACKEND_DEVICES[backend]):
            raise UsageError(
                f"--backend {backend}: communicates tensors on {BACKEND_DEVICES[backend]}, not on {device}"
            )
    if chosen:
        return chosen
    from cs336sys.machine.device import choose_device

    return ["nccl" if choose_device(device).type == "cuda" else "gloo"]
