"""Checks of GPUs, driver, links between GPUs, and of what disturbs timings."""

import functools
import os
import re
from collections.abc import Sequence
from itertools import combinations

import torch

from cs336sys.machine.diagnosis.software import Check, faulty, faulty_if, probe_triton
from cs336sys.machine.environment import nccl_version
from cs336sys.machine.system import SLOWDOWNS, GpuState, installed_version, read_gpus, run_tool

MULTICAST_VARIABLES = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST")


def check_devices(gpus: list[GpuState]) -> list[Check]:
    """Return all checks of the GPUs but that of running a kernel; ``gpus`` are those that nvidia-smi sees."""
    processes = check_processes()  # First: torch's questions below make this process use the GPUs, too.
    checks = [check_gpu(gpus)]
    if gpus:
        checks += [check_driver(gpus), check_memory(gpus), processes, check_clocks(gpus), check_readings()]
    if torch.cuda.is_available():
        checks += [check_architecture(), check_nccl(), check_multicast()]
        if torch.cuda.device_count() > 1:
            checks.append(check_peer_to_peer())
    return checks


def check_gpu(gpus: list[GpuState]) -> Check:
    """Name the GPUs that torch sees, or why it sees none."""
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Check("GPU", ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)))
    if not gpus:
        return faulty("GPU", "none: everything runs on the CPU, at --size tiny", fix="no gpu")
    state = f"nvidia-smi sees {len(gpus)} x {gpus[0].name}, torch sees none"
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") is not None
    fix = "torch for cpus" if torch.version.cuda is None else "hidden gpu" if is_hidden else "unseen gpu"
    return faulty("GPU", state, fix=fix)


def check_driver(gpus: list[GpuState]) -> Check:
    """Check that the driver is for torch's major version of CUDA, or a later one (CUDA minor version compatibility)."""
    match = re.search(r"CUDA Version: (\d+)\.(\d+)", run_tool(["nvidia-smi"]) or "")
    if match is None or torch.version.cuda is None:
        return Check("driver", f"{gpus[0].driver}, torch's CUDA is {torch.version.cuda or 'none'}")
    state = f"{gpus[0].driver} for CUDA {match[1]}.{match[2]}, torch's CUDA is {torch.version.cuda}"
    is_old = int(match[1]) < int(torch.version.cuda.partition(".")[0])
    return faulty_if(is_old, "driver", state, fix="driver", version=torch.version.cuda)


def check_architecture() -> Check:
    """Check that this torch holds machine code, or PTX to compile, for every GPU."""
    built = torch.cuda.get_arch_list()
    devices = range(torch.cuda.device_count())
    if torch.version.hip:
        # AMD's names go on with features: "gfx942:sramecc+:xnack-".
        names = [torch.cuda.get_device_properties(index).gcnArchName.partition(":")[0] for index in devices]
        has_code = [name in built for name in names]
    else:
        capabilities = [torch.cuda.get_device_capability(index) for index in devices]
        names = [f"{major}.{minor}" for major, minor in capabilities]
        has_code = [_runs_on(capability, built) for capability in capabilities]
    state = ", ".join(dict.fromkeys(names))
    if built and not all(has_code):  # without a list nobody knows
        state += f", this torch is built for {' '.join(built)}"
        return faulty("compute capability", state, fix="architecture", verdict="missing")
    return Check("compute capability", state)


def _runs_on(capability: tuple[int, int], built: list[str]) -> bool:
    """Return whether a GPU runs any of the built codes.

    Machine code (sm_86) runs on its own and later minor versions, PTX (compute_90) on everything later.
    """
    # The last digit is the minor version: sm_120 is of 12.0. Code for one architecture alone ends in a letter, sm_90a.
    codes = re.findall(r"(sm|compute)_(\d+)(\d)[af]?\b", " ".join(built))
    return any(
        (int(major), int(minor)) <= capability and (kind == "compute" or int(major) == capability[0])
        for kind, major, minor in codes
    )


def check_memory(gpus: list[GpuState]) -> Check:
    memory_of_gpus = [
        (gpu.index, gpu.memory_free_gib, gpu.memory_total_gib)
        for gpu in gpus
        if gpu.memory_total_gib and gpu.memory_free_gib is not None
    ]
    state = "; ".join(f"GPU {index}: {free:.1f} of {total:.1f} GiB free" for index, free, total in memory_of_gpus)
    # The driver keeps a few per cent for itself; with less free, another program holds memory.
    is_held = any(free < 0.9 * total for _, free, total in memory_of_gpus)
    return faulty_if(is_held, "GPU memory", state or "unknown", fix="gpu memory")


def check_processes() -> Check:
    text = run_tool(["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"])
    if not text:
        return Check("GPU processes", "unknown" if text is None else "none")
    processes = [line.split(", ") for line in text.splitlines() if line]
    state = "; ".join(f"process {pid} holds {memory}" for pid, memory in processes)
    return faulty("GPU processes", state, fix="gpu processes")


def check_clocks(gpus: list[GpuState]) -> Check:
    """Show clocks, temperature and power, and warn of what slows a GPU down."""
    state = "; ".join(
        f"GPU {gpu.index}: {_amount(gpu.sm_clock_mhz)} of {_amount(gpu.max_sm_clock_mhz)} MHz, "
        f"{_amount(gpu.temperature_c)} C, {_amount(gpu.power_w)} of {_amount(gpu.power_limit_w)} W, "
        f"limited by {', '.join(gpu.clock_limits) or 'nothing'}"
        for gpu in gpus
    )
    is_slowed = any(SLOWDOWNS.intersection(gpu.clock_limits) for gpu in gpus)
    return faulty_if(is_slowed, "GPU clocks", state, fix="gpu clocks")


def check_readings() -> Check:
    """Check that ``bench`` can read clocks and energy of the GPU while it measures."""
    version = installed_version("nvidia-ml-py")
    state = "nvidia-ml-py is not installed" if version is None else f"by nvidia-ml-py {version}"
    return faulty_if(version is None, "GPU readings", state, fix="gpu readings")


def _amount(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f}"


def check_triton_kernel() -> list[Check]:
    """Compile and run a kernel on the GPU, where there is one."""
    if not torch.cuda.is_available():
        return []
    outcome = probe_triton("cuda")
    if outcome == "ok":
        return [Check("Triton on the GPU", "compiles and runs a kernel")]
    return [faulty("Triton on the GPU", outcome, fix="triton probe", verdict="missing", device="cuda")]


def check_nccl() -> Check:
    version = nccl_version()
    if version is None and torch.cuda.device_count() > 1:
        return faulty("NCCL", "not in this torch", fix="nccl")
    return Check("NCCL", version or "not in this torch; one GPU does not need it")


def check_multicast() -> Check:
    """Show the variables of NVLink multicast, the machine owner's choice: cs336sys neither sets nor clears them."""
    values = {name: os.environ.get(name, "not set") for name in MULTICAST_VARIABLES}
    return Check("NVLink multicast", ", ".join(f"{name}: {value}" for name, value in values.items()))


def check_peer_to_peer() -> Check:
    """Check that GPUs reach each other's memory directly, and show over which links, by nvidia-smi's numbers."""
    pairs = list(combinations(range(torch.cuda.device_count()), 2))
    reaches = torch.cuda.can_device_access_peer
    blocked = [f"{a}-{b}" for a, b in pairs if not (reaches(a, b) and reaches(b, a))]
    links = read_links(run_tool(["nvidia-smi", "topo", "-m"]) or "")
    shown = ", ".join(f"{a}-{b} {link}" for (a, b), link in sorted(links.items())) or "unknown"
    if blocked:
        return faulty("peer to peer", f"not between GPUs {', '.join(blocked)}; links {shown}", fix="peer to peer")
    return Check("peer to peer", f"between all pairs; links {shown}")


def read_links(topology: str) -> dict[tuple[int, int], str]:
    """Read the link of each pair of GPUs from the matrix that ``nvidia-smi topo -m`` prints: NV18, PIX, SYS ..."""
    # Codes underline the header. A row is a GPU's name, its link to each GPU (X to itself), and more, unread.
    lines = re.sub(r"\x1b\[\d*m", "", topology).splitlines()
    rows = [line.split()[1:] for line in lines if re.match(r"GPU\d+\s.*\bX\b", line)]
    return {(a, b): rows[a][b] for a, b in combinations(range(len(rows)), 2)}


@functools.cache
def describe_links(uuids: Sequence[str]) -> str:
    """Name the links between these GPUs of this machine as ``nvidia-smi topo -m`` does, with the sum of the NVLinks.

    ``uuids``, a tuple for the cache, are those of :class:`cs336sys.machine.system.GpuState`. The names are as in
    ``NV18 (18 NVLinks, 478 GB/s each way)``, ``PIX`` or ``SYS``, several where pairs differ, or ``unknown links``.
    """
    indices = sorted(gpu.index for gpu in read_gpus() if gpu.uuid in uuids)
    links = read_links(run_tool(["nvidia-smi", "topo", "-m"]) or "")
    names = sorted({links[pair] for pair in combinations(indices, 2) if pair in links})
    if not names:
        return "unknown links"
    described = ", ".join(names)
    if any(name.startswith("NV") for name in names):
        # Of one GPU, as the others have as many.
        status = run_tool(["nvidia-smi", "nvlink", "--status", "-i", str(indices[0])]) or ""
        speeds = [float(speed) for speed in re.findall(r"Link \d+: ([\d.]+) GB/s", status)]
        if speeds:
            described += f" ({len(speeds)} NVLinks, {sum(speeds):.0f} GB/s each way)"
    return described
