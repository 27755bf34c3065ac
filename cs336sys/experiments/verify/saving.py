"""Saves what a rank trains and loads it into new objects: own state dicts, and torch.distributed.checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from cs336sys.errors import CapabilityError
from cs336sys.experiments.verify.wraps import Wrapped


@dataclass(frozen=True)
class TrainingObjects:
    """Objects that are saved, or loaded into.

    Attributes:
        inner: the optimizer that updates this rank's parameters, which ``optimizer`` may wrap.
        is_sliced: whether this rank has slices of weights; ``is_distributed``: as DTensors.
    """

    wrapped: Wrapped
    optimizer: Any
    inner: Any
    is_sliced: bool
    is_distributed: bool


def own_state(trained: TrainingObjects) -> Any:
    """A copy of the state dicts of module and optimizer, or of the object that has them."""
    if _saves_all(trained, "state_dict"):
        state = trained.wrapped.owner.state_dict()
    else:
        state = {"model": trained.wrapped.module.state_dict(), "optimizer": _optimizer_state(trained.optimizer)}
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), state)


def _saves_all(trained: TrainingObjects, name: str) -> bool:
    """Return whether the owner has state dicts of module and optimizer, and not the module's by ``__getattr__``."""
    owner = trained.wrapped.owner
    method = getattr(owner, name, None)
    return not isinstance(owner, nn.Module) and method is not None and getattr(method, "__self__", owner) is owner


def _optimizer_state(optimizer: Any) -> Any:
    if not hasattr(optimizer, "consolidate_state_dict"):
        return optimizer.state_dict()
    state = None
    for rank in range(dist.get_world_size()):
        # Another rank's is forgotten by the next.
        optimizer.consolidate_state_dict(to=rank)
        if rank == dist.get_rank():
            state = optimizer.state_dict()
    return state


def load_own_state(trained: TrainingObjects, state: Any) -> None:
    """Load a :func:`own_state`."""
    if _saves_all(trained, "load_state_dict"):
        trained.wrapped.owner.load_state_dict(state)
        return
    trained.wrapped.module.load_state_dict(state["model"])
    trained.optimizer.load_state_dict(state["optimizer"])


def _checkpoint_state(trained: TrainingObjects) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    if not isinstance(trained.inner, torch.optim.Optimizer) or (trained.is_sliced and not trained.is_distributed):
        raise CapabilityError("torch.distributed.checkpoint cannot know its slices, which are no DTensors")
    model, optimizer = get_state_dict(trained.wrapped.module, trained.inner)
    return {"model": model, "optimizer": optimizer}


def folder_of_first(folder: str) -> str:
    """The first rank's folder, on every rank: those that torchrun started each have made one."""
    folders = [folder]
    dist.broadcast_object_list(folders)
    return folders[0]


def save_distributed_checkpoint(trained: TrainingObjects, folder: str) -> None:
    """Save by torch.distributed.checkpoint. All ranks call it together.

    Raises:
        CapabilityError: it holds slices that are no DTensors.
    """
    import torch.distributed.checkpoint as checkpoint

    checkpoint.save(_checkpoint_state(trained), checkpoint_id=folder)


def load_distributed_checkpoint(trained: TrainingObjects, folder: str) -> None:
    """Load what :func:`save_distributed_checkpoint` has saved, by as many ranks or others."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import set_state_dict

    state = _checkpoint_state(trained)
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(
        trained.wrapped.module, trained.inner, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def save_to_folder(trained: TrainingObjects, folder: str) -> None:
    """Save for another number of ranks: DTensors as a checkpoint, all else as each rank's own state."""
    if trained.is_distributed:
        save_distributed_checkpoint(trained, f"{folder}/dcp")
    else:
        torch.save(own_state(trained), f"{folder}/rank{dist.get_rank()}.pt")


def load_from_folder(trained: TrainingObjects, folder: str, ranks: int) -> None:
    """Load what ``ranks`` others have saved there."""
    if Path(folder, "dcp").exists():
        load_distributed_checkpoint(trained, f"{folder}/dcp")
    else:
        state = torch.load(f"{folder}/rank{dist.get_rank() % ranks}.pt", weights_only=False)
        load_own_state(trained, state)
