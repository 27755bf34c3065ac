"""The table of ``--dry-run``: cells that train on one device, and the memory that is predicted for them."""

from collections.abc import Sequence

from cs336sys.accounting.memory import GIB
from cs336sys.machine.system import Capacity
from cs336sys.settings.training import Workload
from cs336sys.tables import titles
from cs336sys.tables.table import Column, Table, fill_row, sentences

# Of a PeakMemory: the memory at the moment when most is held, on paper.
PEAK_COLUMNS = (
    Column("parameters_gib", "parameters", "gib", lambda peak: peak.parameters / GIB),
    Column("gradients_gib", "gradients", "gib", lambda peak: peak.gradients / GIB),
    Column("optimizer_state_gib", "optimizer state", "gib", lambda peak: peak.optimizer_state / GIB),
    Column("activations_gib", "activations", "gib", lambda peak: peak.activations / GIB),
    Column("predicted_peak_gib", "predicted peak", "gib", lambda peak: peak.total_gib),
    Column("moment", "moment of the peak", value=lambda peak: peak.moment),
)

# Of a device's memory: above it the allocator's rounding and gaps, CUDA's context and libraries may be too much.
_TIGHT_PART = 0.9


def training_plan(
    workloads: Sequence[Workload], command: str = "bench", notes: Sequence[str] = (), capacity: Capacity | None = None
) -> Table:
    """Build the table of ``--dry-run``: each cell with its predicted memory, whether it fits, and ``notes`` below."""
    rows = []
    for workload in workloads:
        row = workload.configuration() | {"parameters": workload.parameters}
        if workload.memory_is_known:
            peak = workload.predicted_peak()
            row |= fill_row(PEAK_COLUMNS, peak)
            if capacity is not None:  # Else the device's memory is not known.
                part = peak.total_gib / capacity.memory_gib
                fits = "no" if part > 1 else "tight" if part > _TIGHT_PART else "yes"
                row |= {"capacity_percent": 100 * part, "fits": fits}
        rows.append(row)
    settings = titles.plan_settings(workloads, titles.SETTING_COLUMNS)
    fitting = (Column("capacity_percent", "of the memory", "percent"), Column("fits", "fits"))
    columns = (*titles.SIZE_COLUMNS, *settings, *PEAK_COLUMNS, *fitting)
    assumptions = sentences(__name__, "plan", capacity=capacity, tight_percent=100 * _TIGHT_PART)
    heading = f"{command}: cells and predicted memory (nothing was run)"
    return Table("plan", heading, columns, rows, (*assumptions, *titles.unknown_memory(workloads), *notes))
