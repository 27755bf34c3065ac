import functools
import importlib.util
import sys
import sysconfig
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from cs336sys.commands.bench.measure import BuiltStep, measure_training, training_outcome
from cs336sys.errors import CapabilityError, UserCodeError
from cs336sys.kernels.adamw import AdamW
from cs336sys.kernels.attention import flash_attention
from cs336sys.parity import step
from cs336sys.parity.weights import STEPS
from cs336sys.results.model import Samples
from cs336sys.run.cells import guarded
from cs336sys.settings.profiling import MemoryWorkload
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import UserCode, Workload
from cs336sys.training import flop_counting, user_models
from cs336sys.training.flop_counting import count_step, counted_columns
from cs336sys.training.memory_prediction import predicted_timeline
from cs336sys.training.model import blocks_of, build_optimizer
from cs336sys.training.operation_counting import count_model
from cs336sys.training.step import TrainStep, training_warnings
from cs336sys.training.user_models.loading import user_folders

SIZE = choose_size("tiny", context=16, batch_size=2, vocab_size=50, d_model=32, d_ff=64, num_heads=4)
CPU = torch.device("cpu")
# Where kernels run: on a CPU in the interpreter, where there is no GPU.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FILE = Path(__file__).parents[1] / "user_models.py"
TRITON = FILE.with_name("triton_model.py")
IMAGES = {"batch": f"{FILE}:images", "loss": f"{FILE}:classes"}

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs the package transformers"
)
LANGUAGE_MODELS = [
    "ours",
    "Encoder",
    pytest.param("llama", marks=needs_transformers),
    pytest.param("gpt2", marks=needs_transformers),
]


@pytest.fixture(autouse=True)
def torchs_own_functions():
    yield
    F.scaled_dot_product_attention = user_models.torch_attention


def workload(model, *, blocks=None, batch=None, loss=None, **settings):
    user = UserCode(f"{FILE}:{model}", loss=loss, batch=batch, blocks=blocks)
    return Workload(SIZE, **{"device": "cpu", "warmup": 1, "steps": 1, **settings}, user=user)


def silent(stage):
    pass


def counts(model, **settings):
    return counted_columns(TrainStep(workload(model, **settings), CPU), silent)


def outcome_of(cell):
    return guarded(measure_training, cell.configuration(), silent)


@pytest.mark.parametrize("model", LANGUAGE_MODELS)
def test_a_language_model_of_the_users_is_trained(model):
    step = TrainStep(workload(model), CPU)
    losses = []
    for _ in range(6):
        step()
        losses.append(step.loss.item())
    assert losses[-1] < losses[0]
    assert len(blocks_of(step.workload, step.model)) == SIZE.num_layers


def test_a_model_without_tokens_is_measured():
    cell = replace(workload("Classifier", **IMAGES), optimizer=f"{FILE}:sgd")
    outcome = outcome_of(cell)
    assert outcome.status == "ok", outcome.reason
    step = outcome.samples["step"]
    assert outcome.derived["tokens_per_s"] is None
    assert outcome.derived["examples_per_s"] == pytest.approx(SIZE.batch_size / step.mean * 1e3)
    # Stem: 8 x 8 positions, blocks: 8 x 8 and 4 x 4; the images' gradient is not computed.
    stem, pixels = 2 * 64 * 8 * 3 * 9, 2 * 8 * 8 * 9
    forward = stem + SIZE.num_layers * pixels * (64 + 16) + 2 * 8 * 10
    assert outcome.derived["flops"] == SIZE.batch_size * (3 * forward - stem)


def test_fused_kernels_leave_the_flops_of_a_users_model_and_say_what_they_replace():
    plain, fused = (
        TrainStep(workload("Gated", kernels=kernels, device=DEVICE.type), DEVICE) for kernels in ("reference", "fused")
    )
    counted, expected = (counted_columns(step_, silent) for step_ in (fused, plain))
    assert counted["flops"] == expected["flops"]
    note = "fused kernels replace 5 x rms-norm, 2 x swiglu, 1 x linear-cross-entropy"
    assert set(counted["notes"]) - set(expected["notes"]) == {f"{FILE}:Gated: {note}"}


def test_wrong_update_is_not_explained_by_rounding(monkeypatch):
    """The last update of one weight is left out; the gradient of another is zero but for rounding."""
    write, moved, planted = AdamW.step, [], {}

    def step_without_last_query(self, closure=None):
        query = self.param_groups[0]["params"][2]
        before = query.detach().clone()
        planted.setdefault("start", before)
        write(self, closure)
        moved.append(query.detach() - before)
        if len(moved) == steps:
            query.data.copy_(before)
            planted["percent"] = 100 * moved[-1].norm() / (before + moved[-1] - planted["start"]).norm()

    monkeypatch.setattr(AdamW, "step", step_without_last_query)
    cell = workload("Attentive", optimizer="adamw", device=DEVICE.type)
    plain = TrainStep(cell, DEVICE)
    names = [name for name, _ in plain.model.named_parameters()]
    steps = plain.warmup_of_capture + STEPS
    checked, wrong = step.check_training(cell, DEVICE, silent)
    assert wrong.status == "wrong"
    assert wrong.reason.startswith(f"with our kernels: after 5 steps {names[2]} is off by ")
    assert checked.off.parameter == names[2] == "query.weight"
    assert 100 * checked.off.relative == pytest.approx(planted["percent"].item(), rel=1e-3)


def test_error_of_our_kernels_is_not_put_down_to_the_users_file(monkeypatch):
    monkeypatch.setattr("cs336sys.kernels.rms_norm.forward_settings", None)
    cell = workload("Gated", kernels="fused", device=DEVICE.type)
    outcome = outcome_of(cell)
    assert outcome.status == "error"
    assert outcome.reason.startswith("our kernels failed, called from user_models.py, line ")
    assert outcome.reason.endswith(": TypeError: 'NoneType' object is not callable")


@pytest.mark.parametrize("user", [UserCode(f"{FILE}:Gated", loss=f"{FILE}:half"), UserCode(loss=f"{FILE}:half")])
def test_users_loss_is_computed_with_fused_kernels(user):
    def loss_of(kernels):
        train_step = TrainStep(Workload(SIZE, device=DEVICE.type, user=user, kernels=kernels), DEVICE)
        train_step.forward()
        return train_step.loss.item()

    assert loss_of("fused") == pytest.approx(loss_of("reference"), rel=1e-5)


@pytest.mark.parametrize(("attention", "mode"), [("reference", "train"), ("flash", "forward")])
def test_counts_of_our_model_are_those_of_the_formulas(attention, mode):
    of_formula = Workload(SIZE, mode=mode)
    counted = counts("ours", attention=attention, mode=mode)
    assert (counted["parameters"], counted["flops"]) == (of_formula.parameters, of_formula.flops)


WINDOW_OF_4 = 16 * 4 - 4 * 3 // 2


@pytest.mark.parametrize(
    ("model", "pairs"),
    [
        ("causal_by_flag", 16 * 16 // 2),
        ("causal_by_mask", 16 * 16 // 2),
        ("causal_by_products", 16 * 16 // 2),
        ("window_by_mask", WINDOW_OF_4),
        ("window_by_products", WINDOW_OF_4),
        # What depends on the batch hides nothing for certain.
        ("padding_by_mask", 16 * 16),
        ("padding_by_products", 16 * 16),
    ],
)
def test_flops_of_attention_count_the_pairs_that_a_mask_shows(model, pairs):
    counted = counts(model)
    layers = 16 * SIZE.d_model * (3 * SIZE.d_model + SIZE.vocab_size)
    assert counted["flops"] == 3 * 2 * SIZE.batch_size * (layers + 2 * pairs * SIZE.d_model)
    assert counted["flops_are_upper_bound"] == model.startswith("padding")
    assert any("an upper bound" in note for note in counted["notes"]) == model.startswith("padding")
    assert flop_counting.visible_pairs(torch.ones(2, 1, 1, dtype=torch.bool)) == 2, "one pair each"


@needs_transformers
@pytest.mark.parametrize("model", ["mistral", "eager_mistral"])
def test_flops_of_a_model_with_windows_and_groups_are_those_of_its_visible_pairs(model):
    counted = counts(model)
    layers = SIZE.num_layers * (32 * (32 + 2 * 16 + 32) + 3 * 32 * 64) + 32 * SIZE.vocab_size
    pairs = SIZE.num_layers * WINDOW_OF_4
    flops = 3 * 2 * SIZE.batch_size * (16 * layers + 2 * pairs * SIZE.d_model)
    # Some versions of transformers make the rotary angles by a product of 4 frequencies with 16 positions.
    assert counted["flops"] in (flops, flops + 2 * 4 * 16)


def test_mfu_over_100_percent_is_an_error_and_an_upper_bound_has_none(monkeypatch):
    step = TrainStep(workload("ours"), CPU)
    samples = {name: Samples("ms", "cuda events", measured=(1e-3,)) for name in ("step", "wall")}
    monkeypatch.setattr(step, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    counted = {"flops": 10**12, "notes": [], "flops_are_upper_bound": False}
    outcome = training_outcome(BuiltStep(step, counted, 0.0), samples, None, {})
    assert outcome.status == "error"
    assert outcome.reason.startswith("MFU 1494768 %: more FLOPs are counted than the GPU can compute")
    counted["flops_are_upper_bound"] = True
    outcome = training_outcome(BuiltStep(step, counted, 0.0), samples, None, {})
    assert (outcome.status, outcome.derived["mfu_percent"]) == ("ok", None)


@needs_transformers
def test_attention_of_grouped_queries_with_a_scale_is_replaced_and_changes_no_loss():
    losses = {}
    for attention in ("reference", "flash"):
        step = TrainStep(workload("llama", attention=attention), CPU)
        step()
        losses[attention] = step.loss.item()
        notes = counted_columns(step, silent)["notes"]
    assert losses["flash"] == pytest.approx(losses["reference"], rel=1e-5)
    assert any("2 calls of torch's scaled_dot_product_attention are computed by flash" in note for note in notes)
    assert any("masking_utils.py" in note and "waits for the GPU" in note for note in notes)


@pytest.mark.parametrize(
    ("model", "same"),
    [
        pytest.param("llama", ["reference", "sdpa"], marks=needs_transformers),
        ("causal_by_flag", ["reference", "sdpa"]),
        ("causal_by_mask", ["reference", "sdpa", "flash"]),
        ("causal_by_products", ["reference", "sdpa", "flash"]),
        ("ours", ["reference"]),
    ],
)
def test_attentions_that_compute_the_same_are_known(model, same):
    assert counts(model, attention="flash")["same_attention"] == same


def test_attention_that_our_kernels_lack_goes_to_torchs_with_a_note():
    notes = str(counts("Encoder", attention="flash")["notes"])
    assert "2 of its 2 calls of attention go to torch's, with dropout 0.1" in notes
    assert "never calls" in str(counts("Classifier", attention="flash", **IMAGES)["notes"])
    assert F.scaled_dot_product_attention is not user_models.torch_attention
    TrainStep(Workload(SIZE, attention="sdpa", device="cpu"), CPU)
    assert F.scaled_dot_product_attention is user_models.torch_attention, "a cell of ours leaves it alone"


@pytest.mark.parametrize("settings", [{"scale": 0.3}, {"is_causal": True}, {"enable_gqa": True}])
def test_our_attention_is_torchs(settings, monkeypatch):
    """And reads grouped heads in place."""
    generator, heads = torch.Generator().manual_seed(0), []

    def noted(query, key, *inputs, **options):
        heads.append(key.shape[-3])
        return flash_attention(query, key, *inputs, **options)

    monkeypatch.setattr(user_models.attention, "_flash_attention", noted)
    query = torch.randn(2, 4, 8, 16, generator=generator)
    key, value = torch.randn(2, 2, 2 if settings.get("enable_gqa") else 4, 8, 16, generator=generator)
    expected = user_models.torch_attention(query, key, value, **settings)
    assert user_models.AttentionCall(query, key, value, enable_gqa="enable_gqa" in settings).why_not_ours() is None
    torch.testing.assert_close(user_models.attention.our_attention(query, key, value, **settings), expected)
    assert heads == [key.shape[-3]]


@pytest.mark.parametrize(
    ("variant", "queries", "keys", "compiles"),
    [
        (causal_lower_right, 3, 8, False),
        (causal_lower_right, 3, 8, True),
        (causal_lower_right, 8, 8, False),
        (causal_lower_right, 8, 3, False),
        (causal_upper_left, 3, 8, False),
    ],
)
def test_torchs_causal_masks_are_computed_by_flash(variant, queries, keys, compiles):
    query, (key, value) = torch.randn(1, 2, queries, 16), torch.randn(2, 1, 2, keys, 16)
    with warnings.catch_warnings(action="ignore"):
        mask = variant(queries, keys)
    expected = user_models.torch_attention(query, key, value, mask._materialize().bool())
    user_models.left_to_torch.clear()
    user_models.replace_attention("flash")

    def attention(*inputs, **settings):
        return F.scaled_dot_product_attention(*inputs, **settings)

    compute = torch.compile(attention, backend="eager", fullgraph=True) if compiles else attention
    torch.testing.assert_close(compute(query, key, value, attn_mask=mask), expected)
    assert user_models.left_to_torch == set()
    # A head dimension that ours lack.
    wide = [tensor.repeat(1, 1, 1, 20) for tensor in (query, key, value)]
    expected = user_models.torch_attention(*wide, mask._materialize().bool())
    torch.testing.assert_close(compute(*wide, attn_mask=mask), expected)
    assert len(user_models.left_to_torch) == 1


def test_attention_without_dropout_has_a_name_that_the_compiler_reads():
    """A partial had none: the first code that was compiled within it was refused, in a line of the user's."""
    with user_models.nothing_dropped():
        user_models.replace_attention("sdpa")
        assert F.scaled_dot_product_attention.__name__
    user_models.replace_attention("sdpa")
    assert F.scaled_dot_product_attention is user_models.torch_attention


def test_steps_of_flash_are_timed_with_flash(monkeypatch):
    """Counting the FLOPs once left torch's attention in its place, and the first cell of a model timed that."""
    calls, calls_at = [], {}

    def noted(*inputs, **settings):
        calls.append(inputs)
        return flash_attention(*inputs, **settings)

    monkeypatch.setattr(user_models.attention, "_flash_attention", noted)
    flop_counting._count_cached.cache_clear()
    cell = workload("Attentive", attention="flash", steps=2)
    outcome = measure_training(cell.configuration(), lambda stage: calls_at.setdefault(stage, len(calls)))
    assert outcome.status == "ok", outcome.reason
    assert calls_at["step 2/2"] - calls_at["step 1/2"] == 1


def test_attention_that_compiled_code_leaves_to_torch_is_a_warning():
    """transformers gives its blocks a mask once it is compiled."""
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    user_models.left_to_torch.clear()

    @functools.partial(torch.compile, backend="eager", fullgraph=True)
    def attention(query):
        masked = mask if torch.compiler.is_compiling() else None
        return user_models.attention.our_attention(query, query, query, masked, is_causal=masked is None)

    query = torch.randn(1, 2, 8, 16)
    expected = user_models.torch_attention(query, query, query, is_causal=True)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        torch.testing.assert_close(attention(query), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "a capture would not survive another"
    cell = workload("ours", attention="flash", compile="model")
    (warning,) = training_warnings(1.0, cell)
    assert "compiled, it calls torch's attention, with a mask" in warning
    assert training_warnings(1.0, replace(cell, attention="sdpa")) == []
    with user_models.telling_user_errors(cell):
        assert training_warnings(1.0, cell) == [], "of a cell before"


def test_blocks_are_the_most_modules_of_one_class_in_lists():
    classifier = user_models.build(f"{FILE}:Classifier", SIZE)
    names = [f"stages.{stage}.{layer}" for stage in range(2) for layer in range(SIZE.num_layers)]
    assert list(user_models.find_blocks(classifier, None)) == names
    assert list(user_models.find_blocks(classifier, "stages.1.*,stem")) == ["stem", *names[SIZE.num_layers :]]
    with pytest.raises(UserCodeError, match=r"no module has such a name; its lists are 'stages\.\*', 'stages\.0\.\*'"):
        user_models.find_blocks(classifier, "layers.*")


def test_without_blocks_compiling_them_is_refused():
    with pytest.raises(CapabilityError, match="has no list of blocks; choose model, or name them by --blocks"):
        TrainStep(workload("without_blocks", compile="block"), CPU)


def test_an_optimizer_of_the_users_keeps_its_groups():
    cell = replace(workload("Encoder"), optimizer=f"{FILE}:with_groups")
    parameters = list(TrainStep(cell, CPU).model.parameters())
    optimizer = build_optimizer(cell, parameters, lr=1.0, eps=1.0)
    groups = [(group["weight_decay"], group["lr"], group["eps"]) for group in optimizer.param_groups]
    assert groups == [(0.1, 1.0, 1.0), (0.0, 1.0, 1.0)]
    # Whose eps are two, of other meanings: it stays as it is.
    adafactor = build_optimizer(replace(cell, optimizer="torch.optim:Adafactor"), parameters, eps=1.0)
    assert adafactor.param_groups[0]["eps"] == (None, 0.001)
    with pytest.raises(CapabilityError, match="gives matrices and vectors different settings"):
        user_models.optimizer_class(cell.optimizer)
    assert user_models.optimizer_class(f"{FILE}:sgd")[1]["momentum"] == 0.9


def test_logits_come_first_in_a_tuple():
    logits, targets = torch.zeros(2, 16, 50), torch.zeros(2, 16, dtype=torch.int64)
    assert user_models.token_logits((logits, None), targets, "mine.py:build", 50) is logits
    for output in ((), (None, logits), [logits]):
        with pytest.raises(UserCodeError, match=r"it should return logits, \(logits, \.\.\.\) or something with"):
            user_models.token_logits(output, targets, "mine.py:build", 50)


LINES = FILE.read_text().splitlines()


def line_with(text):
    return next(number for number, line in enumerate(LINES, 1) if text in line)


@pytest.mark.parametrize(
    ("model", "settings", "sentence"),
    [
        ("NOT_CALLABLE", {}, "NOT_CALLABLE is an int, and should be a function"),
        ("other_arguments", {}, f"{FILE}:other_arguments failed: TypeError: other_arguments() missing 1 required"),
        ("no_such_field", {}, "'ModelSize' object has no attribute 'n_embd'; it should take a size and return a "
         "torch.nn.Module; a size has name, d_model, d_ff,"),
        ("raises", {}, f"user_models.py, line {line_with('no such size')}: KeyError: 'no such size'"),
        ("OfTheLastToken", {}, "returned logits of shape (2, 1, 50), and (2, 16, 50) (batch, context, vocabulary)"),
        ("OfTheLastToken", {}, "if it takes targets, as nanoGPT's does, def forward(self, tokens): return super()"),
        ("InPlace", {}, "the backward pass needs a tensor that was changed in place; doctor --model names the line"),
        ("Encoder", {"loss": f"{FILE}:of_each"}, "of_each returned a tensor of shape (32,): a loss is one number"),
        ("Encoder", {"loss": f"{FILE}:without_gradients"}, "the loss depends on no parameter"),
        ("Classifier", {**IMAGES, "batch": f"{FILE}:half_a_batch"}, "(1, 3, 16, 16): the batch should come first, 2"),
        ("Classifier", {}, "user_models.py, line "),
    ],
)  # fmt: skip
def test_each_fault_is_one_sentence(model, settings, sentence, capfd, monkeypatch):
    outcome = outcome_of(workload(model, **settings))
    assert outcome.status == "error"
    assert sentence in outcome.reason
    assert "\n" not in outcome.reason
    assert "Traceback" not in capfd.readouterr().err
    if model == "raises":
        monkeypatch.setenv("CS336SYS_DEBUG", "1")
        outcome_of(workload(model))
        assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("import torch\nx = 1 / 0\n", "broken.py, line 2: ZeroDivisionError: division by zero"),
        ("def build(size:\n    pass\n", "broken.py, line 1: SyntaxError: '(' was never closed"),
        ("import no_such_package\n", "broken.py, line 1: ModuleNotFoundError: No module named 'no_such_package'"),
    ],
)
def test_a_file_that_raises_on_import_is_one_sentence(text, sentence, tmp_path):
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(UserCodeError) as raised:
        user_models.load(f"{tmp_path}/broken.py:build")
    assert str(raised.value) == sentence


def test_a_line_that_reads_a_number_is_named():
    reads = count_step(workload("Synchronizing")).reads
    assert list(reads) == [f"tests/user_models.py:{line_with('.item() < 0')} forward"]


def test_kernels_of_triton_are_launched_where_tensors_have_values_alone():
    """Counting launched them with null pointers: an illegal memory access, after which the process has no GPU."""
    triton_workload = replace(workload("ours"), user=UserCode(f"{TRITON}:Doubled"))
    count = count_step(triton_workload)
    products = SIZE.batch_size * SIZE.context * SIZE.d_model * (2 * SIZE.d_model + SIZE.vocab_size)
    assert (count.flops, count.launches, count.failure) == (6 * products, {"double_kernel": 4}, "")
    output_bytes = SIZE.batch_size * SIZE.context * SIZE.d_model * 4
    traced = predicted_timeline(MemoryWorkload(triton_workload), follow_operations=True).timeline
    outputs = [
        allocation
        for allocation in traced.allocations
        if (allocation.phase, allocation.origin.operation) == ("forward", "empty_like")
    ]
    assert [output.size for output in outputs] == [output_bytes] * 2
    with pytest.raises(CapabilityError, match=r"Triton \(double_kernel\)"):
        count_model(triton_workload.configuration(), silent)
    outcome = outcome_of(replace(triton_workload, device=DEVICE.type))
    assert outcome.status == "ok", outcome.reason
    assert outcome.derived["notes"] == [
        f"{TRITON}:Doubled: no FLOPs are counted in kernels of Triton: double_kernel (4 times)"
    ]


MODEL_OF_TWO_LAYERS = """from torch import nn

class Model(nn.Sequential):
    def __init__(self, size):
        super().__init__(nn.Embedding(size.vocab_size, 16), nn.Linear(16, size.vocab_size))

"""


def test_a_package_that_imports_its_parts_late_is_copied_whole(tmp_path):
    """Where a copy was only of what had been imported by then, parts were registered with it, or with the other one."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("known = {}\n")
    (tmp_path / "parts" / "late.py").write_text("import parts\n\nparts.known['rate'] = 2\n")
    (tmp_path / "late_model.py").write_text("import parts\n" + MODEL_OF_TWO_LAYERS + (
        "    def forward(self, tokens):\n        import parts.late\n\n"
        "        return super().forward(tokens) * parts.known['rate']\n"
    ))  # fmt: skip
    cell = replace(workload("ours"), user=UserCode(f"{tmp_path}/late_model.py:Model"))
    real = TrainStep(cell, CPU)
    for forwards in range(2):
        flop_counting._count_cached.cache_clear()
        assert count_step(cell).failure == "", f"after {forwards} forward passes"
        real.forward()


def test_a_model_with_our_kernels_is_traced(tmp_path):
    """Copying the user's code copied ours, too, where it is installed in place: operators were defined again."""
    (tmp_path / "with_ours.py").write_text("from cs336sys.kernels.swiglu import swiglu\n" + MODEL_OF_TWO_LAYERS + (
        "    def forward(self, tokens):\n        x = self[0](tokens)\n        return self[1](swiglu(x, x))\n"
    ))  # fmt: skip
    cell = replace(workload("ours", device=DEVICE.type), user=UserCode(f"{tmp_path}/with_ours.py:Model"))
    traced = predicted_timeline(MemoryWorkload(cell)).timeline
    assert max(traced.totals()) > 3 * 4 * 16 * 2 * SIZE.vocab_size


def test_a_course_package_of_the_users_is_found_beside_its_file(tmp_path):
    package = tmp_path / "cs336_basics"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "mine.py").write_text("from torch.nn import Linear as Model\n")
    (tmp_path / "adapter.py").write_text(
        "from cs336_basics.mine import Model\n\n"
        "def build(size):\n    import cs336_basics.mine\n    return Model(2, 2)\n"
        "\ndef mixed(size):\n    import cs336_basics.model\n"
    )
    try:
        assert isinstance(user_models.build(f"{tmp_path}/adapter.py:build", SIZE), torch.nn.Linear)
        with pytest.raises(UserCodeError, match=r"line 8: ModuleNotFoundError: No module named 'cs336_basics.model'"):
            user_models.build(f"{tmp_path}/adapter.py:mixed", SIZE)
    finally:
        sys.path.remove(str(tmp_path))
        user_folders.remove(str(tmp_path))
    import cs336_basics.model

    assert "BasicsTransformerLM" in vars(cs336_basics.model)
    assert user_models.load(f"{FILE}:BasicsTransformerLM") is cs336_basics.model.BasicsTransformerLM


def test_modules_beside_a_file_stand_in_for_packages_only_during_its_import(tmp_path):
    (tmp_path / "mine.py").write_text("import random, numpy, tabulate\n\ndef build(size): ...\n")
    for name in ("random", "tabulate"):
        (tmp_path / f"{name}.py").write_text("")
    before = list(sys.path)
    installed = {name: sys.modules.pop(name, None) for name in ("random", "tabulate")}
    try:
        build = user_models.load(f"{tmp_path}/mine.py:build")
        assert (sys.path, Path(build.__globals__["random"].__file__).parent) == (
            [*before, str(tmp_path)],
            Path(sysconfig.get_path("stdlib")),
        )
        assert build.__globals__["tabulate"].__file__ == str(tmp_path / "tabulate.py")
    finally:
        for name, module in installed.items():
            # None if nothing had imported it: then the next one must find the installed one.
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module
        sys.path[:] = before
        user_folders.remove(str(tmp_path))


def test_a_check_drops_nothing_and_measuring_does(monkeypatch):
    """Of a step in CUDA graphs, which draws other random numbers than a launched one."""
    x = torch.ones(1000)
    kept = []
    monkeypatch.setattr(step._StepCheck, "run", lambda check: kept.append(torch.equal(F.dropout(x, 0.5), x)))
    step.check_training(workload("Encoder", cuda_graph="on"), CPU, silent)
    assert kept == [True]
    assert not torch.equal(F.dropout(x, 0.5), x)


@pytest.mark.parametrize(
    ("model", "different"),
    [
        ("Classifier", ""),
        ("without_blocks", ""),
        ("Masked", "mask would start otherwise"),
        ("orthogonal", "1.weight would start otherwise"),
        ("with_hooks", "1.weight has hooks"),
        # Whose layers are copies of one.
        ("Encoder", "encoder.layers.0.self_attn.in_proj_weight would start otherwise"),
    ],
)
def test_models_are_filled_layer_by_layer_only_where_that_changes_nothing(model, different):
    initialize, reason = user_models.layer_initializer(f"{FILE}:{model}", SIZE)
    assert reason == different if not different else different in reason
    assert (initialize is None) == bool(different)
