"""A CUDA graph without a GPU: records torch's operators with their tensors, and runs them again on the same memory.

Like a graph, a replay knows nothing of Python: every number and every address is that of the recorded call, results go
to where they went then, and what the CPU counted or decided stays as it was. Like a graph, recording changes nothing,
and reading a number from a tensor fails.
"""

import contextlib
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from cs336sys.parallel.collectives import _Launched
from cs336sys.parallel.sharded_optimizer import groups, slices

SYNCHRONIZES = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


class OperatorRecorder:
    """In place of ``cs336sys.training.cuda_graphs.CudaRecorder``."""

    pool_bytes = 0

    def __init__(self, *_):
        pass

    def on_launch_stream(self):
        return contextlib.nullcontext()

    def record(self, run):
        wait = _Launched.wait

        def wait_unrecorded(launched):
            # Gloo's reduce-scatter copies its result while it is waited for, each time.
            with _disable_current_modes():
                wait(launched)

        with contextlib.ExitStack() as stack:
            for module in (groups, slices):
                stack.enter_context(mock.patch.object(module, "is_stream_captured", return_value=True))
            stack.enter_context(mock.patch.object(_Launched, "wait", wait_unrecorded))
            recorded = stack.enter_context(_Recorded())
            run()
        recorded.undo()
        return recorded.replay


class _Recorded(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self._calls = []
        self._overwritten = {}

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator in SYNCHRONIZES:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        for argument, value in zip(operator._schema.arguments, args, strict=False):
            if operator.namespace == "c10d" or (argument.alias_info is not None and argument.alias_info.is_write):
                self._save(value)
        for argument in operator._schema.arguments:
            if argument.name in kwargs and argument.alias_info is not None and argument.alias_info.is_write:
                self._save(kwargs[argument.name])
        result = operator(*args, **kwargs)
        _wait(operator, result)
        self._calls.append((operator, *tree_map_only(Tensor, Tensor.detach, (args, kwargs, result))))
        return result

    def _save(self, value):
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._overwritten.setdefault(storage.data_ptr(), (storage, storage.clone()))

    def undo(self):
        for storage, before in self._overwritten.values():
            storage.copy_(before)
        self._overwritten = {}

    def replay(self):
        with torch.no_grad():
            for operator, args, kwargs, result in self._calls:
                again = operator(*args, **kwargs)
                _wait(operator, again)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


def _wait(operator, result):
    if operator.namespace == "c10d" and result is not None:
        (result[-1] if isinstance(result, tuple) else result).wait()
