"""Tiles, pipeline depth and order of work of the Hopper kernels, by problem: the counterpart of launch_settings."""

from dataclasses import dataclass

from cs336sys.kernels.attention.launch_settings import Problem


@dataclass(frozen=True)
class HopperForwardSettings:
    """``consumers`` warpgroups of 64 queries each stream tiles of ``key_rows`` keys through rings of ``num_stages``.

    ``take_turns``: a warpgroup issues its matrix products only after its neighbour has, so that one's softmax falls
    into the other's products. ``persistent``: as many programs as multiprocessors share the items, dealt back and
    forth; otherwise every item is a program of its own, which the GPU starts when a multiprocessor is free.
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


def hopper_forward_settings(problem: Problem) -> HopperForwardSettings:
    """The forward kernel's settings, for head dimension 64 or 128."""
    # Under a causal mask items differ in length, and dealing them out in groups of heads leaves some programs with up
    # to 1.3 times the average number of key tiles; starting them as multiprocessors get free, with 1.01 times.
    persistent = not problem.is_causal
    if problem.head_dim == 64:
        # Full attention, 1x16x16384, H200, by a probe without masks: three consumers 2.24 ms, two 2.45.
        return HopperForwardSettings(consumers=3, key_rows=128, num_stages=2, persistent=persistent)
    return HopperForwardSettings(consumers=2, key_rows=128, num_stages=2, persistent=persistent)


def hopper_backward_settings(problem: Problem) -> HopperBackwardSettings:
    """The backward kernel's settings; with head dimension 128 the scores of two tiles do not fit in the registers."""
    return HopperBackwardSettings(num_stages=2, scores_ahead=problem.head_dim == 64)
