"""Effects of low precision on a sum, and the dtypes that autocast gives to the parts of a model.

Source: handout, problems mixed_precision_accumulation and benchmarking_mixed_precision.
"""

import warnings
from collections.abc import Callable
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cs336sys.errors import CapabilityError
from cs336sys.machine.device import DTYPES
from cs336sys.results.model import Cell

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

TERM = 0.01
TERMS = 1000


def accumulate(device: torch.device) -> dict[str, float]:
    """Add :data:`TERMS` times :data:`TERM`, exactly 10, one addition after another, in the handout's four ways."""
    cases = (
        ("fp32 += fp32", torch.float32, torch.float32, False),
        ("fp16 += fp16", torch.float16, torch.float16, False),
        ("fp32 += fp16", torch.float32, torch.float16, False),
        ("fp32 += fp16 upcast to fp32 first", torch.float32, torch.float16, True),
    )
    sums = {}
    for name, sum_dtype, term_dtype, upcast in cases:
        total = torch.tensor(0, dtype=sum_dtype, device=device)
        for _ in range(TERMS):
            term = torch.tensor(TERM, dtype=term_dtype, device=device)
            total += term.type(sum_dtype) if upcast else term
        sums[name] = total.item()
    return sums


class ToyModel(nn.Module):
    """The handout's model, with a choice of normalization."""

    def __init__(self, in_features: int, out_features: int, norm: type[nn.Module] = nn.LayerNorm):
        super().__init__()
        self.fc1 = nn.Linear(in_features, 10, bias=False)
        self.ln = norm(10)
        self.fc2 = nn.Linear(10, out_features, bias=False)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.fc1(x))
        x = self.ln(x)
        return self.fc2(x)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cross-entropy": F.cross_entropy, "mse": F.mse_loss}

_BATCH, _IN_FEATURES, _OUT_FEATURES = 4, 20, 5


def autocast_dtypes(precision: str, loss_function: str, device: torch.device) -> dict[str, str]:
    """Run one training step of the toy model under autocast and see which dtype each part has.

    Args:
        precision: what autocast casts to: ``fp16`` or ``bf16``.
        loss_function: a name of :data:`LOSSES`.

    Returns:
        ``fp32``, ``fp16`` or ``bf16`` of: ``parameters``, as seen inside the autocast context; ``fc1``;
        ``layer_norm``; ``rms_norm``, of a model with it instead of the layer norm; ``logits``; ``loss``;
        ``loss_outside``, the same loss of the same logits after the context was left; ``gradients``.

    Raises:
        CapabilityError: this device or torch cannot run it.
    """
    try:
        with_layer_norm = _train_step(nn.LayerNorm, DTYPES[precision], loss_function, device)
        with_rms_norm = _train_step(nn.RMSNorm, DTYPES[precision], loss_function, device)
    except RuntimeError as error:
        # The errors for a dtype that a device lacks differ by device and operation; this is their common base.
        raise CapabilityError(str(error).splitlines()[0]) from error
    layer_norm = with_layer_norm.pop("ln")
    return with_layer_norm | {"layer_norm": layer_norm, "rms_norm": with_rms_norm["ln"]}


def _train_step(
    norm: type[nn.Module], autocast_dtype: torch.dtype, loss_function: str, device: torch.device
) -> dict[str, str]:
    """Return the dtype of each part: parameters, fc1, ln, logits, loss, loss_outside, gradients."""
    model = ToyModel(_IN_FEATURES, _OUT_FEATURES, norm).to(device)
    x = torch.randn(_BATCH, _IN_FEATURES, device=device)
    if loss_function == "cross-entropy":
        targets = torch.randint(_OUT_FEATURES, (_BATCH,), device=device)
    else:
        targets = torch.randn(_BATCH, _OUT_FEATURES, device=device)
    compute_loss = LOSSES[loss_function]
    seen: dict[str, set[torch.dtype]] = {}  # By part; parameters and gradients could have several.

    for part, module in (("fc1", model.fc1), ("ln", model.ln), ("logits", model.fc2)):
        module.register_forward_hook(lambda _, inputs, output, part=part: seen.update({part: {output.dtype}}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # No autocast (refused below), or no fused kernel of a norm for mixed dtypes.
        with torch.autocast(device.type, autocast_dtype):
            if not torch.is_autocast_enabled(device.type):
                raise RuntimeError(f"torch {torch.__version__} does not autocast to {autocast_dtype} on {device.type}")
            logits = model(x)
            loss = compute_loss(logits, targets)
            seen["parameters"] = {parameter.dtype for parameter in model.parameters()}
        seen["loss"] = {loss.dtype}
        seen["loss_outside"] = {compute_loss(logits, targets).dtype}
        loss.backward()
        seen["gradients"] = {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None}
    return {part: ", ".join(sorted(_NAMES[dtype] for dtype in dtypes)) for part, dtypes in seen.items()}


def precision_cells(precisions: list[str], device: torch.device, run_id: str) -> list[Cell]:
    """Return a cell for each way to add, and for each precision and loss."""
    cells = []
    for name, total in accumulate(device).items():
        error = abs(total - TERMS * TERM)
        errors = {"absolute_error": error, "relative_error_percent": 100 * error / (TERMS * TERM)}
        configuration = {"accumulation": name, "device": device.type}
        cells.append(Cell("precision", configuration, status="ok", derived={"sum": total} | errors, run_id=run_id))
    for precision, loss in product(precisions, LOSSES):
        configuration = {"precision": precision, "loss_function": loss, "device": device.type}
        try:
            dtypes = autocast_dtypes(precision, loss, device)
            cells.append(Cell("precision", configuration, status="ok", derived=dtypes, run_id=run_id))
        except CapabilityError as error:
            cells.append(Cell("precision", configuration, status="unsupported", reason=str(error), run_id=run_id))
    return cells
