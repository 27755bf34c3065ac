"""Every finding of the diagnosis, on machines made of canned tool output."""

import importlib.metadata
import json
import os
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from fake_tools import GPU_0, GPU_1, IDLE, THROTTLED, only_on_path, put_nvidia_smi, put_tool

from cs336sys.errors import CapabilityError
from cs336sys.machine.diagnosis import diagnose, gpu, profilers, software
from cs336sys.machine.diagnosis.software import Check
from cs336sys.machine.system import installed_version, read_gpus, run_tool

WHEEL_ARCHITECTURES = ["sm_80", "sm_86", "sm_90", "sm_100", "compute_100"]


@pytest.fixture
def two_h200(tmp_path, monkeypatch):
    """A machine with two idle H200, torch for CUDA 13.0, and only nvidia-smi on PATH."""
    put_nvidia_smi(tmp_path, f"{GPU_0}, {IDLE}", f"{GPU_1}, {IDLE}")
    only_on_path(monkeypatch, tmp_path)
    pretend_gpus(monkeypatch, 2)
    for name in gpu.MULTICAST_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def pretend_gpus(monkeypatch, count, capability=(9, 0), peer_access=True):
    fakes = {
        "is_available": lambda: count > 0,
        "device_count": lambda: count,
        "get_device_name": lambda index: "NVIDIA H200",
        "get_device_capability": lambda index: capability,
        "get_arch_list": lambda: WHEEL_ARCHITECTURES,
        "can_device_access_peer": lambda a, b: peer_access,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(gpu, "nccl_version", lambda: "2.28.9")


def devices():
    return {check.name: check for check in gpu.check_devices(read_gpus())}


def test_a_machine_without_fault(two_h200, monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setattr(gpu, "installed_version", {"nvidia-ml-py": "13.590.48"}.get)
    assert gpu.check_devices(read_gpus()) == [
        Check("GPU", "2 x NVIDIA H200"),
        Check("driver", "580.95.05 for CUDA 13.0, torch's CUDA is 13.0"),
        Check("GPU memory", "GPU 0: 139.8 of 140.4 GiB free; GPU 1: 139.8 of 140.4 GiB free"),
        Check("GPU processes", "none"),
        Check(
            "GPU clocks",
            "GPU 0: 345 of 1980 MHz, 31 C, 76 of 700 W, limited by nothing; "
            "GPU 1: 345 of 1980 MHz, 31 C, 76 of 700 W, limited by nothing",
        ),
        Check("GPU readings", "by nvidia-ml-py 13.590.48"),
        Check("compute capability", "9.0"),
        Check("NCCL", "2.28.9"),
        Check("NVLink multicast", "NCCL_NVLS_ENABLE: 0, TORCH_SYMM_MEM_DISABLE_MULTICAST: not set"),
        Check("peer to peer", "between all pairs; links 0-1 NV18"),
    ]


def test_missing_package_of_readings_warns_with_its_install_command(two_h200, monkeypatch):
    monkeypatch.setattr(gpu, "installed_version", {}.get)
    readings = devices()["GPU readings"]
    assert readings.verdict == "warn"
    assert "`python -m pip install 'cs336sys[gpu]'`" in readings.fix


def test_throttled_clocks(two_h200):
    put_nvidia_smi(two_h200, f"{GPU_0}, {IDLE}", f"{GPU_1}, {THROTTLED}")
    clocks = devices()["GPU clocks"]
    assert clocks.verdict == "warn"
    assert clocks.found.endswith(
        "GPU 1: 1155 of 1980 MHz, 88 C, 701 of 700 W, limited by power cap, software thermal slowdown"
    )
    assert "`nvidia-smi -q -d PERFORMANCE`" in clocks.fix


def test_application_clocks_are_shown_but_no_fault(two_h200):
    put_nvidia_smi(two_h200, f"{GPU_0}, {IDLE[:-1]}2")
    assert devices()["GPU clocks"] == Check(
        "GPU clocks", "GPU 0: 345 of 1980 MHz, 31 C, 76 of 700 W, limited by application clocks"
    )


def test_another_program_on_the_gpu(two_h200):
    busy = GPU_0.replace("143156", "102196")
    put_nvidia_smi(two_h200, f"{busy}, {IDLE}", processes="4242, 40960 MiB\n4243, [N/A]")
    found = devices()
    assert (found["GPU memory"].verdict, found["GPU memory"].found) == ("warn", "GPU 0: 99.8 of 140.4 GiB free")
    processes = found["GPU processes"]
    assert (processes.verdict, processes.found) == (
        "warn",
        "process 4242 holds 40960 MiB; process 4243 holds [N/A]",
    )


def test_peers_that_cannot_reach_each_other(two_h200, monkeypatch):
    put_nvidia_smi(
        two_h200,
        f"{GPU_0}, {IDLE}",
        topology="\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tSYS\t0-31\nGPU1\tSYS\t X \t32-63",
    )
    pretend_gpus(monkeypatch, 2, peer_access=False)
    assert devices()["peer to peer"] == Check(
        "peer to peer",
        "not between GPUs 0-1; links 0-1 SYS",
        "warn",
        "Their traffic goes through main memory: see `nvidia-smi topo -p2p r` for the cause.",
    )


def test_a_driver_older_than_torchs_cuda(two_h200):
    put_nvidia_smi(two_h200, f"{GPU_0}, {IDLE}", banner="| Driver Version: 550.54.15   CUDA Version: 12.4 |")
    driver = devices()["driver"]
    assert (driver.verdict, driver.found) == ("warn", "580.95.05 for CUDA 12.4, torch's CUDA is 13.0")


def test_a_newer_driver_runs_an_older_torch(two_h200, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert devices()["driver"].verdict == "ok"


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((8, 9), WHEEL_ARCHITECTURES, True),
        ((12, 0), WHEEL_ARCHITECTURES, True),
        ((12, 0), ["sm_90", "sm_100"], False),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_90a"], True),
        ((9, 0), [], True),
    ],
)
def test_gpus_that_torch_has_code_for(two_h200, monkeypatch, capability, built, runs):
    pretend_gpus(monkeypatch, 2, capability=capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
    assert devices()["compute capability"].verdict == ("ok" if runs else "missing")


@pytest.mark.parametrize(("built", "runs"), [(["gfx90a", "gfx942"], True), (["gfx90a"], False)])
def test_amd_gpus_that_torch_has_code_for(two_h200, monkeypatch, built, runs):
    architecture = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: architecture)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
    check = gpu.check_architecture()
    assert check.verdict == ("ok" if runs else "missing")
    assert check.found.startswith("gfx942")


@pytest.mark.parametrize(
    ("cuda", "variables", "fix"),
    [
        (None, {}, "This torch is built for CPUs"),
        ("13.0", {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES hides it"),
        ("13.0", {}, "See why"),
    ],
)
def test_gpus_that_torch_does_not_see(two_h200, monkeypatch, cuda, variables, fix):
    pretend_gpus(monkeypatch, 0)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = devices()
    assert (found["GPU"].verdict, found["GPU"].found) == ("warn", "nvidia-smi sees 2 x NVIDIA H200, torch sees none")
    assert found["GPU"].fix.startswith(fix)
    assert "NCCL" not in found


def test_no_gpu_is_a_warning_and_leaves_its_other_rows_out(tmp_path, monkeypatch):
    only_on_path(monkeypatch, tmp_path)
    pretend_gpus(monkeypatch, 0)
    (check,) = gpu.check_devices(read_gpus())
    assert (check.verdict, check.found) == ("warn", "none: everything runs on the CPU, at --size tiny")


def test_a_driver_without_nvidia_smi_still_has_its_gpus(tmp_path, monkeypatch):
    only_on_path(monkeypatch, tmp_path)
    pretend_gpus(monkeypatch, 1)
    assert list(devices()) == ["GPU", "compute capability", "NCCL", "NVLink multicast"]


@pytest.mark.parametrize(("count", "verdict"), [(1, "ok"), (2, "warn")])
def test_nccl_is_missed_by_several_gpus_only(two_h200, monkeypatch, count, verdict):
    pretend_gpus(monkeypatch, count)
    monkeypatch.setattr(gpu, "nccl_version", lambda: None)
    assert devices()["NCCL"].verdict == verdict


@pytest.fixture
def installations(tmp_path, monkeypatch):
    """An empty folder in the place of all install folders, with nothing else on PATH."""
    only_on_path(monkeypatch, tmp_path / "bin")
    roots = tmp_path / "roots"
    monkeypatch.setattr(profilers, "INSTALL_ROOTS", (str(roots),))
    monkeypatch.setattr(profilers, "DRIVER_PARAMETERS", tmp_path / "params")
    monkeypatch.setattr(profilers, "library_loads", lambda name: False)
    return roots


def put_nsys(folder, version):
    answer = f"NVIDIA Nsight Systems version {version}-253135822126v0"
    return put_tool(folder, "nsys", {"--version": answer})


def test_no_nsys(installations):
    (check,) = profilers.check_nsys()
    assert (check.name, check.verdict, check.found) == ("nsys", "warn", "not found")
    assert profilers.find_nsys() is None


def test_nsys_inside_nsight_compute_without_libdw(installations):
    put_tool(installations / "cuda-13.0" / "bin", "nsys", {})
    put_nsys(installations / "nsight-compute" / "2024.1.1" / "host" / "target-linux-x64", "2024.1.1.0")
    path = put_nsys(installations / "nsight-compute" / "2025.3.1" / "host" / "target-linux-x64", "2025.3.1.0")
    assert profilers.check_nsys() == [
        Check("nsys", f"2025.3.1.0 at {path}"),
        Check(
            "nsys importer",
            "lacks libdw.so.1: nsys would leave a .qdstrm file and no report",
            "warn",
            "`apt-get install libdw1`, or put a folder with libdw.so.1 and libelf.so.1 into LD_LIBRARY_PATH.",
        ),
    ]


def test_nsys_with_libdw_of_the_system_or_its_own(installations, monkeypatch):
    path = put_nsys(installations / "nsight-systems" / "2025.3.1" / "bin", "2025.3.1.90")
    assert profilers.check_nsys()[1].verdict == "warn"
    library = path.parents[1] / "host-linux-x64" / "libdw.so.1"
    library.parent.mkdir()
    library.touch()
    assert profilers.check_nsys()[1] == Check("nsys importer", "finds libdw.so.1")
    library.unlink()
    monkeypatch.setattr(profilers, "library_loads", lambda name: name == "libdw.so.1")
    assert profilers.check_nsys()[1] == Check("nsys importer", "finds libdw.so.1")


def test_nsys_on_path_comes_first(installations, tmp_path):
    put_nsys(installations / "nsight-systems" / "2025.3.1" / "bin", "2025.3.1.90")
    path = put_nsys(tmp_path / "bin", "2023.4.4.54")
    assert profilers.find_nsys() == profilers.Profiler(path, "2023.4.4.54")


def test_nsys_that_a_variable_names_comes_before_all(installations, tmp_path, monkeypatch):
    put_nsys(tmp_path / "bin", "2023.4.4.54")
    path = put_nsys(tmp_path / "mine", "2025.6.1.10")
    monkeypatch.setenv("CS336SYS_NSYS", str(path))
    assert profilers.find_nsys() == profilers.Profiler(path, "2025.6.1.10")
    monkeypatch.setenv("CS336SYS_NSYS", str(tmp_path / "nowhere"))
    with pytest.raises(CapabilityError, match=r"CS336SYS_NSYS=.*nowhere: this does not run as nsys"):
        profilers.find_nsys()
    (check,) = profilers.check_nsys()
    assert (check.verdict, check.fix) == ("warn", "`unset CS336SYS_NSYS`.")


def test_nsys_that_does_not_run(installations):
    path = put_tool(installations / "cuda-13.0" / "bin", "nsys", {})
    (check,) = profilers.check_nsys()
    assert (check.verdict, check.found) == ("warn", f"{path} does not run")


def test_ncu_and_its_counters(installations, tmp_path, monkeypatch):
    assert profilers.check_ncu().found == "not found"
    banner = "NVIDIA (R) Nsight Compute Command Line Profiler\nCopyright\nVersion 2025.3.1.0 (build 36398880)"
    path = put_tool(installations / "nsight-compute" / "2025.3.1", "ncu", {"--version": banner})
    assert profilers.check_ncu() == Check("ncu", f"2025.3.1.0 at {path}")
    (tmp_path / "params").write_text("EnableMSI: 1\nRmProfilingAdminOnly: 1\n")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    check = profilers.check_ncu()
    assert (check.verdict, check.found) == (
        "warn",
        f"2025.3.1.0 at {path}; the driver keeps performance counters from users",
    )
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert profilers.check_ncu().verdict == "ok"


@pytest.mark.parametrize(
    ("installed", "pinned", "expected"),
    [
        ("3.6.0", "==3.6.0", Check("Triton", "3.6.0, as this torch wants")),
        ("3.9.0", None, Check("Triton", "3.9.0, this torch names none that it needs")),
        (
            "3.9.0",
            "==3.6.0",
            Check("Triton", "3.9.0, this torch wants ==3.6.0", "warn", '`python -m pip install "triton==3.6.0"`.'),
        ),
        (
            "3.2.0",
            None,
            Check("Triton", "3.2.0, supported is >=3.6", "missing", '`python -m pip install "triton>=3.6"`.'),
        ),
        (None, "==3.6.0", Check("Triton", "not installed", "missing", '`python -m pip install "triton==3.6.0"`.')),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_triton_version(monkeypatch, installed, pinned, expected):
    requirements = {
        "cs336sys": ["torch<2.14,>=2.11", 'triton>=3.6; platform_system == "Linux"'],
        "torch": [
            'triton==1.0; platform_system == "Windows"',
            *([f'triton{pinned}; platform_system == "Linux"'] if pinned else []),
            'optree>=0.13; extra == "optree"',
        ],
    }
    monkeypatch.setattr(importlib.metadata, "requires", requirements.__getitem__)
    monkeypatch.setattr(software, "installed_version", lambda package: installed)
    assert software.check_triton() == expected


def test_triton_interpreter_works():
    check = software.check_triton_interpreter()
    assert check == Check("Triton interpreter", f"works, numpy {installed_version('numpy')}")


def test_a_broken_interpreter_names_how_to_see_its_cause(monkeypatch):
    monkeypatch.setattr(software, "probe_triton", lambda device: "TypeError: no loop")
    check = software.check_triton_interpreter()
    assert (check.verdict, check.found) == ("warn", f"TypeError: no loop; numpy {installed_version('numpy')}")
    assert check.fix.startswith("See the whole error: ")


def test_a_kernel_that_cannot_run_says_why():
    # On a CPU without the interpreter, as on a GPU that Triton cannot use.
    command = [sys.executable, "-m", "cs336sys.machine.diagnosis.triton_probe", "cpu"]
    answer = run_tool(command, timeout_s=60, variables={"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""})
    assert answer.startswith("RuntimeError: 0 active drivers")


def test_a_kernel_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(software, "PROBE_TIMEOUT_S", 0.01)
    assert software.probe_triton("cpu") == "the process died or was not done after 0.01 s"


@pytest.mark.gpu
def test_a_kernel_compiles_and_runs_on_the_gpu():
    assert gpu.check_triton_kernel() == [Check("Triton on the GPU", "compiles and runs a kernel")]


def test_a_kernel_that_fails_on_the_gpu_is_missing(monkeypatch):
    pretend_gpus(monkeypatch, 1)
    monkeypatch.setattr(gpu, "probe_triton", lambda device: "wrong result: sum of 0 to 99 is 4950, not 0")
    (check,) = gpu.check_triton_kernel()
    assert (check.verdict, check.found) == ("missing", "wrong result: sum of 0 to 99 is 4950, not 0")


def test_python_and_torch_out_of_range(monkeypatch):
    assert (software.check_python().verdict, software.check_torch().verdict) == ("ok", "ok")
    monkeypatch.setattr(software.platform, "python_version", lambda: "3.10.14")
    assert software.check_python().found == "3.10.14, supported is >=3.11"
    assert software.check_python().verdict == "missing"
    monkeypatch.setattr(software, "installed_version", lambda package: "2.14.0")
    assert software.check_torch() == Check(
        "torch",
        "2.14.0, supported is <2.14,>=2.11",
        "missing",
        '`python -m pip install "torch<2.14,>=2.11"`.',
    )


def test_a_torch_that_cannot_be_imported_is_the_only_finding(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    checks = diagnose()
    assert [(check.name, check.verdict) for check in checks] == [("Python", "ok"), ("torch", "missing")]
    assert "import fails" in checks[1].found


@pytest.fixture
def no_compiler(tmp_path, monkeypatch):
    """A machine without compilers, and the folder that is its PATH."""
    only_on_path(monkeypatch, tmp_path)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


def test_no_compiler(no_compiler):
    check = software.check_compiler()
    assert check.verdict == "warn"
    assert check.found.startswith("C none, C++ none, ")
    assert check.fix == "--compile and Triton need it: `apt-get install build-essential`."
    put_tool(no_compiler, "clang", {})
    assert software.check_compiler().found.startswith("C clang, C++ none, ")


@pytest.fixture
def only_a_c_compiler(no_compiler, monkeypatch):
    """With gcc and Python's headers, too."""
    put_tool(no_compiler, "gcc", {})
    (no_compiler / "Python.h").touch()
    monkeypatch.setattr(software.sysconfig, "get_path", lambda name: str(no_compiler))
    return no_compiler


def test_no_cpp_compiler_is_a_warning_that_says_what_it_costs(only_a_c_compiler):
    assert software.check_compiler() == Check(
        "C compiler",
        "C gcc, C++ none, Python.h there",
        "warn",
        "--compile on a CPU needs C++, and without it calls of the attention kernels on a GPU cost the CPU more time: "
        "`apt-get install g++`, or set CXX.",
    )


def test_either_cpp_compiler_will_do(only_a_c_compiler):
    put_tool(only_a_c_compiler, "clang++", {})
    assert software.check_compiler() == Check("C compiler", "C gcc, C++ clang++, Python.h there")


def test_cxx_goes_before_what_is_on_path(only_a_c_compiler, monkeypatch):
    put_tool(only_a_c_compiler, "g++", {})
    put_tool(only_a_c_compiler, "g++-13", {})
    monkeypatch.setenv("CXX", "g++-13")
    assert software.check_compiler() == Check("C compiler", "C gcc, C++ g++-13, Python.h there")
    monkeypatch.setenv("CXX", "")
    assert software.check_compiler() == Check("C compiler", "C gcc, C++ g++, Python.h there")


@pytest.mark.parametrize("variable", ["CC", "CXX"])
def test_a_variable_that_names_no_compiler(only_a_c_compiler, monkeypatch, variable):
    put_tool(only_a_c_compiler, "g++", {})
    monkeypatch.setenv(variable, "/nowhere/g++")
    assert software.check_compiler() == Check(
        "C compiler",
        f"{variable}=/nowhere/g++: no such program",
        "warn",
        f"Neither Triton nor --compile tries another: `unset {variable}`.",
    )


def test_attention_says_how_it_is_called_and_whose_settings_it_has(monkeypatch):
    pretend_gpus(monkeypatch, 1)
    reason = "through Python: there is no C++ compiler"
    answer = {"attention calls": (reason, "`apt-get install g++`."), "attention settings": ("built-in settings", None)}
    monkeypatch.setattr(software, "run_tool", lambda command, **_: f"a warning\n{json.dumps(answer)}")
    assert software.check_attention() == [
        Check("attention calls", reason, "warn", "`apt-get install g++`."),
        Check("attention settings", "built-in settings"),
    ]


def test_attention_of_a_probe_that_dies(monkeypatch):
    pretend_gpus(monkeypatch, 1)
    monkeypatch.setattr(software, "run_tool", lambda command, **_: None)
    fix = "See the whole error: `python -m cs336sys.kernels.attention.native_probe`."
    assert software.check_attention() == [Check("attention calls", "no answer", "warn", fix)]


def test_attention_without_a_gpu(monkeypatch):
    pretend_gpus(monkeypatch, 0)
    assert software.check_attention() == [Check("attention calls", "no CUDA GPU to launch kernels on")]


def test_the_probe_of_attention_answers(monkeypatch):
    pretend_gpus(monkeypatch, 1)
    monkeypatch.setenv("CXX", "c++-of-the-test")
    # No GPU to ask for its name.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert software.check_attention() == [
        Check("attention calls", "in C++, which c++-of-the-test compiles in the background at the first call"),
        Check("attention settings", "built-in settings"),
    ]


def test_too_little_memory_and_disk(tmp_path, monkeypatch):
    usage = {software.SHARED_MEMORY: 64 * 2**20, ".": 100 * 2**30}
    monkeypatch.setattr(
        shutil, "disk_usage", lambda folder: SimpleNamespace(total=2**40, free=usage.get(folder, 4 * 2**30))
    )
    monkeypatch.setattr(software, "memory_gib", lambda: (32.0, 3.0))
    assert software.check_ram().verdict == "warn"
    assert (software.check_shared_memory().verdict, software.check_shared_memory().found) == (
        "warn",
        "0.06 of 1024.00 GiB free",
    )
    assert software.check_disk(".") == Check("disk, this folder", "100.0 GiB free")
    assert software.check_disk("/tmp").fix == ("Free some, or use another folder: `export TMPDIR=/path/with/space`.")


def test_wsl_is_named(monkeypatch):
    monkeypatch.setattr(software, "is_wsl", lambda: False)
    assert "WSL2" not in [check.name for check in software.check_host()]
    monkeypatch.setattr(software, "is_wsl", lambda: True)
    assert software.check_host()[-1].name == "WSL2"
