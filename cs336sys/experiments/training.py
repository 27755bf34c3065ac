"""Builds a model, a batch and a training step with named phases."""

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import cs336_basics.model
import torch
import torch.nn.functional as F
from cs336_basics.nn_utils import cross_entropy
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from cs336sys.accounting.fused import BLOCKS_BESIDE
from cs336sys.cuda_graphs import WARM_UP_STEPS, CudaRecorder, GraphedStep, Recorder
from cs336sys.errors import CapabilityError
from cs336sys.experiments import user_models
from cs336sys.experiments.optimizers import build_optimizer, require_kernels
from cs336sys.experiments.weight_check import STEPS, plainly_trained
from cs336sys.kernels.attention import flash_attention, wait_until_compiled
from cs336sys.workload import PHASES_OF_MODE, Workload

if TYPE_CHECKING:
    from cs336sys.kernels.fuse import Fused

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Causal attention of query, key and value, each (..., heads, S, D).
CausalAttention = Callable[[Tensor, Tensor, Tensor], Tensor]

_model_attention = cs336_basics.model.scaled_dot_product_attention


def _sdpa(Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None) -> Tensor:
    """torch's own attention in the signature of the model's; the only mask the model passes is the causal one."""
    return F.scaled_dot_product_attention(Q, K, V, is_causal=mask is not None)


def _flash(Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None) -> Tensor:
    """This project's attention in the signature of the model's."""
    return flash_attention(Q, K, V, is_causal=mask is not None)


# What takes the place of cs336_basics.model.scaled_dot_product_attention, by the name of workload.ATTENTION.
ATTENTION_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "reference": _model_attention,
    "sdpa": _sdpa,
    "flash": _flash,
}


_CAUSAL = torch.ones((), dtype=torch.bool)


def model_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """The model's own attention, its softmax among it, on (..., S, D)."""
    mask = None
    if is_causal:
        mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
    return _model_attention(query, key, value, mask)


def use_attention(workload: Workload) -> None:
    """Make all models of the process compute attention its way: they look it up in their module at every call.

    A model of the user's may call torch's, or that of ``cs336_basics``.
    """
    if workload.attention == "flash":
        wait_until_compiled()
    cs336_basics.model.scaled_dot_product_attention = ATTENTION_FUNCTIONS[workload.attention]
    if workload.is_ours:
        user_models.as_written()
    else:
        user_models.replace_attention(workload.attention)


@contextlib.contextmanager
def attention_replaced(attention: Callable[..., Tensor]) -> Iterator[None]:
    """Within this context, all models of the process compute attention by this function, of the model's signature."""
    before = cs336_basics.model.scaled_dot_product_attention
    cs336_basics.model.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        cs336_basics.model.scaled_dot_product_attention = before


def causal_attention(name: str) -> CausalAttention | None:
    """Causal attention of query, key and value by its name; None for the model's own, which looks at the mask."""
    return None if name == "reference" else _with_causal_mask(ATTENTION_FUNCTIONS[name])


# The same for all models, so that what is compiled for one serves the others.
@functools.cache
def _with_causal_mask(compute: Callable[..., Tensor]) -> CausalAttention:
    # Of the mask these functions see only that there is one.
    return lambda query, key, value: compute(query, key, value, _CAUSAL)


def _of_causal_models(attention: CausalAttention) -> Callable[..., Tensor]:
    """The same in the signature of the model's, whose only mask is the causal one."""
    return lambda Q, K, V, mask=None: attention(Q, K, V)


def give_positions(model: nn.Module, positions: Tensor) -> None:
    """Let the model's attention rotate queries and keys by where their tokens stand, in place of 0 to S - 1.

    Args:
        model: of ``cs336_basics``, this project's or anybody's.
        positions: (S,), int64.

    Raises:
        CapabilityError: its attention takes no ``token_positions``.
    """
    attention_class = cs336_basics.model.CausalMultiHeadSelfAttention
    if "token_positions" not in inspect.signature(attention_class.forward).parameters:
        raise CapabilityError(
            "cs336_basics.model.CausalMultiHeadSelfAttention.forward takes no token_positions, so that a rank cannot "
            "tell it where its slice of a sequence is: add the argument, or choose a strategy that splits no sequence"
        )

    def with_positions(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args[:1], kwargs | {"token_positions": positions}

    for module in model.modules():
        if isinstance(module, attention_class):
            module.register_forward_pre_hook(with_positions, with_kwargs=True)


def build_model(
    workload: Workload,
    device: torch.device,
    attention: CausalAttention | None = None,
    compile_options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """The workload's model on ``device``: initialized from its seed, compiled as it says.

    Attention is replaced for the whole process, see :func:`use_attention`.

    Args:
        attention: in place of the workload's, of our model.
        compile_options: what torch.compile is told about blocks.

    Raises:
        UserCodeError: the user's function does not give a model.
    """
    use_attention(workload)
    if attention is not None:
        cs336_basics.model.scaled_dot_product_attention = _of_causal_models(attention)
    torch.manual_seed(workload.seed)
    with device:
        model = _plain_model(workload)
    if any(tensor.device.type != device.type for tensor in (*model.parameters(), *model.buffers())):
        # A user's function may have made parts of it elsewhere.
        model = model.to(device)
    if workload.fused_kernels:
        require_kernels(f"--kernels {workload.kernels}")
        from cs336sys.kernels.fuse import fuse

        fused = fuse(model, attention or causal_attention(workload.attention), workload.fused_kernels)
        if workload.state_dtype == "split":
            fused.stack_weights(torch.bfloat16)
    if workload.compile == "model":
        model.compile(dynamic=False)
    elif workload.compile == "block":
        blocks = blocks_of(workload, model)
        if not blocks:
            raise CapabilityError(
                f"compile block: {workload.user.model} has no list of blocks; choose model, or name them by --blocks"
            )
        for block in blocks.values():
            block.compile(dynamic=False, options=None if compile_options is None else dict(compile_options))
    return model


def _plain_model(workload: Workload) -> nn.Module:
    size = workload.size
    if workload.user.model is not None:
        return user_models.build(workload.user.model, size)
    return cs336_basics.model.BasicsTransformerLM(
        vocab_size=size.vocab_size,
        context_length=size.context,
        d_model=size.d_model,
        num_layers=size.num_layers,
        num_heads=size.num_heads,
        d_ff=size.d_ff,
        rope_theta=10_000.0,
    )


def blocks_of(workload: Workload, model: nn.Module) -> dict[str, nn.Module]:
    """The Transformer blocks of a workload's model by their names in it; of a user's model there may be none.

    Raises:
        UserCodeError: ``--blocks`` names none.
    """
    if workload.is_ours:
        layers = model.layers
        assert isinstance(layers, nn.ModuleList)
        return {f"layers.{number}": block for number, block in enumerate(layers)}
    return user_models.find_blocks(model, workload.user.blocks)


def build_by_layers(workload: Workload, device: torch.device) -> nn.Module:
    """The workload's model with the values that it has where no rank ever holds the whole of it; not compiled.

    Ours has the same as from :func:`build_model`. A user's model is initialized one layer at a time on ``device`` where
    its layers can be, else on the CPU.
    """
    workload = replace(workload, compile="off")
    if workload.is_ours:
        return build_model(workload, device)
    initialize = initializer_of(workload)
    if initialize is None:
        return build_model(workload, torch.device("cpu")).to(device)
    model = build_model(workload, torch.device("meta"))
    torch.manual_seed(workload.seed)
    return user_models.fill(model, initialize, device)


def initializer_of(workload: Workload) -> Callable[[nn.Module], None] | None:
    """What initializes one layer of a workload's model; None where a model of the user's has no such thing."""
    if workload.user.model is None:
        return initialize_layer
    return user_models.layer_initializer(workload.user.model, workload.size)


def build_compared_model(workload: Workload, device: torch.device) -> nn.Module:
    """The model that a workload's training is compared with, see ``plainly_trained``.

    Where the workload keeps weights in bf16, this model starts from the same, and keeps them in fp32.
    """
    model = build_model(plainly_trained(workload), device)
    if workload.state_dtype == "split":
        for parameter in model.get_submodule("layers").parameters():
            if parameter.dim() > 1:
                parameter.data = parameter.data.bfloat16().float()
    return model


def keeping_input(run: Callable[..., Any], *inputs: Any, keeps_random: bool = False, **named: Any) -> Any:
    """``run(*inputs)``, of which only the inputs are kept: the backward pass runs it again for whatever it saved.

    Args:
        keeps_random: draw the same random numbers again; our model draws none.
    """
    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=keeps_random, **named)


@torch.no_grad()
def initialize_layer(layer: nn.Module) -> None:
    """Give a layer that was built on the meta device, and now has memory, the values that its constructor would draw.

    Called for all of ``model.modules()`` in order, after ``torch.manual_seed`` of the workload's seed, it draws the
    numbers that :func:`build_model` draws. Layers without weights are left alone.
    """
    model = cs336_basics.model
    # How each is constructed from the shape of its weight.
    constructors: dict[type[nn.Module], Callable[[torch.Size], nn.Module]] = {
        model.Linear: lambda shape: model.Linear(shape[1], shape[0]),
        model.Embedding: lambda shape: model.Embedding(*shape),
        model.RMSNorm: lambda shape: model.RMSNorm(*shape),
    }
    construct = constructors.get(type(layer))
    if construct is not None:
        weight = layer.weight
        assert isinstance(weight, Tensor)
        with weight.device:
            weight.copy_(construct(weight.shape).get_parameter("weight"))


def make_batch(workload: Workload, device: torch.device, number: int = 0) -> tuple[Any, Any]:
    """Inputs and targets of the workload's seed: token ids and next-token targets, each (batch_size, context), int64.

    Or whatever the user's function returns, whose tensors have the batch first.

    Args:
        number: 0 is the batch that is timed; others are different ones.
    """
    size = workload.size
    if device.type == "meta":
        # Which has no random numbers.
        batch = make_batch(workload, torch.device("cpu"), number)
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)
    if workload.user.batch is not None:
        return user_models.make_batch(workload.user.batch, size, workload.seed + number, device)
    seeded = torch.Generator(device).manual_seed(workload.seed + number)
    tokens = torch.randint(size.vocab_size, (size.batch_size, size.context + 1), generator=seeded, device=device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


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
        chains_blocks: whether fused blocks are called one after another, each whole and once, and nothing between them.
        warmup_of_capture: steps that :meth:`capture` runs before it captures.
        graphs: the step in CUDA graphs, once :meth:`capture` has been called.
    """

    takes_half_gradients = True
    chains_blocks = True
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
        if workload.precision == "fp16" and device.type == "cpu":
            _check_fp16_on_cpu()
        self.workload = workload
        self.device = device
        self.model = build_model(workload, device) if model is None else model
        self._share = share
        self.inputs, self.targets = self._batch = self._share_of_batch(0)
        self.optimizer = optimizer
        if optimizer is None and workload.mode == "train":
            self.optimizer = build_optimizer(workload, self.model)
        self._fused: Fused | None = None
        self._loss_without_logits: Callable[..., Tensor] | None = None
        if workload.fused_kernels:
            from cs336sys.kernels.fuse import fused_kernels

            self._fused = fused_kernels(self.model)
            if self._fused is not None and "linear-cross-entropy" in workload.fused_kernels:
                self._loss_without_logits = self._fused.loss
        half = AUTOCAST_DTYPES.get(workload.precision)
        has_copies = self.optimizer is None or hasattr(self.optimizer, "attach_copy")
        has_copies = has_copies and workload.kernels == "fused"
        if self._fused is not None and self._fused.copies is None and half is not None and has_copies:
            # Autocast rounds them, too. Those of fp16 are unscaled, which torch does in fp32 alone.
            in_bf16 = half == torch.bfloat16 and self.takes_half_gradients
            self._fused.keep_copies(half, self.optimizer, half if in_bf16 else torch.float32)
        if self._fused is not None and self.chains_blocks and "rms-norm" in workload.fused_kernels:
            self._fused.chain_blocks()
        if workload.update == "backward":
            self._update_in_backward()
        # fp16 gradients underflow unless the loss is scaled up (Micikevicius et al. 2018, section 3.2).
        if scaler is None:
            scaler = torch.amp.GradScaler(device.type, enabled=workload.precision == "fp16")
        self.scaler = scaler
        self._loss_function = cross_entropy if workload.user.loss is None else user_models.load(workload.user.loss)
        if workload.compile != "off":
            self._loss_function = torch.compile(self._loss_function, dynamic=False)
        self.loss: Tensor | None = None
        self.graphs: GraphedStep | None = None
        # What the model returned: logits, (batch, context, vocabulary), if it is ours.
        self._output: Any = None
        runs = {"forward": self.forward, "backward": self.backward, "optimizer": self.optimizer_step}
        self.phases: dict[str, Callable[[], None]] = {name: runs[name] for name in PHASES_OF_MODE[workload.mode]}
        self.phases_with_loss = self.phases
        if self._loss_without_logits is None:
            others = {name: run for name, run in self.phases.items() if name != "forward"}
            self.phases_with_loss = {"forward": self.compute_logits, "loss": self.compute_loss} | others
        self._launched, self._launched_with_loss = self.phases, self.phases_with_loss

    def __call__(self) -> None:
        for phase in self.phases.values():
            phase()

    def _update_in_backward(self) -> None:
        from cs336sys.kernels.adamw import AdamW

        assert isinstance(self.optimizer, AdamW)
        blocks = [list(block.parameters()) for block in blocks_of(self.workload, self.model).values()]
        self.optimizer.update_in_backward(blocks, BLOCKS_BESIDE)

    def use_batch(self, number: int) -> None:
        """Train on another batch of the workload from now on, see :func:`make_batch`."""
        self.use(*self._share_of_batch(number))

    def use(self, inputs: Tensor, targets: Tensor) -> None:
        """Train on this batch from now on: of the shape of the workload's, on its device."""
        self._batch = inputs, targets
        if self.graphs is None:
            self.inputs, self.targets = self._batch

    def weights(self, parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The model's parameters as they are after a step, in the precision that the optimizer keeps them in.

        Returns:
            them, by name; and for each copy that the model computes with in their place, by a name of its own, how far
            it is from the weight (zeros where it is up to date).
        """
        exact = getattr(self.optimizer, "float32_weight", Tensor.detach)
        names = {parameter: name for name, parameter in parameters.items()}
        copies = () if self._fused is None or self._fused.copies is None else self._fused.copies.differences()
        return (
            {name: exact(parameter) for name, parameter in parameters.items()},
            {f"the copy of {names[weight]}": off for weight, off in copies if weight in names},
        )

    def _share_of_batch(self, number: int) -> tuple[Any, Any]:
        batch = make_batch(self.workload, self.device, number)
        return tree_map_only(Tensor, lambda tensor: tensor[self._share], batch)

    def capture(
        self,
        *,
        with_loss: bool = False,
        around: Callable[[str], AbstractContextManager[Any]] = contextlib.nullcontext,
        around_warmup: Callable[[int], AbstractContextManager[Any]] = contextlib.nullcontext,
        recorder: Recorder | None = None,
    ) -> None:
        """Replace the phases by CUDA graphs, where the workload says so, after some steps of warm-up that train.

        The first phase copies the batch to where the graphs read it, as training does with every new one.

        Args:
            with_loss: make the loss a graph of its own.
            around: entered around the capture of each phase.
            around_warmup: entered around each step of the warm-up, with its number from 0.
            recorder: as of :class:`~cs336sys.cuda_graphs.GraphedStep`.

        Raises:
            CapabilityError: this step cannot be captured, see there.
        """
        if self.workload.cuda_graph == "off":
            return
        if self.scaler.is_enabled() and not getattr(self.optimizer, "_step_supports_amp_scaling", False):
            raise CapabilityError(
                f"{type(self.optimizer).__name__} with fp16: the CPU looks at the gradients in every step to decide "
                "whether to skip it, which a CUDA graph cannot; choose fused, whose kernel decides, or bf16"
            )
        self.release_graphs()
        if recorder is None and self.workload.update == "backward" and self.device.type == "cuda":
            # Updates take what the backward pass leaves idle.
            recorder = CudaRecorder(self.device, torch.cuda.Stream(self.device, priority=-1))
        self.graphs = GraphedStep(
            self._launched_with_loss if with_loss else self._launched,
            _tensors((self.inputs, self.targets)),
            optimizers=[] if self.optimizer is None else [self.optimizer],
            warmup=self.warmup_of_capture,
            around=around,
            around_warmup=around_warmup,
            recorder=recorder,
        )
        assert self.loss is not None, "the forward pass has set it"
        self.loss = self.loss.detach()
        self._batch = tree_map_only(Tensor, Tensor.clone, (self.inputs, self.targets))
        phases = dict(self.graphs.phases)
        first, replay = next(iter(phases.items()))
        phases[first] = functools.partial(self._replay_on_batch, replay)
        self.phases = self.phases_with_loss = phases

    def release_graphs(self) -> None:
        """Launch the phases again, and free what the graphs and the last step hold."""
        self.phases, self.phases_with_loss = self._launched, self._launched_with_loss
        self.inputs, self.targets = self._batch
        # What is left of the last step's autograd graph is bound to the stream that it was launched on.
        self.loss = self.graphs = None

    def _replay_on_batch(self, replay: Callable[[], None]) -> None:
        assert self.graphs is not None
        self.graphs.load(*_tensors(self._batch))
        replay()

    def forward(self) -> None:
        """Logits and loss; without gradients in mode ``forward``."""
        if self._loss_without_logits is None:
            self.compute_logits()
            self.compute_loss()
            return
        with self._precision():
            self.loss = self._loss_without_logits(self.model, self.inputs, self.targets)

    def compute_logits(self, watching: AbstractContextManager[None] = contextlib.nullcontext()) -> None:
        with self._precision(), watching:
            self._output = user_models.call_model(self.model, self.inputs)

    def compute_loss(self) -> None:
        output, self._output = self._output, None
        user = self.workload.user
        with self._precision():
            if user.loss is not None:
                loss = self._loss_function(output, self.targets)
            else:
                if user.model is not None:
                    vocab_size = self.workload.size.vocab_size
                    output = user_models.token_logits(output, self.targets, user.model, vocab_size)
                loss = self._loss_function(output, self.targets)
        if user.loss or user.model:
            with_gradients = self.workload.mode != "forward"
            loss = user_models.scalar_loss(loss, str(user.loss or user.model), with_gradients=with_gradients)
        self.loss = loss

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        dtype = AUTOCAST_DTYPES.get(self.workload.precision)
        autocast = torch.autocast(self.device.type, dtype) if dtype else contextlib.nullcontext()
        gradients = torch.no_grad() if self.workload.mode == "forward" else contextlib.nullcontext()
        with autocast, gradients:
            yield

    @property
    def batch(self) -> list[Tensor]:
        """The tensors that a step reads, and those that it would be given next."""
        return _tensors((self.inputs, self.targets, self._batch))

    def backward(self) -> None:
        assert self.loss is not None
        self.scaler.scale(self.loss).backward()
        if self.optimizer is None:
            self.model.zero_grad()

    def optimizer_step(self) -> None:
        """Update the parameters and drop the gradients."""
        assert self.optimizer is not None
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def _check_fp16_on_cpu() -> None:
    try:
        with torch.autocast("cpu", torch.float16):
            F.linear(torch.ones(1, 1), torch.ones(1, 1))
    except RuntimeError as error:
        raise CapabilityError(f"precision 'fp16': torch cannot run it on this CPU ({error}); choose bf16") from error


def set_matmul_precision(workload: Workload) -> None:
    """For the whole process, whether fp32 matrix products may use TF32."""
    # "high" allows TF32 in fp32 matrix products, "highest" does not.
    torch.set_float32_matmul_precision("high" if workload.tf32 else "highest")
    # Inductor recommends TF32 to those who have not asked for it; here --tf32 decides, and the results name it.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
    # Said once by the first matrix product of a backward pass: autograd's thread has made none before.
    warnings.filterwarnings("ignore", message=".*no current CUDA context")


def train_for_check(step: TrainStep, warmup: int) -> list[Tensor]:
    """Run some steps, each on a batch of its own, after ``warmup`` on the first batch; the losses, () each.

    A workload with CUDA graphs is captured, and its own warm-up must be as long as the one asked for.
    """
    if step.workload.cuda_graph == "on":
        assert step.warmup_of_capture == warmup, "the weights could not be compared"
        step.capture()
    else:
        for _ in range(warmup):
            step()
    losses = []
    for number in range(1, STEPS + 1):
        step.use_batch(number)
        step()
        assert step.loss is not None
        # Replays overwrite it.
        losses.append(step.loss.detach().clone())
    return losses
