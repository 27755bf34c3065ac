"""Options that commands share which time one operation by itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from cs336sys.commands.options.effects import runs_code, setting
from cs336sys.commands.options.reading import choice
from cs336sys.errors import UsageError, choose_from
from cs336sys.sizes import PRECISIONS
from cs336sys.user_code import digest, read_reference


@dataclass(frozen=True)
class OperationOptions:
    """Implementations of the user's, what ratios are over, and how long each implementation is timed."""

    kernel: Annotated[
        Sequence[str], runs_code(help="Yours, too: FILE.py:NAME (docs/own_kernel.md).", parser=read_reference)
    ] = ()
    dtype: Annotated[Sequence[str], choice(PRECISIONS)] = ("bf16",)
    baseline: Annotated[str | None, setting(help="Which of them speed-ups are over. Default: eager.")] = None
    warmup_ms: Annotated[float, setting(help="Warm-up of each measurement.", min=0)] = 25.0
    repetition_ms: Annotated[float, setting(help="Duration of each measurement.", min=1)] = 100.0

    @property
    def codes(self) -> dict[str, dict[str, str]]:
        """Return what configurations of each of the user's implementations have besides settings."""
        return {reference: {"code": digest([reference])} for reference in self.kernel}

    def checked_baseline(self, implementations: Sequence[str]) -> str:
        """Return the implementation that ratios are over; without ``--baseline`` eager, which need not be measured.

        Raises:
            UsageError: the baseline that was asked for is not measured, so that there would be no ratio.
        """
        measured = (*implementations, *self.kernel)
        if self.baseline is not None and self.baseline not in measured:
            raise UsageError(f"--baseline '{self.baseline}': is not measured: {choose_from(self.baseline, measured)}")
        return self.baseline or "eager"
