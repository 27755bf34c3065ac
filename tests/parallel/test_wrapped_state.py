"""State dicts of wrappers: as those of the plain module, alone and within a module around them; whose slices."""

import pytest
import wrapped_state_ranks


@pytest.mark.parametrize("kind", list(wrapped_state_ranks.WRAPPERS))
def test_state_dict_loads_alone_and_around_but_not_on_another_rank(ranks, kind):
    for rank, (results, errors) in enumerate(ranks(2).run(wrapped_state_ranks.state_dicts, kind)):
        for strict in (True, False):
            assert results.pop(f"around, strict={strict}") == ("<All keys matched successfully>", True)
        moved = results.pop("moved nowhere")
        assert all(results.values()), results
        assert moved is None
        *of_another, assigned, afterwards = errors
        assert afterwards is None
        if kind == "ddp":
            assert of_another == [None] * 4
            continue
        for error in of_another:
            assert error[0] == "UsageError"
            assert f"holds the slices of rank {1 - rank} of 2, this is rank {rank} of 2" in error[1]
        assert assigned[0] == "UsageError"
        assert assigned[1].startswith("assign=True would replace the slices")


@pytest.mark.parametrize("kind", ["fsdp", "tensor"])
def test_slices_are_dtensors_that_other_ranks_refuse(ranks, kind, tmp_path):
    """torch.distributed.checkpoint gave every rank the slices of one, and a file of rank 0 let rank 0 go on alone."""
    for results, errors in ranks(2).run(wrapped_state_ranks.distributed_checkpoint, kind, tmp_path / "saved"):
        assert all(results.values()), results
        *of_first, gathered, gathered_inside = errors
        for error in of_first:
            assert error[0] == "UsageError"
            assert (
                "the state dict holds the slices of rank 0 of 2, this is rank 1 of 2: load the one of this" in error[1]
            )
        for error in (gathered, gathered_inside):
            assert error[1].startswith("torch.distributed.checkpoint.state_dict does not know the slices of optimizers")


def test_slices_that_no_dtensor_can_be_do_not_leave(ranks):
    for errors in ranks(4).run(wrapped_state_ranks.cut_as_no_dtensor):
        for kind, message in errors:
            assert kind == "UsageError"
            assert "is cut as no DTensor can be, by two wrappers or into very few rows: use save_check" in message


def test_state_dict_within_a_forward_pass_is_refused(ranks):
    for errors in ranks(2).run(wrapped_state_ranks.state_dict_within_a_forward_pass):
        for kind, message in errors:
            assert kind == "UsageError"
            assert message.startswith("0.weight is not what was wrapped: save and load between two steps, and call ")


@pytest.mark.parametrize("name", list(wrapped_state_ranks.TRAININGS))
def test_deleted_wrapper_frees_its_parameters(ranks, name):
    """A hook that torch holds and that refers to its own tensor is a cycle that Python's collector does not see."""
    for at_once, collected in ranks(2).run(wrapped_state_ranks.survivors, name):
        assert collected == 0
        if name not in ("FSDP", "TensorParallel"):
            assert at_once == 0
