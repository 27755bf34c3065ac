"""Tiles, pipeline depth and order of work of the Hopper kernels, by problem: the counterpart of triton/settings.py.

Comments give measurements: H200, triton 3.6, bf16, medians in ms, first of what is chosen. Shapes are batch x heads x S
x D, causal unless "full". The numbers that decide where the kernels pay come from those in docs/kernels.md, "Where the
Hopper kernels are chosen".
"""

import math
from dataclasses import dataclass

import torch

from cs336sys.kernels.attention.problem import AMD, AttentionProblem, gpu_capability


@dataclass(frozen=True)
class HopperForwardSettings:
    """``consumers`` warpgroups of 64 queries each stream tiles of ``key_rows`` keys through rings of ``num_stages``.

    ``take_turns``: a warpgroup issues its matrix products only after its neighbour has, so that one's softmax falls
    into the other's products.
    """

    consumers: int
    key_rows: int
    num_stages: int
    take_turns: bool = False

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
    def registers(self) -> dict[str, int]:
        """Registers of a consumer's thread and of the reducer's; with the producer's 24 that is all there are."""
        has_reducer = self.kernel == "reducer"
        return {"consumer_registers": 208, "reducer_registers": 72} if has_reducer else {"consumer_registers": 240}

    @property
    def key_rows(self) -> int:
        """The keys of a program."""
        return 64 if self.kernel == "wide" else 128


def hopper_forward_settings(problem: AttentionProblem) -> HopperForwardSettings:
    """Return the forward kernel's settings, for head dimension 16 to 256; "taking turns": with ``take_turns``."""
    if problem.head_dim == 16:
        # 1x16x16384x16: 0.755; taking turns 0.818. Two consumers with 256 keys 0.862.
        return HopperForwardSettings(consumers=3, key_rows=128, num_stages=2)
    if problem.head_dim == 32:
        # 1x16x16384x32: 0.771; not taking turns 0.790. Two programs of two consumers a multiprocessor lose 9 %.
        return HopperForwardSettings(consumers=3, key_rows=128, num_stages=2, take_turns=True)
    if problem.head_dim == 64:
        # Taking turns and not: 1x16x16384x64 0.969, 0.969; 8x16x2048x64 0.156, 0.169; full 1x16x16384x64 1.930, 1.880.
        # Two consumers where queries see few keys, or rounds are few: shorter items waste less at their ends. With two
        # and three: full 4x16, 512 queries and 4096 keys 0.0811, 0.0978; 8x16 of them 0.153, 0.144, where a round of
        # two takes 0.8 of the time of one of three; 16x12x1024x64 0.0844, 0.0862; 8x16x2048x64 0.175, 0.161;
        # 1x4x8192x64 0.0753, 0.0956; 1x20x1024x64 0.0178, 0.0231; window of 512, 2x16x8192x64: 0.129, 0.137.
        # Full: 1x20x1024x64 0.0254, 0.0210; 1x32x1024x64 0.0263, 0.0331; 1x192x1024x64, 12 rounds and 9, 0.119, 0.122.
        rounds_of_two, rounds_of_three = (
            math.ceil(_items_per_multiprocessor(problem, problem.num_queries, 64 * consumers)) for consumers in (2, 3)
        )
        sees_few = min(problem.num_keys, problem.window or problem.num_keys) <= 1024
        saves_rounds = (0.7 if sees_few else 0.8) * rounds_of_two >= rounds_of_three
        if (problem.is_causal and sees_few) or not saves_rounds:
            return HopperForwardSettings(consumers=2, key_rows=128, num_stages=2, take_turns=True)
        return HopperForwardSettings(consumers=3, key_rows=128, num_stages=2, take_turns=problem.is_causal)
    if problem.head_dim == 256:
        # The output takes 128 registers of a thread, which leaves none to a third warpgroup; queries and two rings of
        # two tiles of 64 keys take 192 KiB, so that longer tiles do not fit. 1x16x16384x256: 2.986; taking turns 3.021.
        # Full, 16 heads of 16384 keys, not taking turns and taking them: 2048 queries 0.724, 0.685; 8192 2.866, 2.843.
        return HopperForwardSettings(consumers=2, key_rows=64, num_stages=2, take_turns=_sees_nearly_all(problem))
    # Not taking turns and taking them: 1x16x16384x128 1.519, 1.576; 1x64x4096x128 0.399, 0.395; 8x16x2048x128 0.230,
    # 0.225. Full, the fewer items a multiprocessor has, the more: 2048 queries and 16384 keys of 8, 16, 32 and 64 heads
    # 0.238, 0.187; 0.423, 0.357; 0.788, 0.724; 1.594, 1.521; 1x8 of 65536 keys 0.997, 0.708; 1x16x16384x128, with 15.5
    # items, 2.996, 3.027. A chunk of 2048 queries at the end of 16384 keys, 8 heads: 0.227, 0.183.
    few_items = _items_per_multiprocessor(problem, problem.num_queries, 128) < 12
    take_turns = problem.num_keys <= 8192 or (few_items and _sees_nearly_all(problem))
    return HopperForwardSettings(consumers=2, key_rows=128, num_stages=2, take_turns=take_turns)


def hopper_backward_settings(problem: AttentionProblem, deterministic: bool = False) -> HopperBackwardSettings:
    """Return the backward kernel's settings; with head dimension 128 dK, dV leave no registers to a third warpgroup."""
    if problem.head_dim <= 64:
        # Three stages and two: 8x16x2048x64 0.414, 0.422; 1x16x16384x64 2.55, 2.68. Deterministic: TURNS is for two.
        return HopperBackwardSettings(num_stages=2 if deterministic else 3, kernel="reducer")
    if problem.head_dim == 256:
        # 1x16x16384x256: 13.28 (Triton 20.10); next S^T alongside dK 15.01, dQ in two halves around dK 13.38.
        # A third stage does not fit into shared memory.
        return HopperBackwardSettings(num_stages=2, kernel="wide")
    return HopperBackwardSettings(num_stages=2, kernel="exchange")


def hopper_forward_is_faster(problem: AttentionProblem) -> bool:
    """Return whether the forward kernel was measured to be faster than plain Triton's, for what it can run.

    Lengths are those of the whole sequences, in a window, too.
    """
    settings = hopper_forward_settings(problem)
    items_per_multiprocessor = _items_per_multiprocessor(problem, problem.num_queries, settings.item_rows)
    if problem.head_dim == 16:
        pays_off = problem.window is None and problem.num_keys > 8192
        pays_off = pays_off and items_per_multiprocessor >= (1.25 if problem.num_keys >= 32768 else 4)
    elif problem.head_dim == 32:
        pays_off = problem.num_keys > 1024 and items_per_multiprocessor >= (1.25 if problem.num_keys >= 16384 else 2)
    elif problem.head_dim == 64:
        # Causal 4x25x512x64: 0.0244, plain Triton's 0.0219; full 4x16x512x64: 0.0190, 0.0240. Items of full attention
        # take the same time: one round of them that is nearly full, or most of a second one. Three consumers are taken
        # where they save a round.
        fills_rounds = 0.6 <= items_per_multiprocessor <= 1 or items_per_multiprocessor >= 1.6
        pays_off = fills_rounds if _sees_nearly_all(problem) else items_per_multiprocessor >= 1
        pays_off = (pays_off or settings.consumers == 3) and problem.num_keys >= (513 if problem.is_causal else 512)
    elif not _sees_nearly_all(problem):
        # Programs of a single round wait for the one with the most keys.
        is_long = min(problem.num_keys, problem.window or problem.num_keys) > 16 * problem.head_dim
        pays_off = items_per_multiprocessor >= (1.05 if is_long else 0.45 if problem.head_dim == 256 else 0.7)
    else:
        # Of 64 queries and fewer an item is half empty; plain Triton splits many keys.
        fills_half = problem.head_dim == 256 or (problem.num_queries > 64 and problem.num_keys <= 4096)
        pays_off = items_per_multiprocessor >= (0.45 if fills_half else 0.6)
    return problem.tma_allowed and pays_off and (problem.head_dim != 128 or problem.num_keys >= 512)


def hopper_backward_is_faster(problem: AttentionProblem, deterministic: bool = False) -> bool:
    """Return whether the backward kernel was measured to be faster than plain Triton's, in any order or deterministic.

    Items are counted as if each head of queries had keys of its own: those of a group are cut into pieces until they
    fill the GPU. In the deterministic form they are not cut, and are counted as they are.
    """
    items_per_multiprocessor = _items_per_multiprocessor(
        problem, problem.num_keys, hopper_backward_settings(problem).key_rows
    )
    if deterministic:
        items_per_multiprocessor /= problem.group_size
    is_grouped = problem.group_size > 1 and not deterministic
    if problem.head_dim == 16:
        pays_off = False
    elif problem.head_dim == 256:
        pays_off = problem.num_queries >= 512 and items_per_multiprocessor >= (1.9 if deterministic else 0.45)
    elif problem.head_dim == 32:
        is_long = problem.num_queries > 8192 or (is_grouped and problem.num_queries >= 2048)
        pays_off = is_long and items_per_multiprocessor >= (3.8 if is_grouped else 1.9)
    elif problem.head_dim == 64:
        # Of full attention also one round that is nearly full.
        fills_round = _sees_nearly_all(problem) and not deterministic and 0.9 <= items_per_multiprocessor <= 1
        pays_off = items_per_multiprocessor >= (0.45 if is_grouped else 1.8) or fills_round
        pays_off = pays_off and problem.num_queries >= 512
    else:
        least = 1.4 if deterministic else 0.35 if is_grouped else 0.6 if _sees_nearly_all(problem) else 1.05
        pays_off = problem.num_queries >= 512 and items_per_multiprocessor >= least
        if not problem.is_causal and not deterministic:
            # Two halves of each item fill the GPU: HopperBackwardPlan cuts them.
            in_halves = problem.num_queries >= 2048 and 0.4 <= items_per_multiprocessor <= 0.5
            # Few queries: with 8192 keys or more the kernel won in all shapes measured (docs/kernels.md).
            has_many_keys = problem.num_keys >= 8192 and items_per_multiprocessor >= 1.4
            pays_off = pays_off or in_halves or has_many_keys
    if deterministic and problem.head_dim <= 64:
        # Fewer dimensions are not measured; 128 and 256 win wherever they do in any order.
        pays_off = pays_off and problem.head_dim == 64 and items_per_multiprocessor >= 3
    return problem.tma_allowed and pays_off


def _sees_nearly_all(problem: AttentionProblem) -> bool:
    """Return whether no tile of queries sees half as many keys as another: in full attention, or at the keys' end."""
    return not problem.is_causal or (problem.window is None and problem.diagonal >= problem.num_queries)


def _items_per_multiprocessor(problem: AttentionProblem, num_rows: int, item_rows: int) -> float:
    """Return how many items of ``item_rows`` of the ``num_rows`` of each sequence a multiprocessor works through."""
    return problem.num_sequences * -(-num_rows // item_rows) / problem.num_multiprocessors


HEAD_DIMS = (16, 32, 64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)


def why_unavailable(query: torch.Tensor) -> str | None:
    """Return why the Hopper kernels cannot take ``query`` and its keys, a sentence, or None if they can."""
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
    # As make_problem: scratch memory pads each sequence to whole tiles, by less than 256 rows.
    if num_sequences * (query.shape[-2] + 256) >= 2**31:
        return f"implementation 'hopper' addresses fewer than 2^31 rows, got {num_sequences} x {query.shape[-2]}"
    return None
