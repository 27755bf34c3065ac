"""Options that ``flash`` and ``kernels`` share: of one operation that is timed by itself."""

from collections.abc import Sequence
from typing import Annotated

from cs336sys.command_line.options.reading import read_function, runs_code, setting
from cs336sys.command_line.options.training import OptionGroup
from cs336sys.errors import UsageError, choose_from
from cs336sys.settings.user_code import digest

# The options that both commands have behind their own, in the order of help.
OPERATION_OPTIONS = ("kernel", "dtype", "baseline", "warmup_ms", "repetition_ms", "plot", "device", "seed")


class OperationOptions(OptionGroup):
    """Options for implementations of the user's, and for the implementation that ratios are over."""

    kernel: Annotated[
        Sequence[str], runs_code(help="Also measure your function: FILE.py:NAME.", parser=read_function)
    ] = ()
    baseline: Annotated[str | None, setting(help="Base of speed-ups. Default: eager.")] = None

    @property
    def codes(self) -> dict[str, dict[str, str]]:
        """Return the additional configuration of each of the user's implementations: the digest of its code."""
        return {reference: {"code": digest([reference])} for reference in self.kernel}

    @property
    def checked_baseline(self) -> str:
        """Return the base of ratios, eager by default; raise a UsageError for a ``--baseline`` that is not measured."""
        measured = (*self.implementation, *self.kernel)
        if self.baseline is not None and self.baseline not in measured:
            raise UsageError(f"--baseline '{self.baseline}': is not measured: {choose_from(self.baseline, measured)}")
        return self.baseline or "eager"
