import torch

from cs336sys.allocations.recorder import DispatchMode


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
