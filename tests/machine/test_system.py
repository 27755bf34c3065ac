"""What the system's tools say, also when they say nothing."""

import sys

import pytest
from fake_tools import only_on_path, put_tool

from cs336sys.machine import system


@pytest.mark.usefixtures("time_limit")
def test_a_tool_that_is_missing_fails_or_hangs_has_no_answer(tmp_path):
    assert system.run_tool([str(tmp_path / "nothing")]) is None
    assert system.run_tool([sys.executable, "-c", "print('half'); raise SystemExit(3)"]) is None
    assert system.run_tool(["sleep", "3600"], timeout_s=0.2) is None


def test_a_tool_gets_the_variables_besides_its_own():
    script = "import os; print(os.environ['TRITON_INTERPRET'], 'PATH' in os.environ)"
    assert system.run_tool([sys.executable, "-c", script], variables={"TRITON_INTERPRET": "7"}) == "7 True"


@pytest.mark.skipif(sys.platform != "linux", reason="lscpu is a Linux tool")
def test_cpu_model_comes_from_lscpu(tmp_path, monkeypatch):
    put_tool(tmp_path, "lscpu", {"": "Architecture:    aarch64\nModel name:      Neoverse-V2\n  Model:   0"})
    only_on_path(monkeypatch, tmp_path)
    assert system.cpu_model() == "Neoverse-V2"


def test_a_library_loads_or_not():
    assert system.library_loads(None if sys.platform == "darwin" else "libc.so.6")
    assert not system.library_loads("libnothing.so.1")
