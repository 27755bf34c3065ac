"""Layers shared in one dimension of a mesh and the batch in the other: training, clipping, checkpoints."""

import pytest
import tensor_parallel_ranks
from same_tensors import assert_same


@pytest.fixture(scope="module")
def expected():
    return tensor_parallel_ranks.two_steps_alone()


def test_meshes_train_as_one_process_and_read_each_others_checkpoints(ranks, expected, tmp_path):
    norms, weights = expected
    of_ddp, of_fsdp = str(tmp_path / "ddp"), str(tmp_path / "fsdp")
    saving = [(2, "ddp", False, of_ddp), (2, "fsdp", True, of_fsdp)]
    loading = [(4, "fsdp", False, None, of_ddp)]
    for found in ranks(4).run(tensor_parallel_ranks.two_steps_on_meshes, saving + loading):
        for (found_norms, found_weights, extra), has_loaded in zip(found, [False, False, True], strict=True):
            assert found_norms == pytest.approx(norms[-len(found_norms) :], rel=1e-5)
            # AdamW divides by the root of a square: a gradient of rounding errors moves a weight as far as any.
            assert_same(found_weights, weights, rtol=1e-4, atol=1e-5)
            assert extra == ({"step": 1} if has_loaded else None)
    for found in ranks(2).run(tensor_parallel_ranks.two_steps_on_meshes, [(1, None, True, None, of_fsdp)]):
        assert_same(found[0][1], weights, rtol=1e-4, atol=1e-5)
