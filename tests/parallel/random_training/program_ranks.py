"""Runs programs on ranks, and compares each rank after every action with one process."""

import contextlib
import copy
import datetime
import enum
import functools
import gc
import json
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from one_process import SCALARS, OneProcess, models_of, parameters_of
from random_models import LIMIT, Attention, Limited, Raised, RandomModel, whole_attention
from random_programs import OPTIMIZERS, Action, Program
from small_models import PlainBlocks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cs336sys.errors import CapabilityError, UsageError
from cs336sys.parallel.context_parallel import AllToAllAttention, ContextGroup, RingAttention
from cs336sys.parallel.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.fsdp.checkpoint import load_checkpoint, save_checkpoint
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer
from cs336sys.parallel.tensor_parallel import TensorParallel
from cs336sys.parallel.tensor_parallel import checkpoint as tensor_checkpoint

DDP_CLASSES = {"naive": NaiveDDP, "flat": FlatDDP, "overlap": OverlappedDDP, "bucketed": BucketedDDP}

# How long ranks wait for one that does not come to the end of an action.
PATIENCE_S = 60.0


class OnRank(OneProcess):
    """One of the ranks: trains on its share of the batch, by the wrapper and optimizer of the program."""

    def __init__(self, program: Program, models: list[RandomModel], groups: list[list[list[str]]] | None = None):
        super().__init__(program, models, dist.get_world_size())
        self.rank = dist.get_rank()
        synchronizer, _, sharded = program.wrapper.partition("+")
        self._has_sharded_optimizer = bool(sharded) or self._is_flat
        self.is_fsdp = synchronizer == "fsdp"
        self._mesh = _mesh(*program.mesh(self.world_size)) if program.inner else None
        self._shared: TensorParallel | None = None
        if self._mesh is not None and program.shares_layers:
            is_sequence_parallel = program.inner == "sequence-parallel"
            self._shared = TensorParallel(models[0], self._mesh["inner"], sequence_parallel=is_sequence_parallel)
        elif self._mesh is not None:
            self._share_sequence(self._mesh["inner"])
        self.called = [self._wrap(synchronizer, model) for model in models]
        self.build_optimizers(groups or [[list(dict(model.named_parameters()))] for model in models])

    def _share_sequence(self, mesh: DeviceMesh) -> None:
        self._context = context = ContextGroup(self.program.split(self.world_size), mesh)
        for part in (part for model in self.models for part in model.modules() if isinstance(part, Attention)):
            is_ring = self.program.inner == "ring"
            part.attend = (
                RingAttention(context, PlainBlocks()) if is_ring else AllToAllAttention(context, whole_attention)
            )

    def _wrap(self, synchronizer: str, model: RandomModel) -> nn.Module:
        if self._is_flat:
            return model
        if self._shared is not None and synchronizer == "none":
            return self._shared
        # Those that share a sequence have whole models, of which all ranks average gradients.
        group = self._mesh["batch"] if self._mesh is not None and self._shared is not None else None
        if self.is_fsdp:
            return FSDP(model, prefetch=self.program.prefetch, keep_gathered=self.program.keep_gathered, group=group)
        options = (self.program.bucket_mb,) if synchronizer == "bucketed" else ()
        return DDP_CLASSES[synchronizer](model, *options, group=group)

    def _optimizer(self, number: int, parameters: list[nn.Parameter]) -> Any:
        if not self._has_sharded_optimizer:
            return super()._optimizer(number, parameters)
        optimizer_class, options = OPTIMIZERS[self.program.optimizer]
        module = self.models[number] if self.program.waits_in_module else None
        return ShardedOptimizer(
            parameters,
            optimizer_class,
            flat=self._is_flat,
            module=module,
            bucket_size_mb=self.program.bucket_mb,
            **options,
        )

    @property
    def synchronizers(self) -> list[Any]:
        if self._is_flat:
            return self.optimizers
        return self.called if self._shared in (None, *self.called) else [*self.called, self._shared]

    def wait(self) -> None:
        """Until parameters may be used outside of the modules."""
        if self._has_sharded_optimizer and self.program.waits_in_module:
            for optimizer in self.optimizers:
                optimizer.wait_for_parameters()

    def _losses(self, seed: int, called: list[Any], penalized: nn.Module | None) -> list[Tensor]:
        if called is self.models or penalized is not None:
            self.wait()
        return [self._loss(seed, self.rank, called, penalized)]

    def _language_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self._shared.loss(logits, targets)

    def _shared_sequence(self, whole: Tensor, positions: list[int]) -> Tensor:
        return whole[:, positions] if self.program.shares_sequence else whole

    def _mean_over_ranks(self, loss_sum: Tensor, is_valid: Tensor, positions: list[int]) -> Tensor:
        return self._context.mean_loss(loss_sum, is_valid[:, positions].sum())

    def _own_tokens(self, results: Tensor, positions: list[int]) -> Tensor:
        return results

    def _no_sync(self) -> contextlib.AbstractContextManager[None]:
        return _all(one.no_sync() for one in self.synchronizers)

    def backward(self, which: str = "all", synchronizes: bool = True, absent: int | None = None) -> Any:
        (loss,) = self._taken(which, synchronizes)
        try:
            with contextlib.nullcontext() if synchronizes else self._no_sync():
                # One that is left, also by an error, restores what was before.
                with contextlib.suppress(Raised), self._no_sync(), self._no_sync():
                    raise Raised
                if self.rank != absent and loss.requires_grad:
                    loss.backward()
        except Raised as raised:
            if not (self.is_fsdp or (self._is_flat and self.is_stepped)):
                self.finish()
            self.drop_gradients()
            return str(raised)
        if absent is not None:
            # The others may wait for this rank.
            self.finish()
        return None

    def sum_losses(self) -> float:
        total = torch.tensor(self._last[0], dtype=torch.float64)
        dist.all_reduce(total)
        return total.item()

    def finish(self) -> None:
        for synchronizer in self.synchronizers:
            synchronizer.finish_gradient_synchronization()
        # Gradients are not finished where this was refused.
        super().finish()

    def _clip(self, number: int, max_norm: float, norm_type: float) -> Tensor:
        if self._shared is not None:
            return self._shared.clip_grad_norm_(max_norm, norm_type, sharded=self._sharded)
        if self.is_fsdp:
            return self.called[number].clip_grad_norm_(max_norm, norm_type)
        if self._has_sharded_optimizer:
            return self.optimizers[number].clip_grad_norm_(max_norm)
        return super()._clip(number, max_norm, norm_type)

    @property
    def _sharded(self) -> FSDP | None:
        return self.called[0] if self.is_fsdp else None

    def rebuild_optimizer(self) -> None:
        self.wait()
        super().rebuild_optimizer()

    def refresh(self) -> None:
        self._settle()
        self.wait()
        for synchronizer in self.synchronizers:
            # With FSDP around the parts, FSDP alone has parameters.
            if synchronizer is not self._shared or not self.is_fsdp:
                synchronizer.refresh()
        if self._has_sharded_optimizer and not self._is_flat:
            for optimizer in self.optimizers:
                optimizer.refresh()
        super().refresh()

    def scale_weights(self, how: str, part: int) -> None:
        self.wait()
        super().scale_weights(how, part)

    def restore_weights(self, assign: bool, who: str) -> None:
        self.wait()
        super().restore_weights(assign, who)

    def _own_rank(self) -> int:
        return self.rank

    def _whole(self, parameter: nn.Parameter) -> Tensor:
        if not self.is_fsdp:
            return super()._whole(parameter)
        for called in self.called:
            names = [name for name, one in called.module.named_parameters(remove_duplicate=False) if one is parameter]
            if names:
                return called.gather_full_params()[names[0]]
        raise AssertionError("it belongs to one of the models")

    # To be continued.

    def write(self, folder: Path) -> None:
        if self._shared is not None:
            tensor_checkpoint.save_checkpoint(
                folder / "0", self._shared, self.optimizers[0], sharded=self._sharded, extra={"number": 0}
            )
            return
        for number, (called, optimizer) in enumerate(zip(self.called, self.optimizers, strict=True)):
            path = folder / str(number)
            if self.is_fsdp:
                extra = {"kept": torch.arange(3), "number": number}
                save_checkpoint(path, called, optimizer, extra=extra)
                continue
            sharded = self._has_sharded_optimizer
            state = optimizer.consolidated_state_dict() if sharded else optimizer.state_dict()
            if self.rank == 0:
                torch.save({"model": called.state_dict(), "optimizer": state}, path)
        dist.barrier()

    @classmethod
    def read(cls, folder: Path, process: OneProcess) -> "OnRank":
        """A rank that goes on from what was written, with models that were made anew."""
        models = copy.deepcopy(process.models)
        torch.manual_seed(dist.get_rank())
        for model in models:
            for parameter in model.parameters():
                parameter.grad = None
                parameter.data.normal_()
            saved = model.state_dict()
            for name, buffer in model.named_buffers():
                if name in saved:
                    buffer.fill_(77.0)
            for part in model.parts:
                if getattr(part, "is_narrow", False):
                    part.float()
        rank = cls(process.program, models, process.group_names())
        if rank._shared is not None:
            path, optimizer = folder / "0", rank.optimizers[0]
            extra = tensor_checkpoint.load_checkpoint(path, rank._shared, optimizer, sharded=rank._sharded)
            assert extra == {"number": 0}
            return rank
        for number, (called, optimizer) in enumerate(zip(rank.called, rank.optimizers, strict=True)):
            path = folder / str(number)
            if rank.is_fsdp:
                extra = load_checkpoint(path, called, optimizer)
                assert extra["number"] == number
                assert extra["kept"].tolist() == [0, 1, 2]
                continue
            saved = torch.load(path, weights_only=False)
            called.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        return rank

    # How it differs from one process.

    def difference(self, process: OneProcess, is_last: bool) -> str | None:
        """The first; None if there is none."""
        if is_last:
            self.wait()
        if self._shared is not None:
            return self._difference_of_parts(process)
        has_arrived = is_last or not (self._has_sharded_optimizer and self.program.waits_in_module)
        if has_arrived and (found := self._compared(process, "weight", lambda one: one.detach())):
            return found
        has_gradients = not (self._is_flat or process.is_unfinished)
        if has_gradients and (found := self._compared(process, "gradient", lambda one: one.grad)):
            return found
        for number, (one, other) in enumerate(zip(self.models, process.models, strict=True)):
            buffers = dict(other.named_buffers())
            for name, buffer in one.named_buffers():
                if not torch.equal(buffer.double(), buffers[name].double()):
                    return f"buffer {number}.{name} is {buffer.item()} and not {buffers[name].item()}"
        if any(not torch.equal(gradient, before) for gradient, before in self.kept_gradients):
            return "gradient of before has changed, which the user has kept"
        # state_dict() takes up what users have made of the state, which steps and checkpoints must do by themselves.
        return None if process.is_edited and not is_last else self._state_difference(process)

    def _difference_of_parts(self, process: OneProcess) -> str | None:
        """Of the layers that ranks share, put together. Every rank calls it."""
        if process.is_changed:
            return None
        model = process.models[0]
        parts = None if self._sharded is None else self._sharded.gather_full_params()
        for name, whole in self._shared.full_state_dict(parts).items():
            if wrong := self._wrong(whole, model.get_parameter(name).detach()):
                return f"weight of {name} {wrong}"
        if self._sharded is not None or process.is_unfinished:
            return None
        gradients = {name: one.grad for name, one in self.models[0].named_parameters() if one.grad is not None}
        expected = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        if gradients.keys() != expected.keys():
            return f"gradient of {sorted(gradients.keys() ^ expected.keys())} is there or is not"
        for name, whole in self._shared.full_state_dict(gradients).items():
            if wrong := self._wrong(whole, model.get_parameter(name).grad):
                return f"gradient of {name} {wrong}"
        return None

    def _compared(self, process: OneProcess, what: str, of: Any) -> str | None:
        sliced = {
            (number, name)
            for number, called in enumerate(self.called)
            if self.is_fsdp and not process.is_changed
            for parameter in called.sharded_parameters.values()
            for name in parameter.names
        }
        new = process.new_parameters
        for (number, name, parameter), (*_, other) in zip(self.named(), process.named(), strict=True):
            if id(other) in new:
                continue
            found, expected = of(parameter), of(other)
            if expected is not None and (number, name) in sliced:
                expected = self._rows(expected)
            elif expected is not None and self.is_fsdp:
                expected = self._own(expected, parameter)
            if expected is not None and not expected.numel():
                continue
            if wrong := self._wrong(found, expected):
                return f"{what} of {number}.{name} {wrong}"
        return None

    def _own(self, expected: Tensor, like: Tensor) -> Tensor:
        if expected.shape == like.shape or expected.dim() == 0:
            return expected
        return self._rows(expected)

    def _rows(self, whole: Tensor) -> Tensor:
        """This rank's slice."""
        each = -(-len(whole) // self.world_size)
        return whole[self.rank * each : (self.rank + 1) * each]

    def _wrong(self, found: Tensor | None, expected: Tensor | None, tolerance: float = 0.0) -> str | None:
        if found is None or expected is None:
            return None if found is expected else f"is {_short(found)} and not {_short(expected)}"
        if found.shape != expected.shape:
            return f"is {tuple(found.shape)} and not {tuple(expected.shape)}"
        error = (found.double() - expected.double()).abs().max().item() if found.numel() else 0.0
        return None if error <= max(self.program.tolerance, tolerance) else f"is {error:.1e} off"

    def _state_difference(self, process: OneProcess) -> str | None:
        for number, (optimizer, other) in enumerate(zip(self.optimizers, process.optimizers, strict=True)):
            held, wanted = parameters_of(optimizer), parameters_of(other)
            if len(held) != len(wanted):
                return f"optimizer {number} has {len(held)} parameters and not {len(wanted)}"
            rates = [[group["lr"] for group in one.param_groups] for one in (optimizer, other)]
            if rates[0] != rates[1]:
                return f"optimizer {number} has rates {rates[0]} and not {rates[1]}"
            names = {id(one): name for name, one in process.models[number].named_parameters()}
            if self._has_sharded_optimizer:
                saved = optimizer.state_dict()
                states, owned = saved["state"], [range(*bounds) for bounds in saved["share"]["owned"]]
            else:
                states, owned = {index: optimizer.state.get(one, {}) for index, one in enumerate(held)}, None
            for index, (parameter, whole) in enumerate(zip(held, wanted, strict=True)):
                name = names.get(id(whole))
                expected, state = other.state.get(whole, {}), states.get(index, {})
                if name is None or not parameter.numel() or (owned is not None and not owned[index]):
                    # Of what has left the model nothing is promised.
                    continue
                for key in (*expected, *(key for key in state if key not in expected)):
                    value, target = state.get(key), expected.get(key)
                    if isinstance(target, Tensor) and key not in SCALARS:
                        if self._is_flat:
                            target = _in_memory_order(target, parameter)[owned[index].start : owned[index].stop]
                        elif self.is_fsdp:
                            target = self._own(target, parameter)
                        elif value is not None and value.shape != target.shape:
                            return f"{key} of {number}.{name} is {tuple(value.shape)}"
                    value, target = (one if one is None else torch.as_tensor(one) for one in (value, target))
                    # Torch makes scalars of the parameter's dtype when it loads a state, and they round in another way.
                    tolerance = 1e-6 if key in SCALARS else 0.0
                    if wrong := self._wrong(value, target, tolerance):
                        return f"{key} of {number}.{name} {wrong}"
        return None


def _short(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"of size {tensor.abs().max().item():.1e}" if tensor.numel() else "empty"


def _in_memory_order(whole: Tensor, parameter: Tensor) -> Tensor:
    order = sorted(range(whole.dim()), key=lambda dim: -parameter.stride(dim))
    return whole.permute(order).reshape(-1)


@contextlib.contextmanager
def _all(contexts: Iterable[contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@functools.cache
def _mesh(groups: int, ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (groups, ranks), mesh_dim_names=("batch", "inner"))


@functools.cache
def _side_group() -> dist.ProcessGroup:
    """For what ranks tell each other about actions, which must not meet the collectives of these."""
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=PATIENCE_S))


def run_programs(programs: list[tuple[Program, int, str]], results: str) -> None:
    """Run each program, and write a line of JSON for each to a file, which is there after a crash, too.

    The line has what went wrong on this rank, if anything did, and how many actions were done and refused.

    Args:
        programs: each with the number of the restart it goes on from, and a folder for what it saves.
        results: the file, but for this rank's number.
    """
    gc.freeze()
    with Path(f"{results}{dist.get_rank()}").open("w", buffering=1) as file:
        for program, leg, folder in programs:
            run = _Run(program, leg, Path(folder))
            try:
                run.run()
                wrong = None
            except _WrongError as error:
                wrong = str(error)
                if "gloo" in wrong or "imeout" in wrong:
                    # Such ranks are of no use any more: these end, and the others of this program with them.
                    raise RuntimeError(wrong) from error
            file.write(json.dumps([wrong, run.counts]) + "\n")
            del run
            # Wrappers are parts of cycles.
            gc.collect()


class Outcome(enum.IntEnum):
    """What an action comes to on a rank."""

    DONE = 0
    REFUSED = 1
    RAISED = 2
    WRONG = 3


class _WrongError(Exception):
    """A rank is not what one process is."""


class _EndError(Exception):
    """A program ends here, and nothing is wrong."""


class _Run:
    """One program between two restarts, on a rank and in one process.

    Attributes:
        counts: how many actions were done, and refused with which words.
    """

    def __init__(self, program: Program, leg: int, folder: Path):
        self.counts: dict[str, int] = {}
        self._program, self._leg, self._folder = program, leg, folder
        self._numbers = program.legs()[leg].actions
        self._world_size = program.legs()[leg].world_size
        self._rank: OnRank | None = None

    def run(self) -> None:
        """Do all actions.

        Raises:
            _WrongError: on every rank, after the first action that came to something else than in one process.
        """
        wrong = None
        try:
            self._begin()
            for number in self._numbers:
                self._act(number)
        except _EndError:
            pass
        except _WrongError as error:
            wrong = error
        self._leave()
        if wrong is not None:
            raise wrong

    def _leave(self) -> None:
        """Let what was launched in a step that was given up not meet the collectives of the next program."""
        if self._rank is not None:
            for leave in (self._rank.finish, self._rank.drop_gradients):
                _attempt(leave)
            _agreed(Outcome.DONE, None, "leaving")

    def _begin(self) -> None:
        if self._leg == 0:
            self._process = OneProcess.begun(self._program)
            self._start("wrapping", lambda: OnRank(self._program, models_of(self._program)))
        else:
            folder = self._folder / f"leg{self._leg}"
            self._process = OneProcess.resumed(self._program, folder / "process", self._world_size)
            self._start("loading", lambda: OnRank.read(folder, self._process))

    def _start(self, where: str, make: Callable[[], OnRank]) -> None:
        outcome, text, self._rank = _attempt(make)
        if outcome == Outcome.RAISED:
            outcome = Outcome.WRONG
        if outcome == Outcome.DONE:
            outcome, text = self._compared(None, None, is_last=False)
        if _agreed(outcome, text, where) == Outcome.REFUSED:
            self._refused(where, text, self._process.is_promised)
            raise _EndError

    def _act(self, number: int) -> None:
        action = self._program.actions[number]
        name, *args = action
        where = f"action {number} {action}"
        is_last_of_leg = name == "restart" and args[0] != self._process.world_size
        if not self._process.allows(action):
            if is_last_of_leg:
                raise _EndError
            return
        # What is refused must not have been promised before.
        is_promised = self._process.is_promised
        folder = self._folder / (f"leg{self._leg + 1}" if is_last_of_leg else f"action{number}")
        if name == "restart":
            outcome, text, value = _attempt(lambda: self._save(folder))
        else:
            outcome, text, value = _attempt(lambda: getattr(self._rank, name)(*args))
        if outcome != Outcome.REFUSED:
            error, expected = _done_by(self._process, action)
            if error is not None and outcome == Outcome.DONE:
                outcome, text = Outcome.WRONG, f"one process raises {error}, this did not"
            elif error is None and outcome == Outcome.RAISED:
                outcome = Outcome.WRONG
            elif outcome == Outcome.DONE and not is_last_of_leg and name != "restart":
                outcome, text = self._compared(value, expected, is_last=number == self._numbers[-1])
        agreed = _agreed(outcome, text, where)
        self._count(f"{name} {agreed.name.lower()}")
        if agreed == Outcome.RAISED:
            # In one process, too.
            raise _EndError
        if agreed == Outcome.REFUSED:
            self._refused(where, text, is_promised)
            if name in _LAST_WHEN_REFUSED:
                raise _EndError
            self._take_changes()
        elif is_last_of_leg:
            if dist.get_rank() == 0:
                self._process.save(folder / "process")
            raise _EndError
        elif name == "restart":
            self._start(where, lambda: OnRank.read(folder, self._process))

    def _save(self, folder: Path) -> None:
        assert self._rank is not None, "it was started"
        if self._rank.rank == 0:
            folder.mkdir(parents=True)
        dist.barrier(group=_side_group())
        self._rank.restart(self._rank.world_size)
        self._rank.write(folder)

    def _compared(self, value: Any, expected: Any, is_last: bool) -> tuple[Outcome, str | None]:
        """With one process: what an action returned, of which one process has that of every rank, and the state."""
        expected = expected[dist.get_rank()] if isinstance(expected, list) else expected
        value = value[0] if isinstance(value, list) else value
        text = _value_difference(value, expected, self._program)
        if text is None:
            rank = self._rank
            assert rank is not None, "it was started"
            outcome, error, text = _attempt(lambda: rank.difference(self._process, is_last))
            if outcome != Outcome.DONE:
                return Outcome.WRONG, f"comparing: {error}"
        return (Outcome.DONE if text is None else Outcome.WRONG), text

    def _refused(self, where: str, text: str | None, is_promised: bool) -> None:
        self._count(f"refused: {text}")
        if is_promised:
            raise _WrongError(f"{where}: refused: {text}")

    def _take_changes(self) -> None:
        """A pass that was refused in its middle may have changed buffers, and brought weights within their bounds."""
        assert self._rank is not None, "it was started"
        for model, other in zip(self._rank.models, self._process.models, strict=True):
            for buffer, of_rank in zip(other.buffers(), model.buffers(), strict=True):
                if not torch.equal(buffer.double(), of_rank.double()):
                    # A pass in one process may have saved the others, as it does a rotation's, for its backward pass.
                    buffer.copy_(of_rank)
            limited = [
                [part.weight for part in module.modules() if isinstance(part, Limited)] for module in (other, model)
            ]
            for weight, of_rank in zip(*limited, strict=True):
                within = weight.detach().clamp(-LIMIT, LIMIT)
                if within.shape == of_rank.shape and torch.equal(within.double(), of_rank.detach().double()):
                    weight.data.copy_(within)

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


# After which a program cannot go on: gradients are incomplete, or a part of the weights or of the model is changed.
_LAST_WHEN_REFUSED = (
    *("backward", "finish", "step", "clip", "zero_grad", "restart", "rebuild_optimizer"),
    *("add", "replace", "adapt", "untie"),
)


def _attempt(act: Callable[[], Any]) -> tuple[Outcome, str | None, Any]:
    try:
        return Outcome.DONE, None, act()
    except (UsageError, CapabilityError) as refusal:
        return Outcome.REFUSED, str(refusal), None
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        places = " < ".join(f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in frames[:-6:-1])
        # How often weights were written to, which autograd's error counts, differs by a rank's share of the optimizer.
        message = re.sub(r"at version \d+", "at version N", str(error))
        return Outcome.RAISED, f"{type(error).__name__}: {message[:300]} [{places}]", None


def _done_by(process: OneProcess, action: Action) -> tuple[str | None, Any]:
    """What one process raises, and what it returns."""
    try:
        return None, getattr(process, action[0])(*action[1:])
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}", None


def _value_difference(found: Any, expected: Any, program: Program) -> str | None:
    if isinstance(found, float) and isinstance(expected, float):
        if abs(found - expected) <= program.tolerance * max(1.0, abs(expected)):
            return None
    elif found == expected:
        return None
    return f"returned {found} and not {expected}"


def _agreed(outcome: Outcome, text: str | None, where: str) -> Outcome:
    """What all ranks have come to.

    Raises:
        _WrongError: they differ, or one is wrong.
    """
    outcomes = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    outcomes[dist.get_rank()] = outcome
    try:
        dist.all_reduce(outcomes, group=_side_group())
    except RuntimeError as error:
        raise RuntimeError(f"{where}: {outcome.name} ({text}), and other ranks did not come") from error
    found = outcomes.tolist()
    if Outcome.WRONG in found:
        raise _WrongError(f"{where}: {text or 'wrong on another rank'}")
    if len(set(found)) > 1:
        raise _WrongError(f"{where}: ranks disagree: {outcome.name} {text or ''}")
    return outcome
