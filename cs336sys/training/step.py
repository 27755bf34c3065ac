"""A training step with named phases."""

import contextlib
import functools
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, cast

import torch
import torch.nn.functional as F
from cs336_basics.nn_utils import cross_entropy
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from cs336sys.errors import CapabilityError
from cs336sys.machine.device import DTYPES
from cs336sys.results.model import Samples
from cs336sys.run.cells import Progress
from cs336sys.settings.choices import CUDA_GRAPHS_MODULE, FUSED_KERNELS_MODULE, MODES, WARM_UP_STEPS
from cs336sys.settings.training import Workload
from cs336sys.timing.phases import time_phases
from cs336sys.training import user_models
from cs336sys.training.model import blocks_of, build_model, build_optimizer, make_batch

AUTOCAST_DTYPES = {name: DTYPES[name] for name in ("bf16", "fp16")}


class TrainStep:
    """One training step of a workload, cut into the phases that are timed.

    Args:
        model, optimizer: what takes the place of the workload's own, for example a wrapper around its model.
        share: which sequences of the workload's batch to train on.
        scaler: scales the loss; None scales it where autocast computes in fp16.

    Attributes:
        phases: the phases of the workload's mode in order; calling them all is one step.
        phases_with_loss: the same, with the loss taken out of the forward pass as a phase of its own, unless a fused
            kernel computes it together with the logits.
        loss: what the last forward pass returned.
        takes_half_gradients: whether float32 parameters may have gradients in bf16.
        warmup_of_capture: steps that :meth:`capture` runs before it captures.
        loss_without_logits: a fused kernel's function that computes logits and loss together; None without one.
        fused: the model's fused kernels; None without.
        graphs: the step in CUDA graphs, a ``GraphedStep``, once :meth:`capture` has been called.
    """

    takes_half_gradients = True
    warmup_of_capture = WARM_UP_STEPS

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        share: slice = slice(None),
        scaler: torch.amp.GradScaler | None = None,
    ):
        if workload.scales_loss and device.type == "cpu":
            _check_fp16_on_cpu()
        self.workload = workload
        self.device = device
        self.model = build_model(workload, device) if model is None else model
        self._share = share
        # Steps read inputs and targets, which graphs keep for ever; the next replay copies _batch there.
        self.inputs, self.targets = self._batch = self._share_of_batch(number=0)
        self.optimizer = optimizer
        if optimizer is None and workload.updates_parameters:
            self.optimizer = build_optimizer(workload, self.model.parameters())
        self.fused: Any = None
        self.loss_without_logits: Callable[..., Tensor] | None = None
        if workload.fused_kernels:
            self._use_fused_kernels()
        if workload.update == "backward":
            blocks = [list(block.parameters()) for block in blocks_of(workload, self.model).values()]
            # The workload's settings allow this with our AdamW alone.
            cast("Any", self.optimizer).update_in_backward(blocks)
        # fp16 gradients underflow unless the loss is scaled up (Micikevicius et al. 2018, section 3.2).
        if scaler is None:
            scaler = torch.amp.GradScaler(device.type, enabled=workload.scales_loss)
        self.scaler = scaler
        self._loss_function = cross_entropy if workload.user.loss is None else user_models.load(workload.user.loss)
        if workload.is_compiled:
            self._loss_function = torch.compile(self._loss_function, dynamic=False)
        self.loss: Tensor | None = None
        self.graphs: Any = None
        self._output: Any = None  # What the model returned: logits, (batch, context, vocabulary), if it is ours.
        runs = {"forward": self.forward, "backward": self.backward, "optimizer": self.optimizer_step}
        self.phases: dict[str, Callable[[], None]] = {name: runs[name] for name in MODES[workload.mode].phases}
        self.phases_with_loss = self.phases
        if self.loss_without_logits is None:
            later_phases = {name: run for name, run in self.phases.items() if name != "forward"}
            self.phases_with_loss = {"forward": self.compute_logits, "loss": self.compute_loss} | later_phases
        self._launched, self._launched_with_loss = self.phases, self.phases_with_loss  # For release_graphs().

    def _use_fused_kernels(self) -> None:
        """Compute the loss with the model's fused kernels, and keep copies of weights for them in half precision."""
        workload = self.workload
        self.fused = import_module(FUSED_KERNELS_MODULE).fused_kernels(self.model)
        if self.fused is None:
            return  # A model that the caller has built need not be fused.
        if self.fused.computes_loss and workload.user.loss is None:
            self.loss_without_logits = self.fused.loss
        half = AUTOCAST_DTYPES.get(workload.precision)
        # Without an optimizer nothing changes weights; our AdamW, which alone has attach_copy(), writes copies, too.
        keeps_copies_fresh = self.optimizer is None or hasattr(self.optimizer, "attach_copy")
        has_copies = self.fused.copies is not None  # Split weights have them, and a strategy of ranks may make them.
        if half is not None and keeps_copies_fresh and workload.is_fused and not has_copies:
            # Autocast rounds gradients, too. Those of fp16 are unscaled, which torch does in fp32 alone.
            in_bf16 = half == torch.bfloat16 and self.takes_half_gradients
            self.fused.keep_copies(half, self.optimizer, gradient_dtype=half if in_bf16 else torch.float32)

    def __call__(self) -> None:
        for phase in self.phases.values():
            phase()

    def use_batch(self, number: int) -> None:
        """Train on another batch of the workload from now on, see :func:`make_batch`."""
        self.use(*self._share_of_batch(number))

    def use(self, inputs: Tensor, targets: Tensor) -> None:
        """Train on this batch from now on: of the shape of the workload's, on its device."""
        self._batch = inputs, targets
        if self.graphs is None:  # Else the next replay copies it to where graphs read it.
            self.inputs, self.targets = self._batch

    def weights(self, parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the parameters after a step, and by how much copies of them are out of date, both by name.

        Args:
            parameters: the model's, by name. Those returned are as exact as the optimizer keeps them.

        Returns:
            The second dictionary has a difference, zeros at best, for each copy that the model computes with.
        """
        exact = getattr(self.optimizer, "float32_weight", Tensor.detach)  # Our AdamW completes 16-bit weights.
        names = {parameter: name for name, parameter in parameters.items()}
        copies = () if self.fused is None or self.fused.copies is None else self.fused.copies.differences()
        differences = {f"the copy of {names[weight]}": difference for weight, difference in copies if weight in names}
        return {name: exact(parameter) for name, parameter in parameters.items()}, differences

    def _share_of_batch(self, number: int) -> tuple[Any, Any]:
        batch = make_batch(self.workload, self.device, number)
        return tree_map_only(Tensor, lambda tensor: tensor[self._share], batch)

    def capture(
        self,
        *,
        with_loss: bool = False,
        around: Callable[[str], AbstractContextManager[Any]] = contextlib.nullcontext,
        around_warmup: Callable[[int], AbstractContextManager[Any]] = contextlib.nullcontext,
        recorder: Any = None,
    ) -> None:
        """Replace the phases by CUDA graphs, where the workload says so, after some steps of warm-up that train.

        The first phase copies the batch to where the graphs read it, as training does with every new one.

        Args:
            with_loss: make the loss a graph of its own.
            around, around_warmup, recorder: as of :class:`~cs336sys.training.cuda_graphs.GraphedStep`, which says what
                it refuses.
        """
        if not self.workload.uses_graphs:
            return
        looks_at_gradients = self.optimizer is not None and self.scaler.is_enabled()
        if looks_at_gradients and not getattr(self.optimizer, "_step_supports_amp_scaling", False):
            raise CapabilityError(
                f"{type(self.optimizer).__name__} with fp16: the CPU looks at the gradients in every step to decide "
                "whether to skip it, which a CUDA graph cannot; choose fused, whose kernel decides, or bf16"
            )
        self.release_graphs()
        cuda_graphs = import_module(CUDA_GRAPHS_MODULE)
        if recorder is None and self.device.type == "cuda":
            recorder = cuda_graphs.CudaRecorder(self.device, self._capture_stream)
        self.graphs = cuda_graphs.GraphedStep(
            self._launched_with_loss if with_loss else self._launched,
            _batch_tensors((self.inputs, self.targets)),
            optimizers=[] if self.optimizer is None else [self.optimizer],
            warmup=self.warmup_of_capture,
            around=around,
            around_warmup=around_warmup,
            recorder=recorder,
        )
        assert self.loss is not None, "the forward pass has set it"
        self.loss = self.loss.detach()  # Replays write its memory, and need no autograd graph.
        self._batch = tree_map_only(Tensor, Tensor.clone, (self.inputs, self.targets))  # Apart: a replay copies it.
        phases = dict(self.graphs.phases)
        first_phase, replay = next(iter(phases.items()))
        phases[first_phase] = functools.partial(self._replay_on_batch, replay)
        self.phases = self.phases_with_loss = phases

    @functools.cached_property
    def _capture_stream(self) -> torch.cuda.Stream:
        """Return one stream for all captures: cuBLAS never frees its workspace of a stream, and peaks include it."""
        return torch.cuda.Stream(self.device)

    def release_graphs(self) -> None:
        """Launch the phases again, and free what the graphs and the last step hold."""
        self.phases, self.phases_with_loss = self._launched, self._launched_with_loss
        self.inputs, self.targets = self._batch
        # The last step's autograd graph, which the loss holds, is bound to the stream that it was launched on.
        self.loss = self.graphs = None

    def _replay_on_batch(self, replay: Callable[[], None]) -> None:
        assert self.graphs is not None
        self.graphs.load(*_batch_tensors(self._batch))
        replay()

    def forward(self) -> None:
        """Compute logits and loss; without gradients in mode ``forward``."""
        if self.loss_without_logits is None:
            self.compute_logits()
            self.compute_loss()
            return
        with self._precision():
            call = functools.partial(user_models.call_model, self.model)
            self.loss = self.loss_without_logits(call, self.inputs, self.targets)

    def compute_logits(self, watching: AbstractContextManager[None] = contextlib.nullcontext()) -> None:
        with self._precision(), watching:
            self._output = user_models.call_model(self.model, self.inputs)

    def compute_loss(self) -> None:
        output, self._output = self._output, None  # Logits are large: they are not held until the next forward pass.
        user = self.workload.user
        with self._precision():
            if user.loss is None and user.model is not None:
                output = user_models.token_logits(output, self.targets, user.model, self.workload.size.vocab_size)
            loss = self._loss_function(output, self.targets)
        if user.loss or user.model:
            with_gradients = self.workload.has_backward
            loss = user_models.scalar_loss(loss, str(user.loss or user.model), with_gradients=with_gradients)
        self.loss = loss

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        """Within this, compute under the workload's autocast, with gradients where its mode needs them."""
        dtype = AUTOCAST_DTYPES.get(self.workload.precision)
        autocast = torch.autocast(self.device.type, dtype) if dtype else contextlib.nullcontext()
        gradients = contextlib.nullcontext() if self.workload.has_backward else torch.no_grad()
        with autocast, gradients:
            yield

    @property
    def batch(self) -> list[Tensor]:
        """List the tensors that a step reads, and those that it would be given next."""
        return _batch_tensors((self.inputs, self.targets, self._batch))

    def backward(self) -> None:
        assert self.loss is not None
        self.scaler.scale(self.loss).backward()
        if self.optimizer is None:
            self.model.zero_grad()  # No optimizer step drops the gradients.

    def optimizer_step(self) -> None:
        """Update the parameters and drop the gradients."""
        assert self.optimizer is not None
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def _batch_tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def _check_fp16_on_cpu() -> None:
    """Refuse fp16 where torch has no product of it on this CPU."""
    try:
        with torch.autocast("cpu", torch.float16):
            F.linear(torch.ones(1, 1), torch.ones(1, 1))
    except RuntimeError as error:
        raise CapabilityError(f"precision 'fp16': torch cannot run it on this CPU ({error}); choose bf16") from error


def set_matmul_precision(workload: Workload) -> None:
    """Set for the whole process whether fp32 matrix products may use TF32, and silence torch's advice on it."""
    torch.set_float32_matmul_precision("high" if workload.tf32 else "highest")  # "high" allows TF32.
    # Inductor recommends TF32 where it is off; here --tf32 decides, and the results name it.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
    # torch warns once that autograd's thread had no context before its first matrix product, which is harmless.
    warnings.filterwarnings("ignore", message=".*no current CUDA context")


def draw_alike(step: int, rank: int) -> None:
    """Let the random numbers of a step be those that every process draws for this rank's share of its batch."""
    seed = 1_000_003 * step + rank  # Another for every rank and step, as there are fewer ranks.
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:  # Else nobody draws from it.
        sys.modules["numpy"].random.seed(seed)


def random_state(device: torch.device) -> Any:
    """Return the states of all generators of random numbers: they differ once a number was drawn."""
    numpy = sys.modules.get("numpy")
    gpu_state = torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else None
    numpy_state = str(numpy.random.get_state()) if numpy is not None else None
    return torch.get_rng_state().tolist(), gpu_state, random.getstate(), numpy_state


def time_steps(
    step: TrainStep,
    phases: Mapping[str, Callable[[], None]],
    progress: Progress = lambda stage: None,
    *,
    warmup: int | None = None,
) -> dict[str, Samples]:
    """Time phases by :func:`~cs336sys.timing.phases.time_phases` as the step's workload says, or with other warm-up."""
    workload = step.workload
    return time_phases(
        phases,
        warmup=workload.warmup if warmup is None else warmup,
        steps=workload.steps,
        device=step.device,
        synchronize_steps=workload.synchronize == "step",
        progress=progress,
    )


def training_warnings(loss: Tensor | float | None, workload: Workload) -> list[str]:
    """Return what was wrong with steps that ran, as notes that begin with ``warning:``, which commands print at once.

    Either the loss is infinite or no number, or calls went to torch's attention that our kernels were to compute. A
    model may call attention otherwise once it is compiled or captured: transformers then adds a mask (masking_utils.py,
    torch < 2.14).
    """
    name = workload.user.model or "the model"
    # A step has no loss before it has run.
    last_loss = 0.0 if loss is None else float(loss.detach() if isinstance(loss, Tensor) else loss)
    warnings = []
    if not math.isfinite(last_loss):
        warnings.append(f"warning: {name}: the loss is {last_loss}: the measured steps train nothing")
    if workload.attention_record.is_ours and (workload.is_compiled or workload.uses_graphs):
        changed = "compiled" if workload.is_compiled else "captured"
        warnings += [
            f"warning: {name}: {changed}, it calls torch's attention, {reason}: not all of it is flash"
            for reason in sorted(user_models.left_to_torch)
        ]
    return warnings


def with_notes(derived: Mapping[str, Any], notes: Sequence[str]) -> dict[str, Any]:
    """Return derived columns with these notes after those that they have."""
    return {**derived, "notes": [*derived.get("notes", ()), *notes]} if notes else dict(derived)
