"""``verify`` as a user runs it, on the CPU: a wrap that sums gradients where it should average them."""

import json
import os
import subprocess
import sys

import pytest
import run_commands
from agents_page import missing_fields
from run_commands import shown, tables
from running import left_in, wait_until

import cs336sys
from cs336sys.commands.verify.options import VerificationOptions, VerifiedModelOptions

pytestmark = pytest.mark.usefixtures("kept_workers")

SUMMED = """
import torch.distributed as dist


def parallelize(model, group):
    def send(parameter):
        dist.all_reduce(parameter.grad, group=group)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(send)
    return model
"""


def invoke(*words):
    return run_commands.invoke("verify", words, env={"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def summed(tmp_path_factory):
    """A wrap of a stranger's, which sums, in two cases."""
    folder = tmp_path_factory.mktemp("verify")
    (folder / "mine.py").write_text(SUMMED)
    arguments = ["--wrap", f"{folder}/mine.py:parallelize", "--case", "step,clipping", "--device", "cpu"]
    files = ["--save", folder / "r.jsonl", "--html", folder / "r.html"]
    return invoke(arguments, files, "--format json"), folder, arguments


def test_summed_gradients_are_named_with_their_line(summed):
    result, folder, _ = summed
    assert result.exit_code == 1, result.output
    assert missing_fields("Is it the same training?", result.stdout) == []
    verify, diagnosis = json.loads(result.stdout)["tables"]
    assert [(row["case"], row["verdict"]) for row in verify["rows"]] == [("step", "wrong"), ("clipping", "wrong")]
    assert "2 wrong" in verify["title"]
    step = diagnosis["rows"][0]
    assert step["cause"] == "not averaged"
    assert step["ratio"] == pytest.approx(2)
    assert step["line"] == "mine.py, line 7"
    assert step["collective"].startswith("allreduce of 2,048 float64")
    assert step["allowed_difference"] < 1e-12
    assert "not averaged" in (folder / "r.html").read_text()
    assert shown(folder / "r.jsonl") == result.stdout


def test_a_test_of_somebody_reads_the_verdict_and_the_report(summed):
    _, folder, _ = summed
    result = cs336sys.verify(f"{folder}/mine.py:parallelize", cases=["step"], device="cpu")
    assert not result.ok
    assert "(not averaged, mine.py, line 7)" in result.report


def test_error_of_the_users_model_is_said_once(tmp_path):
    (tmp_path / "broken.py").write_text("def build(size): return size.nothing\n")
    options = "--wrap ddp,naive --case save,step --device cpu --format json"
    verify, *_ = json.loads(invoke(options, "--model", f"{tmp_path}/broken.py:build").stdout)["tables"]
    assert [row["verdict"] for row in verify["rows"]] == ["error", "refused", "refused", "refused"]
    others = {row["reason"] for row in verify["rows"][1:]}
    assert others == {"not run: the model or its loss fails in one process, see the first case"}


def test_a_size_names_the_model_alone_and_leaves_texts_short():
    def size_of(**settings):
        model = VerifiedModelOptions(size=["tiny"], **settings)
        (workload,) = VerificationOptions(wrap=["ddp"], case=["step"]).workloads(model)
        return workload.training.size

    assert (size_of().d_model, size_of().context, size_of().vocab_size) == (128, 16, 64)
    assert (size_of(context=[32]).context, size_of(vocab_size=100).vocab_size) == (32, 100)


@pytest.mark.nightly
def test_ranks_of_torchrun_verify_a_wrap_and_end_with_its_verdict(summed):
    _, _, arguments = summed
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "cs336sys", "verify", *arguments, "--format", "json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert ended.returncode == 1, ended.stderr
    verify, diagnosis = json.loads(ended.stdout)["tables"]
    assert [row["verdict"] for row in verify["rows"]] == ["wrong", "wrong"]
    assert diagnosis["rows"][0]["cause"] == "not averaged"


def test_the_same_wrap_is_right_where_gradients_are_to_be_summed(summed):
    _, _, arguments = summed
    verify = tables(invoke(arguments, "--gradients sum --format json"))["verify"]
    assert [row["verdict"] for row in verify["rows"]] == ["ok", "ok"]
    assert all(0 < row["relative_difference"] < 1e-12 for row in verify["rows"])


HANGING = """
import pathlib
import time


def parallelize(model, group):
    pathlib.Path(__file__).with_name("began").write_text("by a rank\\n")
    time.sleep(3600)
"""


def test_a_killed_command_leaves_no_folder(tmp_path):
    (tmp_path / "temporary").mkdir()
    (tmp_path / "hanging.py").write_text(HANGING)
    arguments = ["--wrap", f"{tmp_path}/hanging.py:parallelize", "--case", "step", "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "temporary")}
    command = [sys.executable, "-m", "cs336sys", "verify", *arguments]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as verify:
        wait_until((tmp_path / "began").exists, 120)
        assert left_in(tmp_path / "temporary")
        verify.kill()
    wait_until(lambda: not left_in(tmp_path / "temporary"), 60)
