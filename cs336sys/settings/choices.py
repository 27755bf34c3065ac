"""Values of a training step's settings, each a record that says what follows from it. No torch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


def import_named(name: str) -> Any:
    """Import a function or class by its dotted name, which records hold so that only cells that need it import it."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


@dataclass(frozen=True)
class Mode:
    """The part of a step that runs: its phases, in order."""

    phases: tuple[str, ...]
    has_backward: bool = True
    updates_parameters: bool = False


@dataclass(frozen=True)
class Precision:
    """The precision of matrix products.

    Attributes:
        is_half: half precision by autocast; weights are fp32.
        scales_loss: fp16's gradients underflow unless the loss is scaled up.
        leaves_half_gradients: gradients may stay in half precision; those that are unscaled after it need fp32.
    """

    is_half: bool = True
    scales_loss: bool = False
    leaves_half_gradients: bool = False


@dataclass(frozen=True)
class Attention:
    """An implementation of attention.

    Attributes:
        function: the dotted name of our kernels' function of queries, keys, values and ``is_causal``; empty for others.
        wait: the dotted name of the function that waits until ours are compiled.
        keeps_scores: all scores of a layer are in memory, and saved for the backward pass.
        is_torchs, is_ours: torch's kernels compute it, or this project's.
        work: the name of its operations and of their rates, where scores are not kept.
    """

    function: str = ""
    wait: str = ""
    keeps_scores: bool = False
    is_torchs: bool = False
    work: str = "sdpa"
    is_ours: bool = False

    def load(self) -> Callable[..., Any]:
        """Import the function, and wait until it is compiled."""
        if self.wait:
            import_named(self.wait)()
        return import_named(self.function)


@dataclass(frozen=True)
class Optimizer:
    """An optimizer.

    Attributes:
        name: the dotted name of its class.
        settings: what it is constructed with.
        is_ours: the kernels of :mod:`cs336sys.kernels.adamw`, which write copies of weights in half precision.
        is_plain: PyTorch operations on one parameter after the other, steps counted on the CPU.
        takes_dtensors: it updates torch's distributed tensors.
    """

    name: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    is_ours: bool = False
    is_plain: bool = False
    takes_dtensors: bool = False


@dataclass(frozen=True)
class StateDtype:
    """An optimizer's state: the bytes of both moments of a parameter.

    ``splits_weights``: weights of blocks are kept in bf16, and the bits that fp32 has beyond it in the state.
    """

    moment_bytes: int = 8
    splits_weights: bool = False


@dataclass(frozen=True)
class Compile:
    """The parts that torch.compile compiles besides the loss: each block, or the whole model."""

    blocks: bool = False
    whole: bool = False


MODES = {
    "forward": Mode(("forward",), has_backward=False),
    "forward-backward": Mode(("forward", "backward")),
    "train": Mode(("forward", "backward", "optimizer"), updates_parameters=True),
}
PRECISION_RECORDS = {
    "fp32": Precision(is_half=False),
    "bf16": Precision(leaves_half_gradients=True),
    "fp16": Precision(scales_loss=True),
}
ATTENTION = {
    "reference": Attention(keeps_scores=True),
    "sdpa": Attention(is_torchs=True),
    "flash": Attention(
        function="cs336sys.kernels.attention.flash_attention",
        wait="cs336sys.kernels.attention.wait_until_compiled",
        work="flash",
        is_ours=True,
    ),
}
OPTIMIZERS = {
    "course": Optimizer("cs336_basics.optimizer.AdamW", is_plain=True, takes_dtensors=True),
    "fused": Optimizer("torch.optim.AdamW", {"fused": True}, takes_dtensors=True),
    "adamw": Optimizer("cs336sys.kernels.adamw.AdamW", is_ours=True),
}
STATE_DTYPES = {"fp32": StateDtype(), "bf16": StateDtype(moment_bytes=4), "split": StateDtype(splits_weights=True)}
COMPILE_MODES = {"off": Compile(), "block": Compile(blocks=True), "model": Compile(whole=True)}
# Modules that are imported only for settings that need them.
FUSED_KERNELS_MODULE = "cs336sys.kernels.fuse"
CUDA_GRAPHS_MODULE = "cs336sys.training.cuda_graphs"
COUNTING_MODULE = "cs336sys.training.flop_counting"
# Steps before a CUDA graph is captured: in them kernels are compiled and chosen, libraries take their workspaces, and
# optimizers and communicators are set up. torch asks for three, and for eleven with its DistributedDataParallel.
WARM_UP_STEPS = 3
WARM_UP_STEPS_OF_TORCH_DDP = 11


class StepChoices:
    """The meaning of a step's settings, for workloads and descriptions of steps that have them as fields."""

    mode: str
    precision: str
    attention: str
    optimizer: str
    state_dtype: str
    compile: str
    kernels: str

    @property
    def has_backward(self) -> bool:
        return MODES[self.mode].has_backward

    @property
    def updates_parameters(self) -> bool:
        return MODES[self.mode].updates_parameters

    @property
    def is_half(self) -> bool:
        """Return whether matrix products are in half precision."""
        return PRECISION_RECORDS[self.precision].is_half

    @property
    def scales_loss(self) -> bool:
        return PRECISION_RECORDS[self.precision].scales_loss

    @property
    def attention_record(self) -> Attention:
        return ATTENTION[self.attention]

    @property
    def keeps_scores(self) -> bool:
        """Return whether attention saves all its scores for the backward pass."""
        return self.attention_record.keeps_scores

    @property
    def optimizer_record(self) -> Optimizer:
        return OPTIMIZERS.get(self.optimizer, Optimizer())  # Nothing is known of one that the user's function makes.

    @property
    def moment_bytes(self) -> int:
        """Return the bytes of both moments of a parameter."""
        return STATE_DTYPES[self.state_dtype].moment_bytes

    @property
    def keeps_fp32_state(self) -> bool:
        return STATE_DTYPES[self.state_dtype] == StateDtype()

    @property
    def splits_weights(self) -> bool:
        return STATE_DTYPES[self.state_dtype].splits_weights

    @property
    def compiles_blocks(self) -> bool:
        return COMPILE_MODES[self.compile].blocks

    @property
    def is_compiled_whole(self) -> bool:
        return COMPILE_MODES[self.compile].whole

    @property
    def is_fused(self) -> bool:
        """Return whether the model has all fused kernels."""
        return self.kernels == "fused"

    @property
    def leaves_half_gradients(self) -> bool:
        """Return whether gradients of fused blocks are in bf16, as our optimizer takes them."""
        leaves_half = PRECISION_RECORDS[self.precision].leaves_half_gradients
        return self.is_fused and self.optimizer_record.is_ours and leaves_half
