"""Rates of GPUs: datasheets, and what one was measured to reach (``doctor --ceilings``)."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from cs336sys.errors import UsageError
from cs336sys.processes.files import written_whole

_COLUMNS = ("fp32", "tf32", "bf16", "fp16")

# NVLink 4 of an H100 or H200: 18 links of 25 GB/s each way.
NVLINK_BYTES_PER_S = 450e9


@dataclass(frozen=True)
class Datasheet:
    """A GPU on paper.

    Attributes:
        tflops: dense products of matrices in fp32 (without tensor cores), tf32, bf16 and fp16.
        memory_bytes: what ``doctor`` found on such a GPU, else the datasheet's.
        memory_bytes_per_s: of reads and writes together.
        link_bytes_per_s: to other GPUs of its host, both directions: NVLink where the board has it, else PCIe.
        clock_mhz: the clock of the multiprocessors at which ``tflops`` hold.
    """

    tflops: tuple[float, float, float, float]
    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float
    clock_mhz: int


_A100, _NVL = (19.5, 156.0, 312.0, 312.0), (60.0, 417.5, 835.5, 835.5)
_SXM = (66.9, 494.7, 989.4, 989.4)
H200_FLOPS_PER_S = _SXM[_COLUMNS.index("bf16")] * 1e12  # Dense; an H100's, too.
# docs/results/doctor-h200.md
_H200_MEMORY = int(140.4 * 2**30)

# Name as torch.cuda.get_device_name gives it, a regular expression that must match all of it, because near names are
# other GPUs: "NVIDIA GB200", "GeForce RTX 4090 Laptop GPU", "RTX 5090 D", or a MIG slice ("NVIDIA H100 80GB HBM3 MIG
# 1g.10gb"). Data-centre datasheets print rates with 2:4 sparsity; those were halved. GeForce tensor cores run fp16 with
# fp32 accumulation at half the rate of fp16 accumulation; cuBLAS accumulates in fp32, so that rate stands here. Clocks:
# the bf16 rate over all multiprocessors' FLOPs a clock (of each: A100 2,048, H100 4,096, B200 8,192, GeForce 512).
_DATASHEETS = (
    # NVIDIA A100 Tensor Core GPU datasheet.
    (r"(NVIDIA )?A100-SXM4?-40GB", Datasheet(_A100, 40 * 2**30, 1.555e12, 600e9, 1410)),
    (r"(NVIDIA )?A100-SXM4?-80GB", Datasheet(_A100, 80 * 2**30, 2.039e12, 600e9, 1410)),
    (r"(NVIDIA )?A100-PCIE-40GB", Datasheet(_A100, 40 * 2**30, 1.555e12, 64e9, 1410)),
    (r"(NVIDIA )?A100-PCIE-80GB", Datasheet(_A100, 80 * 2**30, 2.039e12, 64e9, 1410)),
    (r"NVIDIA A100 80GB PCIe", Datasheet(_A100, 80 * 2**30, 1.935e12, 64e9, 1410)),
    # NVIDIA H100 datasheet; unrounded dense figures in the H100 architecture whitepaper, table 2.
    (r"NVIDIA H100 PCIe", Datasheet((51.2, 378.0, 756.0, 756.0), 80 * 2**30, 2.0e12, 128e9, 1620)),
    (r"NVIDIA H100 80GB HBM3", Datasheet(_SXM, 80 * 2**30, 3.35e12, 900e9, 1830)),
    # NVIDIA H100 NVL datasheet.
    (r"NVIDIA H100 NVL", Datasheet(_NVL, 94 * 2**30, 3.9e12, 600e9, 1545)),
    # NVIDIA H200 datasheet: the rates of the H100's.
    (r"NVIDIA H200 NVL", Datasheet(_NVL, _H200_MEMORY, 4.8e12, 900e9, 1545)),
    (r"NVIDIA H200", Datasheet(_SXM, _H200_MEMORY, 4.8e12, 900e9, 1830)),
    # NVIDIA Blackwell datasheet, column HGX B200.
    (r"NVIDIA B200", Datasheet((75.0, 1100.0, 2250.0, 2250.0), 180 * 10**9, 7.7e12, 1800e9, 1856)),
    # NVIDIA Ada GPU architecture whitepaper, appendix A.
    (r"NVIDIA GeForce RTX 4090", Datasheet((82.6, 82.6, 165.2, 165.2), 24 * 2**30, 1.008e12, 64e9, 2520)),
    # NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A.
    (r"NVIDIA GeForce RTX 5090", Datasheet((104.8, 104.8, 209.5, 209.5), 32 * 2**30, 1.792e12, 128e9, 2407)),
)


def datasheet(gpu_name: str) -> Datasheet | None:
    """Return a GPU's datasheet by the name that ``torch.cuda.get_device_name`` gives; None if the table lacks it."""
    return next((sheet for name, sheet in _DATASHEETS if re.fullmatch(name, gpu_name)), None)


def peak_tflops(gpu_name: str, precision: str, tf32: bool = False, clock_mhz: float | None = None) -> float | None:
    """Return the peak rate of dense matrix products in TFLOP/s; None for a GPU that the table lacks.

    Args:
        gpu_name: as ``torch.cuda.get_device_name`` gives it.
        precision: ``fp32``, ``tf32``, ``bf16`` or ``fp16``, what matrix products compute in.
        tf32: whether fp32 matrix products may run in TF32 on the tensor cores; it changes no other precision.
        clock_mhz: of the multiprocessors; None is the datasheet's.
    """
    column = _COLUMNS.index("tf32" if tf32 and precision == "fp32" else precision)
    sheet = datasheet(gpu_name)
    return None if sheet is None else sheet.tflops[column] * (clock_mhz / sheet.clock_mhz if clock_mhz else 1)


def model_flops_utilization(flops: int, seconds: float, peak_tflops: float | None) -> float | None:
    """Return the MFU: model FLOPs per second as a share (0 to 1) of the peak; None where the peak is unknown.

    Source: PaLM (Chowdhery et al. 2022), appendix B. ``flops`` are ``flops.model_flops`` (nothing recomputed).
    """
    return None if peak_tflops is None else flops / seconds / (peak_tflops * 1e12)


def impossible_utilization(mfu_percent: float | None) -> str | None:
    """Return a sentence for an MFU over 100 %, which no step has; None for a possible one."""
    if mfu_percent is None or mfu_percent <= 100:
        return None
    return (
        f"MFU {mfu_percent:.7g} %: more FLOPs are counted than the GPU can compute in the time of a step; "
        "the FLOPs, the time or the GPU's peak is wrong"
    )


def least_ms(gpu_name: str, precision: str, flops: float, moved_bytes: float) -> float:
    """Return the milliseconds that FLOPs and bytes take at the datasheet's peaks; 0 where those are not known."""
    sheet, tflops = datasheet(gpu_name), peak_tflops(gpu_name, precision, tf32=True)  # Faster than plain fp32.
    if sheet is None or tflops is None:
        return 0.0
    return 1e3 * max(flops / tflops / 1e12, moved_bytes / sheet.memory_bytes_per_s)


@dataclass(frozen=True)
class OverlapSlowdown:
    """The speed of computing and of communication while both go on, over what each reaches alone.

    Communication occupies multiprocessors and takes memory bandwidth, and so do the kernels that run at the same time.
    """

    computing: float = 1.0
    communication: float = 1.0

    def seconds(self, computing_s: float, communication_s: float) -> float:
        """Return the time until both, begun together, are done; the one that is left goes on at its own full speed."""
        overlapped_computing_s = computing_s / self.computing
        overlapped_communication_s = communication_s / self.communication
        if overlapped_communication_s <= overlapped_computing_s:
            return computing_s + (1 - self.computing) * overlapped_communication_s  # What it lost meanwhile.
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
    """

    node_devices: int
    bytes_per_s: float
    node_bytes_per_s: float
    call_s: float
    memory_bytes: float
    ranks_bytes_per_s: tuple[tuple[int, float], ...] = ()
    slowdown: OverlapSlowdown = OverlapSlowdown()

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
        """Build them from what :meth:`to_json` returned; a ValueError or TypeError for anything else."""
        ceilings = cls(**values)
        # A missing link has no rate to check. Predictions scale by the rates in fp32 and bf16. JSON may hold NaN.
        link_gbps = 1.0 if ceilings.link_gbps is None else ceilings.link_gbps
        are_rates = (0 < rate < math.inf for rate in (*ceilings.tflops.values(), ceilings.copy_gbps, link_gbps))
        is_named = isinstance(ceilings.gpu, str) and ceilings.gpu and {"fp32", "bf16"} <= ceilings.tflops.keys()
        if not (is_named and 0 < ceilings.launch_us < math.inf and all(are_rates)):
            raise ValueError(values)
        return ceilings

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def write(self, path: Path) -> None:
        """Write them to a file, for ``trace --ceilings``."""
        with written_whole(path) as new:
            new.write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")


def read_ceilings(path: Path) -> Ceilings:
    """Read a file that ``doctor --ceilings`` wrote, and refuse any other."""
    try:
        return Ceilings.from_json(json.loads(path.read_text()))
    except OSError as error:
        raise UsageError(f"--ceilings {path}: {error.strerror or error}") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"--ceilings {path}: holds no ceilings; write them by doctor --ceilings {path}") from error
