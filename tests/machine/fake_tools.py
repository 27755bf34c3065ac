"""Command-line tools that answer with canned output, put on PATH in the place of a machine's own."""

import os
from pathlib import Path

import torch

GPU_0 = "0, GPU-11111111-2222-3333-4444-555555555550, NVIDIA H200, 580.95.05, 143771, 143156"
GPU_1 = "1, GPU-11111111-2222-3333-4444-555555555551, NVIDIA H200, 580.95.05, 143771, 143156"
IDLE = "345, 1980, 31, 76.45, 700.00, 0x0000000000000001"
THROTTLED = "1155, 1980, 88, 701.20, 700.00, 0x0000000000000024"

BANNER = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 580.95.05              Driver Version: 580.95.05      CUDA Version: 13.0     |
+-----------------------------------------+------------------------+----------------------+"""

NVLINK = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\t0-47,96-143\t0\t\tN/A
GPU1\tNV18\t X \tNODE\t0-47,96-143\t0\t\tN/A
NIC0\tPIX\tNODE\t X \t\t\t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks"""


def put_tool(folder: Path, name: str, answers: dict[str, str]) -> Path:
    """An executable that prints the first answer whose key is part of its arguments, and fails when there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    cases = []
    for number, (part, text) in enumerate(answers.items()):
        (folder / f".{name}.{number}").write_text(text + "\n")
        cases.append(f'  *"{part}"*) exec cat "{folder}/.{name}.{number}" ;;')
    path = folder / name
    path.write_text("\n".join(["#!/bin/sh", 'case " $* " in', *cases, "esac", "echo not today; exit 2", ""]))
    path.chmod(0o755)
    return path


def put_nvidia_smi(
    folder: Path,
    *gpus: str,
    processes: str = "",
    topology: str = NVLINK,
    banner: str = BANNER,
    old: bool = False,
    nvlinks: str = "",
) -> None:
    """A driver's nvidia-smi; an ``old`` one does not know clocks_event_reasons."""
    reasons = "clocks_throttle_reasons.active" if old else "clocks_event_reasons.active"
    answers = {
        f"{reasons} --format=csv,noheader,nounits": "\n".join(gpus),
        "--query-compute-apps=pid,used_memory --format=csv,noheader": processes,
        "topo -m": topology,
        "nvlink --status -i 0": nvlinks,
    }
    put_tool(folder, "nvidia-smi", answers if banner is None else answers | {"  ": banner})


def only_on_path(monkeypatch, folder: Path) -> None:
    """Leave this folder and the shell's own programs on PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("cat", "sh"):
        if not (folder / name).exists():
            (folder / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", os.fspath(folder))


def pretend_gpus(monkeypatch, count, capability=(9, 0), peer_access=True, built=("sm_90",)) -> None:
    """Let torch see H200, for which it has code."""
    fakes = {
        "is_available": lambda: count > 0,
        "device_count": lambda: count,
        "get_device_name": lambda index: "NVIDIA H200",
        "get_device_capability": lambda index: capability,
        "get_arch_list": lambda: list(built),
        "can_device_access_peer": lambda a, b: peer_access,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
