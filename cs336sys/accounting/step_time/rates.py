"""Hold the rates that turn work into time: of one GPU, from saved measurements, with their error and their reach.

The rates of this project's own measurements stand in ``h200.json``, which ``tools/fit_rates.py docs/results``
derives; a user's file replaces it with ``--rates``. Others are scaled by datasheets or by ``doctor --ceilings``.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Self

from cs336sys.accounting.hardware import Ceilings, Datasheet, datasheet
from cs336sys.accounting.step_time.work import TERMS
from cs336sys.errors import UsageError, choose_from
from cs336sys.findings import sentence

H200 = Path(__file__).with_name("h200.json")

# Of that GPU, by doctor --ceilings: docs/results/ceilings-h200.json, and the link's of ceilings-x2-h200.json.
_H200_CEILINGS = Ceilings(
    "NVIDIA H200", {"fp32": 51.12, "bf16": 769.3}, copy_gbps=4244.0, launch_us=9.161, link_gbps=393.0
)

# The kinds of steps where rates were measured by themselves and not from steps, as a CPU's are: they serve any step.
UNMEASURED = ("any",)

# Names for --gpu, and what torch calls these GPUs.
GPUS = {
    "a100": "NVIDIA A100-SXM4-80GB",
    "a100-40gb": "NVIDIA A100-SXM4-40GB",
    "a100-pcie": "NVIDIA A100 80GB PCIe",
    "h100": "NVIDIA H100 80GB HBM3",
    "h100-pcie": "NVIDIA H100 PCIe",
    "h100-nvl": "NVIDIA H100 NVL",
    "h200": "NVIDIA H200",
    "b200": "NVIDIA B200",
    "rtx4090": "NVIDIA GeForce RTX 4090",
    "rtx5090": "NVIDIA GeForce RTX 5090",
}

# Terms whose rate is set by memory, and those set by matrix products of half precision; the others compute in fp32.
_OF_MEMORY = ("eager_bytes", "fused_bytes", "score_bytes", "course_parameters", "state_bytes")
_OF_NEITHER = ("kernels", "gaps")
_OF_HALF_PRODUCTS = ("half_products", "flash_forward", "flash_backward", "sdpa_forward", "sdpa_backward")


@dataclass(frozen=True)
class GroupError:
    """The error of predictions of saved cells of one kind, each made without the cells of its configuration.

    Attributes:
        group: what the cells have in common.
        cells: how many there are.
        mean_percent: mean of the absolute errors.
        worst_percent: the error that is farthest from 0, with its sign.
        worst: the cell that has it.
    """

    group: str
    cells: int
    mean_percent: float
    worst_percent: float
    worst: str

    def __str__(self) -> str:
        return f"{self.group}: {self.cells} steps, mean {self.mean_percent:.1f} %, worst {self.worst_percent:+.1f} %"


@dataclass(frozen=True)
class Exposure:
    """Cost of a strategy's communication in a step.

    Attributes:
        bytes_per_s: sent bytes of a rank over the time that communication takes alone.
        exposed: the part of that time by which a step is longer than without communication, in half precision.
        exposed_fp32: the same in fp32, whose products take no bandwidth from communication; None: not measured.
    """

    bytes_per_s: float
    exposed: float
    exposed_fp32: float | None = None


@dataclass(frozen=True)
class Rates:
    """Rates of a GPU and its host.

    Attributes:
        gpu: as torch names it.
        seconds: for one unit of each of :data:`.work.TERMS`.
        launch_s: of the CPU for a launch on the fastest host that was measured.
        usual_launch_s: the median of the hosts.
        exposures: by strategy.
        ranges: least and most that was measured of each of :func:`.prediction.ranged_quantities`.
        kinds: that were measured: :func:`kind_of`.
        errors: of predictions, by group.
        scaled_from: the GPU that was measured, where the rates are another one's, scaled.
        scaled_by: what: ``datasheets`` or ``ceilings``.
        files: that the rates were derived from.
    """

    gpu: str
    seconds: Mapping[str, float]
    launch_s: float
    usual_launch_s: float
    exposures: Mapping[str, Exposure] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    kinds: Sequence[str] = ()
    errors: Sequence[GroupError] = ()
    scaled_from: str | None = None
    scaled_by: str | None = None
    files: Sequence[str] = ()

    @classmethod
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        values["exposures"] = {name: Exposure(**exposure) for name, exposure in values["exposures"].items()}
        values["errors"] = [GroupError(**error) for error in values["errors"]]
        values["ranges"] = {name: tuple(range_) for name, range_ in values["ranges"].items()}
        if set(values["seconds"]) != set(TERMS):
            raise KeyError("seconds")  # As for a field that the file lacks: it is of other terms.
        return cls(**values)

    def to_json(self) -> str:
        """Write the rates as JSON, numbers with four digits."""
        exact = json.dumps(asdict(self), allow_nan=False)
        rounded = json.loads(exact, parse_float=lambda number: float(f"{float(number):.4g}"))
        return json.dumps(rounded, indent=1, allow_nan=False) + "\n"

    @property
    def error_note(self) -> str:
        """Say how far predictions are off: the sentence under every table."""
        return sentence(__package__, "error of predictions", rates=self)


@functools.cache
def h200_rates() -> Rates:
    """Return the rates of this project's own measurements."""
    return Rates.from_json(H200.read_text())


def read_rates(path: Path) -> Rates:
    """Read a file that ``doctor --ceilings`` or ``tools/fit_rates.py --write`` wrote, and refuse any other."""
    try:
        text = path.read_text()
        if '"tflops"' not in text:  # A key of ceilings alone.
            return Rates.from_json(text)
        return _scaled(h200_rates(), _H200_CEILINGS, Ceilings.from_json(json.loads(text)), by="ceilings")
    except OSError as error:
        raise UsageError(f"--rates {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"--rates {path}: holds no rates; measure them with doctor --ceilings {path}") from error


def rates_of(gpu: str, measured: Rates | None = None) -> Rates:
    """Return the rates of a GPU: as measured, or scaled by what datasheets say of both.

    Args:
        gpu: a name of :data:`GPUS`, or as torch names it, that has a :class:`Datasheet`.
        measured: rates to scale, unless they are this GPU's or scaled already; None: the H200's.
    """
    measured = measured or h200_rates()
    name = GPUS.get(gpu.lower(), gpu)
    if name == measured.gpu:
        return measured
    if measured.scaled_from is not None:
        raise UsageError(f"--rates are those of {measured.gpu}, not of {name}: give the file of that GPU, or none")
    measured_sheet, sheet = datasheet(measured.gpu), datasheet(name)
    if measured_sheet is None or sheet is None:
        raise UsageError(f"--gpu {gpu}: no datasheet is known; {choose_from(gpu, GPUS)}, or give --rates of yours")
    return _scaled(measured, _peaks_on_paper(measured_sheet, measured.gpu), _peaks_on_paper(sheet, name), "datasheets")


def _peaks_on_paper(sheet: Datasheet, gpu: str) -> Ceilings:
    """Return a datasheet's rates, of any units: launches are the host's, which it does not know."""
    fp32, _tf32, bf16, _fp16 = sheet.tflops
    return Ceilings(gpu, {"fp32": fp32, "bf16": bf16}, sheet.memory_bytes_per_s, 1.0, sheet.link_bytes_per_s)


def _scaled(rates: Rates, peaks: Ceilings, gpu_peaks: Ceilings, by: str) -> Rates:
    """Return rates of the GPU of ``gpu_peaks`` from those of a GPU with ``peaks``; ``by`` names their source."""
    half, full = (peaks.tflops[name] / gpu_peaks.tflops[name] for name in ("bf16", "fp32"))
    # Terms that the next lines do not name compute in fp32.
    slowdown = dict.fromkeys(rates.seconds, full) | dict.fromkeys(_OF_HALF_PRODUCTS, half)
    slowdown |= dict.fromkeys(_OF_MEMORY, peaks.copy_gbps / gpu_peaks.copy_gbps) | dict.fromkeys(_OF_NEITHER, 1.0)
    seconds = {term: unit_s * slowdown[term] for term, unit_s in rates.seconds.items()}
    exposures: dict[str, Exposure] = {}  # Empty where a link's rate is unknown.
    if peaks.link_gbps and gpu_peaks.link_gbps:
        for name, exposure in rates.exposures.items():
            bytes_per_s = exposure.bytes_per_s * gpu_peaks.link_gbps / peaks.link_gbps
            exposures[name] = replace(exposure, bytes_per_s=bytes_per_s)
    launches = gpu_peaks.launch_us / peaks.launch_us
    return replace(
        rates,
        gpu=gpu_peaks.gpu,
        seconds=seconds,
        launch_s=launches * rates.launch_s,
        usual_launch_s=launches * rates.usual_launch_s,
        exposures=exposures,
        scaled_from=rates.gpu,
        scaled_by=by,
    )


def short_gpu_name(gpu: str) -> str:
    """Return a GPU's name without its maker: ``H200``."""
    return re.sub(r"^NVIDIA (GeForce )?", "", gpu)
