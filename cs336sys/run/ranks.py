"""Sweeps whose cells run on several ranks: their options, and what changes when torchrun or Slurm started the ranks.

Then every rank runs the command, with equal options, and measures the cells in its own process. All go through the same
cells and end with the same exit code, and only rank 0 reports. Ranks that torchrun started cannot be replaced: a cell
that runs out of memory or breaks on one of them is the last, and the sweep ends with exit code 1, at which torchrun
ends the other ranks.
"""

import contextlib
import datetime
import itertools
import os
import pickle
import sys
from collections.abc import Collection, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NoReturn

from cs336sys.command_line.options import training as options
from cs336sys.command_line.options.output import OutputOptions
from cs336sys.command_line.options.reading import writes_file
from cs336sys.errors import CapabilityError, UsageError
from cs336sys.processes import RankIdentity, is_first_rank, started_outside
from cs336sys.run.cells import Outcome, Progress, WorkerHere
from cs336sys.settings.parallel import ONLY_BUCKETED, ParallelWorkload
from cs336sys.settings.training import Workload

# How long ranks that failed wait for rank 0 to print what was measured: their exit makes torchrun end it. A failed run
# must be over within 10 s.
_REPORT_S = 5.0

# How long ranks wait for each other at first, where cells have no timeout.
_JOIN_S = 120.0


def choose_world_sizes(values: Sequence[int]) -> Sequence[int]:
    """Return the values of ``--world-size``; without any, the ranks that torchrun or Slurm started, or 2."""
    identity = started_outside()
    return values or [identity.world_size if identity else 2]


@options.setting_options(
    ParallelWorkload, *("world_size", "backend", "timeout_s", "check_layers", "plot_scaling", "trace")
)
class ParallelTraining(options.OptionGroup):
    """Options that ``ddp`` and ``shard`` have in common: the ranks, and what is checked, drawn and kept of them."""

    world_size = ()
    plot_scaling: Annotated[Path | None, writes_file(help="Draw speed and memory over the ranks.")] = None
    trace: Annotated[Path | None, writes_file(help="Keep a Chrome trace of each cell in this folder.")] = None

    def cells(
        self, trainings: Sequence[Workload], world_sizes: Sequence[int], *order: str, **settings: Any
    ) -> list[dict[str, Any]]:
        """Return the fields of each :class:`ParallelWorkload`: each number of ranks, training and combination."""
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
        """Raise a UsageError, on rank 0 alone, if tables, pictures or traces of cells cannot be written or drawn."""
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
            check_writable(self.trace / "trace.json.gz", "--trace")  # Cells' files have other names: trace_path().


class JoinedWorker(WorkerHere):
    """A stand-in for :class:`cs336sys.run.cells.Worker` where this process is itself one of the ranks."""

    def __init__(
        self, measure: str, arguments: tuple[str, ...], identity: RankIdentity, cells: Collection[dict[str, Any]] = ()
    ):
        super().__init__(measure, arguments)
        self.identity = identity
        self.is_first = identity.rank == 0
        # As long as the most patient of the cells.
        self._join_timeout_s = max((cell.get("timeout_s", _JOIN_S) for cell in cells), default=_JOIN_S)

    def start(self, *, timeout_s: float | None = None) -> None:
        """Wait for the other ranks; raise a UsageError or CapabilityError if they cannot be found, or do not come."""
        _shared_store(self._join_timeout_s)

    def measure(self, configuration: dict[str, Any], *, timeout_s: float | None, progress: Progress) -> Outcome:
        """Measure one cell; no time limit can end it, because there is no other process to end."""
        with contextlib.redirect_stdout(sys.stderr):  # Standard output is for results; what a cell prints is log.
            return super().measure(configuration, timeout_s=timeout_s, progress=progress)

    def from_first_rank(self, value: Any) -> Any:
        """Return rank 0's value on every rank, all of which call this; a CapabilityError tells that rank 0 is gone."""
        key = f"cs336sys-from-first-rank-{next(_values_shared)}"
        if self.is_first:
            _shared_store().set(key, pickle.dumps(value))
            return value
        try:
            return pickle.loads(_shared_store().get(key))
        except RuntimeError as error:
            raise CapabilityError(f"rank {self.identity.rank}: rank 0 ended before anything was measured") from error

    def require_same_cells(self, configurations: Sequence[dict[str, Any]]) -> None:
        """Raise a UsageError on every rank if not all have the same cells, whose collectives would not match."""
        store, key = _shared_store(), f"cs336sys-cells-{next(_values_shared)}"
        store.set(f"{key}-{self.identity.rank}", pickle.dumps(configurations))
        no_cell: dict[str, Any] = {}
        first_cells: list[dict[str, Any]] = pickle.loads(store.get(f"{key}-0"))
        for rank in range(1, self.identity.world_size):
            cells: list[dict[str, Any]] = pickle.loads(store.get(f"{key}-{rank}"))
            for first, cell in itertools.zip_longest(first_cells, cells, fillvalue=no_cell):
                for name in sorted(first.keys() | cell.keys()):
                    if first.get(name) != cell.get(name):
                        raise UsageError(
                            f"ranks have different options: {name} is {first.get(name)} on rank 0 and "
                            f"{cell.get(name)} on rank {rank}; start all ranks with one command"
                        )

    def close(self) -> None:
        from cs336sys.parallel.ranks.launch import end_kept

        end_kept()

    def wait_for_report(self) -> None:
        """Tell the others that rank 0 has reported; on these, wait for that, but not long."""
        with contextlib.suppress(RuntimeError):  # Rank 0 may host the store, which is gone with it.
            if self.is_first:
                _shared_store().set("cs336sys-reported", "")
            else:
                _shared_store().wait(["cs336sys-reported"], datetime.timedelta(seconds=_REPORT_S))

    def exit_at_once(self) -> NoReturn:
        """End this process with exit code 1, without destroying the process group, which may wait for lost ranks."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _shared_store(*timeout_s: float) -> Any:
    """Return the store by which ranks that torchrun or Slurm started share values; the first call waits for them."""
    from cs336sys.parallel.ranks.launch import outside_store

    return outside_store(*timeout_s)


_values_shared = itertools.count()  # Makes keys of the store unique: all ranks share values in one order.
