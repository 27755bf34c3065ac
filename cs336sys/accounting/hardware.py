"""Rates of GPUs: datasheets, and what one was measured to reach (``doctor --ceilings``)."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from cs336sys.errors import UsageError
from cs336sys.processes.atomic_write import written_whole

_Value = TypeVar("_Value")

_COLUMNS = ("fp32", "tf32", "bf16", "fp16")

# Name as torch.cuda.get_device_name gives it (a regular expression that must match all of it), and the dense TFLOP/s
# of each column (fp32 without tensor cores). A name must match whole because near names are other GPUs: "NVIDIA
# GB200", "GeForce RTX 4090 Laptop GPU", "RTX 5090 D", or a MIG slice ("NVIDIA H100 80GB HBM3 MIG 1g.10gb").
# Data-centre datasheets print rates with 2:4 sparsity; those were halved. GeForce tensor cores run fp16 with fp32
# accumulation at half the rate of fp16 accumulation; cuBLAS accumulates in fp32, so that rate stands here.
_PEAK_TFLOPS = (
    # NVIDIA A100 Tensor Core GPU datasheet (same rates for SXM4 and PCIe).
    (r"(NVIDIA )?A100-(SXM4?|PCIE)-[48]0GB|NVIDIA A100 80GB PCIe", (19.5, 156.0, 312.0, 312.0)),
    # NVIDIA H100 datasheet, PCIe; unrounded dense figures in the H100 architecture whitepaper, table 2.
    (r"NVIDIA H100 PCIe", (51.2, 378.0, 756.0, 756.0)),
    # NVIDIA H100 NVL datasheet.
    (r"NVIDIA H100 NVL", (60.0, 417.5, 835.5, 835.5)),
    # NVIDIA H100 datasheet, SXM; unrounded dense figures in the H100 architecture whitepaper, table 2.
    (r"NVIDIA H100 80GB HBM3", (66.9, 494.7, 989.4, 989.4)),
    # NVIDIA H200 datasheet, NVL.
    (r"NVIDIA H200 NVL", (60.0, 417.5, 835.5, 835.5)),
    # NVIDIA H200 datasheet, SXM: the H100 SXM's rates.
    (r"NVIDIA H200", (66.9, 494.7, 989.4, 989.4)),
    # NVIDIA Blackwell datasheet, column HGX B200.
    (r"NVIDIA B200", (75.0, 1100.0, 2250.0, 2250.0)),
    # NVIDIA Ada GPU architecture whitepaper, appendix A.
    (r"NVIDIA GeForce RTX 4090", (82.6, 82.6, 165.2, 165.2)),
    # NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A.
    (r"NVIDIA GeForce RTX 5090", (104.8, 104.8, 209.5, 209.5)),
)


def peak_tflops(gpu_name: str, precision: str, tf32: bool = False) -> float | None:
    """Peak dense matrix-multiplication rate in TFLOP/s; None for a GPU that is not in the table.

    Args:
        gpu_name: as ``torch.cuda.get_device_name`` gives it.
        precision: ``fp32``, ``bf16`` or ``fp16``, what matrix products compute in.
        tf32: whether fp32 matrix products may run in TF32 on the tensor cores; it changes no other precision.
    """
    column = _COLUMNS.index("tf32" if tf32 and precision == "fp32" else precision)
    peaks = _of(gpu_name, _PEAK_TFLOPS)
    return None if peaks is None else peaks[column]


def _of(gpu_name: str, table: Sequence[tuple[str, _Value]]) -> _Value | None:
    return next((value for name, value in table if re.fullmatch(name, gpu_name)), None)


def model_flops_utilization(flops: int, seconds: float, peak_tflops: float | None) -> float | None:
    """MFU: model FLOPs per second as a share (0 to 1) of the peak; None where the peak is unknown.

    Source: PaLM (Chowdhery et al. 2022), appendix B. ``flops`` are ``flops.model_flops`` (nothing recomputed).
    """
    return None if peak_tflops is None else flops / seconds / (peak_tflops * 1e12)


# Memory by name, in bytes: what doctor found on a GPU of that name, else what its datasheet says.
_MEMORY_BYTES = (
    (r"(NVIDIA )?A100-(SXM4?|PCIE)-40GB", 40 * 2**30),
    (r"(NVIDIA )?A100-(SXM4?|PCIE)-80GB|NVIDIA A100 80GB PCIe", 80 * 2**30),
    (r"NVIDIA H100 PCIe|NVIDIA H100 80GB HBM3", 80 * 2**30),
    (r"NVIDIA H100 NVL", 94 * 2**30),
    # docs/results/doctor-h200.md
    (r"NVIDIA H200( NVL)?", int(140.4 * 2**30)),
    (r"NVIDIA B200", 180 * 10**9),
    (r"NVIDIA GeForce RTX 4090", 24 * 2**30),
    (r"NVIDIA GeForce RTX 5090", 32 * 2**30),
)


def memory_bytes(gpu_name: str) -> int | None:
    """The memory of one GPU; None for one that is not in the table, named as for :func:`peak_tflops`."""
    return _of(gpu_name, _MEMORY_BYTES)


# Memory bandwidth by name, in bytes/s: the datasheets named above.
_MEMORY_BYTES_PER_S = (
    (r"(NVIDIA )?A100-(SXM4?|PCIE)-40GB", 1.555e12),
    (r"(NVIDIA )?A100-(SXM4?|PCIE)-80GB", 2.039e12),
    (r"NVIDIA A100 80GB PCIe", 1.935e12),
    (r"NVIDIA H100 PCIe", 2.0e12),
    (r"NVIDIA H100 NVL", 3.9e12),
    (r"NVIDIA H100 80GB HBM3", 3.35e12),
    (r"NVIDIA H200( NVL)?", 4.8e12),
    (r"NVIDIA B200", 7.7e12),
    (r"NVIDIA GeForce RTX 4090", 1.008e12),
    (r"NVIDIA GeForce RTX 5090", 1.792e12),
)


def memory_bytes_per_s(gpu_name: str) -> float | None:
    """The memory bandwidth of one GPU; None for one that is not in the table, named as for :func:`peak_tflops`."""
    return _of(gpu_name, _MEMORY_BYTES_PER_S)


# Bandwidth between two GPUs of a host by name, in bytes/s of both directions: NVLink where the datasheet has it as a
# part of the board, else PCIe.
_LINK_BYTES_PER_S = (
    (r"(NVIDIA )?A100-SXM4?-[48]0GB", 600e9),
    (r"(NVIDIA )?A100-PCIE-[48]0GB|NVIDIA A100 80GB PCIe|NVIDIA GeForce RTX 4090", 64e9),
    (r"NVIDIA H100 PCIe|NVIDIA GeForce RTX 5090", 128e9),
    (r"NVIDIA H100 NVL", 600e9),
    (r"NVIDIA H100 80GB HBM3|NVIDIA H200( NVL)?", 900e9),
    (r"NVIDIA B200", 1800e9),
)


def link_bytes_per_s(gpu_name: str) -> float | None:
    """The bandwidth to another GPU of the host; None for one that is not in the table."""
    return _of(gpu_name, _LINK_BYTES_PER_S)


def least_ms(gpu_name: str, precision: str, flops: float, moved_bytes: float) -> float:
    """The least that FLOPs and bytes take at the peaks of the datasheet; 0 where they are not known."""
    tflops, bytes_per_s = peak_tflops(gpu_name, precision, tf32=True), memory_bytes_per_s(gpu_name)
    if tflops is None or bytes_per_s is None:
        return 0.0
    return 1e3 * max(flops / tflops / 1e12, moved_bytes / bytes_per_s)


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
        """Time both, begun together: while both go on each has its lower speed, then the other its own."""
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
        ranks_bytes_per_s: numbers of ranks of one node and what each of them sends a second, instead of
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
        """Return the bandwidth of a ring of ``ranks`` that are ``distance`` devices apart."""
        if ranks * distance <= self.node_devices:
            return dict(self.ranks_bytes_per_s).get(ranks, self.bytes_per_s)
        return min(self.bytes_per_s, self.node_bytes_per_s)


@dataclass(frozen=True)
class Ceilings:
    """Highest measured rates of a GPU.

    Attributes:
        gpu: as torch names it.
        tflops: of matrix products by precision: ``fp32``, ``tf32``, ``bf16``, ``fp16``.
        copy_gbps: of a copy within the GPU's memory, bytes read and written.
        launch_us: CPU time of a small kernel's launch.
        link_gbps: of a copy to another GPU, one way; None with one GPU.
    """

    gpu: str
    tflops: Mapping[str, float]
    copy_gbps: float
    launch_us: float
    link_gbps: float | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build them from what :meth:`to_json` returned.

        Raises:
            ValueError: it is something else.
        """
        found = cls(**values)
        rates = (*found.tflops.values(), found.copy_gbps, found.launch_us, found.link_gbps or 1)
        if not isinstance(found.gpu, str) or not {"fp32", "bf16"} <= found.tflops.keys() or min(rates) <= 0:
            raise ValueError(values)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return them as plain values, for JSON."""
        return asdict(self)

    def write(self, path: Path) -> None:
        """Write them to a file, for ``trace --ceilings``."""
        with written_whole(path) as new:
            new.write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")


def read_ceilings(path: Path) -> Ceilings:
    """Read a file that ``doctor --ceilings`` wrote.

    Raises:
        UsageError: it holds something else.
    """
    try:
        return Ceilings.from_json(json.loads(path.read_text()))
    except OSError as error:
        raise UsageError(f"--ceilings {path}: {error.strerror or error}") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"--ceilings {path}: holds no ceilings; write them by doctor --ceilings {path}") from error
