"""Models that run without values: what they may read, and which of their lines read it."""

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, Self
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cs336sys.machine.late_imports import why_no_triton

_TORCH = os.path.dirname(torch.__file__)
_ALLOCATIONS = os.path.dirname(__file__)


class WithoutValues(TorchDispatchMode):
    """A mode in which code goes on with tensors that have no values, fake ones or those of the meta device.

    Values read from them are zero. Kernels of Triton are not launched: they would write to address 0, after which the
    process has no GPU. Their callers have allocated their results.

    Args:
        decisions: truth values to read instead of False, by line.

    Attributes:
        guessed: how often each line has read another value.
        launches: how often each kernel of Triton was not launched.
    """

    def __init__(self, decisions: Mapping[str, bool] | None = None) -> None:
        super().__init__()
        self._decisions = decisions or {}
        self.guessed: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if why_no_triton() is None:
            from triton.runtime import Autotuner, Heuristics, JITFunction  # Imported here, as it takes 0.2 s.
            from triton.runtime.interpreter import InterpretedFunction

            for kind in (Autotuner, Heuristics, JITFunction, InterpretedFunction):
                self._patches.enter_context(mock.patch.object(kind, "run", self._count_instead(kind.run)))
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._patches.close()
        super().__exit__(*raised)

    def _count_instead(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts a kernel instead of launching it by ``run``, which may still compile it."""

        def count(kernel: Any, *args: Any, warmup: bool = False, **kwargs: Any) -> Any:
            if warmup:  # It only compiles.
                return run(kernel, *args, warmup=warmup, **kwargs)
            while hasattr(kernel, "fn"):  # Autotuners and heuristics wrap the kernel.
                kernel = kernel.fn
            self.launches[kernel.__name__] += 1
            return None

        return count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten._local_scalar_dense.default:  # What item() and bool() of a tensor call.
            return func(*args, **(kwargs or {}))
        line = _reading_line()
        is_decision = args[0].dtype is torch.bool
        if is_decision and line in self._decisions:
            return self._decisions[line]
        self.guessed[line] += 1
        return False if is_decision else 0.0 if args[0].is_floating_point() else 0


class DecisionsRead(TorchDispatchMode):
    """The truth values that are read from real tensors, by line."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, set[bool]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            self._values.setdefault(_reading_line(), set()).add(result)
        return result

    @property
    def decisions(self) -> dict[str, bool]:
        """Return the value of each line that has always read the same."""
        return {line: next(iter(values)) for line, values in self._values.items() if line and len(values) == 1}


def _reading_line() -> str:
    """Return the user's line that reads a value: the innermost outside of torch, this room and our training code."""
    return code_line(frame for frame in python_frames() if "/cs336sys/training/" not in frame[0])


def python_frames() -> Iterator[tuple[str, int, str]]:
    """Yield file name, line and function of the caller and its callers, innermost first; keeps no frame alive."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def code_line(frames: Iterable[tuple[str, int, str]]) -> str:
    """Return the innermost frame of neither torch nor this room, ``cs336_basics/model.py:51 forward``; "" for none."""
    for filename, line, function in frames:
        if filename.endswith(".py") and not filename.startswith((_TORCH, _ALLOCATIONS)):
            return f"{'/'.join(filename.split(os.sep)[-2:])}:{line} {function}"
    return ""
