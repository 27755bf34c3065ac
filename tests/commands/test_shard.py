"""``shard`` as a user runs it, on the CPU."""

import re

import pytest
from run_commands import invoke, tables

from cs336sys.accounting.sharding.step import MOMENTS
from cs336sys.results.model import read_results
from cs336sys.settings.parallel import STATE_SHARDING_STRATEGIES

pytestmark = pytest.mark.usefixtures("kept_workers")

TINY = "--size tiny --device cpu --world-size 2 --context 16 --vocab-size 500 --warmup 1 --steps 2"


def shard(*words):
    return invoke("shard", *words, env={"OMP_NUM_THREADS": "1"})


PARTS = ("parameters_gib", "gradients_gib", "optimizer_state_gib", "rest_gib")


def test_every_strategy_is_checked_and_measured(tmp_path, tier):
    """By default two of them: tests of ``commands/rank_training`` train them all, in ranks that others use, too."""
    strategies = tier.choose(("none", "fsdp"), STATE_SHARDING_STRATEGIES)
    files = ["--save", tmp_path / "r.jsonl", "--plot", tmp_path / "m.png", "--trace", tmp_path / "t"]
    found = tables(shard(TINY, "--strategy", ",".join(strategies), files, "--format json"))
    rows = found["shard"]["rows"]
    assert [(row["strategy"], row["status"]) for row in rows] == [(name, "ok") for name in strategies]
    for row in rows:
        assert row["relative_difference_percent"] < 0.1
        assert row["speedup"] == pytest.approx(rows[0]["step_ms_median"] / row["step_ms_median"])
        assert row["sent_bytes"] == pytest.approx(row["predicted_sent_bytes"], rel=0.01)
    assert rows[0]["sent_bytes"] == 4 * rows[0]["parameters"] == 4 * 652_928

    memory = found["memory"]["rows"]
    for row in memory:
        assert row["total_gib"] == pytest.approx(sum(row[part] for part in PARTS))
        assert all(row[part] >= 0 for part in PARTS)
    for strategy in strategies:
        own = [(row["moment"], row["source"]) for row in memory if row["strategy"] == strategy]
        expected = [(moment, source) for moment in MOMENTS for source in ("measured", "predicted")]
        assert own == (expected if strategy != "torch-fsdp" else expected[:-1])

    gathers = {row["unit"]: row for row in found["gathers"]["rows"]}
    assert list(gathers) == ["token_embeddings", "layers.0", "layers.1", "lm_head"]
    assert gathers["layers.0"]["backward_late_ms"] is not None
    assert gathers["lm_head"]["backward_late_ms"] is None, "kept from the forward pass"
    assert any(re.search(r"[0-7] of 7 gathers ended before their use", note) for note in found["gathers"]["notes"])
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "t").iterdir())) == len(strategies)

    for cell in read_results(tmp_path / "r.jsonl").cells:
        assert 0 <= cell.derived["bare_ms"] <= cell.derived["timeline"]["communication_ms"]
