"""Every finding of the diagnosis, on machines made of canned tool output."""

import json
import os
import platform
import sys
from types import SimpleNamespace

import pytest
from fake_tools import only_on_path, pretend_gpus, put_tool

from cs336sys.errors import CapabilityError
from cs336sys.machine.diagnosis import diagnose, gpu, software
from cs336sys.machine.diagnosis.software import Check
from cs336sys.machine.system import installed_version, run_tool


@pytest.fixture
def installations(tmp_path, monkeypatch):
    """An empty folder in the place of all install folders, with nothing else on PATH."""
    only_on_path(monkeypatch, tmp_path / "bin")
    roots = tmp_path / "roots"
    monkeypatch.setattr(software, "INSTALL_ROOTS", (str(roots),))
    monkeypatch.setattr(software, "DRIVER_PARAMETERS", tmp_path / "params")
    monkeypatch.setattr(software, "library_loads", lambda name: False)
    return roots


def put_nsys(folder, version):
    answer = f"NVIDIA Nsight Systems version {version}-253135822126v0"
    return put_tool(folder, "nsys", {"--version": answer})


def test_no_nsys_or_one_that_does_not_run(installations):
    (check,) = software.check_nsys()
    assert (check.name, check.verdict, check.found) == ("nsys", "warn", "not found")
    path = put_tool(installations / "cuda-13.0" / "bin", "nsys", {})
    (check,) = software.check_nsys()
    assert (check.verdict, check.found) == ("warn", f"{path} does not run")
    assert software.find_nsys() is None


def test_nsys_inside_nsight_compute_without_libdw(installations):
    put_tool(installations / "cuda-13.0" / "bin", "nsys", {})
    put_nsys(installations / "nsight-compute" / "2024.1.1" / "host" / "target-linux-x64", "2024.1.1.0")
    path = put_nsys(installations / "nsight-compute" / "2025.3.1" / "host" / "target-linux-x64", "2025.3.1.0")
    assert software.check_nsys() == [
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
    assert software.check_nsys()[1].verdict == "warn"
    library = path.parents[1] / "host-linux-x64" / "libdw.so.1"
    library.parent.mkdir()
    library.touch()
    assert software.check_nsys()[1] == Check("nsys importer", "finds libdw.so.1")
    library.unlink()
    monkeypatch.setattr(software, "library_loads", lambda name: name == "libdw.so.1")
    assert software.check_nsys()[1] == Check("nsys importer", "finds libdw.so.1")


def test_nsys_on_path_comes_first(installations, tmp_path):
    put_nsys(installations / "nsight-systems" / "2025.3.1" / "bin", "2025.3.1.90")
    path = put_nsys(tmp_path / "bin", "2023.4.4.54")
    assert software.find_nsys() == software.Profiler(path, "2023.4.4.54")


def test_nsys_that_a_variable_names_comes_before_all(installations, tmp_path, monkeypatch):
    put_nsys(tmp_path / "bin", "2023.4.4.54")
    path = put_nsys(tmp_path / "mine", "2025.6.1.10")
    monkeypatch.setenv("CS336SYS_NSYS", str(path))
    assert software.find_nsys() == software.Profiler(path, "2025.6.1.10")
    monkeypatch.setenv("CS336SYS_NSYS", str(tmp_path / "nowhere"))
    with pytest.raises(CapabilityError, match=r"CS336SYS_NSYS=.*nowhere: this does not run as nsys"):
        software.find_nsys()
    (check,) = software.check_nsys()
    assert (check.verdict, check.fix) == ("warn", "`unset CS336SYS_NSYS`.")


def test_ncu_and_its_counters(installations, tmp_path, monkeypatch):
    assert software.check_ncu().found == "not found"
    banner = "NVIDIA (R) Nsight Compute Command Line Profiler\nCopyright\nVersion 2025.3.1.0 (build 36398880)"
    path = put_tool(installations / "nsight-compute" / "2025.3.1", "ncu", {"--version": banner})
    assert software.check_ncu() == Check("ncu", f"2025.3.1.0 at {path}")
    (tmp_path / "params").write_text("EnableMSI: 1\nRmProfilingAdminOnly: 1\n")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    check = software.check_ncu()
    assert (check.verdict, check.found) == (
        "warn",
        f"2025.3.1.0 at {path}; the driver keeps performance counters from users",
    )
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert software.check_ncu().verdict == "ok"


def test_triton_interpreter_works():
    check = software.check_triton_interpreter()
    assert check == Check("Triton interpreter", f"works, numpy {installed_version('numpy')}")


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
        "torch", "2.14.0, supported is <2.14,>=2.11", "missing", '`python -m pip install "torch<2.14,>=2.11"`.'
    )


def test_a_torch_that_cannot_be_imported_is_the_only_finding(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    checks = diagnose()
    assert [(check.name, check.verdict) for check in checks] == [("Python", "ok"), ("torch", "missing")]
    assert "import fails" in checks[1].found


def test_attention_says_how_it_is_called_and_whose_settings_it_has(monkeypatch):
    pretend_gpus(monkeypatch, 1)
    reason = "through Python: there is no C++ compiler"
    answer = {"attention calls": (reason, "`apt-get install g++`."), "attention settings": ("built-in settings", None)}
    monkeypatch.setattr(software, "run_tool", lambda command, **_: f"a warning\n{json.dumps(answer)}")
    assert software.check_attention() == [
        Check("attention calls", reason, "warn", "`apt-get install g++`."),
        Check("attention settings", "built-in settings"),
    ]


def test_attention_of_a_probe_that_dies_and_without_a_gpu(monkeypatch):
    pretend_gpus(monkeypatch, 1)
    monkeypatch.setattr(software, "run_tool", lambda command, **_: None)
    fix = "See the whole error: `python -m cs336sys.kernels.attention.native_probe`."
    assert software.check_attention() == [Check("attention calls", "no answer", "warn", fix)]
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


def test_too_little_memory_and_disk(monkeypatch):
    usage = {".": SimpleNamespace(total=2**40, free=100 * 2**30)}
    little = SimpleNamespace(total=2**40, free=64 * 2**20)
    monkeypatch.setattr(software.shutil, "disk_usage", lambda folder: usage.get(folder, little))
    monkeypatch.setattr(software, "memory_gib", lambda: (32.0, 3.0))
    shared = software.check_shared_memory()
    assert (software.check_ram().verdict, shared.verdict, shared.found) == ("warn", "warn", "0.06 of 1024.00 GiB free")
    assert software.check_disk(".") == Check("disk, this folder", "100.0 GiB free")
    assert software.check_disk("/tmp").fix == "Free some, or use another folder: `export TMPDIR=/path/with/space`."


def test_wsl_is_named(monkeypatch):
    monkeypatch.setattr(platform, "release", lambda: "6.8.0-45-generic")
    assert "WSL2" not in [check.name for check in software.check_host()]
    monkeypatch.setattr(platform, "release", lambda: "5.15.153.1-microsoft-standard-WSL2")
    assert software.check_host()[-1].name == "WSL2"
