"""``slurm``: the script is bash, its directives are sbatch's, and what it would run is what was asked."""

import os
import stat
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from cs336sys.cli import app

TORCHRUN = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=8"]
DDP = ["ddp", "--size", "xl", "--bf16", "--batch-size", "16"]
RENDEZVOUS = ["--rdzv-id=54321", "--rdzv-backend=c10d", "--rdzv-endpoint=node-a7:24321"]


def slurm(*arguments):
    return CliRunner().invoke(app, ["slurm", *map(str, arguments)], auto_envvar_prefix="CS336SYS")


def directives(script):
    """The options as sbatch reads them: from the lines above the first one that is no comment, without a shell."""
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first_command:])
    found = {}
    for line in (line for line in lines[:first_command] if line.startswith("#SBATCH")):
        name, _, value = line.removeprefix("#SBATCH --").partition("=")
        assert "$" not in line, "nothing is expanded here"
        assert name not in found
        found[name] = value
    return found


def steps(script, folder):
    """What each ``srun`` of the script is given, run by bash where srun and scontrol only say so."""
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    programs = {
        "srun": 'printf "%s\\0" "$@" >> steps\necho -e "\\n" >> steps\n',
        "scontrol": "seq -f node-a%g 7 40000\n",
    }
    for name, text in programs.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{text}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    variables = {"SLURM_JOB_ID": "54321", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node-a[7-40000]"}
    path = f"{folder}:{os.environ['PATH']}"
    subprocess.run(
        ["bash"], input=script, text=True, check=True, cwd=folder, env=os.environ | variables | {"PATH": path}
    )
    return [step.strip("\n").split("\0")[:-1] for step in (folder / "steps").read_text().split("\n\n") if step.strip()]


def test_ranks_of_several_machines_are_torchruns(tmp_path):
    asked = ("--nodes", 2, "--gpus-per-node", 8, "--partition", "gpu", "--account", "lab", "--time", "1-12")
    result = slurm(*asked, "--sbatch", "constraint=h200", "--sbatch", "exclusive", *DDP)
    assert (result.exit_code, result.stderr) == (0, "")
    assert directives(result.stdout) == {
        "job-name": "cs336sys-ddp",
        "partition": "gpu",
        "account": "lab",
        "nodes": "2",
        "ntasks-per-node": "1",
        "gpus-per-node": "8",
        "time": "1-12",
        "output": "%x-%j.log",
        "open-mode": "append",
        "constraint": "h200",
        "exclusive": "",
    }
    command = ["-m", "cs336sys", *DDP, "--save", "ddp-54321.jsonl.gz", "--resume"]
    step = ["--kill-on-bad-exit=1", sys.executable, *TORCHRUN, *RENDEZVOUS, *command]
    assert steps(result.stdout, tmp_path) == [step]


def test_a_command_of_one_process_keeps_its_words_and_its_file(tmp_path):
    plot = "it's $HOME/a b.png"
    arguments = ["bench", "--size", "small,medium", "--save", "mine.jsonl", "--plot", plot]
    script = tmp_path / "new" / "bench.sbatch"
    result = slurm("--setup", "export SET_UP='by hand'", "-o", script, *arguments)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"wrote {script}: sbatch {script}\n"
    text = script.read_text()
    assert directives(text)["gpus-per-node"] == "1"
    assert "\nexport SET_UP='by hand'\nsrun " in text
    assert steps(text, tmp_path) == [["--ntasks=1", sys.executable, "-m", "cs336sys", *arguments]]


@pytest.mark.parametrize("time", ["30", "30:00", "1:00:00", "2-0", "2-0:30", "2-0:30:00"])
def test_every_form_of_a_time(time):
    assert directives(slurm("--time", time, "flash").stdout)["time"] == time


def test_a_plan_is_made_and_nothing_of_it_written(tmp_path, monkeypatch):
    """Values were read when the job ran: hours in a queue for a slip. Files are of the machine that it runs on."""
    monkeypatch.chdir(tmp_path)
    files = ["--save", "out/r.jsonl", "--output", "out/r.md", "--plot", "out/r.png", "--columns", "step_ms"]
    result = slurm("bench", "--size", "tiny", *files)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1].endswith(" ".join(["bench", "--size", "tiny", *files]))
    assert list(tmp_path.iterdir()) == []


def test_cores_memory_and_all_gpus(tmp_path):
    result = slurm("--nodes", 2, "--gpus", 16, "--cpus", 12, "--mem", "64G", *DDP)
    found = directives(result.stdout)
    assert (found["gpus-per-node"], found["cpus-per-task"], found["mem"]) == ("8", "12", "64G")
    # srun does not take them over from sbatch.
    assert steps(result.stdout, tmp_path)[0][:2] == ["--kill-on-bad-exit=1", "--cpus-per-task=12"]
