"""Measured ceilings of a GPU: products, copies, launches and links, saved by ``doctor --ceilings``."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from cs336sys.errors import UsageError
from cs336sys.processes.atomic_write import written_whole


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
