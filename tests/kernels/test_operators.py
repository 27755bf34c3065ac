"""What the fused kernels share, on the CPU through Triton's interpreter: refusals, and the sum of partial sums."""

import pytest
import torch
import triton
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

from cs336sys.errors import CapabilityError
from cs336sys.kernels import linear_cross_entropy, rms_norm, rope, swiglu, weighted_sum
from cs336sys.kernels.adamw import AdamW, kernels
from cs336sys.kernels.operators import sum_of_partials

pytestmark = pytest.mark.usefixtures("poisoned_empty")


def update(x):
    parameter = torch.nn.Parameter(x)
    parameter.grad = torch.ones_like(x)
    AdamW([parameter]).step()


def predict(x):
    targets = torch.zeros(2, dtype=torch.int64, device=x.device)
    return linear_cross_entropy.linear_cross_entropy(x, torch.ones(5, 3, device=x.device), targets)


# By the name of the function: where its kernel is, and a call with x (2, 3).
CALLS = {
    "RMSNorm": (rms_norm, "rms_norm_forward_kernel", lambda x: rms_norm.rms_norm(x, torch.ones_like(x[0]))),
    "Rope": (rope, "rope_kernel", lambda x: rope.rope(x[:, :2])),
    "RopeQKV": (rope, "rope_qkv_kernel", lambda x: rope.rope_qkv(x.repeat(1, 2), 1)[0]),
    "SwiGLU": (swiglu, "_swiglu_forward_kernel", lambda x: swiglu.swiglu(x, x)),
    "WeightedSum": (
        weighted_sum, "_weighted_sum_forward_kernel", lambda x: weighted_sum.weighted_sum(x, torch.ones_like(x[0]))
    ),
    "LinearCrossEntropy": (linear_cross_entropy, "cross_entropy_forward_kernel", predict),
    "AdamW": (kernels, "adamw_update_kernel", update),
}  # fmt: skip


@pytest.mark.parametrize(("module", "kernel", "call"), CALLS.values(), ids=CALLS.keys())
def test_cpu_tensors_need_the_interpreter(module, kernel, call, monkeypatch):
    monkeypatch.setattr(module, kernel, triton.JITFunction(getattr(module, kernel).fn))
    with pytest.raises(CapabilityError, match="got cpu: set TRITON_INTERPRET=1"):
        call(torch.ones(2, 3))


@pytest.mark.parametrize("name", ["RMSNorm", "Rope", "RopeQKV", "SwiGLU"])
def test_autocast_decides_the_dtype_of_the_output(name, device):
    with torch.autocast(device.type, torch.bfloat16):
        assert CALLS[name][-1](torch.ones(2, 3, device=device)).dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["RMSNorm", "Rope", "SwiGLU", "WeightedSum"])
def test_offsets_beyond_2_31_elements(name):
    torch.manual_seed(0)
    far = torch.zeros(2**31 + 64, dtype=torch.float16, device="cuda").as_strided((3, 64), (2**30, 1))
    far.copy_(torch.randn(3, 64))
    results = []
    for x in (far.requires_grad_(), far.detach().contiguous().requires_grad_()):
        output = CALLS[name][-1](x)
        results.append((output, *torch.autograd.grad(output.square().sum(), x)))
    torch.testing.assert_close(*results)


def test_fake_tensors_need_no_kernel(monkeypatch):
    monkeypatch.setattr(swiglu, "_swiglu_forward_kernel", triton.JITFunction(swiglu._swiglu_forward_kernel.fn))
    with FakeTensorMode():
        assert swiglu.swiglu(torch.ones(3), torch.ones(3)).shape == (3,)


# Rotations are linear, and an update has no gradient.
@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"Rope", "AdamW"}))
def test_second_derivative_is_refused(name, device):
    x = torch.ones(2, 3, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match=f"{name} is differentiable once"):
        torch.autograd.grad(CALLS[name][-1](x).sum(), x, create_graph=True)


def test_operators_in_compiled_code_refuse_forward_mode(device):
    x = torch.ones(2, 3, device=device)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        torch.ops.cs336sys.swiglu_forward(forward_ad.make_dual(x, x), x, x.dtype)  # It gave no tangent.
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.jvp(lambda gate: torch.ops.cs336sys.swiglu_forward(gate, x, x.dtype), (x,), (x,))  # It gave 0.


@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (128, 32), (300, 70), (0, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_integers_are_added_exactly(shape, dtype, device):
    torch.manual_seed(0)
    partials = torch.randint(-1, 2, shape, device=device).float()
    total = sum_of_partials(partials, dtype)
    assert total.dtype == dtype
    assert torch.equal(total.double(), partials.double().sum(0))


def test_half_precision_is_rounded_once(device):
    # Ones added up in float16 would stay at 2048.
    partials = torch.ones(3000, 2, device=device)
    assert sum_of_partials(partials, torch.float16).tolist() == [3000, 3000]
