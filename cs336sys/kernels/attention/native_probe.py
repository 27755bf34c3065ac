"""Two findings for ``doctor``, each with its fix, in one line of JSON: calls in C++, and kept settings.

It neither compiles the C++, which the first call does, nor launches a kernel.
Usage: ``python -m cs336sys.kernels.attention.native_probe``.
"""

import json

import torch

from cs336sys.errors import CapabilityError
from cs336sys.kernels.attention import native_call
from cs336sys.kernels.attention.triton import kept_settings


def calls_and_fix() -> tuple[str, str | None]:
    """Return how calls run here, and what would let them run in C++, if anything."""
    reason = native_call.why_off()
    if reason is not None:
        fix = None if torch.version.hip else "`apt-get install g++`, or set CXX."
        if not native_call.KNOWN_TRITON:
            fix = f'`python -m pip install "triton=={native_call.KNOWN_LAUNCHERS[-1]}.*"`, if this torch allows it.'
        return f"through Python: {reason}", fix
    path = native_call.library_path()
    if not path.exists():
        return f"in C++, which {native_call.compiler()} compiles in the background at the first call", None
    try:
        native_call.import_from(str(path))
    except CapabilityError as error:
        return f"not at all: {error}", "Set TRITON_CACHE_DIR to a folder that only you can write to."
    except ImportError as error:
        return f"through Python: {error}", f"Have it compiled again: `rm {path}`."
    return f"in C++, compiled by {native_call.compiler()}", None


def settings_and_fix() -> tuple[str, str | None]:
    """Return which settings of the kernels are in force, and what to do about those that cannot be read."""
    try:
        _, description = kept_settings.read_settings(torch.device("cuda"))
        return description, None
    except CapabilityError as error:
        return f"built-in settings: {error}", "`cs336sys flash --keep-settings` measures again."


if __name__ == "__main__":
    print(json.dumps({"attention calls": calls_and_fix(), "attention settings": settings_and_fix()}, allow_nan=False))
