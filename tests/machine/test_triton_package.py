"""What is done where Triton is missing, broken or of version 3.6."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import triton

from cs336sys.machine import triton_package


def run_python(code, path):
    environment = os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{os.pathsep.join(sys.path)}"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)


def test_a_triton_that_cannot_be_imported_costs_only_what_needs_it(tmp_path):
    (tmp_path / "triton.py").write_text("raise OSError('libtriton.so: wrong ELF class')")
    code = """
import torch
from cs336sys.kernels.attention import flash_attention
from cs336sys.allocations.without_values import WithoutValues
from torch.utils._triton import has_triton_package
assert not has_triton_package()
with WithoutValues():
    torch.ones(1)
query = torch.randn(1, 4, 8)
print(flash_attention(query, query, query).shape)
flash_attention(query, query, query, implementation="triton")
"""
    ended = run_python(code, tmp_path)
    assert ended.stdout == "torch.Size([1, 4, 8])\n"
    assert ended.stderr.endswith(
        "CapabilityError: implementations 'triton' and 'hopper' need the package triton, whose import fails here "
        "(OSError: libtriton.so: wrong ELF class): install it again\n"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_doctor_names_why_triton_cannot_be_imported(tmp_path):
    (tmp_path / "triton.py").write_text("raise OSError('libtriton.so: wrong ELF class')")
    code = """
import sys
from cs336sys.cli import app
from cs336sys.machine import diagnosis
from cs336sys.machine.diagnosis import software
diagnosis.diagnose = lambda: [software.check_torch(), software.check_triton()]
sys.argv = ["cs336sys", "doctor", "--format", "csv"]
app()
"""
    ended = run_python(code, tmp_path)
    assert (ended.returncode, ended.stderr) == (3, "")
    _, torch_row, triton_row = ended.stdout.splitlines()
    assert torch_row.startswith("doctor,torch,ok,")
    reason = "whose import fails here (OSError: libtriton.so: wrong ELF class): install it again"
    assert triton_row.startswith(
        f'doctor,Triton,missing,"{triton.__version__}, needed is the package triton, {reason}"'
    )


def test_the_interpreter_of_triton_3_6_reads_bounds_of_one_element(monkeypatch):
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    changes = {}
    scope = SimpleNamespace(set_attr=lambda tensor, name, value: changes.update({name: value}))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", lambda tensor, scope: scope.set_attr(tensor, "T", None))
    triton_package.repair_interpreter()
    interpreter._patch_lang_tensor(object(), scope)
    bound = SimpleNamespace(handle=SimpleNamespace(data=torch.tensor([7]).numpy()))
    assert changes["T"] is None
    assert changes["__index__"](bound) == 7
