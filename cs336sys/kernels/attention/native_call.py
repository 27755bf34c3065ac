"""Compile native_call.cpp once for a machine and a torch, while calls go on, and translate plans for it.

With a plan known to the C++ a call runs no Python between its arguments and its launches, forward or backward. Launches
name tensors by their slots in the plan: first those of the call, then the plan's own.
"""

import ctypes
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

from cs336sys.kernels.attention.plan import Launch, Plan, Scratch
from cs336sys.processes.caches import require_private

SOURCE = Path(__file__).with_suffix(".cpp")
BUILDER = Path(__file__).with_name("native_build.py")
# Read once: torch.compile's inductor sends Triton's cache elsewhere while a process runs.
CACHE = Path(triton.knobs.cache.dir)
_LIBRARY_NAME = f"{SOURCE.stem}{sysconfig.get_config_var('EXT_SUFFIX')}"

# The versions of Triton whose launcher was read (backends/nvidia/driver.py and driver.c); another may launch otherwise.
# From 3.7 on one C function launches all kernels where 3.6 compiled one for each signature, and 3.8 asks the driver for
# more shared memory above 228 KiB. What a kernel is given is the same in all of them.
KNOWN_LAUNCHERS = ("3.6", "3.7", "3.8", "3.9")
KNOWN_TRITON = ".".join(triton.__version__.split(".")[:2]) in KNOWN_LAUNCHERS
MAX_SHARED_BYTES = 228 * 1024

# How the numbers of Triton's signatures lie in memory.
_NUMBER_FORMATS = {"i32": "<i", "i64": "<q", "fp32": "<f"}
_NULL = bytes(8)
_DESCRIPTOR_BYTES = 128


class UnknownLaunchError(Exception):
    """A kernel is launched in a way that the C++ does not know; the message says which."""


def compiler() -> str | None:
    """Return the C++ compiler: what CXX names, or g++ or clang++; None without any."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def why_off() -> str | None:
    """Return why calls go through Python here, as far as is known before the first call; None where they run in C++."""
    if not KNOWN_TRITON:
        versions = ", ".join(KNOWN_LAUNCHERS)
        return (
            f"triton {triton.__version__} may launch kernels in another way than {versions}, the versions that the C++ "
            "supports"
        )
    if torch.version.hip:
        return "the C++ launches kernels by CUDA's driver, and this torch is built for ROCm"
    if compiler() is None:
        return "there is no C++ compiler: install g++ or set CXX"
    return None


class Library:
    """The compiled module, as soon as it is there; until then, and where it cannot be had, calls go through Python."""

    def __init__(self) -> None:
        self._module: ModuleType | None = None
        self._build: subprocess.Popen | None = None
        self._starter_pid = 0  # the process that started the build: one that was forked has no such child
        self._is_off = False

    def start(self) -> None:
        """Start compiling the C++ in another process, unless it is done, begun or impossible; say so once a machine.

        Compiling takes 17 to 47 seconds on the slow CPUs of the H200 machines. The other process goes on when this one
        ends, so that the next finds the library; of several, such as ranks, one compiles and the others wait for it.
        """
        if self._is_off or self._module is not None or self._starter_pid == os.getpid():
            return
        reason = why_off()
        if reason is not None:
            self._is_off = True
            if KNOWN_TRITON:  # Calls are silent about another version, which ``doctor`` names.
                _warn(reason)
            return
        path = library_path()
        if path.exists():
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            is_first = _make_lock(Path(f"{path}.lock"))
            command = [sys.executable, str(BUILDER), str(path), *_build_command()]
            null = subprocess.DEVNULL
            self._build = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)
        except OSError as error:
            self._is_off = True
            _warn(str(error))
            return
        self._starter_pid = os.getpid()
        if is_first:
            print(
                f"cs336sys: first attention on this machine: compiling its kernels, and once the C++ that shortens "
                f"later calls ({compiler()}, up to a minute)",
                file=sys.stderr,
            )

    def load(
        self, forward: Callable, backward: Callable, node_backward: Callable, options: tuple[tuple, ...]
    ) -> ModuleType | None:
        """Return the module, ready to launch on CUDA; None while it is compiled, or after a warning where it fails.

        Its operators take the place of those in Python for CUDA tensors, and call Python where they know no plan.

        Args:
            forward: called with query, key, value and all options; returns output and logsumexp.
            backward: called with query, key, value, output, logsumexp, the output's gradient and all options; returns
                the gradients of query, key and value.
            node_backward: what autograd's node calls in place of ``backward``.
            options: the combinations of is_causal, float32_precision, deterministic and kernels. The C++ knows them by
                their index, to which a window adds their count times its keys.
        """
        if self._module is not None or self._is_off:
            return self._module
        self.start()
        path = library_path()
        is_building = self._build is not None and self._build.poll() is None
        if self._is_off or (self._starter_pid == os.getpid() and is_building):  # In a fork poll() would not know.
            return None
        try:
            if not path.exists():  # Compiling has ended without it.
                log = Path(f"{path}.log")
                errors = log.read_text().strip().splitlines() if log.exists() else []
                raise ImportError(f"the C++ compiler failed: {errors[0] if errors else 'it said nothing'}")
            module = import_from(str(path))
            driver = ctypes.CDLL("libcuda.so.1")
        except (OSError, ImportError) as error:
            self._is_off = True
            _warn(str(error))
            return None
        functions = driver.cuLaunchKernelEx, driver.cuTensorMapEncodeTiled
        module.use_driver(*(ctypes.cast(function, ctypes.c_void_p).value for function in functions))
        module.use_python(forward, backward, node_backward)
        module.use_options(options)
        module.register_operators("cs336sys", "cuda")
        self._module = module
        return module

    def wait(self) -> None:
        """Wait until the library is compiled, or could not be."""
        self.start()
        if self._build is not None:
            self._build.wait()


library = Library()


def _make_lock(lock: Path) -> bool:
    """Make the lock's file, and return whether nobody on this machine had made it before."""
    try:
        lock.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _warn(reason: str) -> None:
    warnings.warn(f"calls of the attention kernels take the longer way through Python: {reason}", stacklevel=3)


def library_path() -> Path:
    """Return where the shared library is, or will be, in Triton's cache."""
    key = "\n".join((SOURCE.read_text(), torch.__version__, sys.version, platform.machine(), str(compiler())))
    return Path(CACHE, hashlib.sha256(key.encode()).hexdigest(), _LIBRARY_NAME)


def _build_command() -> list[str]:
    folder = Path(torch.__file__).parent
    headers = folder / "include", folder / "include/torch/csrc/api/include", Path(sysconfig.get_path("include"))
    flags = ["-shared", "-fPIC", "-O2", "-std=c++20", f"-DTORCH_EXTENSION_NAME={SOURCE.stem}"]
    libraries = [f"-L{folder / 'lib'}", *(f"-l{name}" for name in ("c10", "torch_cpu", "torch", "torch_python"))]
    includes = [f"-isystem{header}" for header in headers]
    return [str(compiler()), *flags, *includes, str(SOURCE), *libraries]


def import_from(path: str, package: str = "") -> ModuleType:
    """Import the module in a file. A process imports one module of a name: ``package`` in front gives it another.

    Raises:
        CapabilityError: others can write to the file's folder.
        ImportError: the file cannot be loaded.
    """
    require_private(Path(path).parent, variable="TRITON_CACHE_DIR")
    spec = importlib.util.spec_from_file_location(f"{package}.{SOURCE.stem}".lstrip("."), path)  # No package, no dot.
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def translate(module: ModuleType, plan: Plan) -> Any | None:
    """Return the C++'s form of a plan that has run once; None, after a warning, if a kernel is launched in another way.

    The last of the tensors that the plan is given are its results, which the C++ allocates.
    """
    try:
        launches = [translate_launch(module, launch, slots) for launch, slots in plan.steps]
    except UnknownLaunchError as error:
        _warn(f"triton {triton.__version__}: {error}")
        return None
    results = [module.Layout(*layout) for layout in plan.result_layouts]
    scratch = [
        module.Layout(tensor.shape, tensor.strides, torch.float32) if isinstance(tensor, Scratch) else tensor
        for tensor in plan.additions
    ]
    return module.Plan(results, scratch, launches)


def translate_launch(module: ModuleType, launch: Launch, slots: Sequence[int]) -> Any:
    """Return the C++'s form of a launch over the tensors in these slots, or raise an :class:`UnknownLaunchError`."""
    compiled = launch.compiled
    metadata = compiled.metadata
    _check_plain_launch(metadata)
    parameters = _launch_parameters(module, compiled, (*slots, *launch.arguments), launch.descriptors)
    _check_sizes(compiled.asm["ptx"], parameters)
    threads, is_early = 32 * metadata.num_warps, metadata.launch_pdl
    return module.Launch(compiled.function, launch.num_programs, threads, metadata.shared, is_early, parameters)


def _check_plain_launch(metadata) -> None:
    """Refuse a launch with attributes, with scratch memory of Triton's or with descriptors other than tiled ones."""
    plain_values = {
        "num_ctas": 1,
        "launch_cooperative_grid": False,
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
    }
    for name, expected in plain_values.items():
        if getattr(metadata, name) != expected:
            raise UnknownLaunchError(f"a kernel has {name} {getattr(metadata, name)}")
    if metadata.shared > MAX_SHARED_BYTES:
        raise UnknownLaunchError(f"a kernel takes {metadata.shared} bytes of shared memory")
    for descriptor in metadata.tensordesc_meta or ():
        for name in ("fp4_padded", "is_im2col"):
            if descriptor.get(name):
                raise UnknownLaunchError(f"a kernel takes a TMA descriptor of the kind {name}")


def _check_sizes(ptx: str, parameters: Sequence) -> None:
    """Refuse a kernel that declares another number of parameters than it will be given, or other sizes."""
    declaration = ptx.partition(".entry")[2].partition(")")[0]  # The kernel's list of parameters.
    # As in ".param .align 64 .b8 name[128]": bits of an element, and their number.
    sizes = [
        int(bits) // 8 * int(count or 1)
        for bits, count in re.findall(r"\.param (?:\.align \d+ )?\.[a-z](\d+)[^,\[]*(?:\[(\d+)\])?", declaration)
    ]
    expected_sizes = list(map(_parameter_bytes, parameters))
    if sizes != expected_sizes:
        raise UnknownLaunchError(f"a kernel takes parameters of {sizes} bytes, expected were {expected_sizes}")


def _parameter_bytes(parameter: Any) -> int:
    """Return the size of a parameter: a number's bytes, the address of the tensor in a slot, or a TMA descriptor."""
    if isinstance(parameter, bytes):
        return len(parameter)
    return len(_NULL) if isinstance(parameter, int) else _DESCRIPTOR_BYTES


def _launch_parameters(module: ModuleType, compiled, arguments: Sequence, descriptors: Sequence) -> list:
    """List a kernel's launch parameters: slots of tensors, descriptors of them, and the bytes of numbers.

    Behind them come the addresses of two kinds of scratch memory, of which it needs none.
    """
    metadata = iter(compiled.metadata.tensordesc_meta or ())
    layouts = iter(descriptors)
    parameters = []

    def add(kind: str | tuple, argument: Any) -> None:
        """Append the parameters of an argument, which is the slot of a tensor where its kind is an address."""
        if isinstance(kind, tuple):
            for element_kind, element in zip(kind, argument, strict=True):
                add(element_kind, element)
        elif kind.startswith("*"):
            parameters.append(argument)
        elif kind.startswith("tensordesc"):
            tile = next(metadata, None)
            if tile is None:  # Triton gives it pointer, shape and strides.
                raise UnknownLaunchError("a kernel takes TMA descriptors apart")
            shape, strides = next(layouts).shape_and_strides
            dtype, swizzle = TMA_DTYPE_DEVICE_TO_HOST[tile["elem_type"]], tile["swizzle"]
            element_bytes, box = tile["elem_size"], tile["block_size"]
            parameters.append(module.Descriptor(argument, dtype, swizzle, element_bytes, box, shape, strides))
            parameters.extend(struct.pack("<i", size) for size in shape)  # The kernel is given these as well.
            parameters.extend(struct.pack("<q", stride) for stride in strides)
        elif kind in _NUMBER_FORMATS:
            parameters.append(struct.pack(_NUMBER_FORMATS[kind], argument))
        elif kind != "constexpr":
            raise UnknownLaunchError(f"a kernel takes a number of the kind {kind}")

    for kind, argument in zip(compiled.src.signature.values(), arguments, strict=True):
        add(kind, argument)
    return [*parameters, _NULL, _NULL]
