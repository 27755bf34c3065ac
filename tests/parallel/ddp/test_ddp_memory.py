"""Gradients are averaged where they are, and no mode needs more memory than torch's."""

import time
import weakref

from ddp_modes import MODES, each_mode, finish
from on_ranks import on_ranks
from small_models import batch, network

from cs336sys.parallel.ddp import FlatDDP


@on_ranks(2)
@each_mode
def test_gradients_are_averaged_where_they_are(mode):
    wrapped = MODES[mode](network(0))
    for step in range(3):
        wrapped.zero_grad(set_to_none=step != 1)
        wrapped(batch(step)[0]).sum().backward()
        trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
        before = [parameter.grad.data_ptr() for parameter in trained]
        finish(wrapped)
        assert [parameter.grad.data_ptr() for parameter in trained] == before
        blocks = {parameter.grad.untyped_storage().data_ptr() for parameter in trained}
        assert (len(blocks) == 1) == (mode == "flat")


@on_ranks(2)
def test_flat_buffer_leaves_its_memory_to_the_next_forward_pass():
    wrapped = FlatDDP(network(0))
    wrapped(batch(0)[0]).sum().backward()
    finish(wrapped)
    buffer = weakref.ref(next(parameter.grad._base for parameter in wrapped.parameters() if parameter.requires_grad))
    assert buffer() is not None
    wrapped.zero_grad()
    # Gloo's thread holds what it communicated a moment longer.
    deadline = time.monotonic() + 60
    while buffer() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert buffer() is None
