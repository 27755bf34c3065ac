"""``doctor`` as a user runs it."""

from functools import partial

from run_commands import invoke, tables

from cs336sys.machine import diagnosis
from cs336sys.machine.diagnosis.software import Check

OK = Check("Python", "3.12.3")
WARNED = Check("nsys importer", "lacks libdw.so.1", "warn", "`apt-get install libdw1`.")
MISSING = Check("Triton", "not installed", "missing", '`python -m pip install "triton>=3.6"`.')


doctor = partial(invoke, "doctor")


def test_this_machine_is_described():
    (table,) = tables(doctor("--format json")).values()
    rows = {row["name"]: row for row in table["rows"]}
    assert {"Python", "torch", "GPU", "C compiler", "nsys", "ncu", "RAM"} <= set(rows)
    for row in rows.values():
        assert row["verdict"] in ("ok", "warn")
        assert (row["fix"] is None) == (row["verdict"] == "ok"), row
        assert row["fix"] is None or "`" in row["fix"], f"no command to type: {row}"


def test_warnings_are_no_failure(monkeypatch):
    monkeypatch.setattr(diagnosis, "diagnose", lambda: [OK, WARNED])
    result = doctor("--format csv")
    assert result.exit_code == 0
    assert result.stdout == (
        "table,name,verdict,found,fix\n"
        "doctor,Python,ok,3.12.3,\n"
        "doctor,nsys importer,warn,lacks libdw.so.1,`apt-get install libdw1`.\n"
    )


def test_something_missing_exits_with_3_and_still_shows_all(monkeypatch):
    monkeypatch.setattr(diagnosis, "diagnose", lambda: [OK, WARNED, MISSING])
    result = doctor("--format table")
    assert result.exit_code == 3
    assert result.stdout == (
        "What cs336sys finds here: 1 ok, 1 warn, 1 missing\n"
        "╭───────────────┬───────────┬──────────────────┬────────────────────────────────────────╮\n"
        "│ check         │ verdict   │ found            │ fix                                    │\n"
        "├───────────────┼───────────┼──────────────────┼────────────────────────────────────────┤\n"
        "│ Python        │ ok        │ 3.12.3           │ -                                      │\n"
        "│ nsys importer │ warn      │ lacks libdw.so.1 │ `apt-get install libdw1`.              │\n"
        '│ Triton        │ missing   │ not installed    │ `python -m pip install "triton>=3.6"`. │\n'
        "╰───────────────┴───────────┴──────────────────┴────────────────────────────────────────╯\n"
    )


def test_ceilings_are_those_of_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = doctor("--ceilings", tmp_path / "c.json")
    assert result.exit_code == 3
    assert "torch sees no CUDA GPU here" in result.output
