"""The record of a run: complete and publishable; and what the system's tools say, also when they say nothing."""

import getpass
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_tools import GPU_0, GPU_1, IDLE, THROTTLED, only_on_path, put_nvidia_smi, put_tool

import cs336sys
from cs336sys.machine import system
from cs336sys.machine.diagnosis import software
from cs336sys.machine.environment import describe_environment, describe_machine, source_digest, source_revision
from cs336sys.processes.caches import kept_settings_file


def test_machine_has_the_hardware_and_every_version_and_nothing_private():
    machine = describe_machine()
    assert list(machine) == [
        *("gpu", "gpu_count", "cpu", "cpu_cores", "driver"),
        *("python", "torch", "triton", "cuda", "cudnn", "nccl"),
    ]
    assert machine["torch"] == torch.__version__
    assert machine["cuda"] == torch.version.cuda
    assert machine["gpu_count"] == torch.cuda.device_count()
    assert machine["cpu_cores"] >= 1
    words = json.dumps(machine).replace('"', " ").split()
    assert not {socket.gethostname(), getpass.getuser(), os.getcwd()}.intersection(words)


def test_matmul_precision_and_tf32_are_those_that_hold():
    try:
        torch.set_float32_matmul_precision("high")
        described = describe_environment()
        assert (described["float32_matmul_precision"], described["tf32_matmul"]) == ("high", True)
        torch.set_float32_matmul_precision("highest")
        described = describe_environment()
        assert (described["float32_matmul_precision"], described["tf32_matmul"]) == ("highest", False)
        # Set through torch's other interface as well, the old one refuses to answer.
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        described = describe_environment()
        assert (described["float32_matmul_precision"], described["tf32_matmul"]) == (None, True)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")


def test_relevant_variables_are_kept_and_paths_are_not(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("NCCL_", "TORCH_", "PYTORCH_", "CUDA_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("NCCL_TOPO_FILE", "/home/somebody/topology.xml")
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("HF_TOKEN", "secret")
    variables = {name: value for name, value in describe_environment().items() if name.isupper()}
    assert variables == {
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_TOPO_FILE": "(a path)",
        "OMP_NUM_THREADS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "TRITON_INTERPRET": "1",
    }


def test_gpu_state_is_that_of_the_visible_gpu(tmp_path, monkeypatch):
    put_nvidia_smi(tmp_path, f"{GPU_0}, {IDLE}", f"{GPU_1}, {THROTTLED}")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    visible = SimpleNamespace(uuid="11111111-2222-3333-4444-555555555551")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: visible)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept_settings_file("NVIDIA A100").parent.mkdir()
    kept_settings_file("NVIDIA A100").write_text("of another GPU")
    assert "attention_settings" not in describe_environment()
    kept_settings_file("NVIDIA H200").write_text("of this one")
    first = describe_environment()["attention_settings"]
    kept_settings_file("NVIDIA H200").write_text("measured again")
    assert describe_environment()["attention_settings"] != first
    states = {name: value for name, value in describe_environment().items() if name.startswith("gpu")}
    assert states == {
        "gpu0_sm_clock_mhz": 1155,
        "gpu0_max_sm_clock_mhz": 1980,
        "gpu0_temperature_c": 88,
        "gpu0_power_w": 701.2,
        "gpu0_power_limit_w": 700,
        "gpu0_clock_limits": "power cap, software thermal slowdown",
    }
    machine = describe_machine()
    assert (machine["gpu"], machine["gpu_count"], machine["driver"]) == ("NVIDIA H200", 1, "580.95.05")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with one commit that holds the package."""
    package = tmp_path / "repository" / "cs336sys"
    package.mkdir(parents=True)
    source = package / "__init__.py"
    source.write_text("")
    git("init", "-q", cwd=package.parent)
    git("add", ".", cwd=package)
    git("-c", "user.name=A", "-c", "user.email=a@example.org", "commit", "-q", "-m", "first", cwd=package)
    monkeypatch.setattr(cs336sys, "__file__", str(source))
    return source


def git(*arguments, cwd):
    return subprocess.run(["git", *arguments], cwd=cwd, check=True, capture_output=True, text=True).stdout.strip()


def test_revision_is_the_commit_and_whether_files_changed(checkout):
    head = git("rev-parse", "HEAD", cwd=checkout.parent)
    git("-c", "user.name=A", "-c", "user.email=a@example.org", "tag", "-a", "-m", "release", "v1", cwd=checkout.parent)
    assert source_revision() == (head, False)
    checkout.write_text("changed = True\n")
    assert source_revision() == (head, True)


def test_asking_for_the_revision_does_not_write_to_the_repository(checkout):
    """A command that is killed meanwhile would leave a lock there, and git would refuse to work."""
    index = checkout.parents[1] / ".git" / "index"
    # Another time of the same content: git looks into the file, and would note that in its index.
    os.utime(checkout, (1, 1))
    before = index.read_bytes()
    assert source_revision()[1] is False
    assert index.read_bytes() == before


def test_a_repository_around_an_installed_package_is_not_its_source(checkout, monkeypatch):
    installed = checkout.parents[1] / ".venv" / "cs336sys" / "__init__.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("")
    monkeypatch.setattr(cs336sys, "__file__", str(installed))
    assert source_revision() == (None, None)


def test_no_revision_without_git(checkout, monkeypatch):
    monkeypatch.setenv("PATH", str(Path("nowhere")))
    assert source_revision() == (None, None)


def test_source_digest_changes_with_any_source_and_with_nothing_else(tmp_path, monkeypatch):
    package = tmp_path / "cs336_basics"
    (package / "part").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "part" / "model.py").write_text("layers = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    # Of what is imported already, that would be the source.
    monkeypatch.delitem(sys.modules, "cs336_basics", raising=False)
    digests = [source_digest()]
    (package / "notes.txt").write_text("no source")
    assert source_digest() == digests[0]
    for change in (
        lambda: (package / "part" / "model.py").write_text("layers = 2"),
        lambda: (package / "part" / "model.py").rename(package / "model.py"),
        lambda: (package / "kernel.cpp").write_text("int main;"),
        lambda: (package / "__init__.py").rename(package / "other.py"),
    ):
        change()
        digests.append(source_digest())
    assert len(set(digests)) == len(digests)
    assert {len(digest) for digest in digests} == {16}
    assert describe_environment()["source_digest"] == digests[-1]


@pytest.mark.usefixtures("time_limit")
def test_a_tool_that_is_missing_fails_or_hangs_has_no_answer(tmp_path):
    assert system.run_tool([str(tmp_path / "nothing")]) is None
    assert system.run_tool([sys.executable, "-c", "print('half'); raise SystemExit(3)"]) is None
    assert system.run_tool(["sleep", "3600"], timeout_s=0.2) is None


@pytest.mark.skipif(sys.platform != "linux", reason="lscpu is a Linux tool")
def test_cpu_model_comes_from_lscpu(tmp_path, monkeypatch):
    put_tool(tmp_path, "lscpu", {"": "Architecture:    aarch64\nModel name:      Neoverse-V2\n  Model:   0"})
    only_on_path(monkeypatch, tmp_path)
    assert system.cpu_model() == "Neoverse-V2"


def test_a_library_loads_or_not():
    assert software.library_loads(None if sys.platform == "darwin" else "libc.so.6")
    assert not software.library_loads("libnothing.so.1")
