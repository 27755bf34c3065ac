"""Prints whether attention's calls run in C++ here, with a fix if they do not: one line of JSON, for ``doctor``.

It neither compiles the C++, which the first call does, nor launches a kernel.
Usage: ``python -m cs336sys.kernels.attention.native_probe``.
"""

import json

from cs336sys.errors import CapabilityError
from cs336sys.kernels.attention import native_call


def found_and_fix() -> tuple[str, str | None]:
    reason = native_call.why_off()
    if reason is not None:
        fix = "`apt-get install g++`, or set CXX."
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


if __name__ == "__main__":
    print(json.dumps(dict(zip(("found", "fix"), found_and_fix(), strict=True)), allow_nan=False))
