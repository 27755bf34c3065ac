"""Tiles, pipeline depth and order of work of the Hopper kernels, by problem: the counterpart of triton/settings.py."""

import math
from dataclasses import dataclass

import torch

from cs336sys.kernels.attention.problem import AMD, AttentionProblem, gpu_capability


@dataclass(frozen=True)
class HopperForwardSettings:
    """``consumers`` warpgroups of 64 queries each stream tiles of ``key_rows`` keys through rings of ``num_stages``.

    ``take_turns``: a warpgroup issues its matrix products only after its neighbour has, so that one's softmax falls
    into the other's products. ``persistent``: as many programs as multiprocessors share the items; otherwise every item
    is a program of its own, which the GPU starts when a multiprocessor is free.
    """

    consumers: int
    key_rows: int
    num_stages: int
    take_turns: bool = False
    persistent: bool = True

    @property
    def item_rows(self) -> int:
        return 64 * self.consumers

    @property
    def consumer_registers(self) -> int:
        """A thread's registers: the rest of the multiprocessor's 64 K after the producer's 24, a multiple of 8."""
        return {2: 240, 3: 160}[self.consumers]


@dataclass(frozen=True)
class HopperBackwardSettings:
    """Rings of ``num_stages`` tiles; ``kernel``: who computes dQ, and how two warpgroups share dK and dV.

    "exchange": the warpgroups of dK and dV also compute dQ; "reducer": a third one does; "wide": the two share 64 keys
    by columns of the head dimension.
    """

    num_stages: int
    kernel: str

    @property
    def registers(self) -> tuple[int, ...]:
        """Registers of a consumer's thread and of the reducer's; with the producer's 24 that is all there are."""
        return (208, 72) if self.kernel == "reducer" else (240,)

    @property
    def key_rows(self) -> int:
        """The keys of a program."""
        return 64 if self.kernel == "wide" else 128


# All measurements: H200, triton 3.6, bf16, medians in ms. Shapes are batch x heads x S x D, causal unless "full".


def hopper_forward_settings(problem: AttentionProblem) -> HopperForwardSettings:
    """The forward kernel's settings, for head dimension 16, 32, 64, 128 or 256."""
    if problem.head_dim == 16:
        # 1x16x16384x16: 0.755; taking turns 0.818. Two consumers with 256 keys 0.862.
        return HopperForwardSettings(consumers=3, key_rows=128, num_stages=2)
    if problem.head_dim == 32:
        # 1x16x16384x32: 0.771; not taking turns 0.790. Two programs of two consumers a multiprocessor lose 9 %.
        return HopperForwardSettings(consumers=3, key_rows=128, num_stages=2, take_turns=True)
    if problem.head_dim == 64:
        # 1x16x16384x64: 0.969; not taking turns 0.969. 8x16x2048x64: 0.156, 0.169. Full 1x16x16384x64: 1.930, 1.880.
        # Shorter items waste less at the ends of few rounds. Two consumers and three: full 4x16, 512 queries and 4096
        # keys 0.0811, 0.0978; 8x16 of them 0.153, 0.144; 16x12x1024x64 0.0844, 0.0862; 8x16x2048x64 0.175, 0.161;
        # 1x4x8192x64 0.0753, 0.0956; 1x20x1024x64 0.0178, 0.0231; window of 512, 2x16x8192x64: 0.129, 0.137.
        rounds = {n: math.ceil(_items_per_multiprocessor(problem, problem.num_queries, 64 * n)) for n in (2, 3)}
        if min(problem.num_keys, problem.window or problem.num_keys) <= 1024 or 0.8 * rounds[2] < rounds[3]:
            return HopperForwardSettings(consumers=2, key_rows=128, num_stages=2, take_turns=True)
        return HopperForwardSettings(consumers=3, key_rows=128, num_stages=2, take_turns=problem.is_causal)
    if problem.head_dim == 256:
        # The output takes 128 registers of a thread, which leaves none to a third warpgroup; queries and two rings of
        # two tiles of 64 keys take 192 KiB, so that longer tiles do not fit. 1x16x16384x256: 2.986; taking turns 3.021.
        return HopperForwardSettings(consumers=2, key_rows=64, num_stages=2)
    # 1x16x16384x128: 1.519; taking turns 1.576. 8x16x2048x128: 0.230, 0.225. Full 1x16x16384x128: 3.013, 3.067;
    # 1x16x4096x128: 0.194, 0.186; 8x16x2048x128: 0.378, 0.377.
    take_turns = problem.num_keys <= (2048 if problem.is_causal else 4096)
    return HopperForwardSettings(consumers=2, key_rows=128, num_stages=2, take_turns=take_turns)


def hopper_backward_settings(problem: AttentionProblem, deterministic: bool = False) -> HopperBackwardSettings:
    """The backward kernel's settings; with head dimension 128 dK and dV leave no registers to a third warpgroup."""
    if problem.head_dim <= 64:
        # 1x16x16384x64: 2.588; dQ in the order of its rows 2.711. 8x16x2048x64: 0.450, 0.469. Before, without reducer:
        # 3.277 against 2.740; 0.544, 0.466. Full 1x16x16384x64: 6.536, 5.552.
        # An item a program 8x16x2048x64: 0.459, as many programs as multiprocessors 0.422, and three stages 0.414;
        # 4x25x512x64: 0.0580, 0.0515, 0.0505; 1x16x16384x64: 2.56, 2.68, 2.55; 8x16x2048x32: 0.357, 0.325, 0.318.
        # Who takes turns has TURNS for two stages.
        return HopperBackwardSettings(num_stages=2 if deterministic else 3, kernel="reducer")
    if problem.head_dim == 256:
        # 1x16x16384x256: 13.28 (Triton 20.10); next S^T alongside dK 15.01, dQ in two halves around dK 13.38.
        # A third stage does not fit into shared memory.
        return HopperBackwardSettings(num_stages=2, kernel="wide")
    # 1x16x16384x128: 4.44; the producer behind the consumers, with one warp, 4.60, and L read only when S^T is issued,
    # alongside dK, 5.55; dQ by TMA reduction 4.86, and without S^T ahead 4.93; before all of that 5.48.
    return HopperBackwardSettings(num_stages=2, kernel="exchange")


def hopper_forward_is_faster(problem: AttentionProblem) -> bool:
    """Return whether the forward kernel was measured to be faster than plain Triton's, for what it can run.

    In a window as without one, by the lengths of the whole sequences. Window of 1024, 1x16x16384: 0.186, Triton 0.248
    with 64; 0.235, 0.333 with 128; 0.418, 0.630 with 256; 0.152, 0.171 with 32. Grouped 8 of 32 heads, 8192x128: 0.250,
    0.351. Window of 256, 8x16x2048x64: 0.108, 0.103.
    """
    rows = hopper_forward_settings(problem).item_rows
    items_per_multiprocessor = _items_per_multiprocessor(problem, problem.num_queries, rows)
    if problem.head_dim == 16:
        # Yes: 1x16x16384: 0.788, Triton 0.815; 1x1x65536, 2.6 items a multiprocessor: 0.785, 0.899; 1x1x32768, 1.3
        # items: 0.270, 0.305. No: 8x16x2048: 0.141, 0.125; 1x16x4096: 0.070, 0.066.
        # In a window of 1024, 1x16x16384: 0.147, 0.141.
        pays_off = problem.window is None and problem.num_keys > 8192
        pays_off = pays_off and items_per_multiprocessor >= (1.25 if problem.num_keys >= 32768 else 4)
    elif problem.head_dim == 32:
        # Yes: 1x16x16384: 0.863, Triton 0.956; 8x16x2048: 0.147, 0.149; 1x16x4096: 0.075, 0.078; 1x1x32768, 1.3 items a
        # multiprocessor: 0.284, 0.365; 1x2x16384, 1.3 items: 0.146, 0.187. No: 4x25x512: 0.022, 0.019; 1x1x16384, 0.6
        # items: 0.165, 0.099.
        pays_off = problem.num_keys > 1024 and items_per_multiprocessor >= (1.25 if problem.num_keys >= 16384 else 2)
    elif problem.head_dim == 256:
        # Yes: 1x16x16384: 2.986, Triton 4.379; 4x25x512: 0.0471, 0.0651; 1x16x2048, 1.9 items a multiprocessor: 0.0630,
        # 0.1270; 2x12x1024, 1.5 items: 0.0361, 0.0501. No: 1x1x16384, 0.97 items: 0.317, 0.292.
        pays_off = items_per_multiprocessor >= 1.4
    elif problem.head_dim == 64:
        # Yes: 1x16x16384: 0.969, Triton 1.242; 4x25x1024: 0.0519, 0.0543; 1x4x8192, 1.3 items a multiprocessor: 0.0902,
        # 0.1113; 2x12x1024, 1.1 items: 0.0213, 0.0218; with two consumers 1x20x1024, 1.2 items: 0.0178, 0.0203; full
        # 4x16x512: 0.0190, 0.0240. No: 4x25x512: 0.0244, 0.0219; 8x16x512: 0.0263, 0.0253; 1x1x16384, 0.65 items:
        # 0.168, 0.116.
        pays_off = problem.num_keys >= (513 if problem.is_causal else 512) and items_per_multiprocessor >= 1
    else:
        # Yes: 1x16x16384: 1.519, Triton 2.151; 4x25x512: 0.0310, 0.0362; 1x16x2048, 1.9 items a multiprocessor: 0.0391,
        # 0.0462; 2x12x1024, 1.5 items: 0.0244, 0.0267. No: 1x1x16384, 0.97 items: 0.170, 0.142. As many items of short
        # sequences, 1x16x1024, were faster when the loop took maxima.
        pays_off = problem.num_keys >= 512 and items_per_multiprocessor >= (0.9 if problem.num_keys <= 1024 else 1.4)
    return problem.tma_allowed and pays_off


def hopper_backward_is_faster(problem: AttentionProblem, deterministic: bool = False) -> bool:
    """As ``hopper_forward_is_faster``, against the deterministic form of plain Triton if it must be that.

    Of grouped queries, which are not measured: as of as many heads of keys, because items are cut into pieces until
    they fill the GPU. Who adds to dQ in turn is not cut. Window of 1024, 1x16x16384: 0.461, Triton 0.594 with 64;
    0.750, 1.174 with 128; 1.977, 3.456 with 256; 0.358, 0.353 with 32. Window of 256, 8x16x2048x64: 0.256, 0.291.
    """
    items_per_multiprocessor = _items_per_multiprocessor(
        problem, problem.num_keys, hopper_backward_settings(problem).key_rows
    )
    if deterministic:
        items_per_multiprocessor /= problem.group_size
    if problem.head_dim == 16:
        # 1x16x16384x16: 1.678, Triton 1.628; 8x16x2048x16: 0.297, 0.257. With dQ in register order 1x1x65536: 1.642,
        # 1.662; 1x1x32768: 0.431, 0.430.
        pays_off = False
    elif problem.head_dim == 256:
        # 1x16x16384: 13.28, Triton 20.10; 4x25x512: 0.188, 0.241; 1x16x2048, 3.9 items a multiprocessor: 0.263, 0.373;
        # 2x12x1024, 2.9 items: 0.131, 0.179; 1x1x16384, 1.9 items: 0.796, 1.530. Fewer are not measured.
        pays_off = problem.num_queries >= 512 and items_per_multiprocessor >= 1.9
    elif problem.head_dim == 32:
        # Yes: 1x16x16384: 1.927, Triton 1.982; full 3.905, 4.030. With dQ in register order 1x4x16384, 3.9 items a
        # multiprocessor: 0.496, 0.521; 1x1x65536, 3.9 items: 1.856, 1.974; 1x1x32768, 1.9 items: 0.484, 0.517;
        # 1x2x16384, 1.9 items: 0.256, 0.276. No: 8x16x2048: 0.358, 0.325; 1x16x4096: 0.157, 0.154.
        pays_off = problem.num_queries > 8192 and items_per_multiprocessor >= 1.9
    elif problem.head_dim == 64:
        # Yes: 1x16x16384: 2.605, Triton 3.390; 4x25x1024: 0.129, 0.142; 4x25x512: 0.0568, 0.0634; 1x16x2048, 1.9 items
        # a multiprocessor: 0.0660, 0.0716; 1x4x8192, 1.9 items: 0.174, 0.217. No: 2x12x1024, 1.5 items: 0.0401, 0.0386;
        # 1x1x16384, 0.97 items: 0.302, 0.289. With several items a program 4x16x512, 1.9 items: 0.0349, 0.0360.
        pays_off = problem.num_queries >= 512 and items_per_multiprocessor >= 1.8
    else:
        # Yes: 1x16x16384: 4.651, Triton 6.361; 4x25x512: 0.0910, 0.1116; 1x4x8192, 1.9 items a multiprocessor: 0.281,
        # 0.477; 2x12x1024, 1.5 items: 0.0592, 0.0851. No: 1x1x16384, 0.97 items: 0.492, 0.451. Full 1x4x2048, 0.48
        # items in two pieces each: 0.0614, Triton 0.0731; uncut 0.0829.
        in_halves = (
            not problem.is_causal
            and not deterministic
            and 0.4 <= items_per_multiprocessor <= 0.5
            and problem.num_queries >= 2048
        )
        pays_off = problem.num_queries >= 512 and (items_per_multiprocessor >= 1.4 or in_halves)
    if deterministic and problem.head_dim <= 64:
        # Yes: 1x16x16384x64: 2.727, Triton 3.395; full 5.769, 6.865; 8x16x2048: 0.484, 0.517; 4x25x512, 3.0 items a
        # multiprocessor: 0.0629, 0.0642. No: 1x16x2048, 1.9 items: 0.0877, 0.0716; full 1x4x8192, 1.9 items: 0.445,
        # 0.431. Fewer dimensions are not measured. 128 and 256 win wherever they do in any order: 1x16x2048x128: 0.139,
        # 0.163; 4x25x512x128: 0.100, 0.112; full 1x4x8192x128: 0.666, 0.913; 1x16x2048x256: 0.320, 0.374.
        pays_off = pays_off and problem.head_dim == 64 and items_per_multiprocessor >= 3
    return problem.tma_allowed and pays_off


def _items_per_multiprocessor(problem: AttentionProblem, num_rows: int, item_rows: int) -> float:
    return problem.num_sequences * -(-num_rows // item_rows) / problem.num_multiprocessors


HEAD_DIMS = (16, 32, 64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)


def why_unavailable(query: torch.Tensor) -> str | None:
    """One sentence why the Hopper kernels cannot take ``query`` and its keys, or None if they can."""
    if not query.is_cuda:
        return f"implementation 'hopper' runs on CUDA tensors, got {query.device}"
    capability = gpu_capability(query.device)
    if capability != (9, 0):
        name, (major, minor) = torch.cuda.get_device_name(query.device), capability
        reason = f"{name} is AMD's" if capability == AMD else f"{name} has {major}.{minor}"
        return f"implementation 'hopper' needs a GPU of compute capability 9.0 (H100, H200), {reason}"
    if query.dtype not in DTYPES:
        return f"implementation 'hopper' takes float16 and bfloat16, got {query.dtype}"
    if query.shape[-1] not in HEAD_DIMS:
        choices = f"{', '.join(map(str, HEAD_DIMS[:-1]))} or {HEAD_DIMS[-1]}"
        return f"implementation 'hopper' takes head dimension {choices}, got {query.shape[-1]}"
    num_sequences = query.shape[:-2].numel()
    if num_sequences * (query.shape[-2] + 256) >= 2**31:
        return f"implementation 'hopper' addresses fewer than 2^31 rows, got {num_sequences} x {query.shape[-2]}"
    return None
