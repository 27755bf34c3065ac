"""What nvidia-smi says about links, in words."""

import pytest
from fake_tools import GPU_0, GPU_1, IDLE, NVLINK, only_on_path, put_nvidia_smi

from cs336sys.machine.diagnosis.gpu import describe_links

BOTH = ("GPU-11111111-2222-3333-4444-555555555550", "GPU-11111111-2222-3333-4444-555555555551")
EIGHTEEN = "GPU 0: NVIDIA H200 (UUID: GPU-1)\n" + "\n".join(f"\t Link {link}: 26.562 GB/s" for link in range(18))


@pytest.fixture(autouse=True)
def _asked_anew():
    describe_links.cache_clear()


@pytest.mark.parametrize(
    ("topology", "nvlinks", "words"),
    [
        (NVLINK, EIGHTEEN, "NV18 (18 NVLinks, 478 GB/s each way)"),
        (NVLINK, "", "NV18"),
        ("\tGPU0\tGPU1\nGPU0\t X \tSYS\nGPU1\tSYS\t X ", "", "SYS"),
        ("", "", "unknown links"),
    ],
)
def test_links_between_two_gpus(tmp_path, monkeypatch, topology, nvlinks, words):
    put_nvidia_smi(tmp_path, f"{GPU_0}, {IDLE}", f"{GPU_1}, {IDLE}", topology=topology, nvlinks=nvlinks)
    only_on_path(monkeypatch, tmp_path)
    assert describe_links(BOTH) == words


def test_only_pairs_that_are_used_count(tmp_path, monkeypatch):
    gpu_2 = GPU_0.replace("0, GPU", "2, GPU", 1).replace("555555555550", "555555555552")
    topology = "\tGPU0\tGPU1\tGPU2\nGPU0\t X \tNODE\tSYS\nGPU1\tNODE\t X \tSYS\nGPU2\tSYS\tSYS\t X "
    put_nvidia_smi(tmp_path, *(f"{gpu}, {IDLE}" for gpu in (GPU_0, GPU_1, gpu_2)), topology=topology)
    only_on_path(monkeypatch, tmp_path)
    assert describe_links(BOTH) == "NODE"
    assert describe_links((BOTH[0], "GPU-11111111-2222-3333-4444-555555555552")) == "SYS"
    assert describe_links((*BOTH, "GPU-11111111-2222-3333-4444-555555555552")) == "NODE, SYS"


def test_without_the_tool_links_are_unknown(tmp_path, monkeypatch):
    only_on_path(monkeypatch, tmp_path)
    assert describe_links(BOTH) == "unknown links"
