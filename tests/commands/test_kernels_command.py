"""``kernels`` as a user runs it, on the CPU."""

from run_commands import invoke, tables

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
