"""Notices ``zero_grad()`` of modules, and lets ranks agree on dropping gradients.

Backward passes leave no gradient with a parameter whose gradient is averaged in slices, so ``zero_grad()`` of a module
would find nothing to drop: it is wrapped, and tells those that hold the slices.
"""

import functools
import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Set as AbstractSet

import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from cs336sys.parallel.collectives import require_process_group


class HoldsGradients(ABC):
    """What has gradients that are not with their parameters."""

    @abstractmethod
    def drop_gradients_of_module(self, parameters: AbstractSet[int], set_to_none: bool) -> None:
        """Drop or zero the gradients of the parameters with these ids, which a module has zeroed."""


_holders: "weakref.WeakSet[HoldsGradients]" = weakref.WeakSet()


def notice_zero_grad(holder: HoldsGradients) -> None:
    """Let ``holder`` drop its gradients, too, whenever a module drops those of its parameters."""
    _wrap_zero_grad()
    _holders.add(holder)


@functools.cache
def _wrap_zero_grad() -> None:
    zero_grad = nn.Module.zero_grad

    @functools.wraps(zero_grad)
    def noticed(module: nn.Module, set_to_none: bool = True) -> None:
        holders = list(_holders)
        if holders:
            parameters = frozenset(map(id, module.parameters()))
            for holder in holders:
                holder.drop_gradients_of_module(parameters, set_to_none)
        zero_grad(module, set_to_none)

    nn.Module.zero_grad = noticed  # type: ignore[assignment]


class HostAgreement:
    """Asks all ranks whether something holds on any of them, without the collectives that they are in the middle of.

    Collectives are matched by the order of calls, which differs between ranks that have launched some and others. So
    this goes through the store by which the ranks found each other. It takes some tenths of a millisecond, and no GPU.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        require_process_group(type(self).__name__)
        # Every rank makes these in the same order.
        self._name = f"cs336sys/agreement/{next(self._numbers)}"
        self._rounds = 0

    def any_rank(self, fact: bool) -> bool:
        """Whether ``fact`` holds on any rank. Every rank must call it."""
        store, world_size = _get_default_store(), dist.get_world_size()
        key = f"{self._name}/{self._rounds}"
        answers = store.add(key, 1 + fact * (world_size + 1))
        holding, answered = divmod(answers, world_size + 1)
        if answered == world_size:
            if self._rounds:
                # All ranks have read the answer of the round before.
                store.delete_key(f"{self._name}/{self._rounds - 1}")
                store.delete_key(f"{self._name}/{self._rounds - 1}/answer")
            store.set(f"{key}/answer", str(holding))
        self._rounds += 1
        return store.get(f"{key}/answer") != b"0"
