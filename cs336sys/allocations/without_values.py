"""Models that run without values: what they may read, and which of their lines read it."""

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cs336sys.machine.triton_package import why_no_triton

_TORCH = os.path.dirname(torch.__file__)
_ALLOCATIONS = os.path.dirname(__file__)


class WithoutValues(TorchDispatchMode):
    """Lets code go on with tensors that have no values, fake ones or those of the meta device.

    What it reads from one is zero, as in initialisation by rejection. Kernels of Triton are not launched: they would
    write to address 0, after which the process has no GPU. What they would have written is allocated by their callers.

    Args:
        decisions: truth values to read instead of False, by line.

    Attributes:
        guessed: lines that have read anything else, with how often.
        launches: kernels of Triton that were not launched, with how often.
    """

    def __init__(self, decisions: Mapping[str, bool] | None = None) -> None:
        super().__init__()
        self._decisions = decisions or {}
        self.guessed: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self._unlaunched = contextlib.ExitStack()

    def __enter__(self) -> "WithoutValues":
        # Here, as the import takes 0.2 s.
        if why_no_triton() is not None:
            return super().__enter__()
        from triton.runtime import Autotuner, Heuristics, JITFunction
        from triton.runtime.interpreter import InterpretedFunction

        for kind in (Autotuner, Heuristics, JITFunction, InterpretedFunction):
            self._unlaunched.enter_context(mock.patch.object(kind, "run", self._counting(kind.run)))
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._unlaunched.close()
        super().__exit__(*raised)

    def _counting(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def count(kernel: Any, *args: Any, warmup: bool = False, **named: Any) -> Any:
            if warmup:
                return run(kernel, *args, warmup=warmup, **named)
            while hasattr(kernel, "fn"):
                kernel = kernel.fn
            self.launches[kernel.__name__] += 1
            return None

        return count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten._local_scalar_dense.default:
            return func(*args, **(kwargs or {}))
        line = _reading_line()
        is_decision = args[0].dtype is torch.bool
        if is_decision and line in self._decisions:
            return self._decisions[line]
        self.guessed[line] += 1
        return False if is_decision else 0.0 if args[0].is_floating_point() else 0


class DecisionsRead(TorchDispatchMode):
    """Notes what truth values are read from real tensors, by line."""

    def __init__(self) -> None:
        super().__init__()
        self._read: dict[str, set[bool]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            self._read.setdefault(_reading_line(), set()).add(result)
        return result

    @property
    def decisions(self) -> dict[str, bool]:
        """Lines that have read one value, and it."""
        return {line: next(iter(values)) for line, values in self._read.items() if line and len(values) == 1}


def _reading_line() -> str:
    return code_line(frame for frame in python_frames() if "/cs336sys/training/" not in frame[0])


def python_frames() -> Iterator[tuple[str, int, str]]:
    """File name, line and function of the caller and of what called it, innermost first; keeps no frame alive."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def code_line(frames: Iterable[tuple[str, int, str]]) -> str:
    """The innermost frame of neither torch nor what records, as ``cs336_basics/model.py:51 forward``; or nothing."""
    for filename, line, function in frames:
        if filename.endswith(".py") and not filename.startswith((_TORCH, _ALLOCATIONS)):
            return f"{'/'.join(filename.split(os.sep)[-2:])}:{line} {function}"
    return ""
