"""Sweeps whose cells run on several ranks: how many ranks, and what changes when torchrun or Slurm started them.

The function that measures a cell is the same however the ranks were started: ``launch.kept(world_size)`` or
``launch.start`` gives it ranks, and ``ranks.run`` every rank's result, in rank order.

Alone, the command measures in a worker process (:class:`cs336sys.run.cells.Worker`), where ``launch`` spawns the
ranks. Under ``torchrun --nnodes 2 ... -m cs336sys ddp`` every rank runs the command, with equal options: each measures
the cells in the command's own process, which ``launch`` makes one of the ranks. All ranks go through the same cells and
end with the same exit code; only rank 0 reports: it alone shows progress, saves, prints, and says which cells a resumed
sweep skips. Ranks that torchrun started cannot be replaced, so a cell that runs out of memory or breaks on one of them
is the last: the sweep ends with exit code 1, at which torchrun ends the other ranks.
"""

import contextlib
import datetime
import functools
import importlib
import itertools
import os
import pickle
import sys
from collections.abc import Collection, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from cs336sys.command_line.options import training as options
from cs336sys.command_line.options.effects import writes_file
from cs336sys.command_line.options.output import OutputOptions
from cs336sys.errors import CapabilityError, UsageError
from cs336sys.processes import RankIdentity, is_first_rank, started_outside
from cs336sys.results.model import Run
from cs336sys.settings.course_package import telling_import_errors
from cs336sys.settings.parallel import ONLY_BUCKETED, ParallelWorkload
from cs336sys.settings.training import Workload

if TYPE_CHECKING:
    from cs336sys.run.cells import Outcome, Progress

# How long ranks that failed wait for rank 0 to print what was measured: their exit makes torchrun end it. A failed run
# must be over within 10 s.
_REPORT_S = 5.0

# How long ranks wait for each other at first, where cells do not say it.
_JOIN_S = 120.0


def choose_world_sizes(values: Sequence[int]) -> Sequence[int]:
    """The values of ``--world-size``; without any, the ranks that torchrun or Slurm started, or 2."""
    identity = started_outside()
    return values or [identity.world_size if identity else 2]


@options.setting_options(
    ParallelWorkload,
    *("world_size", "backend", "high_priority", "timeout_s", "check_layers", "plot_scaling", "trace"),
)
class ParallelTraining(options.OptionGroup):
    """Options that ``ddp`` and ``shard`` have in common: the ranks, and what is checked, drawn and kept of them."""

    world_size = ()
    plot_scaling: Annotated[Path | None, writes_file(help="Draw speed and memory over the ranks.")] = None
    trace: Annotated[Path | None, writes_file(help="Keep a Chrome trace of each cell in this folder.")] = None

    def cells(
        self, trainings: Sequence[Workload], world_sizes: Sequence[int], *order: str, **settings: Any
    ) -> list[dict[str, Any]]:
        """Return a cell for each number of ranks, workload and :meth:`combinations`, as fields of workloads."""
        settings["trace"] = str(self.trace) if self.trace else None
        return [
            {"training": training} | cell
            for ranks, training in product(world_sizes, trainings)
            for cell in self.combinations(ParallelWorkload, *order, world_size=[ranks], **settings)
        ]

    @property
    def pictures(self) -> dict[str, Path | None]:
        """Return the picture files by the names of their options."""
        names = "plot", "plot_buckets", "plot_scaling"
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def check(self, output: OutputOptions, workloads: Sequence[ParallelWorkload]) -> None:
        """Find out on the first rank, before anything is measured, whether tables, pictures and traces can be written.

        Raises:
            UsageError: one of them cannot, or the cells have nothing to draw.
        """
        from cs336sys.tables.outputs import check_writable

        if not is_first_rank():
            return
        output.check(**self.pictures)
        if self.pictures.get("plot_buckets") and all(workload.bucket_mb is None for workload in workloads):
            raise UsageError(f"--plot-buckets {self.plot_buckets}: {ONLY_BUCKETED}")
        if self.plot_scaling is not None and len({workload.world_size for workload in workloads}) == 1:
            option = f"--plot-scaling {self.plot_scaling}"
            raise UsageError(f"{option}: needs several numbers of ranks: give --world-size 1,2")
        if self.trace is not None:
            check_writable(self.trace / "trace.json.gz", "--trace")


class JoinedWorker:
    """Stands in for :class:`cs336sys.run.cells.Worker` where this process is itself one of the ranks."""

    def __init__(
        self, measure: str, arguments: tuple[str, ...], identity: RankIdentity, cells: Collection[dict[str, Any]] = ()
    ):
        module, function = measure.split(":")
        with telling_import_errors():
            self._measure_cell = getattr(importlib.import_module(module), function)
        self._arguments = arguments
        self.identity = identity
        self.is_first = identity.rank == 0
        # As long as the most patient of the cells.
        self._join_timeout_s = max((cell.get("timeout_s", _JOIN_S) for cell in cells), default=_JOIN_S)

    @functools.cached_property
    def run(self) -> Run:
        from cs336sys.machine.environment import new_run

        return new_run(self._arguments)

    def start(self, *, timeout_s: float | None) -> None:
        """This process runs already; the others are waited for.

        Raises:
            UsageError, CapabilityError: they cannot be found, or have not come.
        """
        from cs336sys.parallel.ranks.launch import outside_store

        outside_store(self._join_timeout_s)

    def measure(self, configuration: dict[str, Any], *, timeout_s: float | None, progress: "Progress") -> "Outcome":
        """Measure one cell; no time limit can end it, because there is no other process to end."""
        from cs336sys.run.cells import guarded, release_memory

        # Results are printed to standard output; what a cell prints is log.
        with contextlib.redirect_stdout(sys.stderr):
            outcome = guarded(self._measure_cell, configuration, progress)
        release_memory()
        return outcome

    def from_first_rank(self, value: Any) -> Any:
        """Rank 0's value, on every rank; all ranks call this equally often.

        Raises:
            CapabilityError: rank 0 is gone; it has said why.
        """
        from cs336sys.parallel.ranks.launch import outside_store

        key = f"cs336sys-from-first-rank-{next(_values_shared)}"
        if self.is_first:
            outside_store().set(key, pickle.dumps(value))  # type: ignore[arg-type]  # takes bytes, as its stub does not say
            return value
        try:
            return pickle.loads(outside_store().get(key))
        except RuntimeError as error:
            raise CapabilityError(f"rank {self.identity.rank}: rank 0 ended before anything was measured") from error

    def require_same_cells(self, configurations: Sequence[dict[str, Any]]) -> None:
        """Refuse cells that are not those of every other rank: their collectives would not match.

        Raises:
            UsageError: on every rank, naming the first difference.
        """
        from cs336sys.parallel.ranks.launch import outside_store

        store, key = outside_store(), f"cs336sys-cells-{next(_values_shared)}"
        store.set(f"{key}-{self.identity.rank}", pickle.dumps(configurations))  # type: ignore[arg-type]  # as above
        no_cell: dict[str, Any] = {}
        first: list[dict[str, Any]] = pickle.loads(store.get(f"{key}-0"))
        for rank in range(1, self.identity.world_size):
            others: list[dict[str, Any]] = pickle.loads(store.get(f"{key}-{rank}"))
            for first_cell, cell in itertools.zip_longest(first, others, fillvalue=no_cell):
                for name in sorted(first_cell.keys() | cell.keys()):
                    if first_cell.get(name) != cell.get(name):
                        raise UsageError(
                            f"ranks have different options: {name} is {first_cell.get(name)} on rank 0 and "
                            f"{cell.get(name)} on rank {rank}; start all ranks with one command"
                        )

    def close(self) -> None:
        from cs336sys.parallel.ranks.launch import end_kept

        end_kept()

    def wait_for_report(self) -> None:
        """On rank 0: tell the others that it has reported. On the others: wait for that, but not long."""
        from cs336sys.parallel.ranks.launch import outside_store

        # The store is gone with rank 0 where that hosts it.
        with contextlib.suppress(RuntimeError):
            if self.is_first:
                outside_store().set("cs336sys-reported", "")
            else:
                outside_store().wait(["cs336sys-reported"], datetime.timedelta(seconds=_REPORT_S))

    def exit_at_once(self) -> NoReturn:
        """End this process with 1; an ordinary exit destroys the process group, which may wait for lost ranks."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


_values_shared = itertools.count()
