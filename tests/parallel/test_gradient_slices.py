"""Ranks that hold slices of the gradients do not clip each by the norm of its own."""

import gradient_slices_ranks
import pytest


def test_clipping_by_the_norm_of_a_slice_is_refused_and_by_that_of_whole_gradients_is_not(ranks):
    alone = (
        "UsageError",
        "torch.nn.utils.clip_grad_norm_ would clip by the norm of this rank's share of the gradients: call "
        "clip_grad_norm_() of the FSDP or TensorParallel module, or of the sharded optimizer, on every rank",
    )
    expected = {
        "flat, values": (
            "UsageError",
            "torch.nn.utils.clip_grad_value_ would clip nothing, because backward passes leave no gradients with these "
            "parameters: give it own_tensors of the sharded optimizer, or call its clip_grad_norm_()",
        ),
        "fsdp": alone,
        "flat": alone,
        "tensor": alone,
        "fsdp of parts": (
            "UsageError",
            "other ranks have other parts of these layers, whose gradients count, too: call clip_grad_norm_(max_norm, "
            "sharded=...) of the TensorParallel module",
        ),
        "adamw, fsdp": (
            "ValueError",
            "AdamW: max_grad_norm 0.01 would clip by the norm of this rank's share of the gradients: leave it out, "
            "and call clip_grad_norm_() of the module that shares them before step()",
        ),
        "adamw, sharded": (
            "UsageError",
            "max_grad_norm 0.01 would clip by the norm of this rank's share: leave it out, and call "
            "clip_grad_norm_() of the sharded optimizer before step()",
        ),
    }
    # Of a layer's gradients, all 2: 16 weights and 4 biases.
    norm = (20 * 4) ** 0.5
    for errors, values, norms in ranks(2).run(gradient_slices_ranks.clippings):
        assert errors == expected
        assert values == {"fsdp": 0.5, "flat": 0.5}
        assert norms == pytest.approx({"ddp": norm, "sharded": norm, "flat no more": norm})
