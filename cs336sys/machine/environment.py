"""The machine and the settings that a measurement was taken with."""

import contextlib
import hashlib
import importlib.util
import os
import platform
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import cs336sys
from cs336sys.machine.system import cpu_cores, cpu_model, installed_version, read_gpus, run_tool
from cs336sys.processes.caches import kept_settings_file
from cs336sys.results.model import Run
from cs336sys.settings.course_package import course_package

# Variables that change what runs, how fast, or in how much memory; a name ending in "_" is a prefix.
RELEVANT_VARIABLES = (
    *("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "NCCL_", "NVIDIA_TF32_OVERRIDE"),
    *("OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_NCCL_", "TORCH_SYMM_MEM_"),
    "TRITON_INTERPRET",
)


def new_run(arguments: Sequence[str]) -> Run:
    """Return the record of an invocation that starts now on this machine."""
    return Run(
        run_id=str(uuid.uuid4()),
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        arguments=tuple(arguments),
        machine=describe_machine(),
        environment=describe_environment(),
    )


def describe_machine() -> dict[str, Any]:
    """Return hardware and versions that timings depend on, as JSON scalars; None for what is not there.

    No host, user or path is named, so that result files can be published. The CPU is part of it on GPU machines too: it
    launches the kernels.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(index) for index in range(count)]
    drivers = {gpu.driver for gpu in read_gpus()}
    cudnn = torch.backends.cudnn.version()  # major * 10000 + minor * 100 + patch, since version 9.
    return {
        "gpu": ", ".join(dict.fromkeys(names)) or None,
        "gpu_count": count,
        "cpu": cpu_model(),
        "cpu_cores": cpu_cores(),
        "driver": drivers.pop() if drivers else None,  # one for all GPUs of a machine
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": installed_version("triton"),
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else f"{cudnn // 10_000}.{cudnn // 100 % 100}.{cudnn % 100}",
        "nccl": nccl_version(),
    }


def describe_environment() -> dict[str, Any]:
    """Return everything else worth knowing later, as JSON scalars; None for what cannot be found out.

    The source revision and digest, matmul precision and TF32, threads, every variable of
    :data:`RELEVANT_VARIABLES` that is set, the state of each visible GPU now, and a digest of its attention settings.
    """
    commit, dirty = source_revision()
    precision = None
    with contextlib.suppress(RuntimeError):
        # torch refuses to answer when TF32 was set through both its old and its new interface.
        precision = torch.get_float32_matmul_precision()
    description = {
        "cs336sys": cs336sys.__version__,
        "git_commit": commit,
        "git_dirty": dirty,
        "source_digest": source_digest(),
        "seed": None,  # a setting of each cell
        "float32_matmul_precision": precision,
        "tf32_matmul": torch.backends.cuda.matmul.fp32_precision == "tf32",
        # torch adds the attribute when it runs.
        "tf32_cudnn": torch.backends.cudnn.conv.fp32_precision == "tf32",  # type: ignore[attr-defined]
        "torch_threads": torch.get_num_threads(),
    }
    package = course_package()
    if not package.is_ours:
        description["cs336_basics"] = package.name
    prefixes = tuple(name for name in RELEVANT_VARIABLES if name.endswith("_"))
    variables = {
        name: "(a path)" if "/" in value else value  # A path would name this machine's folders or its user.
        for name, value in sorted(os.environ.items())
        if name in RELEVANT_VARIABLES or name.startswith(prefixes)
    }
    return description | variables | _gpu_states()


def source_revision() -> tuple[str | None, bool | None]:
    """Return the commit of the checkout that cs336sys is imported from, and whether tracked files differ from it.

    (None, None) when cs336sys is not imported from a git checkout of its own, or git is missing.
    """
    git = ["git", "-C", str(Path(cs336sys.__file__).parent)]
    # A repository that merely contains the virtual environment tracks no file of this package.
    if run_tool([*git, "ls-files", "--error-unmatch", "__init__.py"]) is None:
        return None, None
    commit = run_tool([*git, "rev-parse", "HEAD"])
    # Not git describe --dirty, which writes the index, and leaves its lock behind if it is killed with us.
    changes = run_tool([*git, "--no-optional-locks", "status", "--porcelain", "--untracked-files=no"])
    if commit is None or changes is None:
        return None, None
    return commit, bool(changes)


def source_digest() -> str:
    """Return 16 hexadecimal digits that change with the name or content of any source of cs336sys and of the model.

    They need no git, and change with edits that are not committed.
    """
    digest = hashlib.sha256()
    # Their folders are found without importing them: only who builds the model needs to import it.
    for package in ("cs336sys", "cs336_basics"):
        spec = importlib.util.find_spec(package)
        for folder in spec.submodule_search_locations or () if spec else ():
            for path in sorted(path for path in Path(folder).rglob("*") if path.suffix in (".py", ".cpp")):
                digest.update(f"{package}/{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def nccl_version() -> str | None:
    """Return the version of the NCCL that torch was built with, or None."""
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _gpu_states() -> dict[str, Any]:
    """Return clocks, temperature and power of each visible GPU, and a digest of its measured attention settings."""
    if not torch.cuda.is_available():
        return {}
    states = {gpu.uuid: gpu for gpu in read_gpus()}
    description: dict[str, Any] = {}
    for index in range(torch.cuda.device_count()):
        gpu = states.get(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
        if gpu is not None:
            for name in ("sm_clock_mhz", "max_sm_clock_mhz", "temperature_c", "power_w", "power_limit_w"):
                description[f"gpu{index}_{name}"] = getattr(gpu, name)
            description[f"gpu{index}_clock_limits"] = ", ".join(gpu.clock_limits)
        # GPUs of one kind share a file; of several kinds, the last one's is recorded.
        settings_file = kept_settings_file(torch.cuda.get_device_name(index))
        if settings_file.exists():
            description["attention_settings"] = hashlib.sha256(settings_file.read_bytes()).hexdigest()[:16]
    return description
