"""Tiles, pipeline depth and order of work of the Hopper kernels, by problem: the counterpart of launch_settings."""

from dataclasses import dataclass

from cs336sys.kernels.attention.launch_settings import Problem


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
        """A thread's registers: what remains of the multiprocessor's 64 K beside the producer's 24, a multiple of 8."""
        return {2: 240, 3: 160}[self.consumers]


@dataclass(frozen=True)
class HopperBackwardSettings:
    """``scores_ahead``: compute the scores of the next tile while dQ of this one leaves the multiprocessor."""

    num_stages: int
    scores_ahead: bool
    consumer_registers: int = 240


# The keys of a backward program.
BACKWARD_KEY_ROWS = 128

# All measurements: H200, triton 3.6, bf16, medians in ms. Shapes are batch x heads x S x D, causal unless "full".


def hopper_forward_settings(problem: Problem) -> HopperForwardSettings:
    """The forward kernel's settings, for head dimension 64 or 128."""
    if problem.head_dim == 64:
        # 1x16x16384x64: 1.093; three stages 1.242, two consumers 1.323, 64 keys 1.246. Full: 2.188, 2.526, 2.522.
        return HopperForwardSettings(consumers=3, key_rows=128, num_stages=2)
    # 1x16x16384x128: 1.794; 64 keys with three stages 2.491, and with three consumers 2.032. Full: 3.584, 4.084, 3.848.
    return HopperForwardSettings(consumers=2, key_rows=128, num_stages=2)


def hopper_backward_settings(problem: Problem) -> HopperBackwardSettings:
    """The backward kernel's settings; with head dimension 128 the scores of two tiles do not fit in the registers."""
    if problem.head_dim == 64:
        # 1x16x16384x64: 3.279; no scores ahead 3.388, three stages 3.296. 8x16x2048x64: 0.537, 0.557, 0.534.
        return HopperBackwardSettings(num_stages=2, scores_ahead=True)
    # 1x16x16384x128: 5.099, three stages 5.101. 8x16x2048x128: 0.846, 0.849.
    return HopperBackwardSettings(num_stages=2, scores_ahead=False)


def hopper_forward_is_faster(problem: Problem) -> bool:
    """Whether the forward kernel was measured to be faster than plain Triton's, for what it can run."""
    # 1x16x16384x64: 1.093, Triton 1.243; 8x16x2048x64: 0.182, 0.199. 1x16x16384x128: 1.794, 2.182; 8x16x2048x128:
    # 0.287, 0.349. But 4x25x512x64: 0.0226, 0.0214; and with few items 1x1x8192x128: 0.144, 0.093.
    rows = hopper_forward_settings(problem).item_rows
    return problem.tma_allowed and problem.num_keys > 512 and _has_many_items(problem, problem.num_queries, rows)


def hopper_backward_is_faster(problem: Problem) -> bool:
    """As ``hopper_forward_is_faster``, for a backward that need not be deterministic."""
    # 1x16x16384x64: 3.279, Triton 3.452; 8x16x2048x64: 0.537, 0.544. 1x16x16384x128: 5.099, 6.445; 8x16x2048x128:
    # 0.846, 0.999. But 4x25x512x64: 0.148, 0.101; and with few items 1x1x8192x128: 0.375, 0.278.
    return (
        problem.tma_allowed
        and problem.num_queries > 512
        and _has_many_items(problem, problem.num_keys, BACKWARD_KEY_ROWS)
    )


def _has_many_items(problem: Problem, num_rows: int, item_rows: int) -> bool:
    return problem.num_sequences * -(-num_rows // item_rows) >= 2 * problem.num_multiprocessors
