"""The engine of ``shard`` where ranks share layers or sequences: what they train, hold and send."""

from dataclasses import replace

import pytest
import shared_training_ranks
import torch
import training_ranks
from training_ranks import largest, measured, outcome_of

from cs336sys.accounting.sharding.cells import predicted_rank_memory, sharding_sent_bytes
from cs336sys.accounting.sharding.step import MOMENTS, predicted_memory, predicted_sent_bytes, sharded_step
from cs336sys.commands.shard.tables import shard_plan
from cs336sys.errors import CapabilityError
from cs336sys.parity.rounding import TOLERANCES
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import Workload
from cs336sys.training.ranks.tensor_strategies import torch_context

# Two ranks share neither inner features nor tokens equally.
SIZE = choose_size("tiny", context=8, batch_size=2, vocab_size=101, d_model=32, num_heads=4, d_ff=59)


def workload(strategy, mesh=None, checkpointing="none", world_size=2, size=SIZE, **settings):
    training = Workload(**{"size": size, "device": "cpu", "warmup": 1, "steps": 3} | settings)
    prefetch = 1 if strategy.startswith("fsdp") else None
    return ParallelWorkload(
        training, strategy, world_size=world_size, prefetch=prefetch, checkpointing=checkpointing, mesh=mesh
    )


CELLS = [
    workload("tensor"),
    workload("tensor", precision="bf16", optimizer="fused"),
    workload("tensor-sequence", checkpointing="block"),
    workload("ddp+tensor", "ddp=2,tp=1"),
    workload("fsdp+tensor-sequence", "fsdp=1,tp=2", precision="bf16"),
    workload("fsdp+tensor", "fsdp=2,tp=1"),
    workload("fsdp+context-ring", "fsdp=1,cp=2"),
]


def test_weights_are_those_of_one_process_and_bytes_those_of_the_formula(ranks):
    of_ranks = ranks().run(training_ranks.verify_and_count, CELLS)
    for cell, by_rank in zip(CELLS, zip(*of_ranks, strict=True), strict=True):
        name = cell.strategy, cell.mesh, cell.checkpointing, cell.training.precision
        off, sent = map(max, zip(*by_rank, strict=True))
        assert off < TOLERANCES[cell.training.precision] / (50 if cell.training.precision == "fp32" else 1), name
        assert sent == sharding_sent_bytes(cell), name


def test_peaks_are_those_predicted(ranks):
    wide = choose_size("tiny", context=64, batch_size=4, vocab_size=500, d_model=64, num_heads=4, d_ff=256)
    logits = choose_size("tiny", context=64, batch_size=4, vocab_size=4000, d_model=64, num_heads=4, d_ff=128)
    cells = [
        workload("tensor", size=wide, optimizer="fused", checkpointing="block"),
        workload("tensor-sequence", size=logits, optimizer="fused", attention="sdpa"),
    ]
    expected = [next(m for m in predicted_rank_memory(cell) if m.moment == "peak") for cell in cells]
    observed = []
    # Gloo's threads may hold on to what they have sent: then on a busy machine on both ranks.
    for _ in range(3):
        observed.append(ranks().run(training_ranks.observe_all, cells))
        of_cells = zip(*(rank for observation in observed for rank in observation), strict=True)
        lowest = [min((memory[-1] for memory, _ in cell), key=lambda moment: moment.total) for cell in of_cells]
        if [moment.total for moment in lowest] == pytest.approx([moment.total for moment in expected], rel=0.015):
            break
    else:
        pytest.fail(f"{lowest} in place of {expected}")
    assert [moment.parameters for moment in lowest] == [moment.parameters for moment in expected]
    torchs, gathering = workload("torch-tensor"), workload("fsdp+tensor", "fsdp=1,tp=2", precision="bf16")
    assert "peak" not in [moment.moment for cell in (torchs, gathering) for moment in predicted_rank_memory(cell)]


def test_checkpoints_surround_compiled_blocks_of_torch(ranks):
    size = replace(SIZE, vocab_size=100, d_ff=60)
    cells = [workload("torch-tensor", size=size, checkpointing=name, compile="block") for name in ("none", "block")]
    runs = [ranks().run(shared_training_ranks.count_block_runs, cell)[0] for cell in cells]
    assert runs == [SIZE.num_layers, 2 * SIZE.num_layers]


@pytest.mark.parametrize(
    ("fault", "strategy"),
    [
        ("input gradients not summed", "tensor"),
        ("outputs not summed", "tensor"),
        ("norms' gradients not summed", "tensor-sequence"),
        ("wrong first token", "tensor"),
    ],
)
def test_the_check_finds_what_is_forgotten(ranks, fault, strategy):
    for difference in ranks().run(shared_training_ranks.verify_faulty, fault, workload(strategy)):
        assert difference.relative > TOLERANCES["fp32"], fault
        if fault == "norms' gradients not summed":
            assert "ln" in difference.parameter


# Divides by no number of ranks.
UNEVEN = choose_size("tiny", context=37, batch_size=2, vocab_size=100, d_model=32, d_ff=64, num_heads=4)
# Activations are most of this one's memory.
WIDE = choose_size("tiny", context=387, batch_size=1, vocab_size=2000)
RING, ALL_TO_ALL = "context-ring", "context-all-to-all"


def context(strategy, **settings):
    return workload(strategy, **{"size": UNEVEN} | settings)


@pytest.mark.parametrize("fault", shared_training_ranks.OF_RINGS)
def test_the_check_finds_a_ring_that_is_wrong_in_one_thing(ranks, fault):
    """In the precision with the widest tolerance."""
    cell = context(RING, precision="bf16", size=replace(UNEVEN, num_layers=1))
    assert largest(ranks().run(shared_training_ranks.verify_faulty, fault, cell)) > 2 * TOLERANCES["bf16"]


def test_ranks_hold_and_send_of_sequences_as_predicted(ranks):
    cells = [context(RING, size=WIDE, attention="flash"), context(ALL_TO_ALL, size=WIDE, attention="sdpa")]
    of_ranks = ranks().run(training_ranks.observe_all, cells)
    for cell, by_rank in zip(cells, zip(*of_ranks, strict=True), strict=True):
        step = sharded_step(cell)
        assert max(sent for _, sent in by_rank) == predicted_sent_bytes(step), cell.strategy
        memory = {
            moment.moment: moment
            for moment in max((of_rank[0] for of_rank in by_rank), key=lambda moment: moment[-1].total)
        }
        predicted = {moment.moment: moment for moment in predicted_memory(step)}
        assert list(memory) == list(predicted) == list(MOMENTS)
        for part in ("parameters", "gradients", "optimizer_state"):
            assert getattr(memory["before the optimizer"], part) == getattr(predicted["before the optimizer"], part)
        assert 0.99 <= memory["peak"].total / predicted["peak"].total <= 1.01, (cell.strategy, cell.checkpointing)


def test_a_cell_is_measured_beside_the_same_step_without_communication(ranks):
    ranks()
    # What travels is in half precision forward and in float32 back.
    cell = context(RING, checkpointing="block", precision="bf16")
    outcome = outcome_of(cell)
    assert outcome.status == "ok"
    assert outcome.derived["relative_difference_percent"] < 100 * TOLERANCES["bf16"] / 4
    assert {"step", "forward", "unsynchronized", "communication"} <= outcome.samples.keys()
    assert outcome.derived["sent_bytes"] == predicted_sent_bytes(sharded_step(cell))


def test_torchs_own_is_refused_where_it_has_no_kernels():
    def reason(device="cpu", **settings):
        with pytest.raises(CapabilityError) as refusal:
            torch_context(context("torch-context", **settings), torch.device(device), None)
        return str(refusal.value)

    assert reason().endswith("supports only SDPA's CUDA kernels")
    assert reason("cuda").endswith("--attention reference is not torch's; choose sdpa")
    assert reason("cuda", attention="sdpa").endswith("equal chunks: context 37 is no multiple of that")
    assert reason("cuda", attention="sdpa", compile="block").endswith("choose --compile off and --cuda-graph off")


def test_a_ring_of_torchs_attention_has_no_logsumexp(ranks):
    with pytest.raises(CapabilityError, match="which --attention sdpa does not return; choose flash or reference"):
        ranks().run(training_ranks.verify_all, [context(RING, attention="sdpa")])


def test_a_plan_says_what_a_rank_has_of_each_sequence():
    (row,) = shard_plan([context(RING, world_size=4)]).rows
    assert (row["share"], row["tokens"]) == (2, 10)
    assert row["predicted_sent_bytes"] == predicted_sent_bytes(sharded_step(context(RING, world_size=4)))


@pytest.mark.multigpu
@pytest.mark.parametrize("compile_mode", ["off", "block"])
@pytest.mark.parametrize("strategy", ["tensor", "tensor-sequence", "torch-tensor", "torch-tensor-sequence"])
def test_gpus_send_what_the_formula_says_beside_products(strategy, compile_mode):
    """Weights are compared before anything is timed."""
    # In small's blocks the CPU launches no product before a sum has arrived, compiled or not: 0 to 4 % ran beside. With
    # the 32 blocks of 2.7b it was 64 %.
    size = choose_size("2.7b", num_layers=4, batch_size=4, context=2048)
    settings = {"precision": "bf16", "optimizer": "fused", "attention": "sdpa", "device": "cuda", "steps": 5}
    cell = workload(strategy, size=size, compile=compile_mode, **settings)

    def overlap_percent():
        outcome = measured(cell)
        assert strategy.startswith("torch") or outcome.derived["sent_bytes"] == sharding_sent_bytes(cell)
        return outcome.derived["overlap_percent"]

    first_percent = overlap_percent()
    if compile_mode == "block" and not strategy.startswith("torch"):
        # Gradients of layers' inputs, while those of their weights are computed; in one of three, since the tests of
        # other processes may have the GPUs in turn (4 % was seen).
        assert first_percent > 10 or any(overlap_percent() > 10 for _ in range(2))


@pytest.mark.multigpu
@pytest.mark.parametrize("checkpointing", ["none", "block"])
@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [
        *((f"{outer}{inner}", None) for outer in ("", "ddp+", "fsdp+") for inner in ("tensor", "tensor-sequence")),
        *((f"{outer}{inner}", None) for outer in ("", "fsdp+") for inner in ("context-ring", "context-all-to-all")),
        ("fsdp+tensor", "fsdp=2,tp=1"),
    ],
)
def test_gpus_replay_strategies_that_share_layers_or_sequences(strategy, mesh, checkpointing):
    """Weights are compared before anything is timed."""
    size = choose_size("small", num_layers=3, batch_size=2, context=256)
    settings = {"precision": "bf16", "optimizer": "fused", "attention": "flash", "device": "cuda", "cuda_graph": "on"}
    cell = workload(strategy, size=size, mesh=mesh, checkpointing=checkpointing, **settings)
    outcome = measured(cell)
    assert outcome.derived["sent_bytes"] == sharding_sent_bytes(cell)
