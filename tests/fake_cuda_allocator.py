"""A CUDA caching allocator without a GPU: what torch.cuda.memory shows of one, built row by row."""

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cuda", 1)

FRAMES = [
    {"filename": nn.modules.module.__file__, "line": 1, "name": "_call_impl"},
    {"filename": "/home/me/cs336_basics/model.py", "line": 51, "name": "forward"},
]


class FakeCudaAllocator:
    """Counts every call from the start, and keeps the last ``max_entries`` entries while it is recorded.

    Sizes are rounded up to 512 bytes in its counters, not in its history, as by the real one.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls = {"allocated": 0, "freed": 0}
        self.allocated = self.peak = 0
        self.trace: list[dict] = []
        self.max_entries: int | None = None
        self.settings: dict = {}
        memory = {"_record_memory_history": self._record, "_snapshot": self._snapshot}
        for name, function in memory.items():
            monkeypatch.setattr(torch.cuda.memory, name, function)
        cuda = {
            "memory_stats_as_nested_dict": lambda device: {"allocation": {"all": self.calls}},
            "memory_allocated": lambda device: self.allocated,
            "max_memory_allocated": lambda device: self.peak,
            "max_memory_reserved": lambda device: 2 * self.peak,
            "reset_peak_memory_stats": self._reset_peak,
        }
        for name, function in cuda.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def alloc(self, address: int, size: int, frames: list[dict] = FRAMES) -> None:
        self.calls = self.calls | {"allocated": self.calls["allocated"] + 1}
        self.allocated += _rounded(size)
        self.peak = max(self.peak, self.allocated)
        self._append("segment_alloc", address, 2**21)
        self._append("alloc", address, size, frames=frames)

    def free(self, address: int, size: int) -> None:
        self.calls = self.calls | {"freed": self.calls["freed"] + 1}
        self.allocated -= _rounded(size)
        self._append("free_requested", address, size)
        self._append("free_completed", address, size)

    def _reset_peak(self, device: torch.device) -> None:
        self.peak = self.allocated

    def _record(self, enabled: str | None, **settings) -> None:
        self.max_entries = settings.get("max_entries") if enabled else None
        self.settings = settings or self.settings

    def _snapshot(self) -> dict:
        return {"segments": [], "device_traces": [[], list(self.trace)]}

    def _append(self, action: str, address: int, size: int, **more) -> None:
        if self.max_entries is not None:
            entry = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 1_700_000_000_000_000}
            self.trace = [*self.trace, entry | more][-self.max_entries :]


class AllocateFrom(TorchDispatchMode):
    """While it is entered, the memory of results on the CPU is said to come from the fake allocator."""

    def __init__(self, allocator: FakeCudaAllocator):
        super().__init__()
        self._allocator = allocator
        self._live: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in before | self._live.keys():
                self._follow(leaf.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, address, size = storage._cdata, storage.data_ptr(), storage.nbytes()
        if not size:
            return

        def freed(_: weakref.ref) -> None:
            del self._live[key]
            self._allocator.free(address, size)

        self._live[key] = weakref.ref(storage, freed)
        self._allocator.alloc(address, size)


def _rounded(size: int) -> int:
    return -(-size // 512) * 512
