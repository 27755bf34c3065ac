"""The parameter groups of an optimizer: names, order and options, and a description to compare between ranks."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336sys.errors import CapabilityError, UsageError
from cs336sys.parallel.collectives import all_gather_single, group_device, is_stream_captured
from cs336sys.parallel.gradient_slices import is_slice
from cs336sys.parallel.rank_consistency import describe_parameter, digest_of, require_sendable, same_on_every_rank

Group = dict[str, Any]

# Types whose values read the same in every process if they are equal.
_PLAIN = (bool, int, float, str, type(None), list, tuple, torch.dtype)


def parameters_of(groups: Sequence[Group]) -> list[nn.Parameter]:
    return [parameter for group in groups for parameter in group["params"]]


def given_names(groups: Sequence[Group]) -> list[str | None]:
    """Return the names that parameters were given with; None for parameters without one."""
    return [name for group in groups for name in group.get("param_names", [None] * len(group["params"]))]


def names_of(groups: Sequence[Group]) -> list[str]:
    """Return a unique name for every parameter: the given one, or one made from its number."""
    names = [f"parameter {index}" if name is None else name for index, name in enumerate(given_names(groups))]
    count = Counter(names)
    return [name if count[name] == 1 else f"{name} (parameter {index})" for index, name in enumerate(names)]


def in_model_order(groups: Sequence[Group], module: nn.Module | None) -> dict[str, nn.Parameter]:
    """Return all parameters by name, in the order in which the model most likely uses them.

    This is the order of ``module``. Without one, and for parameters that are not in it, each group is assumed to be in
    order and spread evenly over the model: often one group holds the matrices of all layers and another their norms.
    """
    parameters = dict(zip(names_of(groups), parameters_of(groups), strict=True))
    # Sort keys: where in the model a parameter is assumed to be, between 0 and 1; negative for those of the module.
    positions = [(index + 0.5) / len(group["params"]) for group in groups for index in range(len(group["params"]))]
    position_of = dict(zip(parameters.values(), positions, strict=True))
    if module is not None:
        members = list(module.parameters())
        position_of |= {parameter: index for index, parameter in enumerate(members, start=-len(members))}
    return dict(sorted(parameters.items(), key=lambda item: position_of[item[1]]))


def options_of(group: Group) -> Group:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def copy_options(sources: Sequence[Group], targets: Sequence[Group]) -> None:
    """Copy options from each group to its counterpart, for example a learning rate that a scheduler has set."""
    for source, target in zip(sources, targets, strict=True):
        target.update(options_of(source))


def describe_options(options: Group) -> str:
    """Return options in words, for :func:`describe_groups`: without those that read differently in another process."""
    shown = {key: value.tolist() if isinstance(value, Tensor) else value for key, value in options.items()}
    return ", ".join(f"{key}={value}" for key, value in sorted(shown.items()) if isinstance(value, _PLAIN))


def options_now(group: Group) -> Group:
    """Return plain options as texts, to see which change; without tensors on a GPU, for which the CPU would wait."""
    return {
        key: repr(value.tolist() if isinstance(value, Tensor) else value)
        for key, value in options_of(group).items()
        if isinstance(value, _PLAIN) or (isinstance(value, Tensor) and value.is_cpu)
    }


def describe_groups(groups: Sequence[Group]) -> list[str]:
    """Return lines of text that are equal on two ranks if their groups are."""
    names = iter(names_of(groups))
    lines = []
    for number, group in enumerate(groups):
        lines.append(f"group {number} with {describe_options(options_of(group))}")
        for parameter in group["params"]:
            lines.append(f"{next(names)} of group {number} {describe_parameter(parameter)}")
    return lines


def check_parameters(groups: Sequence[Group], *, flat: bool) -> None:
    """Refuse parameters that an ordinary optimizer takes and a sharded one cannot."""
    named_parameters = list(zip(names_of(groups), parameters_of(groups), strict=True))
    require_sendable(named_parameters)
    count = Counter(id(parameter) for _, parameter in named_parameters)
    device = group_device().type
    for name, parameter in named_parameters:
        if count[id(parameter)] > 1:
            raise UsageError(f"{name} is given twice: give a tied weight once")
        refuse_slice(name, parameter)
        if flat and parameter.requires_grad and not parameter.is_floating_point():
            raise UsageError(f"{name} is {parameter.dtype}: flat=True shards real floating-point parameters only")
        if flat and parameter.device.type != device:
            raise CapabilityError(
                f"{name} is on {parameter.device}: with flat=True this process group needs it on {device}; "
                "choose NCCL for GPUs and Gloo for the CPU, or flat=False"
            )


def refuse_slice(name: str, parameter: Tensor) -> None:
    """Refuse a parameter that is a slice of this rank's: construction would overwrite it with rank 0's slice."""
    if is_slice(parameter):
        raise UsageError(
            f"{name} is a slice that this rank has of a parameter, made by FSDP or TensorParallel: their optimizer "
            "state is sharded already, so build an optimizer of the class itself"
        )


class StepAgreement:
    """Lets a step raise on every rank if it raises on one, or if ranks differ in what they say.

    On GPUs the CPU does not wait for the answer, which is read in the next step: then ranks stop one step late. In a
    CUDA graph nothing is compared.
    """

    def __init__(self) -> None:
        # On GPUs: the digests of every rank, on their way to the CPU, and the events of their arrival.
        self._answers: list[tuple[Tensor, torch.cuda.Event]] = []
        self._has_compared_before_step = False  # Whether there was a comparison since the last step.

    @contextlib.contextmanager
    def compared(self, *, is_step: bool = True) -> Iterator[list[str]]:
        """Within this context, lines of text are collected that must be the same on every rank.

        Args:
            is_step: False before the step, as for clipping: the step does not wait for that answer.
        """
        if is_stream_captured():
            yield []
            return
        if group_device().type != "cuda":
            try:
                with same_on_every_rank() as lines:
                    yield lines
            except RuntimeError as error:
                error.add_note("in the comparison of steps before parameters are updated")
                raise
            return
        lines = []
        # If there was a comparison before this step, as for clipping, it has read the answers of the last step, and its
        # own answer is perhaps still under way: the next step reads it.
        if not (is_step and self._has_compared_before_step):
            self._read_answers()
        self._has_compared_before_step = not is_step
        try:
            yield lines
        except Exception as error:
            self._ask([f"{type(error).__name__}: {error}"])
            raise
        self._ask(lines)

    def _ask(self, lines: list[str]) -> None:
        """Start to compare digests of lines between ranks."""
        sent = digest_of(lines).pin_memory().to(group_device(), non_blocking=True)
        gathered = sent.new_empty(dist.get_world_size() * len(sent))
        all_gather_single(gathered, sent)
        on_host = torch.empty(gathered.shape, dtype=torch.int64, pin_memory=True)
        on_host.copy_(gathered, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._answers.append((on_host, event))

    def _read_answers(self) -> None:
        """Wait for the digests that comparisons have sent to the CPU, and refuse to go on if ranks differ in one."""
        answers, self._answers = self._answers, []
        for on_host, event in answers:
            event.synchronize()
            first, *others = on_host.chunk(dist.get_world_size())
            for rank, other in enumerate(others, start=1):
                if not torch.equal(first, other):
                    raise UsageError(
                        f"ranks differ in what they train: in the last step, rank {rank} had other options of groups "
                        "than rank 0, or one of the two refused to step; make the same changes on every rank"
                    )
