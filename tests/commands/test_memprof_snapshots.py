"""``memprof --from`` as a user runs it, on snapshots of other programs."""

import base64
import hashlib
import os
import pickle
import re
from functools import partial
from pathlib import Path

import pytest
import run_commands
from agents_page import missing_fields
from cuda_snapshots import write
from memory_causes import run
from run_commands import invoke


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("snapshots")
    for name, settings in {"a": ("none", 1), "b": ("list", 1), "failed": ("fragmentation", 2)}.items():
        write(path / f"{name}.pickle", run(*settings).snapshot())
    return path


memprof = partial(invoke, "memprof")


def tables(*words):
    return run_commands.tables(memprof(words, "--format json"))


def test_verdict_comes_first_and_the_failure_before_peaks(folder):
    printed = memprof("--from", folder, "--top 10 --format json")
    assert missing_fields("Why did memory run out?", printed.stdout) == []
    found = run_commands.tables(printed)
    assert list(found) == ["verdict", "causes", "memory", "ranks", "kinds"]
    assert [row["snapshot"] for row in found["verdict"]["rows"]] == ["failed.pickle", "b.pickle", "a.pickle"]
    failed, leaking, healthy = (row["verdict"] for row in found["verdict"]["rows"])
    assert re.search(r"An allocation of [\d.]+ MiB at .*memory_causes.py:\d+ run failed with [\d.]+ MiB held", failed)
    assert failed.endswith("fragmentation; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.")
    assert re.search(r"Memory grows by [\d.]+ [KM]iB a step from .*memory_causes.py:\d+", leaking)
    assert "the largest kind is" in healthy
    for row in found["memory"]["rows"]:
        parts = sum(row[key] or 0 for key in row if key.endswith("_bytes") and key in CATEGORIES)
        assert parts == row["held_bytes"]
    causes = [(row["cause"], row["certainty"]) for row in found["causes"]["rows"]]
    assert causes == [("fragmentation", "proved"), ("leak", "proved")]


KINDS = "parameters gradients optimizer_state activations temporary graph_pools unknown"
CATEGORIES = [f"{kind}_bytes" for kind in KINDS.split()]


def test_difference_adds_up_to_the_last_row(folder):
    found = tables("--from", folder / "b.pickle", "--against", folder / "a.pickle")
    assert list(found) == ["verdict", "against"]
    *parts, whole = found["against"]["rows"]
    assert sum(row["difference_bytes"] for row in parts) == whole["difference_bytes"]
    assert sum(row["before_bytes"] for row in parts) == whole["before_bytes"]
    assert whole["what"] == "all"
    both = f"{folder / 'a.pickle'},{folder / 'b.pickle'}"
    assert "one of them must be one" in " ".join(memprof("--from", both, "--against", both).stderr.split())


def test_page_and_pictures(folder, tmp_path):
    result = memprof("--from", folder / "a.pickle", "--html", tmp_path / "page.html", "--snapshot", tmp_path / "s")
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "s").iterdir()} == {"a.png", "a.svg", "a.html"}
    page = (tmp_path / "page.html").read_text()
    assert "optimizer state" in page
    # What to do comes first, then the timeline, then the tables.
    order = ["Nothing failed", "What to do:", 'class="timeline"', "who holds memory at that moment"]
    assert [page.index(text) for text in order] == sorted(page.index(text) for text in order)
    assert "why memory ran out" not in page, "the verdict is told, not put into a table"
    assert 'tabindex="0"' in page
    assert "http:" not in page
    # Browsers run the one script whose digest the page's policy names.
    (script,) = re.findall(r"<script>(.*?)</script>", page, flags=re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    assert 'getElementById("timeline" + data.number)' in script


def test_snapshots_of_one_name_have_files_of_their_own(folder, tmp_path):
    for rank in ("rank0", "rank1"):
        (tmp_path / rank).mkdir()
        (tmp_path / rank / "oom.pickle").write_bytes((folder / "a.pickle").read_bytes())
    result = memprof("--from", f"{tmp_path / 'rank0'},{tmp_path / 'rank1'}", "--snapshot", tmp_path / "s")
    assert result.exit_code == 0, result.output
    pages = sorted(path.name for path in (tmp_path / "s").glob("*.html"))
    assert [page[-14:] for page in pages] == ["rank0-oom.html", "rank1-oom.html"]


def test_name_that_the_system_refuses_is_refused_before_measuring(tmp_path):
    model = tmp_path / f"{'m' * 200}.py"
    model.write_text("raise AssertionError('loaded')\n\n\ndef build(size): ...\n")
    result = memprof("--model", f"{model}:build", "--size", "tiny", "--device", "cpu", "--snapshot", tmp_path / "s")
    assert result.exit_code == 2
    assert "cannot write --snapshot" in result.stderr
    assert "File name too long" in result.stderr


def test_plan_of_another_model_says_what_is_not_predicted():
    model = f"{Path(__file__).parents[1] / 'user_models.py'}:Encoder"
    words = "--size tiny --context 32 --batch-size 2 --plan --memory 10GiB --model"
    answer = tables(words, model)["answer"]
    assert answer["rows"][0]["answer"].startswith("It fits as it is")
    assert any("model of yours: fsdp" in note for note in answer["notes"])


def test_hostile_file_runs_nothing(tmp_path):
    class Runs:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[Runs()]]}))
    result = memprof("--from", path)
    assert result.exit_code == 2
    assert "asks for posix.mkdir, which could run code" in result.stderr
    assert not (tmp_path / "made").exists()
