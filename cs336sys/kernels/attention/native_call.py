"""The C++ of native_call.cpp: compiled once for a machine and a torch, and given what the plans say.

An ``autograd.Function`` in Python costs about what torch's own attention costs the CPU altogether. With a plan known to
the C++ a call runs no Python between its arguments and its launches, forward or backward.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.runtime.cache import get_cache_manager

from cs336sys.kernels.attention.plan import Launch, Plan, Scratch

SOURCE = Path(__file__).with_suffix(".cpp")

# Elsewhere a kernel may have other parameters; that of 3.6 was read in its launcher and run.
KNOWN_TRITON = triton.__version__.startswith("3.6.")

# How the numbers of Triton's signatures lie in memory.
_NUMBER_FORMATS = {"i32": "<i", "i64": "<q", "fp32": "<f"}
_NULL = bytes(8)


def compiler() -> str | None:
    """The C++ compiler: what CXX names, or g++ or clang++; None without any."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


@functools.cache
def load(
    forward: Callable, backward: Callable, node_backward: Callable, options: tuple[tuple, ...]
) -> ModuleType | None:
    """The compiled module, ready to launch on CUDA; None where it cannot be had, after a warning if that has a mend.

    Its operators take the place of those in Python for CUDA tensors. Compiling takes some 20 seconds on a slow CPU,
    once: Triton's cache keeps the result.

    Args:
        forward: what the operator calls where no plan is known, with query, key, value and options; returns output and
            logsumexp.
        backward: likewise, with query, key, value, output, logsumexp, the output's gradient and options; returns the
            gradients of query, key and value.
        node_backward: what autograd's node calls instead, outside of the operators.
        options: all there are, each (is_causal, float32_precision, deterministic, kernels); a plan is for one of them,
            named by its place.
    """
    if not KNOWN_TRITON:
        return None
    if compiler() is None:
        _warn("there is no C++ compiler: install g++ or set CXX")
        return None
    try:
        module = import_from(built_library())
        driver = ctypes.CDLL("libcuda.so.1")
    except subprocess.CalledProcessError as error:
        _warn(f"the C++ compiler failed: {(error.stderr.strip().splitlines() or ['it said nothing'])[0]}")
    except (OSError, ImportError) as error:
        _warn(str(error))
    else:
        functions = driver.cuLaunchKernel, driver.cuTensorMapEncodeTiled
        module.use_driver(*(ctypes.cast(function, ctypes.c_void_p).value for function in functions))
        module.use_python(forward, backward, node_backward)
        module.use_options(options)
        module.register_operators("cs336sys", "cuda")
        return module
    return None


def _warn(reason: str) -> None:
    warnings.warn(f"calls of the attention kernels take the longer way through Python: {reason}", stacklevel=3)


def built_library() -> str:
    """The path of the shared library, compiled if Triton's cache does not have it."""
    described = SOURCE.read_text(), torch.__version__, sys.version, platform.machine(), str(compiler())
    cache = get_cache_manager(hashlib.sha256("\n".join(described).encode()).hexdigest())
    name = SOURCE.stem + sysconfig.get_config_var("EXT_SUFFIX")
    path = cache.get_file(name)
    if path is None:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder, name)
            subprocess.run(_build_command(library), check=True, capture_output=True, text=True)
            path = cache.put(library.read_bytes(), name, binary=True)
    return path


def _build_command(library: Path) -> list[str]:
    folder = Path(torch.__file__).parent
    headers = folder / "include", folder / "include/torch/csrc/api/include", Path(sysconfig.get_path("include"))
    flags = ["-shared", "-fPIC", "-O2", "-std=c++20", f"-DTORCH_EXTENSION_NAME={SOURCE.stem}"]
    libraries = [f"-L{folder / 'lib'}", *(f"-l{name}" for name in ("c10", "torch_cpu", "torch", "torch_python"))]
    includes = [f"-isystem{header}" for header in headers]
    return [str(compiler()), *flags, *includes, str(SOURCE), "-o", str(library), *libraries]


def import_from(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(SOURCE.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def translate(module: ModuleType, plan: Plan) -> Any | None:
    """A plan that has run once, for the C++; None if a kernel is launched in a way that it does not know.

    The last of the tensors that the plan is given are its results, which the C++ allocates.
    """
    launches = [_translate_launch(module, launch, slots) for launch, slots in plan.steps]
    if None in launches:
        return None
    results = [module.Layout(*layout) for layout in plan.result_layouts]
    own = [
        module.Layout(one.shape, one.strides, torch.float32) if isinstance(one, Scratch) else one for one in plan.own
    ]
    return module.Plan(results, own, launches)


def _translate_launch(module: ModuleType, launch: Launch, slots: Sequence[int]) -> Any | None:
    compiled = launch.compiled
    if not _has_known_parameters(compiled):
        return None
    parameters = _parameters(module, compiled, (*slots, *launch.arguments), launch.descriptors)
    threads = 32 * compiled.metadata.num_warps
    return module.Launch(compiled.function, launch.num_programs, threads, compiled.metadata.shared, parameters)


def _has_known_parameters(compiled) -> bool:
    """Whether the kernel's parameters are its arguments and two pointers to no memory, and the launch a plain one."""
    run = compiled.run
    special = run.global_scratch_size, run.profile_scratch_size, run.launch_cooperative_grid, run.launch_pdl
    return run.num_ctas == 1 and not any(special)


def _parameters(module: ModuleType, compiled, arguments: Sequence, descriptors: Sequence) -> list:
    """What the kernel is launched with: slots of tensors, descriptors of them, and the bytes of numbers."""
    metadata = iter(compiled.metadata.tensordesc_meta or ())
    layouts = iter(descriptors)
    parameters = []

    def add(kind: str | tuple, argument: Any) -> None:
        if isinstance(kind, tuple):
            for one_kind, one in zip(kind, argument, strict=True):
                add(one_kind, one)
        elif kind.startswith("*"):
            parameters.append(argument)
        elif kind.startswith("tensordesc"):
            about, (shape, strides) = next(metadata), next(layouts).shape_and_strides
            dtype = TMA_DTYPE_DEVICE_TO_HOST[about["elem_type"]]
            bytes_and_box = about["elem_size"], about["block_size"]
            parameters.append(module.Descriptor(argument, dtype, about["swizzle"], *bytes_and_box, shape, strides))
            # The kernel is given shape and strides as well.
            parameters.extend(struct.pack("<i", size) for size in shape)
            parameters.extend(struct.pack("<q", stride) for stride in strides)
        elif kind != "constexpr":
            parameters.append(struct.pack(_NUMBER_FORMATS[kind], argument))

    for kind, argument in zip(compiled.src.signature.values(), arguments, strict=True):
        add(kind, argument)
    return [*parameters, _NULL, _NULL]
