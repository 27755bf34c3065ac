import importlib
import sys

import pytest
import torch
from torch import nn

from cs336sys.allocations.recorder import DispatchMode
from cs336sys.machine.lazy_dynamo import importing_no_compiler


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


def test_whoever_is_decorated_once_the_compiler_is_there_stays_as_it_is():
    importlib.import_module("torch._dynamo")

    def function():
        pass

    left_out = torch._disable_dynamo(function)
    assert importing_no_compiler(left_out) is left_out
    assert not vars(function)


class Listed(DispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(operator.name())
        return operator(*args, **(kwargs or {}))


def test_compilers_leave_out_what_watches_operators():
    def function(x):
        # A number is read between two graphs, by an operator that runs uncompiled.
        return x * (x + 1).sum().item()

    def compiled_frames():
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        torch.compile(function, backend="eager")(torch.ones(3))
        return torch._dynamo.utils.counters["frames"]["total"]

    expected = compiled_frames()
    with Listed() as listed:
        found = compiled_frames()
    assert "aten::_local_scalar_dense" in listed.names
    assert found == expected
