"""State dicts of wrappers, which are those of the wrapped module, and marks that say whose slices are in them."""

import functools
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from cs336sys.errors import UsageError

# What nn.Module.load_state_dict puts into the metadata of a module, for lack of an argument.
_ASSIGNS = "assign_to_params_buffers"


class StateDictOfWrapped(nn.Module):
    """A wrapper whose state dict is that of ``module``, also where the wrapper is a part of another module.

    State dicts are loaded with or without ``module.`` before the names: torch's wrappers, for example, write it.
    """

    module: nn.Module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the wrapped module's state dict, without a prefix."""
        state = self.module.state_dict(*args, **kwargs)
        prefix = args[1] if len(args) > 1 else kwargs.get("prefix", "")
        metadata = getattr(state, "_metadata", None)
        if prefix and metadata is not None:
            # The module around this one will look for them, but not for values, as if they had this wrapper's name.
            inner = {name: one for name, one in metadata.items() if f"{name}.".startswith(prefix)}
            metadata.update({f"{prefix}module.{f'{name}.'[len(prefix) :]}"[:-1]: one for name, one in inner.items()})
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict of the wrapped module, with or without ``module.`` before every name."""
        if self._has_prefix(state_dict, "module."):
            metadata = getattr(state_dict, "_metadata", None)
            state_dict = OrderedDict((key.removeprefix("module."), value) for key, value in state_dict.items())
            if metadata is not None:
                metadata = {name.removeprefix("module").removeprefix("."): one for name, one in metadata.items()}
                state_dict._metadata = metadata  # type: ignore[attr-defined]
        return self.module.load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # nn.Module looks for the entries of a child under the child's name, here "module".
        own = [key for key in state_dict if key.startswith(prefix)]
        if not self._has_prefix(own, f"{prefix}module."):
            for key in own:
                state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _has_prefix(self, keys: Any, prefix: str) -> bool:
        return not hasattr(self.module, "module") and all(key.startswith(prefix) for key in keys)


def mark_share(module: nn.Module, kind: str, group: dist.ProcessGroup) -> None:
    """Let state dicts of ``module`` say which rank's slices they hold, and let it refuse those of another rank.

    It also refuses ``assign=True``, which would put other parameters in the place of slices.

    The mark is in the state dict's metadata, which ``torch.save`` keeps. A dictionary made of a state dict has none,
    and is taken if shapes fit.

    Args:
        kind: the wrapper that has cut the parameters; each has a mark of its own.
        group: the ranks that hold slices.
    """
    share = {"rank": group.rank(), "ranks": group.size()}
    module.register_state_dict_post_hook(functools.partial(_write_mark, kind, share))
    module.register_load_state_dict_pre_hook(functools.partial(_compare_mark, kind, share))


def _write_mark(
    kind: str,
    share: dict[str, int],
    module: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    metadata: dict[str, Any],
) -> None:
    metadata[kind] = share


def _compare_mark(
    kind: str,
    share: dict[str, int],
    module: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    *of_errors: Any,
) -> None:
    # nn.Module leaves it in the state dict, where a later call would find it.
    if metadata.pop(_ASSIGNS, False):
        raise UsageError(f"assign=True would replace the slices that {kind} works with: choose assign=False")
    saved = metadata.get(kind, share)
    if saved != share:
        raise UsageError(
            f"the state dict holds the slices of rank {saved['rank']} of {saved['ranks']}, this is rank "
            f"{share['rank']} of {share['ranks']}: load the one of this rank, or use save_checkpoint()"
        )
