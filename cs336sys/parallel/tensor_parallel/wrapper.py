"""Tensor parallel training: every layer of a model is shared by all ranks, which all work on the same sequences.

Of attention a rank has some of the heads, of the feed-forward network some of the inner features, of embedding and LM
head the rows of some tokens. ``docs/parallelism.md`` follows the data through a block.

Sources: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019);
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), for sequence parallelism.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cs336sys.accounting.sharding.partition import cut_dimension, own_part
from cs336sys.errors import UsageError
from cs336sys.parallel.checkpoint_state import StateDictOfSlices, differences, mark_share
from cs336sys.parallel.collectives import group_device, process_group, require_process_group
from cs336sys.parallel.gradient_slices import clip_over_ranks, mark_unfinished, require_whole
from cs336sys.parallel.rank_consistency import broadcast_from_first, describe_module, same_on_every_rank, ties_of
from cs336sys.parallel.tensor_parallel import weights
from cs336sys.parallel.tensor_parallel.layers import TensorGroup, share_layers, vocabulary_parallel_cross_entropy
from cs336sys.parallel.tensor_parallel.trial import require_same_results
from cs336sys.parallel.wrapped_modules import HeldParameters, is_unit, require_module


class PartialGradients:
    """Sums the gradients of some parameters over the ranks of ``group``.

    What backward passes have added since the last sum is known from hooks. A gradient that was summed and not dropped
    is the same on every rank: where a pass adds to it, each rank keeps its share of it alone, so that the next sum has
    it once. Nothing is known of passes that a CUDA graph replays: of what was captured, every call makes a sum.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._gradients: dict[nn.Parameter, _PartialGradient] = {}

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note what backward passes add to the gradients of those parameters that are trained.

        Every rank gives the same, before anything else has hooks on them that read their gradients.
        """
        # Marked, so that passes that return gradients, as torch.autograd.grad, refuse them: nobody would sum those.
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._gradients:
                gradient = self._gradients[parameter] = _PartialGradient(self._group.size())
                mark_unfinished(parameter, gradient.lacks_ranks)
                parameter.register_hook(functools.partial(gradient.before_pass, parameter))
                parameter.register_post_accumulate_grad_hook(gradient.after_pass)

    def sum(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum over ranks each gradient to which passes have added since its last sum.

        Every rank calls it with the same parameters, after the same passes.
        """
        states = self._gradients.items()
        summed = {parameter for parameter, state in states if state.is_summed and not state.is_captured}
        partial = [parameter for parameter in parameters if parameter.grad is not None and parameter not in summed]
        gradients = [parameter.grad for parameter in partial if parameter.grad is not None]  # Checked again for mypy.
        if not gradients:
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self._group)
        sums = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_([gradient.view(-1) for gradient in gradients], sums)
        self.watch(partial)  # A layer that was frozen and is trained now is watched from its first sum on.
        for parameter in partial:
            if parameter in self._gradients:  # Those that are frozen are not watched.
                self._gradients[parameter].is_summed = True


class _PartialGradient:
    """The state of one parameter's gradient, known from its hooks: whether it is summed over ranks.

    Attributes:
        is_summed: whether no pass has added to it since it was summed.
        is_captured: whether passes of a CUDA graph, which call no hooks, may have added to it.
    """

    def __init__(self, ranks: int):
        self._share_of_others = (ranks - 1) / ranks
        self._before: Tensor | None = None
        self.is_summed = self.is_captured = False

    def lacks_ranks(self) -> bool:
        return not (self.is_summed or self.is_captured)

    def before_pass(self, parameter: Tensor, _: Tensor) -> None:
        """Keep a copy of a gradient that is summed, before autograd adds to it."""
        # At every pass anew: one that leaves grad alone, as torch.autograd.grad does, calls no after_pass().
        self._before = parameter.grad.clone() if self.is_summed and parameter.grad is not None else None

    def after_pass(self, parameter: Tensor) -> None:
        """Leave this rank's share of what was summed before, now that more has been added."""
        before, self._before, self.is_summed = self._before, None, False
        if before is not None and parameter.grad is not None:
            parameter.grad.sub_(before, alpha=self._share_of_others)
        if parameter.is_cuda and torch.cuda.graphs.is_current_stream_capturing():
            self.is_captured = True


class TensorParallel(StateDictOfSlices):
    """Shares the layers of a ``cs336_basics`` model among the ranks of a process group. A training step is::

        logits = shared(token_ids)                  # of this rank's part of the vocabulary
        shared.loss(logits, targets).backward()     # the loss of all sequences, the same on every rank
        shared.finish_gradient_synchronization()
        optimizer.step()

    All ranks of the group give the same sequences, which the first call compares. The result is that of one process.

    - The module is changed in place: ``shared.module`` has the names and modules that it had, with this rank's parts of
      their weights, so that :class:`~cs336sys.parallel.fsdp.FSDP` or a class of :mod:`~cs336sys.parallel.ddp` can wrap
      it for the other dimension of a mesh; then call that wrapper, and ``finish_gradient_synchronization()`` of both,
      the wrapper's first. Compile its blocks before or afterwards, ``block.compile(options=COMPILE_OPTIONS)``.
    - It is anybody's ``cs336_basics``: a model with the names of its state dict, whose attention has ``num_heads``.
    - Code that reads a parameter outside of its layer gets this rank's part: a model that does is refused, as is any
      whose layers compute something else where ranks share them, after a trial with random weights.
    - Parameters may be frozen, and trained again. Whoever replaces or unfreezes some calls :meth:`refresh`. Adapters
      cannot be shared: forward passes refuse a module to which parameters were added.
    - ``state_dict()`` has this rank's parts as DTensors, which ``torch.distributed.checkpoint`` saves and loads, and
      ``load_state_dict()`` refuses those of another rank (see also :meth:`full_state_dict`).
    - A deep copy is a wrapper in its own right, of the same group.
    - Inner features and tokens need not divide by the ranks. Tied embedding and LM head stay tied.
    - With ``sequence_parallel`` norms and residuals are computed by each rank on its slice of the sequence, whose
      length the ranks must divide. As many bytes are sent; activations between the layers take a part of the memory.
      Gradients of norms are summed over ranks, so divide a penalty on the weight of a norm by ``group.size()``.

    Attributes:
        module: the module, changed.
        group: the process group.
        shapes: of the whole parameters, by their names.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        sequence_parallel: bool = False,
        initialize: Callable[[nn.Module], None] | None = None,
        device: torch.device | None = None,
        communicates: bool = True,
    ):
        """Cut ``module`` on every rank of the group. Before, it is tried on a few tokens, whole and shared.

        Args:
            module: with the same parameters on every rank, which get the first rank's values; or on the meta device.
            group: a process group, or a mesh of one dimension; None takes all ranks.
            sequence_parallel: share the sequence between the layers.
            initialize: fills parameters of one module on the meta device, see :class:`~cs336sys.parallel.fsdp.FSDP`.
            device: where to put a module on the meta device; None is the device of the process group.
            communicates: False computes as much and sends nothing: wrong results, to time a step without communication.

        Raises:
            UsageError: on every rank: there is no process group, the module is no ``cs336_basics`` model, ranks cannot
                share its heads (the message gives the choices), a layer computes something else where ranks share it,
                or modules or settings differ between ranks.
        """
        super().__init__()
        require_process_group(type(self).__name__)
        require_module(module)
        self.group = process_group(group)
        rank, size = self.group.rank(), self.group.size()
        with same_on_every_rank(self.group) as lines:
            if hasattr(module, "finish_gradient_synchronization"):
                raise UsageError(f"{type(module).__name__} is wrapped already: wrap the plain module first")
            require_whole(module.named_parameters(), self.group)
            weights.require_shareable(module, size)
            lines += [
                f"TensorParallel with {sequence_parallel=}, {communicates=}",
                *describe_module(module, moves=True),
            ]
        if device is None and any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            device = group_device()
        name = self.group.group_name if communicates and size > 1 else ""  # An empty name sends nothing.
        self._tensor_group = TensorGroup(name, rank, size, sequence_parallel)
        require_same_results(module, self.group, self._tensor_group, initialize, device)
        self.shapes = weights.cut_weights(module, self.group, initialize, device)
        share_layers(module, self._tensor_group, self.shapes)
        self.module = module
        self._vocabulary = self.shapes["lm_head.weight"][0]
        self._first_token = own_part(self._vocabulary, rank, size).start
        self._partial_gradients = PartialGradients(self.group)
        self._mark_and_watch_parts()
        mark_share(module, type(self).__name__, self.group)

    def forward(self, token_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return logits of this rank's tokens, (batch, S, own tokens), of token ids of any integer dtype, (batch, S).

        Raises:
            UsageError: the module has other parameters than those that were cut, or one was unfrozen; under sequence
                parallelism, ranks do not divide the sequence; tokens are no integers; or on every rank, in the first
                training and the first evaluating call: they give other tokens.
        """
        # Without gradients, other tensors may replace parameters, as torch.func.functional_call() puts them there.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._require_unchanged()
        if self._tensor_group.sequence_parallel and token_ids.size(-1) % self.group.size():
            raise UsageError(
                f"a sequence of {token_ids.size(-1)} tokens cannot be shared by {self.group.size()} ranks: "
                f"choose a multiple of {self.group.size()}, or sequence_parallel=False"
            )
        return self.module(token_ids, *args, **kwargs)

    def loss(self, logits: Tensor, targets: Tensor, *, compiles: bool = False) -> Tensor:
        """Return the mean cross-entropy of what :meth:`forward` returned, the same scalar on every rank.

        See :func:`.layers.vocabulary_parallel_cross_entropy`, also for ``compiles``.

        Raises:
            UsageError: targets are no tokens; or on every rank, in the first training and the first evaluating call:
                they give other targets, or the model draws other random numbers, as for dropout.
        """
        embedding: Any = self.module.get_submodule("token_embeddings")  # It compares the tokens of each first pass.
        embedding.first_calls.compare("targets", targets, self.module.training)
        return vocabulary_parallel_cross_entropy(
            logits, targets, self._first_token, self._vocabulary, self._tensor_group, compiles=compiles
        )

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Return the logits of all tokens, (..., tokens), of those that :meth:`forward` returned, for generation.

        Every rank of the group must call it. No gradient goes through it.
        """
        # The tokens come first, because ranks share the rows of lm_head.weight, for which logits pass here.
        shape = torch.Size([self._vocabulary])
        whole = weights.whole_tensor(logits.movedim(-1, 0), "lm_head.weight", shape, self.group)
        return whole.movedim(0, -1)

    def finish_gradient_synchronization(self) -> None:
        """Complete the gradients. Every rank must call it between backward passes and optimizer step.

        Under sequence parallelism the gradients of norms, which each rank has of its slice of the sequence, are summed;
        all others are complete already. On a GPU the wait is only queued.

        Gradients add up over several backward passes, whether it is called after the last or after each of them; called
        again before another pass it does nothing. Passes that a CUDA graph replays are not seen: it sums after every
        replay, so call it once for each, or capture it with them.

        Raises:
            UsageError: the module has other parameters than those that were cut, or one was unfrozen.
        """
        self._require_unchanged()
        if self.completes_gradients:  # Under sequence parallelism alone.
            self._partial_gradients.sum(self._whole_parameters())

    def refresh(self) -> None:
        """Take up parts of this rank that were replaced by others of the same shapes, or unfrozen, between two steps.

        Every rank must call it. Norms get the values of the group's first rank.

        Raises:
            UsageError: on every rank: there are others, their shapes are not those of the parts, or FSDP is around
                the module, whose ``refresh()`` takes them up.
        """
        with same_on_every_rank(self.group) as lines:
            if any(map(is_unit, self.module.modules())):
                raise UsageError("FSDP holds slices of the parts: call refresh() of the FSDP module instead")
            weights.require_parts(self.module, self.shapes, self.group.rank(), self.group.size())
            lines += [f"{name} trained={value.requires_grad}" for name, value in self.module.named_parameters()]
        broadcast_from_first(self._whole_parameters(), self.group)
        self._mark_and_watch_parts()

    @property
    def completes_gradients(self) -> bool:
        """Return whether :meth:`finish_gradient_synchronization` has anything to do."""
        return self._tensor_group.sequence_parallel and bool(self._tensor_group.name)

    def no_sync(self) -> AbstractContextManager[None]:
        """Do nothing, for gradient accumulation as with the other wrappers: layers must communicate in every pass."""
        return contextlib.nullcontext()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, sharded: Any = None) -> Tensor:
        """Clip as :meth:`.FSDP.clip_grad_norm_` does, after ``finish_gradient_synchronization()``, on every rank.

        Args:
            sharded: the :class:`~cs336sys.parallel.fsdp.FSDP` module around ``module``, if there is one.
        """
        groups = [self.group]
        parameters = dict(self.module.named_parameters())
        if sharded is not None:
            groups.append(sharded.group)
            parameters = {name: cut.shard for name, cut in sharded.sharded_parameters.items()}
            parameters |= sharded.replicated_parameters
        # FSDP cuts what tensor parallelism does, matrices, and both keep norms whole: no element counts twice.
        parts = [parameter for name, parameter in parameters.items() if cut_dimension(name) is not None]
        whole = [parameter for name, parameter in parameters.items() if cut_dimension(name) is None]
        return clip_over_ranks(parts, whole, max_norm, norm_type, groups)

    def full_state_dict(self, parts: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return whole copies of all parameters by their names, as in one process. Every rank of the group calls it.

        Args:
            parts: this rank's parts by name, where ``module`` has only slices of them
                (``FSDP.gather_full_params()``), or gradients, which frozen parameters lack; a tied one under its first
                name. None takes the module's own.
        """
        parts = dict(self.module.named_parameters()) if parts is None else parts
        whole = {
            name: weights.whole_tensor(parts[name].detach(), name, self.shapes[name], self.group)
            for name, _ in self.module.named_parameters()
            if name in parts
        }
        ties = ties_of(self.module.named_parameters(remove_duplicate=False))
        return whole | {name: whole[first] for name, first in ties.items() if first in whole}

    @torch.no_grad()
    def load_full_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take this rank's parts of whole parameters from any mesh. Call it before FSDP or DDP wraps the module.

        Raises:
            UsageError: names or shapes are not those of this model (the message says which).
        """
        saved_shapes = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
        if different := differences(saved_shapes, {name: tuple(shape) for name, shape in self.shapes.items()}):
            raise UsageError(f"the state dict belongs to another model: {different}")
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            parameter.copy_(weights.part_of(state_dict[name], name, self.group.rank(), self.group.size()))

    def __deepcopy__(self, memo: dict[int, Any]) -> "TensorParallel":
        # A process group cannot be copied, and neither hooks nor attributes are copied with a parameter.
        memo[id(self.group)] = self.group
        copied = memo[id(self)] = type(self).__new__(type(self))
        members = {name: value for name, value in self.__dict__.items() if name != "_held"}  # Made anew below.
        copied.__dict__.update(copy.deepcopy(members, memo))
        for parameter, original in zip(copied.module.parameters(), self.module.parameters(), strict=True):
            vars(parameter).update(copy.deepcopy(vars(original), memo))
        copied._partial_gradients = PartialGradients(self.group)
        copied._mark_and_watch_parts()
        return copied

    def __getstate__(self) -> NoReturn:
        raise UsageError("a TensorParallel module cannot be pickled: save its full_state_dict()")

    def _mark_and_watch_parts(self) -> None:
        """Mark what the module holds now as parts, and watch what is summed."""
        weights.mark_parts(self.module, self.group, self.shapes)
        if self.completes_gradients:
            self._partial_gradients.watch(self._whole_parameters())
        # Whether FSDP around the module was seen to have replaced the parts by slices of them.
        self._is_sharded = False
        self._held = HeldParameters(self, prefix="module.")

    def _require_unchanged(self) -> None:
        """Refuse a module with other parameters than those that were cut; FSDP's slices of them FSDP itself checks."""
        if self._is_sharded:
            return
        try:
            self._held.require_unchanged()
        except UsageError:
            self._is_sharded = any(map(is_unit, self.module.modules()))
            if not self._is_sharded:
                raise

    def _whole_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that every rank has whole: those of norms."""
        return [parameter for name, parameter in self.module.named_parameters() if cut_dimension(name) is None]
