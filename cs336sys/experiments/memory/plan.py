"""Find the cheapest changes with which a step fits into so much memory, by formulas or by traces of fake tensors."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from cs336sys.accounting.sharding.step import sharded_optimizer_state
from cs336sys.errors import CapabilityError, UsageError
from cs336sys.experiments.memory.prediction import predicted_timeline, timeline_peaks
from cs336sys.measure.cells import Outcome, Progress
from cs336sys.workload import MemoryWorkload
from cs336sys.workload.memory_changes import (
    SettingChange,
    changed,
    command_line,
    number_of_ranks,
    plans,
    possible_changes,
    sharded_bytes,
)

# Traces take seconds: of models that are not ours no more plans are tried.
MOST_TRACES = 60


def plan_memory(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Plan one cell of ``memprof --plan``: runs in the worker process.

    Derived columns: ``limit_bytes``, ``peak_bytes`` as configured, ``changes`` one by one, and the ``plan``, ``steps``
    of which each adds a change, or None where nothing fits.
    """
    workload = MemoryWorkload.from_configuration(configuration)
    return Outcome("ok", derived=_Planner(workload, configuration["limit_bytes"], progress).plan())


class _Planner:
    def __init__(self, workload: MemoryWorkload, limit: float, progress: Progress):
        self._workload, self._limit, self._progress = workload, limit, progress
        # On a CPU, what torch computes there differs from the formulas, which are a GPU's.
        training = workload.training
        self._by_formula = training.memory_is_known and training.device != "cpu"
        self._known: dict[tuple[MemoryWorkload, SettingChange | None], int | None] = {}
        self._traces = 0
        self._failed = ""

    def plan(self) -> dict[str, Any]:
        progress = self._progress
        progress("predicting the step as it is")
        base = self._bytes(())
        if base is None:
            raise CapabilityError(self._failed)
        changes = possible_changes(self._workload)
        rows = []
        for change in changes:
            progress(f"predicting {change.option}")
            alone = self._bytes((change,))
            if alone is not None:
                rows.append(asdict(change) | {"peak_bytes": alone, "saved_bytes": base - alone})
        usable = [change for change in changes if any(row["option"] == change.option for row in rows)]
        plan = () if base <= self._limit else self._cheapest(usable)
        derived: dict[str, Any] = {
            "limit_bytes": self._limit,
            "base_bytes": base,
            "changes": rows,
            "plan": None if plan is None else self._steps(plan),
            "by_formula": self._by_formula,
            "least_bytes": min((size for size in self._known.values() if size is not None), default=base),
            "tried": len(self._known),
        }
        if plan is not None and not any(change.setting == "ranks" for change in plan):
            derived["command"] = command_line(changed(self._workload, plan) or self._workload)
        elif plan:
            *own, ranks = plan
            single = changed(self._workload, own) or self._workload
            words = command_line(single).split(" ")
            derived["command"] = " ".join([*words[:1], ranks.option, *words[2:]])
        return derived

    def _cheapest(self, changes: Sequence[SettingChange]) -> tuple[SettingChange, ...] | None:
        for plan in plans(changes):
            self._progress(f"trying {' '.join(change.option for change in plan)}")
            size = self._bytes(plan)
            if size is not None and size <= self._limit:
                # More GPUs come last: everything else is one command's settings.
                return tuple(sorted(plan, key=lambda change: change.setting == "ranks"))
        return None

    def _steps(self, plan: Sequence[SettingChange]) -> list[dict[str, Any]]:
        """The plan's changes, each with what is held once it and those before it are made."""
        return [asdict(change) | {"peak_bytes": self._bytes(plan[: i + 1])} for i, change in enumerate(plan)]

    def _bytes(self, plan: Sequence[SettingChange]) -> int | None:
        ranks = next((change for change in plan if change.setting == "ranks"), None)
        workload = changed(self._workload, [change for change in plan if change is not ranks])
        if workload is None:
            return None
        if ranks is not None and workload.training.is_ours:
            return sharded_bytes(workload, ranks)
        if ranks is not None and workload.micro_batches > 1:
            # A shared step takes one micro-batch.
            return None
        key = workload, ranks
        if key not in self._known:
            if self._traces >= MOST_TRACES:
                return None
            self._known[key] = self._predicted(workload, ranks)
        return self._known[key]

    def _predicted(self, workload: MemoryWorkload, ranks: SettingChange | None) -> int | None:
        if self._by_formula:
            return workload.peak.total if workload.training.memory_is_known else None
        self._traces += 1
        try:
            if ranks is not None:
                return bytes_with_shared_state(workload, number_of_ranks(ranks))
            traced = predicted_timeline(workload)
        except (CapabilityError, UsageError) as error:
            self._failed = str(error)
            return None
        return max(peak.allocated for peak in timeline_peaks(traced.timeline))


def bytes_with_shared_state(workload: MemoryWorkload, ranks: int) -> int:
    """Trace one of several ranks with ``--strategy optimizer``: its part of the batch, and its share of the state.

    Returns:
        the peak of the rank that updates most.
    """
    training = workload.training
    share = replace(training.size, batch_size=training.size.batch_size // ranks)
    timeline = predicted_timeline(replace(workload, training=replace(training, size=share))).timeline
    whole = timeline.bytes_by_category()["optimizer state"]
    sizes = [one.size // 4 for one in timeline.allocations if one.category == "parameters"]
    kept = max(state.optimizer_state for state in sharded_optimizer_state(sizes, ranks)) / (8 * sum(sizes))
    return max(int(total - (1 - kept) * state) for total, state in zip(timeline.totals(), whole, strict=True))
