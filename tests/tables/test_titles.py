"""Whatever decides a measurement is seen in its table: as a column where cells differ in it, else in the title."""

import pytest

from cs336sys.commands.attention.tables import attn_tables, flash_tables
from cs336sys.commands.bench.tables import bench_tables
from cs336sys.commands.ddp.tables import ddp_tables
from cs336sys.commands.kernels.tables import kernel_tables
from cs336sys.commands.losses.tables import loss_tables
from cs336sys.results.model import Cell, Run, Samples
from cs336sys.settings.operations import AttentionWorkload, KernelWorkload
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.profiling import LossWorkload
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import Workload
from cs336sys.tables.titles import interpreted_notes, steps_words

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


def test_cells_of_ranks_show_what_their_modes_are_given():
    usual = ParallelWorkload(Workload(choose_size("tiny", batch_size=4)), "bucketed", 2, bucket_mb="block")
    cells = [
        failed("ddp", usual.configuration() | {"transport": transport})
        for transport in (usual.transport, "copy-engines")
    ]
    titles = [ddp_tables([cell], None)[0].title for cell in cells]
    assert ["sent by copy-engines" in title for title in titles] == [False, True]
    assert "transport" in [column.key for column in ddp_tables(cells, None)[0].columns]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tf32": True}, "TF32 True"),
        ({"synchronize": "none"}, "synchronize none"),
        ({"seed": 7}, "seed 7"),
        ({"kernels": "rope"}, "kernels rope"),
    ],
)
def test_a_title_names_what_is_not_as_usual(settings, words):
    usual, other = (failed("bench", TRAINING.configuration() | more) for more in ({}, settings))
    assert words in bench_tables([other], None)[0].title
    assert words not in bench_tables([usual], None)[0].title


def test_one_step_is_one_step():
    cells = [Cell("bench", {"warmup": warmup, "steps": steps}, "ok") for warmup, steps in ((1, 5), (0, 1), (1, 5))]
    assert steps_words(cells) == "mean ± standard deviation of 1 step after 0 warm-up, 5 steps after 1 warm-up"


@pytest.mark.parametrize(("count", "words"), [(6, "mean of the last 6"), (30, "mean of the last 20")])
def test_a_mean_is_of_as_many_losses_as_its_header_says(count, words):
    configuration = LossWorkload(TRAINING, "README.md", text_digest="0123").configuration()
    values = tuple(float(number) for number in range(count))
    cell = Cell("losses", configuration, "ok", {"loss": Samples("nats", "of every step", values)})
    (table,) = loss_tables([cell], None)
    column = next(column for column in table.columns if column.key == "last_loss")
    averaged = int(words.split()[-1])
    assert column.header == words
    assert table.rows[0]["last_loss"] == sum(values[-averaged:]) / averaged


@pytest.mark.parametrize(
    ("setting", "note"),
    [
        (
            {"implementation": "triton"},
            "implementation triton: in Triton's interpreter, whose times say nothing of the",
        ),
        (
            {"attention": "flash", "kernels": "rope+swiglu", "optimizer": "adamw", "mode": "train"},
            "attention flash, kernels rope+swiglu,",
        ),
        ({"optimizer": "adamw", "mode": "train"}, "optimizer adamw: in"),
        ({"optimizer": "adamw", "mode": "forward"}, None),
        ({"implementation": "tiled", "attention": "sdpa", "kernels": "reference", "optimizer": "course"}, None),
    ],
)
def test_times_of_the_interpreter_are_not_taken_for_those_of_kernels(setting, note):
    cells = [Cell("flash", {"implementation": "eager"}, "ok"), Cell("flash", setting, "ok")]
    interpreted, compiled = (Run("1", "", (), {}, {"TRITON_INTERPRET": value}) for value in ("1", None))
    assert [text.partition(note or "?")[0] for text in interpreted_notes(cells, interpreted)] == ([""] if note else [])
    assert interpreted_notes(cells, compiled) == interpreted_notes(cells, None) == ()


def test_attention_that_a_cpu_computes_by_tiles_is_not_called_interpreted():
    settings = {"optimizer": "adamw", "mode": "train"}, {"implementation": "auto"}, {"implementation": "triton"}
    common = {"attention": "flash", "kernels": "fused"}
    for device, gpu in (("auto", None), ("cpu", "NVIDIA H200")):
        cells = [Cell("bench", common | setting | {"device": device}, "ok") for setting in settings]
        run = Run("1", "", (), {"gpu": gpu}, {"TRITON_INTERPRET": "1"})
        assert [note.partition(", whose")[0] for note in interpreted_notes(cells, run)] == [
            "implementation triton, kernels fused, optimizer adamw: in Triton's interpreter",
            "attention flash, implementation auto: on a CPU FlashAttention-2 by tiles in PyTorch",
        ]
