"""The engine of ``shard`` where ranks share layers: what they train, and what they send."""

from dataclasses import replace

import pytest
import tensor_training_ranks
import training_ranks
from training_ranks import measured

from cs336sys.accounting.sharding.cells import predicted_rank_memory, sharding_sent_bytes
from cs336sys.parity.rounding import TOLERANCES
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import Workload

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
    of_ranks = ranks().run(tensor_training_ranks.verify_and_count, CELLS)
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
    runs = [ranks().run(tensor_training_ranks.count_block_runs, cell)[0] for cell in cells]
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
    for off, parameter in ranks().run(tensor_training_ranks.verify_faulty, fault, workload(strategy)):
        assert off > TOLERANCES["fp32"], fault
        if fault == "norms' gradients not summed":
            assert "ln" in parameter


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
