"""A fused kernel of the user's beside ours: honest ones are timed, and shortcuts do not pass."""

import pytest

from cs336sys.commands.kernels import measure as measurement
from cs336sys.errors import UserCodeError
from cs336sys.settings.operations import KernelWorkload

HONEST = """
import torch, torch.nn.functional as F

def rms_norm(x, weight):
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), 1e-5)

def add_rms_norm(x, weight, residual):
    return rms_norm(x + residual, weight), x + residual

def swiglu(gate, up):
    return F.silu(gate) * up

def cross_entropy(hidden, weight, targets):
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)

def weighted_sum(x, weight):
    return x @ weight

kept = {}

def replay(x, weight):
    if x.shape not in kept:
        kept[x.shape] = rms_norm(x, weight).detach()
    return kept[x.shape].clone()

def loss_without_gradient(hidden, weight, targets):
    loss = cross_entropy(hidden, weight, targets)
    return loss + 0 * hidden.sum() - (loss - loss.detach())

def even_rows_alone(x, weight):
    assert len(x) % 2 == 0
    return rms_norm(x, weight)
"""


@pytest.fixture
def measure(tmp_path):
    (tmp_path / "mine.py").write_text(HONEST)

    def measured(op, name, **more):
        settings = {"dtype": "fp32", "device": "cpu", "warmup_ms": 0.5, "repetition_ms": 1.0} | more
        settings |= {"vocab_size": 61} if op == "linear-cross-entropy" else {}
        workload = KernelWorkload(op, f"{tmp_path}/mine.py:{name}", 16, 32, **settings)
        return measurement.measure_own_kernel(workload.configuration(), lambda stage: None)

    return measured


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("rms-norm", "rms_norm"),
        ("add-rms-norm", "add_rms_norm"),
        ("swiglu", "swiglu"),
        ("linear-cross-entropy", "cross_entropy"),
        ("weighted-sum", "weighted_sum"),
    ],
)
def test_honest_functions_are_timed(measure, op, name):
    outcome = measure(op, name)
    assert outcome.status == "ok", outcome.reason
    assert set(outcome.samples) == {"forward", "backward", "end_to_end"}
    assert outcome.derived["end_to_end_tflops" if op == "linear-cross-entropy" else "forward_gbps"] > 0


@pytest.mark.parametrize(("op", "name"), [("rms-norm", "replay"), ("linear-cross-entropy", "loss_without_gradient")])
def test_other_functions_are_wrong(measure, op, name):
    outcome = measure(op, name)
    assert outcome.status == "wrong"
    assert "relative error" in outcome.reason


def test_a_function_of_another_op_is_the_user_s_error(measure):
    with pytest.raises(UserCodeError, match="gate"):
        measure("swiglu", "rms_norm")


def test_refused_rows_are_told(measure):
    assert "does not take 131 rows, 1 rows" in measure("rms-norm", "even_rows_alone").derived["notes"][0]
