"""Which module is running, found by hooks."""

import contextlib
from collections.abc import Mapping

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class ModuleStack:
    """While it is entered, :attr:`current` is the name of the innermost module that runs, empty outside of all.

    The Python frames of the modules would say it too, but to ask a frame for its variables keeps these alive.

    Args:
        names: the modules by name; any other counts as a part of the one that calls it.
    """

    def __init__(self, names: Mapping[nn.Module, str]):
        self._names = names
        self._running: list[str] = []
        self._hooks = contextlib.ExitStack()

    @property
    def current(self) -> str:
        return self._running[-1] if self._running else ""

    @property
    def is_running(self) -> bool:
        return bool(self._running)

    def __enter__(self) -> "ModuleStack":
        self._hooks.callback(register_module_forward_pre_hook(self._start).remove)
        # always_call: a recomputation is ended by an exception as soon as it has computed what it must.
        self._hooks.callback(register_module_forward_hook(self._end, always_call=True).remove)
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.close()

    def _start(self, module: nn.Module, inputs: object) -> None:
        self._running.append(self._names.get(module, self.current))

    def _end(self, module: nn.Module, inputs: object, output: object) -> None:
        self._running.pop()
