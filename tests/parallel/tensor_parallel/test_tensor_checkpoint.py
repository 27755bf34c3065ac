"""Checkpoints of tensor parallel training: everything that the module holds, or one sentence on every rank."""

import tensor_checkpoint_ranks


def test_everything_comes_back_and_one_process_reads_it(ranks, tmp_path):
    for results in ranks(2).run(tensor_checkpoint_ranks.save_and_load, tmp_path / "saved"):
        assert all(results.values()), results


def test_refusals_leave_the_checkpoint_as_it_was(ranks, tmp_path):
    path = tmp_path / "saved"
    expected = {
        "full disk": ("OSError", f"checkpoint {path} could not be written: "),
        "no folder": ("OSError", "nowhere/saved could not be written: "),
        "extra": ("UsageError", "extra['sizes'] is of type builtins.set: checkpoints hold tensors"),
        "state": ("UsageError", "the optimizer's state['ln_final.weight']['history'] is of type builtins.set: "),
        "without extra state": (
            "UsageError",
            "another model: ln_final.seen is (2,) there and missing here; extra state of",
        ),
        "damaged": ("UsageError", "damaged is damaged, or more than plain data: "),
        "foreign": ("UsageError", "foreign is no checkpoint of tensor parallel training"),
        "nothing": ("UsageError", f"there is no checkpoint {tmp_path / 'nothing'}"),
        "slices alone": ("UsageError", "this FSDP module has slices of tensor parallel parts: use save_checkpoint()"),
        "changed": ("UsageError", "layers.1.ffn.w1.weight is (3, 3), and this rank's part of it was ("),
    }
    for errors, left in ranks(2).run(tensor_checkpoint_ranks.refusals, path):
        assert errors.pop("weights") is None
        assert errors.keys() == expected.keys()
        for what, (kind, message) in expected.items():
            assert errors[what][0] == kind, what
            assert message in errors[what][1]
        assert left == ["damaged", "foreign", "saved"]
