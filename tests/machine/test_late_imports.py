"""Imports of torch's compiler, and what is done where Triton is missing, broken or of version 3.6."""

import importlib
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import triton
from torch import nn

from cs336sys.machine.late_imports import importing_no_compiler, repair_interpreter


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
    repair_interpreter()
    interpreter._patch_lang_tensor(object(), scope)
    bound = SimpleNamespace(handle=SimpleNamespace(data=torch.tensor([7]).numpy()))
    assert changes["T"] is None
    assert changes["__index__"](bound) == 7


class Doubled(nn.Module):
    """Code of its own, as blocks have: torch 2.11 compiles none of a layer of torch's that has such a hook."""

    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize("is_called_before", [False, True])
def test_hook_disabled_before_the_compiler_s_import_stays_out_of_what_it_compiles(monkeypatch, is_called_before):
    calls = []
    module = importlib.import_module("torch._dynamo")

    def hook(layer, args):
        calls.append(torch.compiler.is_compiling())

    layer = Doubled()
    with monkeypatch.context() as before:
        before.delitem(sys.modules, "torch._dynamo")
        layer.register_forward_pre_hook(importing_no_compiler(torch._disable_dynamo(hook)))
        if is_called_before:
            layer(torch.ones(2))
            assert calls.pop() is False
            assert "torch._dynamo" not in sys.modules, "to call it imports nothing"
        # As an import statement looks for it.
        for finder in sys.meta_path:
            if finder.find_spec("torch._dynamo", torch.__path__):
                break
    assert sys.modules["torch._dynamo"] is module
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layer.compile(backend="eager")
    for _ in range(3):
        layer(torch.ones(2))
    # Only what is left out sees every call, and no frame of it is compiled.
    assert calls == [False] * 3
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
