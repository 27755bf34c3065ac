"""Commands where Triton is not installed, as on macOS and Windows, and where Linux's calls are missing."""

import csv
import io
import os
import subprocess
import sys

import pytest

# What Python runs as it starts, in the command and in all processes that it starts: each is without these.
WITHOUT = {
    "triton": "import sys\nsys.modules['triton'] = None\n",
    "linux": """
import os, sys, sysconfig
sysconfig.get_config_vars()  # looks for this system's own
sys.platform = "freebsd"
if hasattr(os, "sched_getaffinity"):
    del os.sched_getaffinity

def refuse(event, arguments):
    if event in ("os.fork", "os.forkpty"):
        raise OSError("no fork here")
    if event == "open" and str(arguments[0]).startswith("/proc"):
        raise FileNotFoundError(2, "No such file or directory", str(arguments[0]))
    if event == "ctypes.dlsym" and arguments[1] == "prctl":
        raise AttributeError("no prctl here")

sys.addaudithook(refuse)
""",
}


@pytest.fixture
def run_without(tmp_path):
    def run(missing, *arguments):
        (tmp_path / "sitecustomize.py").write_text(WITHOUT[missing])
        path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "cs336sys", *arguments, "--device", "cpu", "--format", "csv"]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": path}
        )

    return run


def rows(ended):
    assert "Traceback" not in ended.stderr
    return list(csv.DictReader(io.StringIO(ended.stdout)))


TINY = ("--size", "tiny", "--num-layers", "1", "--context", "16", "--batch-size", "1", "--warmup", "1", "--steps", "2")


def test_models_train_without_triton(run_without):
    """With our attention, too: on a CPU it is PyTorch."""
    ended = run_without("triton", "bench", *TINY, "--attention", "reference,flash")
    assert (ended.returncode, [row["status"] for row in rows(ended)]) == (0, ["ok", "ok"])


def test_kernels_are_unsupported_without_triton(run_without):
    ended = run_without("triton", "kernels", "--op", "rms-norm", "--implementation", "ours")
    assert (ended.returncode, [row["status"] for row in rows(ended)]) == (3, ["unsupported"])
    assert ended.stderr.endswith("error: needs the package triton, which is not installed\n")


def test_ranks_communicate_without_the_calls_of_linux(run_without):
    ended = run_without("linux", "allreduce", "--message", "8B", "--world-size", "2", "--steps", "1")
    assert (ended.returncode, [row["status"] for row in rows(ended)]) == (0, ["ok"])
