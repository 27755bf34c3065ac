"""The kernel of tools/cluster_backward.py: compiled for an H200, planned, and on a Hopper GPU computed."""

import os
import sys
from types import SimpleNamespace

import compile_cluster_backward
import pytest
import time_cluster_backward
import torch
from attention_checks import on_hopper
from cluster_backward import PEER_READY_AT, ClusterBackwardPlan, ClusterLaunch, cluster_backward_plan
from compile_for_hopper import MAX_SHARED_BYTES

from cs336sys.commands.attention.measure import TOLERANCES
from cs336sys.errors import CapabilityError, UsageError
from cs336sys.kernels.attention.problem import AttentionProblem, Operand
from cs336sys.timing.relative_error import why_wrong

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def compiled(tier, compile_by):
    """{mask: what came out}; full attention, a causal kernel without its mask, at night."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        return compile_by(compile_cluster_backward.__file__, *tier.choose(["causal"], ["causal", "full"]))


def test_sums_stay_in_registers_and_products_run_beside_all_else(compiled):
    for name, kernel in compiled.items():
        assert kernel["spilled_bytes"] == 0, name
        assert not kernel["serialized"], name
        assert kernel["touched_early"] == [], name
        assert kernel["reallocates_registers"], name
        assert kernel["shared_bytes"] <= MAX_SHARED_BYTES, name


def test_what_another_program_writes_to_lies_where_it_thinks(compiled):
    """Gluon does not tell where: a program of a cluster knows the compiler's order."""
    at = PEER_READY_AT.value
    for name, kernel in compiled.items():
        assert kernel["barriers"][:4] == [at, at + 16, at + 8, at + 24], name


def test_dq_is_added_in_parts(compiled):
    """A quarter of the columns, in parts of 6 and 2 for each tile but the last one, and of 2 and 8 behind it."""
    for name, kernel in compiled.items():
        assert (kernel["tma_reduce"], kernel["vector_reduce"]) == (0, 2 * (6 + 2 + 2 + 8)), name


PTX = """
add.s32 \t%r7, %r1, {};
mbarrier.init.shared::cta.b64 [%r7], 1;
add.s32 \t%r8, %r1, {};
mbarrier.init.shared::cta.b64 [%r8], 2;
add.s32 \t%r9, %r1, {};
mbarrier.init.shared::cta.b64 [%r9], 1;
add.s32 \t%r10, %r1, {};
mbarrier.init.shared::cta.b64 [%r10], 2;
mbarrier.init.shared::cta.b64 [%r2], 1;
"""


def launch_of(*addresses, launched):
    compiled = SimpleNamespace(
        run=lambda *arguments: launched.append(arguments),
        function="function",
        packed_metadata=(12, 1, 99),
        asm={"ptx": PTX.format(*addresses)},
    )
    return ClusterLaunch(SimpleNamespace(warmup=lambda *arguments, grid: compiled), 5, (3,), (64,))


@pytest.mark.usefixtures("active_driver")
def test_clusters_are_launched_of_what_is_compiled_without_them():
    """Triton multiplies the grid by what it is told to be the programs of a cluster."""
    launched, tensor, at = [], torch.empty(4), PEER_READY_AT.value
    launch = launch_of(at, at + 16, at + 8, at + 24, launched=launched)
    for _ in range(2):
        launch(tensor)
    handle = ["function", (12, 2, 99), None, None, None]
    assert launched == [(5, 1, 1, "stream of 3", *handle, tensor.data_ptr(), 3, 64)] * 2


@pytest.mark.usefixtures("active_driver")
def test_barriers_that_lie_elsewhere_are_not_written_to():
    launched, at = [], PEER_READY_AT.value
    launch = launch_of(at, at + 8, at + 16, at + 24, launched=launched)
    for _ in range(2):
        with pytest.raises(CapabilityError, match=f"barriers of clusters at .{at}, {at + 8}, .* needs them at"):
            launch(torch.empty(4))
    assert not launched


def problem(num_sequences, length, head_dim):
    """Causal, on an H200."""
    options = {"capability": (9, 0), "num_multiprocessors": 132, "tma_allowed": True}
    return AttentionProblem(head_dim, torch.bfloat16, "tf32x3", True, num_sequences, length, length, **options)


def plan_on_h200(described, deterministic=False):
    of_queries, of_keys = (
        Operand(torch.empty(1, heads, length, described.head_dim, dtype=torch.bfloat16, device="meta"))
        for heads, length in (
            (described.num_sequences, described.num_queries),
            (described.num_key_sequences, described.num_keys),
        )
    )
    tensors = of_queries, of_keys, of_keys
    return ClusterBackwardPlan(described, (*tensors, of_queries), of_queries, tensors, CPU, deterministic)


def test_programs_of_a_cluster_share_an_item_of_128_keys():
    plan = plan_on_h200(problem(16, 16384, 256))
    launch, _ = plan.steps[1]
    assert isinstance(launch, ClusterLaunch)
    assert launch.num_programs == 128 * 16
    (schedule,) = (addition for addition in plan.additions if isinstance(addition, torch.Tensor))
    works, items = schedule[: 128 * 16].tolist(), schedule[128 * 16 :].tolist()
    assert works == [[1, 128 * 16 + item] for item in range(128 * 16)]
    assert sorted(items) == [[tile, sequence] for tile in range(128) for sequence in range(16)]


def test_a_program_loads_keys_and_stores_dk_in_halves_of_their_columns():
    launch, _ = plan_on_h200(problem(16, 16384, 256)).steps[1]
    query, key, value, grad_out, statistics, grad_key, grad_value = (
        descriptors._layout[2:] for descriptors in launch.descriptors
    )
    assert query == value == grad_out == grad_value
    assert key == grad_key
    assert (query[0], key[0], statistics[0]) == ([1, 1, 64, 256], [1, 1, 64, 128], [1, 64])
    assert query[1] == key[1]


@pytest.mark.parametrize(("head_dim", "deterministic"), [(128, False), (256, True)])
def test_what_clusters_do_not_compute_is_refused(head_dim, deterministic):
    with pytest.raises(UsageError, match=f"dimension 256 .* got head dimension {head_dim} .*={deterministic}"):
        plan_on_h200(problem(16, 16384, head_dim), deterministic)


def computed_in_float64(tensors, grads, is_causal):
    """In the place of a plan."""
    scale = tensors[0].shape[-1] ** -0.5

    def compute(query, key, value, out, logsumexp, grad_out, grad_query, grad_key, grad_value):
        query, key, value, out, grad_out = (tensor.double() for tensor in (query, key, value, out, grad_out))
        scores = scale * query @ key.mT
        if is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        weights = torch.exp(scores - logsumexp[..., None])
        grad_scores = weights * (grad_out @ value.mT - (out * grad_out).sum(-1, keepdim=True))
        grad_query.copy_(scale * grad_scores @ key)
        grad_key.copy_(scale * grad_scores.mT @ query)
        grad_value.copy_(weights.mT @ grad_out)

    return compute


def without_a_tile(tensors, grads, is_causal):
    plan = computed_in_float64(tensors, grads, is_causal)

    def compute(*tensors):
        plan(*tensors)
        tensors[-3][..., -64:, :64] = 0  # Of dQ, what one warpgroup adds to a tile.

    return compute


def test_the_check_passes_what_is_rounded_and_no_tile_that_is_left_out(monkeypatch):
    monkeypatch.setattr(time_cluster_backward, "NUM_PROBLEMS", 4)
    monkeypatch.setattr(time_cluster_backward, "LONGEST", 100)
    errors = time_cluster_backward.check(computed_in_float64, CPU)
    assert 0 < errors["fp16"] < errors["bf16"] < 1e-2
    with pytest.raises(SystemExit, match=r"fp16, full, queries and keys 2x2x.*: relative error over 0\.004: dQ by"):
        time_cluster_backward.check(without_a_tile, CPU)


def test_without_a_hopper_gpu_the_script_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"needs a GPU of compute capability 9\.0"):
        time_cluster_backward.main()


@on_hopper
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("lengths", "group_size"),
    [
        *((lengths, 1) for lengths in ((1, 2), (70, 65), (18, 701), (701, 18), (334, 518), (1100, 1100))),
        ((900, 1100), 3),
    ],
)
def test_programs_exchange_their_shares_of_dq(lengths, group_size, is_causal, dtype, device, poisoned_empty):
    half = time_cluster_backward.DTYPES[dtype]
    inputs = time_cluster_backward.random_inputs((2, 3), lengths, half, is_causal, device, group_size=group_size)
    errors = time_cluster_backward.errors_of(cluster_backward_plan, inputs, is_causal)
    assert why_wrong(errors, TOLERANCES[dtype]) is None
