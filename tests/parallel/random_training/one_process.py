"""What programs do: in one process on the whole batch, with which ranks are compared after every action."""

import copy
import functools
import pickle
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from random_models import PARTS, Adapted, Limited, Raised, RandomModel, matrix_of
from random_programs import DDP, MAY_BE_LEFT_OUT, OPTIMIZERS, Action, Program, choices_of
from torch import Tensor, nn

# Of the state of a parameter, what is no number for each of its elements.
SCALARS = ("step", "eta", "mu", "mu_product")

# After which nobody promises to go on: a class may refuse.
_NOT_PROMISED = ("edit_state", "hook", "rebuild_optimizer", "tie", "untie")


@functools.cache
def _adagrad_makes_state() -> bool:
    """Whether its step makes the state of parameters that it was not built with."""
    one, other = (nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = torch.optim.Adagrad([one])
    optimizer.add_param_group({"params": [other]})
    other.grad = torch.ones(1)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


class OneProcess:
    """Trains on the whole batch, in float64 if its models are; each action of a program is a method.

    Attributes:
        models: the towers, one after another.
        called: what passes go through: the models, or what wraps them.
        passes: those whose backward pass is yet to come: for each rank its loss.
        is_unfinished: whether there was a backward pass since the last :meth:`finish`.
        is_launched: whether it was synchronized.
        is_stepped: whether there was a step since gradients were dropped.
        is_complete: whether gradients were completed since then.
        is_outdated: whether weights have changed since a forward pass, or one is to raise in its backward pass.
        is_held_back: whether gradients of the next backward pass wait until those of the last step are dropped.
        is_dropped_by_module: whether the last ``zero_grad()`` was a module's.
        is_changed: whether the models have changed since the last :meth:`refresh` in a way that wrappers must be told.
        is_edited: whether the optimizers' state was edited since they were asked to do anything.
        kept_gradients: those that were taken from parameters, each with the values that it had then.
        new_parameters: ids of those that no wrapper has made the same on all ranks yet.
        is_promised: whether nothing was done that may be refused.
    """

    def __init__(self, program: Program, models: list[RandomModel], world_size: int):
        self.program, self.world_size = program, world_size
        self.models = models
        self.called: list[Any] = list(models)
        self.optimizers: list[Any] = []
        self.passes: list[list[Tensor]] = []
        self._inputs: list[Tensor] = []
        self.is_unfinished = self.is_launched = self.is_changed = self.has_hooks = False
        self.is_stepped = self.is_complete = self.is_outdated = self.is_dropped_by_module = False
        self.is_held_back = self.is_edited = False
        self.is_promised = True
        self.kept_gradients: list[tuple[Tensor, Tensor]] = []
        self.changes = 0
        self.new_parameters: set[int] = set()
        self._last: list[float] | None = None
        self._kept: dict[str, tuple[int, list[Any]]] = {}
        self._is_flat = program.wrapper == "optimizer-flat"

    @classmethod
    def begun(cls, program: Program) -> "OneProcess":
        process = cls(program, [model.double() for model in models_of(program)], program.world_size)
        process.build_optimizers([[list(dict(model.named_parameters()))] for model in process.models])
        return process

    # What may be done.

    def allows(self, action: Action) -> bool:
        """Whether an action makes sense now. Sets :attr:`is_promised`."""
        name, *args = action
        allowed = getattr(self, f"_allows_{name}", lambda *_: True)(*args)
        if allowed and not self._is_promised(name, args):
            self.is_promised = False
        return allowed

    def _is_promised(self, name: str, args: list[Any]) -> bool:
        parts = [part for model in self.models for part in model.modules()]
        if self.program.wrapper == "fsdp" and any(isinstance(part, Limited) for part in parts):
            return False
        if name == "forward":
            return len(args) == 1 and not self.is_changed
        if self.program.shares_layers and self.is_changed and name != "refresh":
            return False
        if name == "evaluate":
            return not self.is_changed
        if name == "backward":
            if self._is_flat and (self.is_complete or (self.is_stepped and not self.is_held_back)):
                # Gradients that are complete are to be dropped before.
                return False
            return len(args) < 3 and not (self.is_launched and self.program.wrapper != "fsdp") and len(self.passes) == 1
        if name in ("refresh", "restart"):
            # A sharded optimizer that knows its module must be built anew where one of its parameters was replaced.
            is_replaced = self.program.waits_in_module and self.new_parameters
            # Gradients are averaged before, which needs the parameters and slices that they are of.
            is_late = self.is_unfinished and (self.is_changed or (self._is_flat and self.is_stepped))
            return not (is_replaced or is_late)
        if name in ("clip", "finish", "step") and (self.is_unfinished or name == "finish") and self.is_changed:
            # Wrappers compare what the module holds before they average.
            return False
        if name in ("clip", "finish"):
            # Gradients of the last step are to be dropped before.
            return not (self._is_flat and self.is_stepped)
        if name in ("add", "replace", "adapt"):
            # The optimizer is given the new parameters at once, which is refused while gradients wait.
            return not (self._is_flat and self.is_unfinished)
        if name == "restore_weights":
            return not args[0] and not self.passes
        if name == "step":
            if any(one.grad is not None and not one.requires_grad for one in self._all_parameters()):
                # Sharded optimizers refuse gradients of what was frozen before it was given to them.
                return False
            return not self.passes and not (self._is_flat and self.is_stepped)
        if name == "scale_weights":
            return args[0] != "data" and not self.passes
        if name == "zero_grad":
            return not self._refuses_zero_grad(args[0])
        return name not in _NOT_PROMISED

    def _allows_forward(self, seed: int, how: str = "", part: int = 0) -> bool:
        if how == "penalty" and self.program.shares_layers:
            # Each rank adds another.
            return False
        if how == "inner" and self.new_parameters:
            # What wraps the module does not see the pass, and refuses its gradients alone.
            return False
        if how == "raises in backward":
            # Nobody promises to go on from one of several wrapped modules in a graph.
            return self.program.inputs_need_gradients and (self.program.wrapper == "fsdp" or len(self.models) == 1)
        return True

    def _allows_backward(self, which: str = "all", synchronizes: bool = True, absent: int | None = None) -> bool:
        # Nobody promises anything of several wrapped modules of which a rank runs none backward.
        may_be_absent = self.program.wrapper != "fsdp" and len(self.models) == 1 and not self.is_launched
        # Those that are present may raise, and one that is absent would wait for them.
        may_be_absent = may_be_absent and not self.is_outdated and not self.program.inner
        if self.is_launched and self.program.wrapper != "fsdp" and self._may_leave_out:
            # A second gradient of a step is refused by the ranks that have one.
            return False
        if self._is_flat and self.program.bucket_mb is not None and not self._is_reached:
            # To launch a third bucket waits for the first, which a rank that reaches no parameter launches in step(),
            # and here ranks wait for each other before.
            return False
        return bool(self.passes) and (absent is None or may_be_absent)

    def _allows_sum_losses(self) -> bool:
        # Where a backward pass may reach no parameter, all-reduces may be launched after the user's.
        return self._last is not None and (self._is_reached or not self.is_unfinished or self.program.wrapper == "fsdp")

    @property
    def _is_reached(self) -> bool:
        """Whether a backward pass of any rank reaches a parameter."""
        return any(
            type(part).__name__ not in MAY_BE_LEFT_OUT and any(one.requires_grad for one in part.parameters())
            for model in self.models
            for part in model.parts
        )

    def _allows_zero_grad(self, who: str, set_to_none: bool) -> bool:
        # A rank without gradients does not know that they are being averaged.
        return not (self._refuses_zero_grad(who) and self._may_leave_out)

    def _refuses_zero_grad(self, who: str) -> bool:
        """Whether a module is to drop gradients that are being averaged, or has dropped those before."""
        return self._is_flat and self.is_launched and (who != "optimizer" or self.is_dropped_by_module)

    def _allows_step(self) -> bool:
        return not (self._raises_on_some_ranks or self._lacks_state)

    @property
    def _lacks_state(self) -> bool:
        """Whether Adagrad would raise, in torch 2.11 and on the ranks that update something of a group added later."""
        return self.program.optimizer == "adagrad" and any(
            one.grad is not None and not optimizer.state.get(one)
            for optimizer in self.optimizers
            for one in parameters_of(optimizer)
            if not _adagrad_makes_state()
        )

    @property
    def _raises_on_some_ranks(self) -> bool:
        """Whether autograd would raise, if weights changed now, on the ranks alone that have used them."""
        return bool(self.passes) and self.program.wrapper != "fsdp" and self._may_leave_out

    @property
    def _may_leave_out(self) -> bool:
        """Whether some ranks may have no gradient of a parameter of which others have one."""
        parts = {type(part).__name__ for model in self.models for part in model.modules()}
        return not parts.isdisjoint(MAY_BE_LEFT_OUT)

    def _allows_add(self, *_: Any) -> bool:
        return not (self.program.shares_layers or self._moves_used_parameters)

    @property
    def _moves_used_parameters(self) -> bool:
        """Whether a sharded optimizer would be given parameters that a pass has used, and moves what it is given."""
        optimized = {one for optimizer in self.optimizers for one in parameters_of(optimizer)}
        is_new = any(one not in optimized for model in self.models for one in model.parameters())
        return bool(self.passes) and is_new and "optimizer" in self.program.wrapper

    _allows_replace = _allows_add

    def _allows_remove(self, part: int) -> bool:
        return len(self.place(part)[0].parts) > 1 and not self.program.shares_layers

    def _allows_swap(self, first: int, second: int) -> bool:
        (one, here), (other, there) = self.place(first), self.place(second)
        return one is other and here != there and not self.program.shares_layers

    def _allows_adapt(self, part: int, seed: int) -> bool:
        return self._allows_add() and not isinstance(self._part(part), Adapted)

    def _allows_tie(self, first: int, second: int) -> bool:
        one, other = (matrix_of(self._part(index)) for index in (first, second))
        narrow = [getattr(self._part(index), "is_narrow", False) for index in (first, second)]
        same_model = self.place(first)[0] is self.place(second)[0]
        return one is not None and other is not None and one is not other and same_model and narrow[0] == narrow[1]

    def _allows_untie(self, part: int) -> bool:
        matrix = matrix_of(self._part(part))
        names = [name for _, name, one in self.named() if one is matrix]
        return matrix is not None and len(names) > 1

    def _allows_hook(self, part: int) -> bool:
        return next(self._part(part).parameters()).requires_grad and not self.program.shares_layers

    def _allows_optimize_new(self) -> bool:
        return not (self.is_changed or self._moves_used_parameters)

    def _allows_rebuild_optimizer(self) -> bool:
        # A sharded optimizer moves parameters, after which autograd refuses the backward pass.
        return not (self.is_changed or self.passes)

    def _allows_scale_weights(self, how: str, part: int) -> bool:
        return how == "data" or not self._raises_on_some_ranks

    def _allows_keep_weights(self) -> bool:
        # FSDP around shared layers has no state dict: a slice of a part is no DTensor.
        return not (self.is_changed or (self.program.shares_layers and self.program.wrapper == "fsdp"))

    def _allows_restore_weights(self, assign: bool, who: str) -> bool:
        is_kept = "weights" in self._kept and self._kept["weights"][0] == self.changes
        return is_kept and not self._raises_on_some_ranks

    def _allows_restore_optimizer(self) -> bool:
        return "optimizer" in self._kept and self._kept["optimizer"][0] == self.changes

    def _allows_restart(self, world_size: int) -> bool:
        return not (self.new_parameters or self.has_hooks or self._orphans)

    @property
    def _orphans(self) -> list[nn.Parameter]:
        """Those that have left the models, but not the optimizers."""
        owned = {parameter for model in self.models for parameter in model.parameters()}
        return [one for optimizer in self.optimizers for one in parameters_of(optimizer) if one not in owned]

    def _allows_keep_gradients(self, part: int) -> bool:
        return not self._is_flat

    # Passes.

    def forward(self, seed: int, how: str = "", part: int = 0) -> Any:
        called = self.models if how == "inner" else self.called
        penalized = self._part(part) if how == "penalty" else None
        model, index = self.place(part)
        if how.startswith("raises"):
            model.raises = how.removeprefix("raises in "), index
        try:
            losses = self._losses(seed, called, penalized)
        except Raised as raised:
            for one in self.models:
                one.auxiliary_loss()
            return str(raised)
        finally:
            model.raises = None
        self.passes.append(losses)
        self.is_outdated = self.is_outdated or how == "raises in backward"
        # Of a slice there is another penalty than of the weight; its backward pass is refused.
        self._last = None if how == "penalty" else [loss.item() for loss in losses]
        return self._last

    def evaluate(self, seed: int, mode: str) -> Any:
        for called in self.called:
            called.eval()
        try:
            with getattr(torch, mode)():
                losses = self._losses(seed, self.called, None)
        finally:
            for called in self.called:
                called.train()
        return [loss.item() for loss in losses]

    def _losses(self, seed: int, called: list[Any], penalized: nn.Module | None) -> list[Tensor]:
        """Of every rank; each begins with the same buffers."""
        buffers = [(buffer, buffer.clone()) for model in self.models for buffer in model.buffers()]
        losses = []
        for rank in range(self.world_size):
            with torch.no_grad():
                for buffer, before in buffers:
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)
            losses.append(self._loss(seed, rank, called, penalized))
        return losses

    def _loss(self, seed: int, rank: int, called: list[Any], penalized: nn.Module | None) -> Tensor:
        group, place = divmod(rank, self.program.mesh(self.world_size)[1])
        x, tokens, targets = self.program.data(seed, group)
        if self.program.shares_layers:
            return self._language_loss(called[0](x), targets)
        if x.requires_grad:
            self._inputs.append(x)
        is_reversed = rank % 2 == 1 and self.program.wrapper != "fsdp" and not self.program.shares_sequence
        split = self.program.split(self.world_size)
        positions = [token for chunk in split.chunks[place % split.world_size] for token in chunk]
        x, tokens = self._shared_sequence(x, positions), self._shared_sequence(tokens, positions)
        for module in called:
            x = module(x, tokens, choices_of(seed, group), is_reversed)
        if not self.program.shares_sequence:
            loss = F.mse_loss(x, targets)
        else:
            # Of the tokens that count a rank has some or none.
            is_valid = torch.rand(targets.shape[:2], generator=torch.Generator().manual_seed(seed)) > 0.3
            is_valid[:, 0] = True
            x = self._own_tokens(x, positions)
            errors = (x - targets[:, positions]).square().mean(-1) * is_valid[:, positions]
            loss = self._mean_over_ranks(errors.sum(), is_valid, positions)
        for model in self.models:
            loss = loss + 0.1 * model.auxiliary_loss()
        if penalized is not None:
            # Not a sum over elements: that of a slice would have the right gradients. In any dtype the parameter itself
            # is saved for the backward pass, which then sees that it was changed.
            loss = loss + sum(0.1 * parameter.square().double().sum() ** 2 for parameter in penalized.parameters())
        return loss

    def _language_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _shared_sequence(self, whole: Tensor, positions: list[int]) -> Tensor:
        """What the model gets of a sequence."""
        return whole

    def _mean_over_ranks(self, loss_sum: Tensor, is_valid: Tensor, positions: list[int]) -> Tensor:
        """The loss of a rank, of which the mean over ranks is that over all tokens that count."""
        return loss_sum * self.program.split(self.world_size).world_size / is_valid.sum()

    def _own_tokens(self, results: Tensor, positions: list[int]) -> Tensor:
        """What it makes of a rank's tokens."""
        return results[:, positions]

    def backward(self, which: str = "all", synchronizes: bool = True, absent: int | None = None) -> Any:
        inputs = self._inputs
        losses = self._taken(which, synchronizes)
        present = [loss for rank, loss in enumerate(losses) if rank != absent]
        loss = sum(present) / self.world_size if present else None
        trained = [one for one in self._all_parameters() if one.requires_grad]
        if loss is None or not loss.requires_grad:
            return None
        try:
            # Not backward(): gradients are added without sharing memory. Like it, back to the inputs.
            gradients = torch.autograd.grad(loss, [*trained, *inputs], allow_unused=True)
        except Raised as raised:
            self.drop_gradients()
            return str(raised)
        for parameter, gradient in zip(trained, gradients, strict=False):
            if gradient is not None:
                parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient
        if absent is not None:
            self.finish()
        return None

    def _taken(self, which: str, synchronizes: bool) -> list[Tensor]:
        """The losses of the passes that a backward pass is for, added up for each rank."""
        self.is_unfinished = True
        self.is_launched = self.is_launched or (synchronizes and not self.is_held_back)
        if which == "all":
            taken, self.passes, self._inputs, self.is_outdated = self.passes, [], [], False
        else:
            taken = [self.passes.pop(0 if which == "first" else -1)]
        return [sum(losses) for losses in zip(*taken, strict=True)]

    def drop(self) -> None:
        """Forget the passes."""
        self.passes = []

    def sum_losses(self) -> float:
        """A collective of the user's."""
        return sum(self._last)

    # Gradients.

    def finish(self) -> None:
        self.is_complete = self.is_complete or self.is_unfinished
        self.is_unfinished = self.is_launched = False

    def _settle(self) -> None:
        if self.is_unfinished:
            self.finish()

    def zero_grad(self, who: str, set_to_none: bool) -> None:
        if self.program.wrapper.split("+")[0] in DDP:
            # They forbid to touch gradients before.
            self._settle()
        # A module does not drop the gradients of what has left it.
        is_left = self._is_flat and who != "optimizer" and any(one.grad is not None for one in self._orphans)
        self.is_stepped &= is_left
        self.is_complete &= is_left
        self.is_held_back &= is_left
        self.is_dropped_by_module = who != "optimizer"
        for one in {"optimizer": self.optimizers, "module": self.models, "wrapper": self.called}[who]:
            one.zero_grad(set_to_none)

    def clip(self, max_norm: float, norm_type: float | str = 2.0) -> list[float] | float:
        self._settle()
        return sum(self._clip(number, max_norm, float(norm_type)).item() for number in range(len(self.models)))

    def _clip(self, number: int, max_norm: float, norm_type: float) -> Tensor:
        is_sharded = "optimizer" in self.program.wrapper
        of = parameters_of(self.optimizers[number]) if is_sharded else self.models[number].parameters()
        # A sharded optimizer clips by the Euclidean norm alone.
        return nn.utils.clip_grad_norm_(of, max_norm, 2.0 if is_sharded else norm_type)

    def keep_gradients(self, part: int) -> None:
        """Take those of a part, which nobody may change from now on, from its parameters; zero the others."""
        self._settle()
        for parameter in self._part(part).parameters():
            if parameter.grad is not None:
                self.kept_gradients.append((parameter.grad, parameter.grad.clone()))
                parameter.grad = None
        self.zero_grad("optimizer", False)

    def drop_gradients(self) -> None:
        """Let no gradient be left, whatever holds it."""
        self.is_unfinished = self.is_launched = self.is_stepped = self.is_complete = self.is_held_back = False
        # First the optimizers: those that average gradients refuse to drop them for a module while they do.
        for one in (*self.optimizers, *self.called):
            one.zero_grad()

    # The optimizer.

    def build_optimizers(self, groups: list[list[list[str]]]) -> None:
        """For each tower one, with groups of the parameters of these names."""
        self.optimizers = []
        for number, (model, names) in enumerate(zip(self.models, groups, strict=True)):
            held = dict(model.named_parameters(remove_duplicate=False))
            first, *others = [[held[name] for name in group] for group in names]
            optimizer = self._optimizer(number, first)
            for other in others:
                optimizer.add_param_group({"params": other})
            self.optimizers.append(optimizer)

    def _optimizer(self, number: int, parameters: list[nn.Parameter]) -> Any:
        optimizer_class, options = OPTIMIZERS[self.program.optimizer]
        return optimizer_class(parameters, **options)

    def group_names(self) -> list[list[list[str]]]:
        """The names of the parameters of each group of each optimizer."""
        names = []
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            named = {id(parameter): name for name, parameter in model.named_parameters()}
            names.append([[named[id(one)] for one in group["params"]] for group in optimizer.param_groups])
        return names

    def rebuild_optimizer(self) -> None:
        self._settle()
        self.drop_gradients()
        self.changes += 1
        self.optimizers = []
        self.build_optimizers([[list(dict(model.named_parameters()))] for model in self.models])

    def step(self) -> None:
        self._settle()
        self.is_stepped, self.is_complete = True, False
        self.is_outdated = bool(self.passes)
        self.is_edited = False
        gradients = [[one.grad for one in parameters_of(optimizer)] for optimizer in self.optimizers]
        self.is_held_back = self._is_flat and all(any(one is not None for one in some) for some in gradients)
        for optimizer in self.optimizers:
            optimizer.step()

    def optimize_new(self) -> None:
        """Give parameters that no optimizer has to that of their tower."""
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            known = {id(one) for one in parameters_of(optimizer)}
            new = [one for one in model.parameters() if id(one) not in known]
            if new:
                self.changes += 1
                optimizer.add_param_group({"params": new})

    def set_rate(self, rate: float) -> None:
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = rate

    def edit_state(self, how: str) -> None:
        self.is_edited = True
        for optimizer in self.optimizers:
            if how == "clear":
                optimizer.state.clear()
            elif how == "reassign":
                optimizer.state = defaultdict(dict)
            else:
                for state in optimizer.state.values():
                    for key, value in state.items():
                        if key not in SCALARS and value is not None:
                            if how == "scale":
                                value.mul_(0.5)
                            else:
                                state[key] = value * 0.5

    def keep_optimizer(self) -> None:
        states = [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers]
        self._kept["optimizer"] = self.changes, states

    def restore_optimizer(self) -> None:
        for optimizer, state in zip(self.optimizers, self._kept["optimizer"][1], strict=True):
            optimizer.load_state_dict(copy.deepcopy(state))

    # Weights.

    def keep_weights(self) -> None:
        kept = [{name: value.clone() for name, value in called.state_dict().items()} for called in self.called]
        self._kept["weights"] = self.changes, kept

    def restore_weights(self, assign: bool, who: str) -> None:
        self.is_outdated = bool(self.passes)
        if assign:
            self._changed()
        for one, kept in zip(self.called if who == "wrapper" else self.models, self._kept["weights"][1], strict=True):
            one.load_state_dict({name: value.clone() for name, value in kept.items()}, assign=assign)

    @torch.no_grad()
    def scale_weights(self, how: str, part: int) -> None:
        self.is_outdated = bool(self.passes)
        for parameter in self._part(part).parameters():
            if how == "data":
                parameter.data = parameter.data * 0.5
            elif how == "clamp":
                parameter.clamp_(-0.3, 0.3)
            else:
                parameter.mul_(0.9)

    def hook(self, part: int) -> None:
        self.has_hooks = True
        next(self._part(part).parameters()).register_hook(_half)

    # The model.

    def add(self, kind: str, seed: int) -> None:
        self.models[-1].parts.append(self._new(lambda: PARTS[kind](), seed))
        self._changed(is_new=True)

    def replace(self, part: int, kind: str, seed: int) -> None:
        model, index = self.place(part)
        model.parts[index] = self._new(lambda: PARTS[kind](), seed)
        self._changed(is_new=True)

    def adapt(self, part: int, seed: int) -> None:
        model, index = self.place(part)
        base = model.parts[index]
        is_narrow = getattr(base, "is_narrow", False)
        adapted = self._new(lambda: Adapted(base), seed)
        if is_narrow:
            adapted.is_narrow = True
            adapted.to(next(base.parameters()).dtype)
        model.parts[index] = adapted
        self._changed(is_new=True)

    def _new(self, make: Any, seed: int) -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(1000 * seed + self._own_rank())
        try:
            return make()
        finally:
            torch.set_default_dtype(before)

    def _own_rank(self) -> int:
        """What new parts are initialized by: every rank does it in its own way, and the first counts."""
        return 0

    def remove(self, part: int) -> None:
        model, index = self.place(part)
        del model.parts[index]
        self._changed()

    def swap(self, first: int, second: int) -> None:
        (model, here), (_, there) = self.place(first), self.place(second)
        model.parts[here], model.parts[there] = model.parts[there], model.parts[here]
        self._changed()

    def tie(self, first: int, second: int) -> None:
        self._part(second).linear.weight = self._part(first).linear.weight
        self._changed()

    def untie(self, part: int) -> None:
        matrix = self._whole(matrix_of(self._part(part)))
        self._part(part).linear.weight = nn.Parameter(matrix)
        self._changed(is_new=True)

    def _whole(self, parameter: nn.Parameter) -> Tensor:
        return parameter.detach().clone()

    def freeze(self, part: int) -> None:
        self._part(part).requires_grad_(False)
        self._changed()

    def unfreeze(self, part: int) -> None:
        self._part(part).requires_grad_(True)
        self._changed()

    def _changed(self, is_new: bool = False) -> None:
        self.changes += 1
        self.is_changed = True
        if is_new:
            known = {id(one) for optimizer in self.optimizers for one in parameters_of(optimizer)}
            self.new_parameters |= {id(one) for _, _, one in self.named() if id(one) not in known}
        if is_new and self._is_flat:
            # There is no wrapper that could be told; a sharded optimizer makes new parameters the same on all ranks.
            self.optimize_new()
            self.is_changed = False
            self.new_parameters = set()

    def refresh(self) -> None:
        """Between two steps."""
        self._settle()
        self.passes = []
        self.is_changed = False
        self.new_parameters = set()

    # To be continued by other ranks.

    def restart(self, world_size: int) -> None:
        """What is not saved is gone."""
        self._settle()
        self.passes, self._last, self._kept, self.kept_gradients = [], None, {}, []
        self.is_changed = self.is_edited = False
        self.drop_gradients()
        self.world_size = world_size

    def save(self, path: Path) -> None:
        state = self.models, self.optimizers, self.changes, self.is_promised
        path.write_bytes(pickle.dumps(state))

    @classmethod
    def resumed(cls, program: Program, path: Path, world_size: int) -> "OneProcess":
        models, optimizers, changes, is_promised = pickle.loads(path.read_bytes())
        process = cls(program, models, world_size)
        process.optimizers, process.changes, process.is_promised = optimizers, changes, is_promised
        return process

    def place(self, part: int) -> tuple[RandomModel, int]:
        """The model and the index in it of a part, of all parts one after another and over again."""
        places = [(model, index) for model in self.models for index in range(len(model.parts))]
        return places[part % len(places)]

    def _part(self, part: int) -> Any:
        model, index = self.place(part)
        return model.parts[index]

    def _all_parameters(self) -> list[nn.Parameter]:
        """Also those that have left the models, but not the optimizers."""
        held = [one for model in self.models for one in model.parameters()]
        return list(dict.fromkeys([*held, *(one for optimizer in self.optimizers for one in parameters_of(optimizer))]))

    def named(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        """Every parameter by tower and name."""
        for number, model in enumerate(self.models):
            for name, parameter in model.named_parameters(remove_duplicate=False):
                yield number, name, parameter


def models_of(program: Program) -> list[RandomModel]:
    """The models of a program; of each part is known whether it is in float32 on ranks."""
    models = program.models()
    for model in models:
        for part in model.parts:
            part.is_narrow = next(part.parameters()).dtype == torch.float32
    return models


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _half(gradient: Tensor) -> Tensor:
    return gradient * 0.5
