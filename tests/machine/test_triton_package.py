"""What is done where Triton is missing, broken or of version 3.6."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import triton

from cs336sys.machine import triton_package


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_a_triton_that_cannot_be_imported_costs_only_what_needs_it_and_doctor_says_why(tmp_path):
    (tmp_path / "triton.py").write_text("raise OSError('libtriton.so: wrong ELF class')")
    code = """
import torch
from cs336sys.kernels.attention import flash_attention
from cs336sys.allocations.without_values import WithoutValues
from cs336sys.machine.diagnosis import software
from torch.utils._triton import has_triton_package
assert not has_triton_package()
with WithoutValues():
    torch.ones(1)
query = torch.randn(1, 4, 8)
print(flash_attention(query, query, query).shape)
for check in (software.check_torch(), software.check_triton()):
    print(check.name, check.verdict, check.found)
flash_attention(query, query, query, implementation="triton")
"""
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.pathsep.join(sys.path)}"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    shape, torch_check, triton_check = ended.stdout.splitlines()
    assert shape == "torch.Size([1, 4, 8])"
    assert torch_check.startswith("torch ok ")
    reason = "whose import fails here (OSError: libtriton.so: wrong ELF class): install it again"
    assert triton_check == f"Triton missing {triton.__version__}, needed is the package triton, {reason}"
    assert ended.stderr.endswith(
        f"CapabilityError: implementations 'triton' and 'hopper' need the package triton, {reason}\n"
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
