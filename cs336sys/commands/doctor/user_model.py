"""A check of a user's model step by step, small and on the CPU, and of what each command can do with it."""

import math
import traceback
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cs336sys.errors import CapabilityError, UsageError, UserCodeError
from cs336sys.machine.diagnosis.software import Check, faulty
from cs336sys.machine.late_imports import why_no_triton
from cs336sys.settings.training import Workload
from cs336sys.settings.user_code import source_file
from cs336sys.training import user_models
from cs336sys.training.flop_counting import AttentionCalls, count_step
from cs336sys.training.model import blocks_of, initializer_of
from cs336sys.training.step import TrainStep

_CPU = torch.device("cpu")


def check_model(workload: Workload) -> list[Check]:
    """Check imports, training, and what commands need of a user's model, in turn, up to the first that fails.

    Args:
        workload: small, neither compiled nor in a CUDA graph, with the user's model.
    """
    checks: list[Check] = []
    try:
        with user_models.telling_user_errors(workload):
            for check in (_imports, _trains, _blocks, _attention, _kernels, _compiles, _waits, _starts_in_parts):
                checks += check(workload)
    except (UsageError, CapabilityError, UserCodeError) as error:
        name = {_imports: "imports", _trains: "trains", _blocks: "blocks"}.get(check, "model")  # The failed one.
        fix = "imports fail" if check is _imports else "fails"
        return [*checks, _faulty(name, str(error), fix=fix, verdict="missing")]
    return [*checks, *_commands(checks)]


_faulty = partial(faulty, package=__package__)


def _imports(workload: Workload) -> list[Check]:
    references = user_models.references_of(workload)
    for reference in references:
        user_models.load(reference)
    return [Check("imports", f"{', '.join(references)}, code {workload.user.code_digest}")]


def _trains(workload: Workload) -> list[Check]:
    """Train three steps on one batch, and check that losses are finite and that all parameters get gradients."""
    step = TrainStep(workload, _CPU)
    count = sum(parameter.numel() for parameter in step.model.parameters())
    size = workload.size
    sizes = f"d_model {size.d_model}, d_ff {size.d_ff}, {size.num_layers} layers, {size.num_heads} heads"
    checks = [Check("builds", f"{type(step.model).__name__}, {count:,} parameters at {sizes}")]
    losses, without_gradient = [], []
    for number in range(3):
        step.forward()
        assert step.loss is not None
        losses.append(step.loss.item())
        try:
            step.backward()
        except RuntimeError as error:
            # Named after the line that changes a saved tensor, or else the model; 160 characters fit into the table.
            raise UserCodeError(f"{_changed_in_place(workload) or workload.user.model}: {error!s:.160}") from error
        if number == 0:
            trained = [(name, weight) for name, weight in step.model.named_parameters() if weight.requires_grad]
            without_gradient = [name for name, weight in trained if weight.grad is None]
        step.optimizer_step()  # Drops the gradients.
    # Of all tensors the first two, mostly inputs and targets.
    batch = ", ".join(f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in step.batch[:2])
    losses_text = f"batch {batch}; losses {', '.join(f'{loss:.4f}' for loss in losses)}"
    if all(map(math.isfinite, losses)):
        checks.append(Check("trains", losses_text))
    else:
        checks.append(_faulty("trains", f"{losses_text}: a NaN or infinite loss trains nothing", fix="infinite loss"))
    hidden = user_models.hidden_warnings(str(workload.user.model), user_models.hidden_parameters(step.model))
    # Without "warning: ", which the check's verdict says.
    checks += [_faulty("parameters", warning.partition(": ")[2], fix="hidden parameters") for warning in hidden]
    if without_gradient:
        names = f"none for {', '.join(without_gradient[:3])}" + (" ..." if without_gradient[3:] else "")
        checks.append(_faulty("gradients", names, fix="no gradients"))
    return checks


def _changed_in_place(workload: Workload) -> str:
    """Say which line of the user's changes a tensor in place that the backward pass needs; "" if none is found."""
    step = TrainStep(workload, _CPU)
    with _InPlaceChanges() as changes, torch.autograd.graph.saved_tensors_hooks(changes.save, lambda saved: saved):
        step.forward()
    files = [source_file(reference) for reference in user_models.references_of(workload)]
    line = user_models.innermost_line(changes.stack(), files)
    return f"{line} changes a tensor in place that the backward pass needs" if line else ""


class _InPlaceChanges(TorchDispatchMode):
    """Records where tensors that autograd has saved are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self._saved: list[tuple[Tensor, int]] = []  # With its version then; holding tensors keeps addresses unique.
        self._stacks: dict[int, list[tuple[Path, int]]] = {}  # The stack of the first change, by address.

    def save(self, tensor: Tensor) -> Tensor:
        self._saved.append((tensor, tensor._version))
        return tensor

    def stack(self) -> list[tuple[Path, int]]:
        """Return the stack, innermost last, of the change that the backward pass meets first; empty without one."""
        changed = (tensor for tensor, version in reversed(self._saved) if tensor._version != version)
        stacks = (self._stacks.get(tensor.untyped_storage().data_ptr()) for tensor in changed)
        return next(filter(None, stacks), [])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operation, and note the stack where it changes memory of saved tensors."""
        if func._schema.is_mutable:
            addresses = {tensor.untyped_storage().data_ptr() for tensor, _ in self._saved}
            frames = [(Path(frame.filename).absolute(), frame.lineno or 0) for frame in traceback.extract_stack()]
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() in addresses:
                    self._stacks.setdefault(tensor.untyped_storage().data_ptr(), frames)
        return func(*args, **(kwargs or {}))


def _blocks(workload: Workload) -> list[Check]:
    blocks = blocks_of(workload, TrainStep(workload, _CPU).model)
    if not blocks:
        return [_faulty("blocks", "no list of modules of one class", fix="no blocks")]
    names, modules = list(blocks), list(blocks.values())
    return [Check("blocks", f"{len(blocks)} of {type(modules[0]).__name__}: {names[0]} to {names[-1]}")]


def _attention(workload: Workload) -> list[Check]:
    """Count the calls of torch's attention, which ``--attention`` replaces."""
    step = TrainStep(workload, _CPU)
    attention = AttentionCalls()
    with torch.no_grad():
        step.compute_logits(attention.watching())
    calls = attention.calls  # How many, by the reason why --attention flash cannot compute them; "" if it can.
    if not calls:
        return [_faulty("attention", "torch's scaled_dot_product_attention is never called", fix="no attention")]
    counts = f"{calls.total()} calls of torch's scaled_dot_product_attention, {calls['']} of them"
    reasons = "; ".join(f"{times} stay torch's, {reason}" for reason, times in calls.items() if reason)
    summary = f"{counts} --attention flash can compute"
    return [Check("attention", summary, verdict="warn", fix=reasons) if reasons else Check("attention", summary)]


def _kernels(workload: Workload) -> list[Check]:
    if why_no_triton() is not None:
        return []  # --kernels fused does not run here.
    from cs336sys.kernels.fuse import fuse

    try:
        handle = fuse(TrainStep(workload, _CPU).model)
    except UsageError:
        return [Check("kernels", "--kernels fused finds no module that it can replace")]
    replaced = ", ".join(f"{times} x {name}" for name, times in handle.recognized.items())
    # Modules of cs336_basics are replaced without a search for what their outputs compute: none is "recognized".
    return [Check("kernels", f"--kernels fused replaces {replaced or 'the modules of cs336_basics'}")]


def _compiles(workload: Workload) -> list[Check]:
    """Let torch's compiler find the graph breaks, without compiling."""
    if launches := count_step(workload).launches:
        summary = f"not tried: Triton's interpreter runs {', '.join(launches)} here, and cannot be compiled"
        return [Check("compiles", summary)]
    step = TrainStep(workload, _CPU)
    try:
        explained = torch._dynamo.explain(user_models.call_model)(step.model, step.inputs)
    except Exception as error:
        return [_faulty("compiles", f"{type(error).__name__}: {error!s:.120}", fix="compile off")]
    if explained.graph_break_count == 0:
        return [Check("compiles", "the whole model, in one graph")]
    if explained.graph_count == 0:
        return [_faulty("compiles", "nothing: torch.compile leaves the model as it is", fix="compile off")]
    reason = explained.break_reasons[0].reason.strip().splitlines()[0] if explained.break_reasons else ""
    summary = f"in {explained.graph_count} graphs, the first break: {reason:.120}"
    return [_faulty("compiles", summary, fix="graph breaks")]


def _waits(workload: Workload) -> list[Check]:
    """Count a step on the meta device, to find where it would wait for numbers from the GPU."""
    count = count_step(workload)
    if count.failure:
        return [_faulty("counts", f"no FLOPs: {count.failure:.160}", fix="no flops")]
    if count.reads:
        return [_faulty("waits", f"a step reads numbers from tensors: {', '.join(count.reads)}", fix="reads tensors")]
    return [Check("waits", "a step reads no number from a tensor, so a CUDA graph can hold it")]


def _starts_in_parts(workload: Workload) -> list[Check]:
    """Check whether layers can be built one by one, and name layers that several ranks compute differently."""
    model = TrainStep(workload, _CPU).model
    checks = [Check("initial values", "layer by layer, from the meta device")]
    if initializer_of(workload) is None:
        _, reason = user_models.layer_initializer(str(workload.user.model), workload.size)
        checks = [_faulty("initial values", f"of the whole model at once: {reason}", fix="built whole")]
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules()):
        checks.append(Check("batch norm", "over a rank's share of the batch: checks compare with that"))
    if any(isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 for part in model.modules()):
        checks.append(Check("dropout", "ddp and shard train without it, so that their weights can be checked"))
    return checks


def _commands(checks: list[Check]) -> list[Check]:
    """Say what each command can do with the model."""
    is_ok = {check.name: check.verdict == "ok" for check in checks}
    graphs = "" if is_ok.get("waits") else ", but --cuda-graph on"  # "waits" is lacking where no step could be counted.
    blocks = "" if is_ok["blocks"] else ", but --compile block, ranges and tables of blocks"
    return [
        Check("bench", f"all{graphs}{blocks}"),
        Check("nsys", f"all{graphs}{blocks}"),
        Check("memprof", "--checkpoint none, block" if is_ok["blocks"] else "--checkpoint none"),
        Check("ddp", f"all{graphs}"),
        Check("shard", "all" if is_ok["blocks"] else "all; fsdp gathers layer by layer"),
    ]
