"""The tables of ``nsys`` from cells measured on a GPU, whose numbers are made up here."""

from dataclasses import replace

import pytest

from cs336sys.capture.analysis import Analysis, KernelGroup
from cs336sys.capture.summary import KernelTime, Profile, RangeTime
from cs336sys.capture.taxonomy import Category
from cs336sys.commands.nsys.tables import profile_tables
from cs336sys.commands.trace.tables import kind_table
from cs336sys.results.model import Cell, Samples
from cs336sys.settings.profiling import ProfileWorkload
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import Workload
from cs336sys.tables.table import with_rows

SIZE = choose_size("small", context=256)


def ms(value):
    return Samples("ms", "cuda events", measured=(value,) * 3)


def range_time(name, busy_ms, kernels=10, count=3):
    """``count`` ranges, in each of which kernels run one after another for ``busy_ms``."""
    busy_ns = round(busy_ms * count * 1e6)
    return RangeTime(name, count, busy_ns + 9, kernels * count, busy_ns, busy_ns, busy_ns + 3)


def cell(precision="fp32", busy=(8.0, 16.0), step_ms=30.0, compile="off", profiler="auto", **changes):
    """A cell whose forward pass takes 10 ms without a profiler and whose backward pass takes 20."""
    training = Workload(SIZE, precision=precision, compile=compile, mode="forward-backward", device="cuda")
    profile = Profile(
        profiler="Nsight Systems",
        is_gpu=True,
        phases=(range_time("forward", busy[0]), range_time("backward", busy[1], kernels=20)),
        step=range_time("step", sum(busy), kernels=30),
        parts=(
            range_time("computing attention scores", 0.5, count=36),
            range_time("computing softmax", 1.0, count=36),
            range_time("final matmul", 0.25, count=36),
        ),
        kernels=(KernelTime("forward", "nvjet_hsh_128x256", 15, round(busy[0] * 3e6), 1.0, 1, 1),),
        part_kernels=(),
        attributed_percent=99.5,
        configuration=training.configuration(),
    )
    samples = {"forward": ms(10.0), "backward": ms(20.0), "step": ms(step_ms), "annotated": ms(step_ms + 0.2)}
    derived = {"profiler": "Nsight Systems 2025.3.1", "profiler_reason": None}
    derived["profile"] = replace(profile, **changes).to_json()
    return Cell("nsys", ProfileWorkload(training, profiler).configuration(), "ok", samples, derived)


def tables(*cells, **options):
    built = with_rows(*profile_tables(cells, None, top=5, full_names=False, **options))
    return {table.name: table for table in built}


def rows(table):
    return {row["phase"]: row for row in table.rows}


def test_idle_time_is_of_the_step_without_profiler():
    found = rows(tables(cell(busy=(9.0, 10.0)))["phases"])
    assert found["forward"]["idle_percent"] == pytest.approx(10)
    assert found["backward"]["idle_percent"] == pytest.approx(50)
    assert found["step"]["idle_percent"] == pytest.approx(100 * 11 / 30)
    expected = {"forward": "no", "backward": "yes", "step": "yes"}
    assert {name: row["launch_bound"] for name, row in found.items()} == expected
    assert (found["step"]["kernels"], found["step"]["annotated_ms"].median) == (30, 30.2)
    assert found["forward"]["annotated_ms"] is None


def test_notes_name_profiler_and_coverage():
    notes = tables(cell(), cell("bf16", attributed_percent=97.25))["phases"].notes
    assert "profiled by Nsight Systems 2025.3.1" in notes
    assert any("97.25 % of the kernels' time could be given to phases; the rest" in note for note in notes)
    whole = tables(cell(attributed_percent=99.996))["phases"].notes
    assert any(note.endswith("all of the kernels' time could be given to phases") for note in whole)
    assert not any("warning" in note for note in notes)


def test_a_cell_without_parts_of_attention_says_what_they_need():
    found = tables(cell(compile="block", parts=(), part_kernels=()))
    assert "attention" not in found
    assert any("--attention reference --compile off" in note for note in found["phases"].notes)


def test_precisions_side_by_side():
    found = rows(tables(cell(), cell("bf16", busy=(2.0, 4.0), step_ms=15.0), compare_precision=True)["precisions"])
    assert found["forward"]["busy_speedup"] == pytest.approx(4)
    assert found["step"]["speedup"] == pytest.approx(2)
    assert found["computing attention scores"]["fp32_busy_ms"] == pytest.approx(6), "12 layers of 0.5 ms"
    assert "speedup" not in found["computing attention scores"]


def test_both_profilers_side_by_side():
    table = tables(cell(profiler="nsys"), cell(profiler="torch"))["phases"]
    assert [row["profiler"] for row in table.rows] == ["nsys"] * 3 + ["torch"] * 3
    assert "profiler" in {column.key for column in table.columns}
    assert "profiler" not in {column.key for column in tables(cell())["phases"].columns}


def test_unclassified_kernels_are_named_by_the_time_of_all_their_groups():
    def group(name, module, ms):
        return KernelGroup(name, Category.UNCLASSIFIED, module, "", "", (1,), (ms,), (ms,))

    kernels = (group("first_odd", "a", 3.0), group("second_odd", "a", 2.0), group("first_odd", "b", 1.0))
    analysis = Analysis("f", "", "torch.profiler", True, "", 0, "", True, (6.0,), {}, kernels, (), (), {}, {})
    assert kind_table(analysis).notes[-1] == "unclassified: first_odd, second_odd"
