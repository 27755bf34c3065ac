"""Saves what a rank's run trains and loads it into new objects: own state dicts, torch.distributed.checkpoint."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from cs336sys.errors import CapabilityError


def own_state(run: Any) -> Any:
    """A copy of the state dicts of module and optimizer, or of the object that has them."""
    if _saves_all(run, "state_dict"):
        state = run.wrapped.owner.state_dict()
    else:
        state = {"model": run.wrapped.module.state_dict(), "optimizer": _optimizer_state(run.optimizer)}
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), state)


def _saves_all(run: Any, name: str) -> bool:
    """Return whether the owner has state dicts of module and optimizer, and not the module's by ``__getattr__``."""
    owner = run.wrapped.owner
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


def load_own_state(run: Any, state: Any) -> None:
    if _saves_all(run, "load_state_dict"):
        run.wrapped.owner.load_state_dict(state)
    else:
        run.wrapped.module.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])


def distributed_checkpoint(run: Any, folder: str, *, loads: bool = False) -> None:
    """Save by torch.distributed.checkpoint, or load what as many ranks or others have saved. All ranks call it.

    Raises:
        CapabilityError: it holds slices that are no DTensors.
    """
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    if not isinstance(run.inner, torch.optim.Optimizer) or (run.is_sliced and not run.is_distributed):
        raise CapabilityError("torch.distributed.checkpoint cannot know its slices, which are no DTensors")
    objects = run.wrapped.module, run.inner
    model, optimizer = get_state_dict(*objects)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if loads:
        checkpoint.load(state, checkpoint_id=folder)
        set_state_dict(*objects, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    else:
        checkpoint.save(state, checkpoint_id=folder)


def folder_of_first(folder: str) -> str:
    """The first rank's folder, on every rank: those that torchrun started each have made one."""
    folders = [folder]
    dist.broadcast_object_list(folders)
    return folders[0]


def save_to_folder(run: Any, folder: str) -> None:
    """Save for another number of ranks: DTensors as a checkpoint, all else as each rank's own state."""
    if run.is_distributed:
        distributed_checkpoint(run, f"{folder}/dcp")
    else:
        torch.save(own_state(run), f"{folder}/rank{dist.get_rank()}.pt")


def load_from_folder(run: Any, folder: str, ranks: int) -> None:
    """Load what ``ranks`` others have saved there."""
    if Path(folder, "dcp").exists():
        distributed_checkpoint(run, f"{folder}/dcp", loads=True)
    else:
        load_own_state(run, torch.load(f"{folder}/rank{dist.get_rank() % ranks}.pt", weights_only=False))
