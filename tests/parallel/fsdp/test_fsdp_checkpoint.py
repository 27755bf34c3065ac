"""Checkpoints of fully sharded training: any number of ranks goes on where another stopped; nothing whole is lost."""

import io
import pickle

import fsdp_checkpoint_ranks as checkpoint_ranks
import pytest
import torch
from same_tensors import assert_same
from torch.distributed.checkpoint import metadata

from cs336sys.errors import UsageError
from cs336sys.parallel import safe_unpickle


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("optimizer", ["adamw", "course", "fused", "sgd"])
def test_training_goes_on_bitwise_on_as_many_ranks(ranks, tmp_path, optimizer):
    losses, weights = ranks(2).run(checkpoint_ranks.uninterrupted, optimizer)[0]
    first = ranks(2).run(checkpoint_ranks.save_after_two_steps, tmp_path / "saved", optimizer)[0]
    for rest, resumed, offset, rate in ranks(2).run(checkpoint_ranks.resume, tmp_path / "saved", optimizer):
        assert first + rest == losses
        assert_same(resumed, weights)
        assert (offset == 3.0).all()
        assert rate == (0.025 if optimizer == "sgd" else 0.0025)
    assert names_in(tmp_path) == ["saved"]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 4), (4, 2), (1, 3)])
def test_training_goes_on_with_another_number_of_ranks(ranks, tmp_path, before, after):
    """The sums of other ranks round differently: in fp64."""
    losses, weights = ranks(2).run(checkpoint_ranks.uninterrupted, "adamw")[0]
    first = ranks(before).run(checkpoint_ranks.save_after_two_steps, tmp_path / "saved", "adamw")[0]
    rest, resumed, _, _ = ranks(after).run(checkpoint_ranks.resume, tmp_path / "saved", "adamw")[0]
    assert first + rest == pytest.approx(losses, rel=1e-12)
    assert_same(resumed, weights, atol=1e-11)


def test_saving_again_keeps_the_checkpoint_before_it(ranks, tmp_path):
    path = tmp_path / "saved"
    for value in (1.0, 2.0, 3.0):
        ranks(2).run(checkpoint_ranks.save_model, path, value)
    assert names_in(tmp_path) == ["saved", "saved.previous"]
    for extra, weight, error, _ in ranks(2).run(checkpoint_ranks.load_model, path):
        assert (extra, error) == (3.0, None)
        assert (weight == 3.0).all()
    assert ranks(2).run(checkpoint_ranks.load_model, tmp_path / "saved.previous")[0][0] == 2.0


@pytest.mark.parametrize("what", ["file", "metadata", "no file", "no metadata", "folder"])
def test_checkpoint_that_is_not_whole_is_refused_and_the_one_before_is_named(ranks, tmp_path, what):
    path = tmp_path / "saved"
    for value in (1.0, 2.0):
        ranks(2).run(checkpoint_ranks.save_model, path, value)
    file = path / (".metadata" if "metadata" in what else "__1_0.distcp")
    if what == "folder":
        path.rename(tmp_path / "elsewhere")
        reason = f"there is no checkpoint {path}"
    elif what.startswith("no "):
        file.unlink()
        reason = "its .metadata cannot be read" if "metadata" in what else "__1_0.distcp has 0 of"
    else:
        file.write_bytes(file.read_bytes()[:-7])
        reason = "its .metadata cannot be read" if what == "metadata" else "__1_0.distcp has"
    for _, _, (kind, message), unchanged in ranks(2).run(checkpoint_ranks.load_model, path):
        assert kind == "UsageError"
        assert reason in message
        assert message.endswith(f"; the one before it is {path}.previous")
        assert unchanged
    assert ranks(2).run(checkpoint_ranks.load_model, tmp_path / "saved.previous")[0][0] == 1.0


def test_failure_while_saving_is_an_error_on_every_rank_and_what_was_there_is_whole(ranks, tmp_path):
    path = tmp_path / "saved"
    ranks(2).run(checkpoint_ranks.save_model, path, 1.0)
    for kind, message in ranks(2).run(checkpoint_ranks.fail_to_save, path, "write"):
        assert kind == "OSError"
        assert "no space left on device" in message
    assert ranks(2).run(checkpoint_ranks.load_model, path)[0][0] == 1.0
    ranks(2).run(checkpoint_ranks.save_model, path, 2.0)
    assert names_in(tmp_path) == ["saved", "saved.previous"]
    (tmp_path / "file").write_text("in the way")
    for kind, _ in ranks(2).run(checkpoint_ranks.fail_to_save, tmp_path / "file" / "saved", "folder"):
        assert kind in ("NotADirectoryError", "FileExistsError")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shape", "belongs to another model: weight is (5, 3) there and (6, 3) here; bias is (5,) there and (6,) here"),
        ("names", "0.weight is missing there and (5, 3) here; 0.bias is missing there and (5,) here; weight is (5"),
        ("optimizer", "has no optimizer: load it without one"),
        ("foreign", "has no optimizer: load it without one"),
    ],
)
def test_checkpoint_of_another_model_is_refused(ranks, tmp_path, what, message):
    ranks(2).run(checkpoint_ranks.save_model, tmp_path / "saved", 1.0)
    for (kind, found), unchanged in ranks(2).run(checkpoint_ranks.load_into_another, tmp_path / "saved", what):
        assert kind == "UsageError"
        assert message in found
        assert unchanged


def test_optimizer_that_cannot_be_shared_out_is_refused(ranks, tmp_path):
    for kind, message in ranks(2).run(checkpoint_ranks.save_with_momentum, tmp_path / "saved"):
        assert kind == "UsageError"
        assert "rows of weight is (7,) where the slice is (" in message
    for what, reason in {"groups": "groups of [2] parameters, this one has [1, 1]", "foreign": "build it over"}.items():
        for (kind, message), unchanged in ranks(2).run(checkpoint_ranks.load_into_another, tmp_path / "saved", what):
            assert kind == "UsageError"
            assert reason in message
            assert unchanged


def test_saving_before_the_first_step_and_between_accumulated_passes(ranks, tmp_path):
    path = tmp_path / "saved"
    for empty, (undisturbed, saved) in ranks(2).run(
        checkpoint_ranks.save_before_the_first_step_and_in_an_accumulation, path
    ):
        assert empty
        assert undisturbed.keys() == saved.keys()
        for name, gradient in undisturbed.items():
            assert gradient is saved[name] is None or torch.equal(gradient, saved[name])


def test_plain_data_beside_the_model_comes_back_as_it_was(ranks, tmp_path):
    for value in (checkpoint_ranks.PLAIN, torch.ones(3), None):
        for extra, rate in ranks(2).run(checkpoint_ranks.save_and_load, tmp_path / "saved", value):
            assert repr(extra) == repr(value)
            assert rate == 0.25


def test_objects_are_refused_when_saving(ranks, tmp_path):
    for errors, found in ranks(2).run(checkpoint_ranks.refuse_to_save, tmp_path / "folder" / "saved"):
        for beginning, (kind, message) in errors.items():
            assert kind == "UsageError"
            assert message == (
                f"{beginning}checkpoints hold tensors, numbers, strings, bools, None, and lists, tuples and dicts of "
                "these, because loading anything else may run code"
            )
        assert not found


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (
            "metadata",
            "the checkpoint's .metadata asks for posix.mkdir, which could run code and is in no list that tor",
        ),
        ("extra", "extra is more than plain data, and loading it could run code: do not trust it"),
        ("optimizer_groups", "optimizer_groups is more than plain data"),
        ("optimizer/step/weight", "optimizer/step/weight is more than plain data"),
        ("model/weight", "belongs to another model: weight is missing there"),
        ("everything pickled", "has no extra: choose one that save_checkpoint wrote"),
    ],
)
def test_loading_runs_no_code(ranks, tmp_path, what, reason):
    path = tmp_path / "saved"
    for (kind, message), extra, rate in ranks(2).run(checkpoint_ranks.load_what_others_wrote, path, what):
        assert kind == "UsageError"
        assert reason in message
        assert extra is None
        assert rate == 0.0
    assert not (tmp_path / "ran").exists()


def test_hooks_extra_state_and_buffers_of_the_first_rank_come_back_on_every_rank(ranks, tmp_path):
    for same, mean, count, scratch, error in ranks(2).run(checkpoint_ranks.save_and_load_hooked, tmp_path / "saved"):
        assert same
        assert mean == [3.0] * 5
        assert count == 3
        assert scratch == [5.0, 5.0]
        assert error[0] == "UsageError"
        assert "the module does not load" in error[1]


def test_changed_module_is_saved_under_its_present_names_or_refused(ranks, tmp_path):
    for sources, errors in ranks(2).run(checkpoint_ranks.save_changed_modules, tmp_path / "saved"):
        for now, before in {0: 0, 1: 3, 2: 2}.items():
            for what in ("weight", "bias"):
                assert sources[f"layers.{now}.{what}"] == [f"layers.{before}.{what}"] * 2
        for what, part in {
            "removed": "that the module lacks (by now): build it over parameters()",
            "state of nothing": "the optimizer keeps state of 'steps', which is no parameter of the module",
            "made by a hook": "layers.0.weight of the state dict is no parameter or buffer of Linear, but made by a ",
            "added": "adapter.weight is not what was wrapped: save and load between two steps, and call refresh() on",
            "gathered": "adapter.weight is not what was wrapped",
        }.items():
            kind, message = errors[what]
            assert kind == "UsageError"
            assert part in message


def test_each_group_has_checkpoints_of_its_own(ranks, tmp_path):
    *_, (same, (kind, message)) = results = ranks(3).run(checkpoint_ranks.save_on_groups, tmp_path)
    assert same
    assert kind == "UsageError"
    assert "shared belongs to ranks [0, 1], and ranks [2] have slices of their own: save on one group" in message
    assert results[:2] == [(True, None), (True, None)]
    assert names_in(tmp_path) == ["0", "1", "shared"]


def test_uneven_tied_frozen_and_exact_state_moves_between_numbers_of_ranks(ranks, tmp_path):
    for before, after in ((2, 3), (3, 2)):
        path = tmp_path / f"{before}"
        weights, state = ranks(before).run(checkpoint_ranks.save_uneven, path)[0]
        assert state["exact of 0.weight"].dtype == torch.float32
        for loaded_weights, loaded_state in ranks(after).run(checkpoint_ranks.load_uneven, path):
            assert_same(loaded_weights, weights)
            assert_same(loaded_state, state)


def test_full_disk_is_an_error_on_every_rank_and_leaves_nothing(ranks, tmp_path):
    for (kind, message), left in ranks(2).run(checkpoint_ranks.save_on_a_full_disk, tmp_path / "saved"):
        assert kind == "OSError"
        assert "saved could not be written" in message
        assert left == []


class AskedByGetattr:
    """Pickles as Python 3.11.2 pickles a member of an enumeration, or as an attacker anything else."""

    def __init__(self, owner, name):
        self.asked = owner, name

    def __reduce__(self):
        return getattr, self.asked


def test_metadata_may_ask_for_members_of_enumerations_alone():
    def load(owner, name):
        return safe_unpickle._MetadataUnpickler(io.BytesIO(pickle.dumps(AskedByGetattr(owner, name)))).load()

    encoding = metadata._MEM_FORMAT_ENCODING
    member = next(iter(encoding))
    assert load(encoding, member.name) is member
    for owner, name in ((encoding, "__subclasses__"), (torch.Size, "__reduce__"), ("text", "upper")):
        with pytest.raises(UsageError, match="could run code: do not trust it"):
            load(owner, name)
