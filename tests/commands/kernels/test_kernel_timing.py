import time

import pytest
import torch
from run_commands import invoke, tables

from cs336sys.commands.kernels import measure as measurement
from cs336sys.commands.kernels.measure import TOLERANCES, kernel_errors, measure_kernel
from cs336sys.commands.kernels.operations import OPERATIONS
from cs336sys.errors import CapabilityError, UserCodeError
from cs336sys.settings.operations import KERNELS, KernelWorkload
from cs336sys.timing.calls import time_queued_calls

# Where our kernels run: compiled, or in the interpreter.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def workload(op, implementation="eager", dtype="fp32", tokens=6, width=24):
    return KernelWorkload(op, implementation, tokens, width, dtype, *extent(op), device=DEVICE.type)


def extent(op):
    return 8 if op == "rope" else None, 13 if op == "linear-cross-entropy" else None


@pytest.fixture
def known_copy_rate(monkeypatch):
    monkeypatch.setattr(measurement, "copy_gbps", lambda device: 4.0)


def test_every_op_is_there_with_every_implementation():
    implementations = {name: op.implementations for name, op in KERNELS.items()}
    assert {name: tuple(operation.implementations) for name, operation in OPERATIONS.items()} == implementations


RESULTS = {
    "rms-norm": {"out", "dx", "dweight"},
    "add-rms-norm": {"out", "sum", "dx", "dweight", "dresidual"},
    "rope": {"out", "dx"},
    "swiglu": {"out", "dgate", "dup"},
    "linear-cross-entropy": {"out", "dhidden", "dweight"},
    "adamw": {"parameter", "exp_avg", "exp_avg_sq", "copy"},
    "weighted-sum": {"out", "dx", "dweight"},
}
INSTALLED = [
    (op, name)
    for op, record in KERNELS.items()
    for name in record.implementations
    if name not in ("compiled", "quack", "liger")
]


@pytest.mark.parametrize(("op", "implementation"), INSTALLED)
def test_implementations_agree_with_the_reference(op, implementation):
    dtype = "fp16" if op == "adamw" else "fp32"
    shape, operation = workload(op, implementation, dtype), OPERATIONS[op]
    function = operation.implementations[implementation](shape)
    errors = kernel_errors(function, operation, shape, DEVICE)
    assert set(errors) == RESULTS[op]
    assert max(error.whole for error in errors.values()) < TOLERANCES[dtype]
    assert all(error.whole < TOLERANCES["fp32"] for name, error in errors.items() if name != "copy"), errors


@pytest.mark.parametrize("broken", ["out", "sum", "dx", "dweight", "dresidual"])
def test_an_error_shows_up_under_its_own_name(broken):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            return tuple(tensor.clone() for tensor in inputs)

        @staticmethod
        def backward(ctx, *grads):
            names = ("x", "weight", "residual")
            return tuple(1.5 * g if f"d{name}" == broken else g for name, g in zip(names, grads, strict=True))

    operation, shape = OPERATIONS["add-rms-norm"], workload("add-rms-norm")
    eager = operation.implementations["eager"](shape)

    def function(x, weight, residual):
        outputs = zip(("out", "sum"), eager(*Broken.apply(x, weight, residual)), strict=True)
        return tuple(out + out.detach() if name == broken else out for name, out in outputs)

    errors = kernel_errors(function, operation, shape, DEVICE)
    assert {name for name, error in errors.items() if error.whole > 0.4} == {broken}


@pytest.mark.parametrize(
    ("op", "forward", "backward"),
    [("rms-norm", 2, 3), ("add-rms-norm", 4, 4), ("rope", 2, 2), ("swiglu", 3, 5), ("weighted-sum", 1, 2)],
)
def test_rates_are_of_the_tensors_that_must_be_moved(op, forward, backward, known_copy_rate):
    configuration = workload(op).configuration() | {"warmup_ms": 0, "repetition_ms": 1}
    outcome = measure_kernel(configuration, lambda stage: None)
    assert outcome.status == "ok"
    for part, tensors in {"forward": forward, "backward": backward, "end_to_end": forward + backward}.items():
        gbps = tensors * 6 * 24 * 4 / outcome.samples[part].median / 1e6
        assert outcome.derived[f"{part}_gbps"] == pytest.approx(gbps)
        assert outcome.derived[f"{part}_copy_percent"] == pytest.approx(25 * gbps)
    assert (outcome.derived["over_inputs_gib"] is None) == (DEVICE.type == "cpu")


def test_wrong_implementation_gets_no_time(monkeypatch):
    def wrong(workload):
        return lambda gate, up: gate * up * torch.nan

    monkeypatch.setitem(OPERATIONS["swiglu"].implementations, "ours", wrong)
    outcome = measure_kernel(workload("swiglu", "ours").configuration(), lambda stage: None)
    assert (outcome.status, outcome.samples) == ("wrong", {})
    assert outcome.reason.startswith("relative error over 0.0001: out by nan, dgate by nan")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_step_moves_states_and_copies(dtype, known_copy_rate):
    configuration = workload("adamw", dtype=dtype).configuration() | {"warmup_ms": 0, "repetition_ms": 1}
    outcome = measure_kernel(configuration, lambda stage: None)
    (step,) = outcome.samples.values()
    moved = 6 * 24 * (28 if dtype == "fp32" else 30)
    assert outcome.derived["end_to_end_gbps"] == pytest.approx(moved / step.median / 1e6)


def test_products_have_flops_and_no_copy_rate():
    configuration = workload("linear-cross-entropy").configuration() | {"warmup_ms": 0, "repetition_ms": 1}
    outcome = measure_kernel(configuration, lambda stage: None)
    tflops = 3 * 2 * 6 * 24 * 13 / outcome.samples["end_to_end"].median / 1e9
    assert outcome.derived["end_to_end_tflops"] == pytest.approx(tflops)
    assert outcome.derived["copy_gbps"] is None


@pytest.mark.parametrize("implementation", ["quack", "liger"])
def test_a_package_that_is_not_installed_is_named(implementation, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CapabilityError, match=rf"'{implementation}\w*' needs the package {implementation}-kernel"):
        measure_kernel(workload("rms-norm", implementation).configuration(), lambda stage: None)


def test_command_shows_what_the_machine_has_and_says_what_it_lacks(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    picture = tmp_path / "kernels.png"
    options = "--op swiglu,rope --head-dim 8 --implementation ours,eager,liger --format json --plot"
    result = invoke("kernels --device cpu --dtype fp32 --tokens 4 --width 16 --repetition-ms 1", options, picture)
    (table,) = tables(result).values()
    rows = [(row["op"], row["implementation"], row["head_dim"], row["status"]) for row in table["rows"]]
    assert rows == [
        ("swiglu", "ours", None, "ok"),
        ("swiglu", "eager", None, "ok"),
        ("swiglu", "liger", None, "unsupported"),
        ("rope", "ours", 8, "ok"),
        ("rope", "eager", 8, "ok"),
    ]
    assert table["title"].startswith("kernels: tokens 4, width 16, dtype fp32, ")
    assert any(note.startswith("liger unsupported: ") for note in table["notes"])
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
@pytest.mark.parametrize("op", KERNELS)
def test_gpu_cell_knows_its_memory_and_its_share_of_the_copy_rate(op):
    # Angles of narrow heads take longer than memory.
    head_dim, vocab_size = 128 if op == "rope" else None, extent(op)[1]
    shape = KernelWorkload(op, "ours", 4096, 4096, "bf16", head_dim, vocab_size, repetition_ms=20)
    outcome = measure_kernel(shape.configuration(), lambda stage: None)
    assert outcome.status == "ok", outcome.reason
    assert 25 < outcome.derived.get("end_to_end_copy_percent", 50) < 115
    assert 0 <= outcome.derived["over_inputs_gib"] < 6 * 4096 * 4096 * 2 / 2**30


@pytest.mark.gpu
def test_gpu_is_timed_and_not_the_cpu_that_launches():
    x = torch.ones(2**20, device="cuda")

    def launch_slowly():
        time.sleep(0.005)
        x.add_(1)

    samples = time_queued_calls(launch_slowly, x.device, warmup_ms=1, repetition_ms=50)
    assert len(samples.measured) >= 5
    assert samples.median < 1


# A fused kernel of the user's beside ours: honest ones are timed, and shortcuts do not pass.
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
def measure_own(tmp_path):
    (tmp_path / "mine.py").write_text(HONEST)

    def measured(op, name, **more):
        settings = {"dtype": "fp32", "device": "cpu", "warmup_ms": 0.5, "repetition_ms": 1.0} | more
        settings |= {"vocab_size": 61} if op == "linear-cross-entropy" else {}
        workload = KernelWorkload(op, f"{tmp_path}/mine.py:{name}", 16, 32, **settings)
        return measurement.measure_kernel(workload.configuration(), lambda stage: None)

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
def test_honest_functions_are_timed(measure_own, op, name):
    outcome = measure_own(op, name)
    assert outcome.status == "ok", outcome.reason
    assert set(outcome.samples) == {"forward", "backward", "end_to_end"}
    assert outcome.derived["end_to_end_tflops" if op == "linear-cross-entropy" else "forward_gbps"] > 0


@pytest.mark.parametrize(("op", "name"), [("rms-norm", "replay"), ("linear-cross-entropy", "loss_without_gradient")])
def test_other_functions_are_wrong(measure_own, op, name):
    outcome = measure_own(op, name)
    assert outcome.status == "wrong"
    assert "relative error" in outcome.reason


def test_a_function_of_another_op_is_the_user_s_error(measure_own):
    with pytest.raises(UserCodeError, match="gate"):
        measure_own("swiglu", "rms_norm")


def test_refused_rows_are_told(measure_own):
    assert "does not take 131 rows, 1 rows" in measure_own("rms-norm", "even_rows_alone").derived["notes"][0]
