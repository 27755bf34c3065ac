"""What the ranks of test_ddp_memory run: functions that spawned processes can import."""

import gc
import time
import weakref

import torch
from ddp_modes import MODES, TORCH_MODES, by_mode, finish
from small_models import batch, network
from torch import nn

from cs336sys.parallel.ddp import FlatDDP


@by_mode
def gradient_memory(wrap):
    """By mode: whether gradients stayed where autograd put them, and whether they lie in one allocation, over steps."""
    wrapped = wrap(network(0))
    stayed, together = [], []
    for step in range(3):
        wrapped.zero_grad(set_to_none=step != 1)
        wrapped(batch(step)[0]).sum().backward()
        trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
        before = [parameter.grad.data_ptr() for parameter in trained]
        finish(wrapped)
        stayed.append(before == [parameter.grad.data_ptr() for parameter in trained])
        together.append(len({parameter.grad.untyped_storage().data_ptr() for parameter in trained}) == 1)
    return stayed, together


def flat_buffer_is_dropped():
    """Whether the flat buffer is there after the synchronization, and whether it is after zero_grad."""
    wrapped = FlatDDP(network(0))
    wrapped(batch(0)[0]).sum().backward()
    finish(wrapped)
    buffer = weakref.ref(next(parameter.grad._base for parameter in wrapped.parameters() if parameter.requires_grad))
    before = buffer() is not None
    wrapped.zero_grad()
    # Gloo's thread holds what it communicated a moment longer.
    deadline = time.monotonic() + 60
    while buffer() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    return before, buffer() is not None


def peak_memory_mib():
    """By mode: most memory allocated in a training step of 8 layers with 4 MiB of fp32 weights each."""
    peaks = {}
    for mode in (*MODES, "torch"):
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)]).cuda()
        wrapped = (MODES | TORCH_MODES)[mode](model)
        # Fused, because others need memory of their own.
        optimizer = torch.optim.AdamW(wrapped.parameters(), fused=True)
        for step in range(4):
            if step == 2:
                torch.cuda.reset_peak_memory_stats()
            optimizer.zero_grad()
            wrapped(torch.ones(16, 1024, device="cuda")).sum().backward()
            finish(wrapped)
            optimizer.step()
        peaks[mode] = torch.cuda.max_memory_allocated() / 2**20
        del model, wrapped, optimizer
        gc.collect()
    return peaks
