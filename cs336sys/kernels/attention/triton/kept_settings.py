"""Settings that ``flash --keep-settings`` measured on this GPU: a JSON file in the cache, read for the first plan.

A file is for one GPU, driver, Triton and version of these kernels, and refused with others. It names settings that the
kernels would try for a class of problems, so that nothing else can come from it.
"""

import dataclasses
import functools
import hashlib
import json
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from cs336sys.errors import CapabilityError
from cs336sys.kernels.attention.problem import AttentionProblem
from cs336sys.kernels.attention.triton.settings import backward_settings, candidates, forward_settings, problem_class
from cs336sys.processes.caches import kept_settings_file, require_private
from cs336sys.processes.files import written_whole

# What chooses the built-in settings of a pass; gradients may be added up in any order.
BUILT_IN: dict[str, Callable[[AttentionProblem], Any]] = {
    "forward": forward_settings,
    "backward": functools.partial(backward_settings, deterministic=False),
}
# The texts of settings, which name the form of a backward pass, then the tile of each pass.
_SETTINGS = re.compile(r"(\w+; )?(\d+x\d+, \d warps, \d stages(, TMA)?(, \d+ registers)?(; )?)+")


def kept_settings(pass_name: str, problem: AttentionProblem, device: torch.device) -> Any:
    """Return the settings that were kept for a pass and the problem's class on a GPU; None for the built-in ones."""
    kept = settings_on(device)
    text = kept.get(key_of(pass_name, problem)) if kept else None
    settings = candidates(BUILT_IN[pass_name], problem).get(text) if text else None
    if text and settings is None:
        warnings.warn(f"attention uses its built-in settings: {text!r} are none for this {pass_name}", stacklevel=2)
    return settings


def key_of(pass_name: str, problem: AttentionProblem) -> str:
    """Return a text for the class of a problem, to which kept settings apply."""
    representative = problem_class(problem)  # The class's largest problem.
    # Without the scale, which decides nothing and is not compared, and below without defaults: keys stay short.
    fields = [(field, getattr(representative, field.name)) for field in dataclasses.fields(problem) if field.compare]
    return " ".join([pass_name, *(f"{field.name}={value}" for field, value in fields if value != field.default)])


def describe_gpu(device: torch.device) -> str | None:
    """Return what measured settings depend on besides the problem; None where no GPU runs the kernels."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return None
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    # CUDA is loaded by now, from a file that is named after the driver; nvidia-smi would take a second.
    maps = Path("/proc/self/maps")
    libraries = re.findall(r"/libcuda\.so\.([\d.]+)", maps.read_text()) if maps.exists() else []
    driver = max(libraries, key=len, default="unknown")  # libcuda.so.1, a link, is shorter.
    kernels = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))
    numbers = f"{capability[0]}.{capability[1]}, driver {driver}, triton {triton.__version__}"
    return f"{name}, compute capability {numbers}, kernels {kernels.hexdigest()[:16]}"


def _file_of(gpu: str) -> Path:
    return kept_settings_file(gpu.partition(",")[0])


@functools.cache
def settings_on(device: torch.device) -> dict[str, str]:
    """Return the settings in force on a GPU, by :func:`key_of`: read once, and none from a file that is refused."""
    try:
        settings, description = read_settings(device)
    except CapabilityError as error:
        warnings.warn(f"attention uses its built-in settings: {error}", stacklevel=2)
        return {}
    if settings:
        print(f"cs336sys: attention uses settings of flash --keep-settings: {description}", file=sys.stderr)
    return settings


def read_settings(device: torch.device) -> tuple[dict[str, str], str]:
    """Return the settings that were kept on a GPU, and how many there are, where, and how to undo it.

    Raises:
        CapabilityError: the file is broken, or of another GPU, driver, Triton or version of the kernels, or others can
            write to its folder.
    """
    gpu = describe_gpu(device)
    path = None if gpu is None else _file_of(gpu)
    if path is None or not path.exists():
        return {}, "built-in settings"
    require_private(path.parent, variable="XDG_CACHE_HOME")
    remedy = f"measure again by cs336sys flash --keep-settings, or rm {path}"
    try:
        content = json.loads(path.read_text())
        measured_on, settings = content.pop("gpu"), content.pop("settings")  # A valid file has nothing else.
        is_valid = not content and all(_SETTINGS.fullmatch(text) for text in settings.values())
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        is_valid = False
    if not is_valid:
        raise CapabilityError(f"{path} is broken: {remedy}")
    if measured_on != gpu:
        raise CapabilityError(f"{path} was measured on {measured_on!r:.200}, this is {gpu!r}: {remedy}")
    return settings, f"{len(settings)} kept in {path} (undo: rm {path})"


def write_settings(gpu: str, settings: dict[str, str]) -> None:
    """Replace the settings that were kept on a GPU; without any, remove the file."""
    path = _file_of(gpu)
    if not settings:
        path.unlink(missing_ok=True)
        return
    require_private(path.parent, variable="XDG_CACHE_HOME")
    with written_whole(path) as partial:
        partial.write_text(json.dumps({"gpu": gpu, "settings": settings}, indent=2, allow_nan=False) + "\n")
