"""What a rank holds in a step: worked by hand, against the model that is not shared, and against measured ranks."""

from dataclasses import replace
from pathlib import Path

import pytest

from cs336sys.accounting.checkpointing import predicted_peak
from cs336sys.accounting.memory import GIB, TrainingState, widest_moments
from cs336sys.accounting.sharding.cells import memory_of
from cs336sys.accounting.sharding.fsdp import fully_sharded_peak
from cs336sys.accounting.sharding.step import ShardedStep, flat_optimizer_state, fullest_state, rank_moments, rank_peak
from cs336sys.commands.account.tables.model import rank_memory_tables
from cs336sys.results.model import read_results
from cs336sys.settings.parallel import STATE_SHARDING_STRATEGIES
from cs336sys.settings.sizes import SIZES, ModelSize
from cs336sys.settings.strategies import STRATEGIES

RESULTS = Path(__file__).parents[3] / "docs" / "results"
# d 64, d_ff 192, 2 layers: per layer 4 * 4096 + 3 * 12,288 + 128 = 53,376; with 2 * 640 * 64 and a last norm 188,736.
SMALL = ModelSize("hand", 64, 192, 2, 4, vocab_size=640, context=8, batch_size=4)


# How much more a rank held than predicted, least and most, between the passes and at the peak. AdamW's step counters,
# 4 bytes a parameter, are not predicted, nor what DDP keeps beside its buckets (51 MB for xl). The cells' fused AdamW
# makes no temporary. fsdp's buffers are an upper bound.
MEASURED = {
    "none": ((0.0, 1e-6), (-0.0016, 1e-6)),
    "optimizer": ((0.0, 1e-6), (-0.0022, 1e-6)),
    "optimizer-flat": ((0.0, 1e-6), (-0.0004, 1e-5)),
    "fsdp": ((0.0, 1e-6), (-0.007, 0.0)),
    "torch-zero": ((0.0, 0.0033), (0.0, 0.0016)),
    "torch-fsdp": ((0.0, 1e-6), (0.0, 0.0)),
}
# The same of 2.7b, measured again later, where it differs: 8 MB more at the peak; of torch-zero 12.4 GiB, about as much
# as the buckets of torch's DDP, which lays them out anew in the second step.
MEASURED_AGAIN = {
    "none": ((0.0, 1e-6), (0.0, 1.5e-4)),
    "optimizer": ((0.0, 1e-6), (0.0, 2e-4)),
    "torch-zero": ((0.0, 0.0033), (0.243, 0.244)),
}


def step(strategy, size=SMALL, world_size=2, precision="fp32", attention="reference", **settings):
    return ShardedStep(strategy, size, world_size, precision, attention, **settings)


def test_state_of_the_fullest_rank_worked_by_hand():
    assert fullest_state(step("none")) == TrainingState(754_944, 754_944, 1_509_888, 0)
    # Largest first: the two 40,960 apart, then 12,288s and 4096s three and four to a side, and the norms: 94,368 each.
    assert fullest_state(step("optimizer")) == TrainingState(754_944, 754_944, 8 * 94_400, 0)
    flat = fullest_state(step("optimizer-flat"))
    # Five norms of 64 are packed, and padded to a whole number of slices of 64: 384.
    assert flat.parameters == 4 * (188_736 + 64)
    assert flat.gradients == flat.parameters / 2
    # FSDP halves the matrices, 188,416, and keeps the norms, 320.
    assert fullest_state(step("fsdp")) == TrainingState(4 * 94_528, 4 * 94_528, 8 * 94_528, 0)
    # 640 and 64 rows on 3 ranks: 214 and 22 are held, of 192 rows 64.
    held = 2 * 214 * 64 + 2 * (4 * 22 * 64 + 2 * 64 * 64 + 22 * 192) + 320
    of_three = fullest_state(step("fsdp", replace(SMALL, batch_size=3), 3))
    assert of_three == TrainingState(4 * held, 4 * held, 8 * held, 0)


def test_half_precision_parameters_have_masters():
    state = fullest_state(step("optimizer-flat", parameter_bytes=2))
    sizes = [188_416 // 2, 188_416 // 2, *[64] * 5]
    fullest = max(flat_optimizer_state([sizes], 2, element_bytes=2, master_bytes=4), key=lambda rank: rank.total)
    assert state.optimizer_state == fullest.optimizer_state
    assert state.master_parameters == fullest.master_parameters
    own = 94_400
    expected = TrainingState(2 * 188_736, 2 * 188_736, 8 * own, 4 * own)
    assert fullest_state(step("optimizer", parameter_bytes=2)) == expected


@pytest.mark.parametrize("mode", ["forward", "forward-backward", "train"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_alone_and_unshared_the_peak_is_that_of_bench(precision, mode):
    size = SIZES["small"]
    alone = rank_peak(step("none", size, 1, precision, mode=mode))
    assert alone == predicted_peak(size, precision, mode, "reference")


def test_each_rank_has_its_part_of_the_batch():
    size = SIZES["small"]
    part = predicted_peak(replace(size, batch_size=1), "fp32", "train", "reference")
    assert rank_peak(step("none", size, 4)) == part


@pytest.mark.parametrize("name", ["small", "xl"])
def test_sharing_out_lowers_the_peak_by_what_a_rank_no_longer_holds(name):
    """And what is under way comes on top: with fsdp in fp32 two units gathered, and the gradients of two."""
    size = SIZES[name]
    local = replace(size, batch_size=size.batch_size // 2)
    none, first = rank_peak(step("none", size)), rank_peak(step("none", size, mode="forward-backward"))
    whole = fullest_state(step("none", size)).gradients
    for strategy in ("optimizer", "fsdp"):
        state = fullest_state(step(strategy, size))
        peak = fully_sharded_peak(size, 4, 2)
        expected = []
        for moment in widest_moments(local, "fp32", "train", "reference"):
            gradients = moment.gradients * state.gradients / whole
            buffers = 0
            if strategy == "fsdp" and moment.gradients < whole:
                buffers = peak.gathered + (peak.whole_gradients if moment.gradients else 0)
            expected.append(state.parameters + gradients + state.optimizer_state + moment.activations + buffers)
        found = rank_peak(step(strategy, size))
        assert found.total == pytest.approx(max(expected))
        assert found.total < none.total
        assert rank_peak(step(strategy, size, mode="forward-backward")).total <= first.total
    flat = step("optimizer-flat", size)
    assert rank_peak(flat).total < none.total
    # Beside gradients under way, as many as there are without sharding, are the slices of two full buckets.
    assert rank_peak(replace(flat, mode="forward-backward")).total <= first.total + flat.bucket_mb * 1e6


def test_slices_of_gradients_exist_when_their_bucket_is_full():
    """188,736 gradients of 4 bytes; buckets of 0.2 MB have 50,000."""
    flat = step("optimizer-flat", bucket_mb=0.2)
    state = fullest_state(flat)
    (last,) = [
        moment
        for moment in widest_moments(flat.share, "fp32", "train", "reference")
        if moment.moment == "softmax backward, last block"
    ]
    # LM head and last norm, 41,024, three matrices of 12,288, a projection and a norm: 82,048.
    assert last.gradients == 4 * 82_048
    block = next(moment for moment in rank_moments(flat) if moment.moment == "softmax backward, block 2 of 2")
    assert block.gradients == state.gradients * 50_000 // 188_736
    assert block.activations == last.activations + 4 * 82_048
    end = next(moment for moment in rank_moments(flat) if moment.moment == "end of backward")
    assert end.gradients == state.gradients
    # Three are full; two of them are being reduced beside the last, which is not.
    assert end.activations == 16 * 16 + 4 * 8 * 16 + 4 * 16 * 64 + 4 * (188_736 - 50_000)


def test_the_three_times_of_the_handout():
    (row,) = rank_memory_tables([step("fsdp")])[0].rows
    state = fullest_state(step("fsdp"))
    assert row["after_initialization_gib"] * GIB == state.parameters
    assert row["before_first_step_gib"] * GIB == state.parameters + state.gradients
    # Nothing of the optimizer is there in the first backward pass.
    assert row["first_peak_gib"] == rank_peak(step("fsdp", mode="forward-backward")).total_gib


@pytest.mark.parametrize("strategy", STATE_SHARDING_STRATEGIES)
@pytest.mark.parametrize("name", ["xl", "2.7b", "10b"])
def test_eager_ranks_held_what_is_predicted(name, strategy):
    """Two H200, bf16. Beside tensors, a GPU held two workspaces of cuBLAS, 64 MiB, once it had multiplied.

    Of 2.7b's ranks each cell begins without those of the one before; when the others were measured they were kept.
    """
    cells = [
        cell
        for cell in read_results(RESULTS / f"shard-{name}-h200.jsonl.gz").cells
        if (cell.configuration["strategy"], cell.configuration["compile"]) == (strategy, "off")
    ]
    if name == "10b" and not STRATEGIES[strategy].shards_weights:
        assert cells == []
        return
    (cell,) = cells
    measured = MEASURED | MEASURED_AGAIN if name == "2.7b" else MEASURED
    by_source = memory_of(cell)
    predicted = {held.moment: held for held in by_source["predicted"]}
    assert ("peak" in predicted) == (strategy != "torch-fsdp")
    for held in by_source["measured"]:
        if held.moment in predicted:
            low, high = measured[strategy][held.moment == "peak"]
            has_multiplied = name != "2.7b" or held.moment != "initialized"
            total = held.total - has_multiplied * 64 * 2**20
            assert low <= total / predicted[held.moment].total - 1 <= high, held.moment
