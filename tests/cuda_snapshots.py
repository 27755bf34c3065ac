"""Snapshots of ``torch.cuda.memory._dump_snapshot`` without a GPU: fake tensors, and an allocator on paper.

The forms follow torch/csrc/cuda/Module.cpp (``THCPModule_memorySnapshot``) and memory_snapshot.cpp:

- snapshot: ``segments``, ``device_traces``; from 2.3 on ``allocator_settings``; from 2.5 on ``external_annotations``.
- segment: ``device``, ``address``, ``total_size``, ``allocated_size``, ``active_size``, ``requested_size``, ``stream``,
  ``segment_type`` (``small``, ``large``), ``segment_pool_id`` (a pair, 0, 0 outside of graphs), ``is_expandable``,
  ``frames``, ``blocks``.
- block: ``size``, ``requested_size``, ``state`` (``active_allocated``, ``active_pending_free``, ``inactive``),
  ``frames``; ``address`` from 2.2 on.
- entry of a trace: ``action``, ``addr`` (of an oom ``device_free``), ``size`` (as asked for; of an oom rounded),
  ``stream``, ``frames`` where a stack was recorded; ``time_us`` from 2.2 on, ``compile_context`` from 2.5 on,
  ``user_metadata`` from 2.10 on, ``pool_id`` from 2.13 on.
- frame: ``name``, ``filename``, ``line``; shared by all stacks that have it. Autograd's threads have no Python stack.
"""

import contextlib
import pickle
import sys
import weakref

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MIB = 2**20
VERSIONS = ("2.1", "2.2", "2.3", "2.5", "2.10", "2.13")


class Allocator:
    """The rules of CUDACachingAllocator: rounding, two pools, best fit, splitting, merging, releasing at failure."""

    def __init__(self, capacity, *, expandable=False, device=0):
        self.capacity, self.expandable, self.device = capacity, expandable, device
        self.segments = []  # [address, size, is_small, stream, pool, is_expandable]
        self.blocks = {}  # address -> [size, requested, frames or None if free, segment]
        self.trace = []
        self.next_address = 0x7F0000000000
        self.clock = 1_700_000_000_000_000
        self.stream, self.pool = 0, (0, 0)
        self.stopped = False

    @property
    def reserved(self):
        return sum(segment[1] for segment in self.segments)

    def record(self, action, address, size, frames):
        self.clock += 7
        place = "device_free" if action == "oom" else "addr"
        entry = {"action": action, place: address, "size": size, "stream": self.stream, "time_us": self.clock}
        self.trace.append(
            entry | {"frames": frames, "pool_id": self.pool, "user_metadata": "", "compile_context": "N/A"}
        )

    def alloc(self, requested, frames):
        size = max(512, -(-requested // 512) * 512)
        small = size <= MIB
        found = self._best(size, small)
        if found is None:
            grown = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            if not self._grow(grown, small, frames) and not (
                self._release(frames) and self._grow(grown, small, frames)
            ):
                self.record("oom", self.capacity - self.reserved, size, frames)
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {requested} bytes")
            found = self._best(size, small)
        whole, _, _, segment = self.blocks[found]
        if whole - size >= (512 if small else MIB + 1):
            self.blocks[found + size] = [whole - size, 0, None, segment]
            whole = size
        self.blocks[found] = [whole, requested, frames or [], segment]
        self.record("alloc", found, requested, frames)
        return found

    def stop(self):
        """What is freed from now on is part of no snapshot."""
        self.stopped = True

    def free(self, address, frames):
        if self.stopped:
            return
        size, requested, _, segment = self.blocks[address]
        self.record("free_requested", address, requested, frames)
        self.record("free_completed", address, requested, frames)
        self.blocks[address] = [size, 0, None, segment]
        self._merge(segment)

    def _best(self, size, small):
        fits = [
            (block[0], address)
            for address, block in self.blocks.items()
            if block[2] is None
            and block[0] >= size
            and (block[3][2], block[3][3], block[3][4]) == (small, self.stream, self.pool)
        ]
        return min(fits)[1] if fits else None

    def _grow(self, size, small, frames):
        if self.reserved + size > self.capacity:
            return False
        own = [one for one in self.segments if one[5] and one[2] == small and one[3:5] == [self.stream, self.pool]]
        if self.expandable and own:
            address = own[0][0] + own[0][1]
            self.blocks[address] = [size, 0, None, own[0]]
            own[0][1] += size
            self._merge(own[0])
            self.record("segment_map", address, size, frames)
            return True
        segment = [self.next_address, size, small, self.stream, self.pool, self.expandable]
        self.next_address += (1 << 40) if self.expandable else size + 2 * MIB
        self.segments.append(segment)
        self.blocks[segment[0]] = [size, 0, None, segment]
        self.record("segment_map" if self.expandable else "segment_alloc", segment[0], size, frames)
        return True

    def _release(self, frames):
        released = False
        for segment in list(self.segments):
            blocks = [(address, block) for address, block in self.blocks.items() if block[3] is segment]
            if len(blocks) == 1 and blocks[0][1][2] is None:
                del self.blocks[blocks[0][0]]
                self.segments.remove(segment)
                self.record("segment_unmap" if segment[5] else "segment_free", segment[0], segment[1], frames)
                released = True
        return released

    def _merge(self, segment):
        before = None
        for address in sorted(address for address, block in self.blocks.items() if block[3] is segment):
            block = self.blocks[address]
            if block[2] is None and before is not None:
                self.blocks[before][0] += block[0]
                del self.blocks[address]
            else:
                before = address if block[2] is None else None

    def snapshot(self, version="2.13", entries=None):
        after = tuple(map(int, version.split(".")))
        segments = []
        for segment in sorted(self.segments):
            address, size, small, stream, pool, expandable = segment
            blocks = []
            for where in sorted(where for where, block in self.blocks.items() if block[3] is segment):
                held, requested, frames, _ = self.blocks[where]
                state = "inactive" if frames is None else "active_allocated"
                blocks.append({"address": where, "size": held, "requested_size": requested, "state": state})
                blocks[-1]["frames"] = frames or []
                if after < (2, 2):
                    del blocks[-1]["address"]
            held = sum(block["size"] for block in blocks if block["state"] != "inactive")
            segments.append(
                {"device": self.device, "address": address, "total_size": size, "allocated_size": held}
                | {"active_size": held, "requested_size": sum(block["requested_size"] for block in blocks)}
                | {"stream": stream, "segment_type": "small" if small else "large", "segment_pool_id": pool}
                | {"is_expandable": expandable, "frames": [], "blocks": blocks}
            )
        missing = {"time_us": (2, 2), "compile_context": (2, 5), "user_metadata": (2, 10), "pool_id": (2, 13)}
        trace = [
            {key: value for key, value in entry.items() if after >= missing.get(key, (0,)) and value is not None}
            for entry in self.trace[-entries if entries else 0 :]
        ]
        traces = [[] for _ in range(self.device)] + [trace]
        more = {"allocator_settings": {"expandable_segments": self.expandable}} if after >= (2, 3) else {}
        more |= {"external_annotations": []} if after >= (2, 5) else {}
        return {"segments": segments, "device_traces": traces} | more


class OnFakeCuda(TorchDispatchMode):
    """While it is entered, under a ``FakeTensorMode``, memory of new storages comes from the allocator.

    Args:
        stacks: ``python``, ``all`` (C++ frames, too), or ``none``.
    """

    def __init__(self, allocator, stacks="python"):
        super().__init__()
        self.allocator, self.stacks = allocator, stacks
        self._live, self._frames = {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._follow(leaf.untyped_storage())
        return result

    def _follow(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self._live or not size:
            return
        address = self.allocator.alloc(size, self._stack())

        def freed(_):
            if self._live.pop(key, None) is not None:
                self.allocator.free(address, [] if self.stacks != "none" else None)

        self._live[key] = weakref.ref(storage, freed)

    def _frame(self, name, filename, line):
        return self._frames.setdefault((name, filename, line), {"name": name, "filename": filename, "line": line})

    def _stack(self):
        if self.stacks == "none":
            return None
        frames, frame = [], sys._getframe(3)
        while frame is not None:
            code = frame.f_code
            # A thread of autograd begins below this one.
            if code.co_name == "_engine_run_backward":
                if self.stacks == "all":
                    frames.append(self._frame("torch::autograd::Engine::thread_main(...)", "engine.cpp", 1))
                return frames
            if "/pytest" in code.co_filename or "/pluggy/" in code.co_filename:
                break
            ours = (__file__, "_python_dispatch.py", "_dynamo/eval_frame.py", "_compile.py")
            if not code.co_filename.endswith(ours):
                frames.append(self._frame(code.co_name, code.co_filename, frame.f_lineno))
            frame = frame.f_back
        if self.stacks == "all":
            frames.insert(0, self._frame("at::native::empty_cuda(...)", "??", 0))
        return frames


@contextlib.contextmanager
def fake_cuda(capacity=80 * 1024 * MIB, *, stacks="python", **settings):
    """Train within this on fake tensors; yields the allocator. A failure to allocate ends it."""
    allocator = Allocator(capacity, **settings)
    with contextlib.suppress(torch.OutOfMemoryError), FakeTensorMode(), OnFakeCuda(allocator, stacks) as mode:
        allocator.mode = mode
        yield allocator


def write(path, snapshot):
    path.write_bytes(pickle.dumps(snapshot, 4))
    return path
