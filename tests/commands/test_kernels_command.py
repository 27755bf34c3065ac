"""``kernels`` as a user runs it, on the CPU."""

from dataclasses import replace

from run_commands import invoke, tables

from cs336sys.commands.kernels.tables import kernel_tables, plot_kernels
from cs336sys.results.model import Cell, Samples

KERNELS = "kernels --device cpu --dtype fp32 --tokens 4 --width 16 --repetition-ms 1"


def test_shows_what_the_machine_has_and_says_what_it_lacks(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    picture = tmp_path / "kernels.png"
    options = "--op swiglu,rope --head-dim 8 --implementation ours,eager,liger --format json"
    (table,) = tables(invoke(KERNELS, options, "--plot", picture)).values()
    assert [(row["op"], row["implementation"], row["status"]) for row in table["rows"]] == [
        ("swiglu", "ours", "ok"),
        ("swiglu", "eager", "ok"),
        ("swiglu", "liger", "unsupported"),
        ("rope", "ours", "ok"),
        ("rope", "eager", "ok"),
    ]
    assert [row["head_dim"] for row in table["rows"]] == [None, None, None, 8, 8]
    assert table["title"].startswith("kernels: tokens 4, width 16, dtype fp32, ")
    assert any(note.startswith("liger unsupported: ") for note in table["notes"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def cell(implementation, milliseconds, status="ok", op="swiglu", **derived):
    configuration = {"op": op, "implementation": implementation, "tokens": 8, "width": 4, "dtype": "bf16"}
    if status != "ok":
        return Cell("kernels", configuration, status, {}, derived, "relative error over 0.016: out by nan")
    parts = {"forward": milliseconds, "backward": 2 * milliseconds, "end_to_end": 3 * milliseconds}
    samples = {part: Samples("ms", "triton do_bench", (ms, ms, 9 * ms)) for part, ms in parts.items()}
    rates = {f"{part}_gbps": 1 / ms for part, ms in parts.items()} | {f"{part}_copy_percent": 50.0 for part in parts}
    return Cell("kernels", configuration, status, samples, rates | {"copy_gbps": 4000.0} | derived)


def test_table_and_picture_of_measured_and_wrong_cells(tmp_path):
    # No copy can be as fast as what moves nothing, and an optimizer's step is one part.
    product = cell("chunked", 1.0, op="linear-cross-entropy")
    product = replace(
        product,
        samples={"end_to_end": product.samples["end_to_end"]},
        derived={"end_to_end_tflops": 7.0, "copy_gbps": None},
    )
    cells = [
        cell("ours", 1.0, out_error=1e-3, dgate_error=2e-3),
        cell("eager", 4.0),
        cell("liger", 1.0, "wrong", out_error=float("nan"), dgate_error=2e-3),
        cell("ours", 2.0, op="rope"),
        product,
    ]
    (table,) = kernel_tables(cells, None, "eager")
    assert [row["end_to_end_speedup"].estimate for row in table.rows[:2]] == [4.0, 1.0]
    assert not any("end_to_end_speedup" in row for row in table.rows[2:])
    assert [row.get("forward_ms") for row in table.rows] == [1.0, 4.0, None, 2.0, None]
    assert [row.get("error") for row in table.rows] == ["2.0e-03 (dgate)", None, "nan (out)", None, None]
    assert "a copy: 4,000 GB/s read and written" in table.notes
    assert "liger wrong: relative error over 0.016: out by nan" in table.notes
    plot_kernels(cells, tmp_path / "kernels.svg")
    picture = (tmp_path / "kernels.svg").read_text()
    assert all(f"<!-- {text} -->" in picture for text in ("ours", "eager", "swiglu", "rope", "end-to-end, % of a copy"))
    assert not any(name in picture for name in ("liger", "chunked"))
