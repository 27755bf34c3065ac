"""Mistakes of public projects, each written anew and as small as it gets; their links stand with them."""

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from audit_faults import average
from data_faults import Trainer
from faults import Fault


def _bug(link, name, case, cause, file="real_bugs", **settings):
    """A mistake, the case that shows it, and the cause that is named."""
    cases = () if case == "step" else (case,)
    wrap = f"{Path(__file__).with_name(file)}.py:{name}"
    return Fault(wrap, cases, (cause,), f"https://github.com/{link}", **settings)


BUGS = (
    _bug("huggingface/picotron/issues/39", "last_micro_batch_alone", "no-sync", "accumulation", is_quick=True),
    _bug("karpathy/build-nanogpt/pull/30", "switched_after_forward", "no-sync", "accumulation"),
    _bug(
        "huggingface/transformers/pull/34191", "UnevenAveragedEvenly", "uneven", "uneven", "data_faults", is_quick=True
    ),
    _bug("huggingface/transformers/pull/24088", "schedule_of_all_ranks", "step", "schedule", file="audit_faults"),
    _bug("NVIDIA-NeMo/RL/pull/3788", "replicas_in_the_norm", "clipping", "clipping", is_quick=True),
    _bug("facebookresearch/fairscale/pull/167", "largest_of_the_norms", "clipping", "clipping"),
    _bug(
        "NVIDIA/Megatron-LM/issues/1446", "tensor_norms_not_added", "step", "partial sum", "layer_faults", mesh="tensor"
    ),
    _bug("lightly-ai/lightly/issues/1977", "gathered_without_gradient", "step", "averaged twice", is_quick=True),
    _bug("huggingface/accelerate/pull/2791", "clipped_in_silence", "step", "optimizer"),
    _bug(
        "uw-syfi/piper/issues/13", "pipeline_tied_apart", "tied", "tied", "layer_faults", mesh="pipeline", is_quick=True
    ),
    _bug("NVIDIA/Megatron-LM/pull/6920", "not_gathered_after_loading", "save", "resume"),
    _bug("pytorch/pytorch/issues/101343", "matrices_in_no_group", "groups", "groups", file="audit_faults"),
)


class Synchronized(nn.Module):
    """A module with a switch for sending gradients, which ``no_sync`` turns off."""

    def __init__(self, module, group):
        super().__init__()
        self.module, self.group, self.sends = module, group, True

    def forward(self, *args):
        return self.module(*args)

    @contextlib.contextmanager
    def no_sync(self):
        self.sends = False
        yield
        self.sends = True


def last_micro_batch_alone(model, group):
    """The hook sees the gradient of one backward pass, and not what was accumulated before it."""
    module = Synchronized(model, group)

    def send(gradient):
        if module.sends:
            dist.all_reduce(gradient, group=group)
            gradient /= dist.get_world_size(group)
        return gradient

    for parameter in model.parameters():
        parameter.register_hook(send)
    return module


def switched_after_forward(model, group):
    """DistributedDataParallel is told whether to send between its passes: its forward pass has looked already."""

    class Late(Synchronized):
        def forward(self, *args):
            output = self.module(*args)
            self.module.require_backward_grad_sync = self.sends
            return output

    return Late(nn.parallel.DistributedDataParallel(model, process_group=group), group)


def _scale_to(parameters, norm, max_norm):
    for parameter in parameters:
        parameter.grad *= min(1.0, max_norm / norm)
    return norm


def _squares(parameters):
    return sum(parameter.grad.square().sum() for parameter in parameters)


def replicas_in_the_norm(model, group):
    """Adds up over ranks the squares of gradients that all of them have alike."""
    model = average(model, group)

    def clip(max_norm):
        total = _squares(model.parameters())
        dist.all_reduce(total, group=group)
        return _scale_to(model.parameters(), total.sqrt(), max_norm)

    model.clip_grad_norm_ = clip
    return model


def largest_of_the_norms(model, group):
    """Of slices, takes the largest norm of a rank, where squares should be added up."""
    model = average(model, group)
    parameters = list(model.parameters())
    owned = parameters[dist.get_rank(group) :: dist.get_world_size(group)]

    def clip(max_norm):
        norm = _squares(owned).sqrt()
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
        return _scale_to(parameters, norm, max_norm)

    model.clip_grad_norm_ = clip
    return model


def gathered_without_gradient(model, group):
    """The loss of all ranks' outputs, of which only its own have gradients, which are averaged once more."""
    module = average(model, group)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)

    def gathered(tensor):
        parts = [torch.empty_like(tensor) for _ in range(ranks)]
        dist.all_gather(parts, tensor.detach().contiguous(), group=group)
        parts[rank] = tensor
        return torch.cat(parts)

    def loss(output, targets):
        return nn.functional.cross_entropy(gathered(output).flatten(0, 1), gathered(targets).flatten())

    return SimpleNamespace(module=module, loss=loss)


def clipped_in_silence(model, group):
    """The engine clips gradients to a norm that nobody set; the public default is 1.0, which this model stays below."""
    module = average(model, group)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, eps=1.0)
    step = optimizer.step

    def clipped_step(closure=None):
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        step(closure)

    optimizer.step = clipped_step
    return module, optimizer


class not_gathered_after_loading(Trainer):
    """Saves everything, and loads what this rank owns: nothing sends it to the others."""

    def load_state_dict(self, state):
        names = list(state["model"])[dist.get_rank(self.group) :: self.ranks]
        self.module.load_state_dict({name: state["model"][name] for name in names}, strict=False)
        self.optimizer.load_state_dict(state["optimizer"])
