"""State of a rank under each way of sharing it out: by hand, and against what the ranks really hold."""

from dataclasses import replace

import pytest

from cs336sys.accounting.answers.memory import rank_memory, state_answers
from cs336sys.accounting.memory import predicted_peak, widest_moments
from cs336sys.accounting.sharding.ideal import STRATEGIES, RankState, rank_state, sent_bytes
from cs336sys.accounting.sharding.optimizer import flat_optimizer_state
from cs336sys.errors import UsageError
from cs336sys.sizes import SIZES, ModelSize

GB = 10**9
# d 64, d_ff 192, 2 layers: per layer 4 * 4096 + 3 * 12,288 + 128 = 53,376; with 2 * 640 * 64 and a last norm 188,736.
SMALL = ModelSize("hand", 64, 192, 2, 4, vocab_size=640, context=8, batch_size=4)


@pytest.mark.parametrize(
    ("strategy", "element_bytes", "state"),
    [
        ("none", 4, RankState(400, 400, 800)),
        ("none", 2, RankState(200, 200, 800, 400)),
        ("optimizer", 4, RankState(400, 400, 200)),
        ("optimizer", 2, RankState(200, 200, 200, 100)),
        ("optimizer-flat", 4, RankState(400, 100, 200)),
        ("optimizer-flat", 2, RankState(200, 100, 200, 100)),
        ("fsdp", 4, RankState(100, 100, 200)),
        ("fsdp", 2, RankState(100, 100, 200)),
    ],
)
def test_state_of_100_parameters_on_4_ranks(strategy, element_bytes, state):
    assert rank_state(strategy, 100, 4, element_bytes) == state


def test_state_of_the_zero_paper():
    # ZeRO, figure 1: 7.5 B parameters in fp16 on 64 ranks: 120 GB, 31.4 GB with stage 1; all shared out 1.9 GB.
    assert rank_state("none", 7.5 * GB, 64, 2).total == 120 * GB
    assert rank_state("optimizer", 7.5 * GB, 64, 2).total == pytest.approx(31.4 * GB, rel=1e-3)
    assert rank_state("fsdp", 7.5 * GB, 64).total == pytest.approx(1.9 * GB, rel=2e-2)


def test_bytes_sent_worked_by_hand():
    # 100 parameters on 4 ranks: three quarters travel; 2 * 4 bytes, 3 * 4, 2 * 4, and 2 * 4 + 4 gathered and scattered.
    assert [sent_bytes(strategy, 100, 4) for strategy in STRATEGIES] == [600, 900, 600, 900]
    assert sent_bytes("fsdp", 100, 4, compute_bytes=2) == 600
    assert sent_bytes("optimizer-flat", 100, 4, element_bytes=2) == 300
    assert [sent_bytes(strategy, 100, 1) for strategy in STRATEGIES] == [0, 0, 0, 0]


def test_rank_memory_worked_by_hand():
    none = rank_memory(SMALL, 2, "none").state
    assert none == RankState(754_944, 754_944, 1_509_888)
    # Largest first: the two 40,960 apart, then 12,288s and 4096s three and four to a side, and the norms: 94,368 each.
    assert rank_memory(SMALL, 2, "optimizer").state == RankState(754_944, 754_944, 8 * 94_400)
    flat = rank_memory(SMALL, 2, "optimizer-flat").state
    # Five norms of 64 are packed, and padded to a whole number of slices of 64: 384.
    assert flat.parameters == 4 * (188_736 + 64)
    assert flat.gradients == flat.parameters / 2
    # FSDP halves the matrices, 188,416, and keeps the norms, 320.
    fsdp = rank_memory(SMALL, 2, "fsdp").state
    assert fsdp == RankState(4 * 94_528, 4 * 94_528, 8 * 94_528)
    # 640 and 64 rows on 3 ranks: 214 and 22 are held, of 192 rows 64.
    held = 2 * 214 * 64 + 2 * (4 * 22 * 64 + 2 * 64 * 64 + 22 * 192) + 320
    assert rank_memory(replace(SMALL, batch_size=3), 3, "fsdp").state == RankState(4 * held, 4 * held, 8 * held)


def test_half_precision_parameters_have_masters():
    state = rank_memory(SMALL, 2, "optimizer-flat", element_bytes=2).state
    sizes = [188_416 // 2, 188_416 // 2, *[64] * 5]
    fullest = max(flat_optimizer_state([sizes], 2, element_bytes=2, master_bytes=4), key=lambda rank: rank.total)
    assert state.optimizer_state == fullest.optimizer_state
    assert state.master_parameters == fullest.master_parameters
    assert rank_memory(SMALL, 2, "optimizer", element_bytes=2).state.master_parameters == 4 * 94_400


@pytest.mark.parametrize("mode", ["forward", "forward-backward", "train"])
def test_alone_and_unshared_the_peak_is_that_of_bench(mode):
    size = SIZES["small"]
    for precision in ("fp32", "bf16"):
        memory = rank_memory(size, 1, "none", precision=precision, mode=mode)
        assert memory.peak == predicted_peak(size, precision, mode, "reference")


def test_each_rank_has_its_part_of_the_batch():
    size = SIZES["small"]
    assert rank_memory(size, 4, "none").peak == predicted_peak(
        replace(size, batch_size=1), "fp32", "train", "reference"
    )


@pytest.mark.parametrize("name", ["small", "xl"])
def test_sharing_out_lowers_the_peak_by_what_a_rank_no_longer_holds(name):
    size = SIZES[name]
    local = replace(size, batch_size=size.batch_size // 2)
    none = rank_memory(size, 2, "none")
    for strategy in STRATEGIES[1:]:
        memory = rank_memory(size, 2, strategy)
        expected = []
        for moment in widest_moments(local, "fp32", "train", "reference"):
            cut = memory.state.gradients / none.state.gradients
            gradients = moment.gradients * cut
            expected.append(memory.state.parameters + gradients + memory.state.optimizer_state + moment.activations)
        assert memory.peak.total == pytest.approx(max(expected))
        assert memory.peak.total < none.peak.total
        assert memory.first_peak <= none.first_peak


def test_the_three_times_of_the_handout():
    memory = rank_memory(SMALL, 2, "fsdp")
    state = memory.state
    assert memory.after_initialization == state.parameters
    assert memory.before_first_step == state.parameters + state.gradients
    # Nothing of the optimizer is there in the first backward pass.
    later = rank_memory(SMALL, 2, "fsdp", mode="forward-backward").peak.total
    assert memory.first_peak == later


def test_answers_are_the_ideal_shares():
    found = {answer.quantity: answer for answer in state_answers(SIZES["xl"], 2, "fsdp")}
    p = 1_998_235_200
    assert found["fsdp: after model initialization"].value == 2 * p
    assert found["fsdp: directly before the first step"].value == 4 * p
    assert found["fsdp: directly after the first step"].value == 8 * p
    assert found["fsdp: less than none"].value == 8 * p
    assert found["fsdp: less than optimizer"].value == 4 * p
    assert found["fsdp: optimizer state"].derivation(str) == f"o = 8 P / N = 8 x {p} / 2"
    found = {answer.quantity: answer for answer in state_answers(SIZES["xl"], 2, "optimizer", element_bytes=2)}
    assert found["optimizer: fp32 master parameters"].value == 2 * p
    assert found["optimizer: directly after the first step"].value == 2 * p + 2 * p + 4 * p + 2 * p


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: rank_state("zero", 100, 4),
            "unknown strategy 'zero': choose from none, optimizer, optimizer-flat, fsdp",
        ),
        (lambda: sent_bytes("dp", 100, 4), "unknown strategy 'dp': choose from none, optimizer, optimizer-flat, fsdp"),
        (lambda: rank_memory(SMALL, 0, "none"), "--world-size 0: must be at least 1"),
        (lambda: rank_memory(SMALL, 3, "none"), "3 ranks do not divide the batch of 4: choose a multiple of them"),
    ],
)
def test_bad_input_is_refused(call, sentence):
    with pytest.raises(UsageError) as refusal:
        call()
    assert str(refusal.value) == sentence
