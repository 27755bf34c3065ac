"""One profile as the tables see it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cs336sys.measure.profile.summary import KernelTime, Profile, RangeTime
from cs336sys.results import Cell, Samples


@dataclass(frozen=True)
class Measured:
    """A profile and what it is of.

    Attributes:
        labels: values of the columns that say what was run, by their keys.
        cell: the cell that it was measured in; None for a report that was read.
    """

    labels: Mapping[str, Any]
    profile: Profile
    cell: Cell | None = None

    @property
    def steps(self) -> int:
        """What "a step" means: the steps, or else how often the first phase occurs."""
        return self.profile.step.count if self.profile.step else self.profile.phases[0].count

    @property
    def ranges(self) -> tuple[RangeTime, ...]:
        """The phases, and the step that they make up; of several GPUs those of each."""
        if self.profile.of_gpus:
            return self.profile.of_gpus
        return (*self.profile.phases, *([self.profile.step] if self.profile.step else []))

    def unprofiled(self, name: str) -> Samples | None:
        """Times of a phase or the step without profiler."""
        return self.cell.samples.get(name) if self.cell else None

    def kernels_by_phase(self) -> dict[str, list[KernelTime]]:
        """The longest first."""
        return {
            phase.name: [kernel for kernel in self.profile.kernels if kernel.range == phase.name]
            for phase in self.profile.phases
        }
