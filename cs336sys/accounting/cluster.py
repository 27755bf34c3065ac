"""Devices, their links, and what computing and communication cost each other."""

from dataclasses import dataclass

from cs336sys.errors import UsageError


@dataclass(frozen=True)
class OverlapSlowdown:
    """The speed of computing and of communication while both go on, over what each reaches alone.

    Communication occupies multiprocessors and takes memory bandwidth, and so do the kernels that run at the same time.

    Raises:
        UsageError: a speed is not above 0, or above 1.
    """

    computing: float = 1.0
    communication: float = 1.0

    def __post_init__(self) -> None:
        for name, speed in vars(self).items():
            if not 0 < speed <= 1:
                raise UsageError(f"{name} while both go on at {speed} of its speed: must be above 0 and at most 1")

    def seconds(self, computing_s: float, communication_s: float) -> float:
        """Of both, begun together: as long as both go on each has its lower speed, then the other its own."""
        overlapped_computing_s, overlapped_communication_s = (
            computing_s / self.computing,
            communication_s / self.communication,
        )
        if overlapped_communication_s <= overlapped_computing_s:
            return computing_s + (1 - self.computing) * overlapped_communication_s
        return communication_s + (1 - self.communication) * overlapped_computing_s


@dataclass(frozen=True)
class Cluster:
    """Devices and their links.

    Attributes:
        node_devices: how many devices share the fast links of a node.
        bytes_per_s: that a device sends to others of its node.
        node_bytes_per_s: that a device sends to other nodes.
        call_s: what a collective takes besides its bytes.
        memory_bytes: of a device.
        ranks_bytes_per_s: numbers of ranks of one node and what each of them sends a second, in the place of
            ``bytes_per_s`` for rings of so many.
        slowdown: what communication and computing cost each other.

    Raises:
        UsageError: one of them is not positive.
    """

    node_devices: int
    bytes_per_s: float
    node_bytes_per_s: float
    call_s: float
    memory_bytes: float
    ranks_bytes_per_s: tuple[tuple[int, float], ...] = ()
    slowdown: OverlapSlowdown = OverlapSlowdown()

    def __post_init__(self) -> None:
        for name in ("node_devices", "bytes_per_s", "node_bytes_per_s", "memory_bytes"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} {getattr(self, name)}: must be positive")
        if self.call_s < 0:
            raise UsageError(f"call_s {self.call_s}: must not be negative")

    def ring_bytes_per_s(self, ranks: int, distance: int) -> float:
        """Of a ring of ``ranks`` that are ``distance`` devices apart."""
        if ranks * distance <= self.node_devices:
            return dict(self.ranks_bytes_per_s).get(ranks, self.bytes_per_s)
        return min(self.bytes_per_s, self.node_bytes_per_s)
