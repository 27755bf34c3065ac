"""Whatever decides a measurement is seen in its table: as a column where cells differ in it, else in the title."""

import pytest

from cs336sys.commands.attention.tables import attn_tables, flash_tables
from cs336sys.commands.bench.tables import bench_tables
from cs336sys.commands.kernels.tables import kernel_tables
from cs336sys.commands.losses.tables import loss_tables
from cs336sys.results.model import Cell
from cs336sys.settings.operations import AttentionWorkload, KernelWorkload
from cs336sys.settings.profiling import LossWorkload
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import Workload

# What says how long is measured and not what; the size's name, which stands for its shape; where, which the machine's
# name says.
NOT_SHOWN = {
    *("steps", "warmup_ms", "repetition_ms"),
    *("size", "d_model", "d_ff", "num_layers", "num_heads"),
    "device",
}
# Names that a workload knows.
OTHER_NAMES = {
    **{"mode": "forward", "precision": "bf16", "compile": "block", "attention": "sdpa", "kernels": "rope"},
    **{"optimizer": "fused", "state_dtype": "bf16", "update": "backward", "cuda_graph": "on", "synchronize": "none"},
    **{"dtype": "fp16", "op": "swiglu", "implementation": "compiled", "text": "other.md", "text_digest": "4567"},
}


def other_than(name, value):
    if isinstance(value, bool):
        return not value
    return 2 * (value or 4) if value is None or isinstance(value, int | float) else OTHER_NAMES[name]


def failed(command, configuration):
    return Cell(command, configuration, "oom", reason="out of memory")


TRAINING = Workload(choose_size("tiny"), optimizer="adamw")
TABLES = {
    "bench": (TRAINING, lambda cells: bench_tables(cells, None)[0]),
    "losses": (LossWorkload(TRAINING, "README.md", text_digest="0123"), lambda cells: loss_tables(cells, None)[0]),
    "flash": (
        AttentionWorkload("eager", 1, 2, 16, 8, kv_heads=1, window=2),
        lambda cells: flash_tables(cells, None, "eager")[0],
    ),
    "attn": (AttentionWorkload("eager", 1, 1, 16, 8), lambda cells: attn_tables(cells, None)[0]),
    "kernels": (KernelWorkload("rope", "ours", 4, 8, head_dim=4), lambda cells: kernel_tables(cells, None, "eager")[0]),
}


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (command, name)
        for command, (workload, _) in TABLES.items()
        for name in workload.configuration()
        if name not in NOT_SHOWN and (command, name) != ("losses", "mode")
    ],
)
def test_rows_that_differ_in_a_setting_show_it(command, name):
    workload, table_of = TABLES[command]
    usual = workload.configuration() | {"steps": 1, "warmup": 1}
    cells = [failed(command, usual), failed(command, usual | {name: other_than(name, usual[name])})]
    table = table_of(cells)
    column = next((column for column in table.columns if column.key == name), None)
    assert column is not None, [column.key for column in table.columns]
    assert [row.get(name) for row in table.rows] == [cell.configuration[name] for cell in cells]
