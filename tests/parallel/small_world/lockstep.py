"""Ranks as threads of one process, of which one runs at a time, and process groups that check every collective.

Ranks affect each other through collectives alone, so the order in which they run changes nothing that they compute. A
rank runs until it waits for a collective that another has not launched. If no rank can run, or two ranks launch
different collectives in the same place of a group, the program would hang: this is noticed without a clock.

Between launch and wait a result is filled with NaN, so that whoever reads it early, or writes into it, computes
something else than one process.
"""

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed import multi_threaded_pg

from cs336sys.parallel import gradient_synchronizer

_KINDS = dist.ReduceOp.RedOpType
_REDUCTIONS = {
    _KINDS.SUM: lambda of_ranks: torch.stack(of_ranks).sum(0),
    _KINDS.AVG: lambda of_ranks: torch.stack(of_ranks).mean(0),
    _KINDS.MAX: lambda of_ranks: torch.stack(of_ranks).amax(0),
    _KINDS.MIN: lambda of_ranks: torch.stack(of_ranks).amin(0),
}


class HangError(RuntimeError):
    """What every rank raises that waits in a program that hangs."""


class _Work(dist._Work):
    def __init__(self, finish: Callable[[], None]):
        super().__init__()
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: Any = None) -> bool:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True


class LockstepGroup(dist.ProcessGroup):
    """One rank's part of a group of all ranks; methods have torch's names of before 2.13 and since."""

    def __init__(self, world: "Lockstep", rank: int, name: str):
        super().__init__(rank, world.size)
        self._world, self._me, self._name, self._count = world, rank, name, 0

    group_name = property(lambda group: group._name)

    def _launch(
        self,
        operation: str,
        targets: Sequence[Tensor],
        sent: Sequence[Tensor],
        receive: Callable[[list[list[Tensor]]], Sequence[Tensor]],
        detail: Any = None,
    ) -> _Work:
        """Send copies of ``sent``; at the wait, ``receive`` of what each rank has sent goes to ``targets``."""
        world, place = self._world, (self._name, self._count)
        signature = (operation, self._name, tuple((tuple(one.shape), one.dtype) for one in sent), str(detail))
        world.logs[self._me].append(signature)
        expected, slot = world.slots.setdefault(place, (signature, {}))
        self._count += 1
        if expected != signature:
            world.problem = world.problem or f"{expected} of a rank meets {signature} of another"
        slot[self._me] = [tensor.detach().clone() for tensor in sent]
        for target in targets:
            # By .data, because no backend counts a change.
            target.data.fill_(torch.nan if target.is_floating_point() else 255 if target.dtype == torch.uint8 else -1)

        def finish() -> None:
            world.wait_until(self._me, lambda: len(slot) == world.size)
            values = receive([slot[rank] for rank in range(world.size)])
            for target, value in zip(targets, values, strict=True):
                target.data.copy_(value.view(target.shape))

        return _Work(finish)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> _Work:
        reduced = _REDUCTIONS[opts.reduceOp.op]
        return self._launch(
            "all-reduce", tensors, tensors, lambda sent: list(map(reduced, zip(*sent, strict=True))), opts.reduceOp.op
        )

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Work:
        targets = [] if opts.rootRank == self._me else tensors
        return self._launch("broadcast", targets, tensors, lambda sent: sent[opts.rootRank][: len(targets)])

    def all_gather_single(self, whole: Tensor, part: Tensor, opts: Any = None) -> _Work:
        kept = part.detach().clone()
        work = self._launch("all-gather", [whole], [part], lambda sent: [torch.cat([one.view(-1) for (one,) in sent])])
        # Backends leave this rank's part alone, which may be the memory of what is sent.
        whole.data.view(-1).chunk(self._world.size)[self._me].copy_(kept.view(-1))
        return work

    _allgather_base = all_gather_single

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> _Work:
        return self._launch("all-gather", outputs[0], inputs, lambda sent: [tensor for (tensor,) in sent])

    def reduce_scatter_single_coalesced(self, slices: list[Tensor], tensors: list[Tensor], opts: Any) -> _Work:
        reduced, ranks, me = _REDUCTIONS[opts.reduceOp.op], self._world.size, self._me
        return self._launch(
            "reduce-scatter",
            slices,
            tensors,
            lambda sent: [reduced(of_ranks).view(-1).chunk(ranks)[me] for of_ranks in zip(*sent, strict=True)],
            opts.reduceOp.op,
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(self, received: Tensor, tensor: Tensor, _: Any, sizes: list[int], opts: Any) -> _Work:
        sizes = list(sizes) or [tensor.numel() // self._world.size] * self._world.size
        return self._launch(
            "all-to-all",
            [received],
            [tensor],
            lambda sent: [torch.cat([one.split(sizes)[self._me] for (one,) in sent])],
            sizes,
        )

    alltoall_base = all_to_all_single

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> _Work:
        targets = outputs[0] if outputs else []
        return self._launch("gather", targets, inputs, lambda sent: [one for (one,) in sent][: len(targets)])

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> _Work:
        # Ranks but the root send as much as they get, which nobody takes.
        sent = inputs[0] if inputs else outputs * self._world.size
        return self._launch("scatter", outputs, sent, lambda of_ranks: [of_ranks[opts.rootRank][self._me]])

    def barrier(self, opts: Any = None) -> _Work:
        return self._launch("barrier", [], [], lambda sent: [])

    # Between two ranks: no collectives, and not logged.

    def send(self, tensors: list[Tensor], to: int, tag: int) -> _Work:
        self._world.mail[self._me, to].append(tensors[0].detach().clone())
        return _Work(lambda: None)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Work:
        mail = self._world.mail[source, self._me]

        def finish() -> None:
            self._world.wait_until(self._me, lambda: bool(mail))
            tensors[0].data.copy_(mail.pop(0))

        return _Work(finish)


class Lockstep:
    """A world of ranks: ``with Lockstep(2) as world: world.run(function)`` calls ``function(rank)`` on each.

    Attributes:
        problem: why the last program would hang; None if it does not.
        logs: the collectives of each rank in the last program, in the order of their launches.
    """

    def __init__(self, size: int):
        self.size = size
        self._turns = [threading.Semaphore(0) for _ in range(size + 1)]
        self._begin(None)

    def _begin(self, function: Callable[[int], Any] | None) -> None:
        self.problem: str | None = None
        # What a rank's function raises, which ends its thread's turn: nobody waits for it.
        self._error: Exception | None = None
        self.logs: list[list[tuple]] = [[] for _ in range(self.size)]
        self.slots: dict[tuple[str, int], tuple[tuple, dict[int, list[Tensor]]]] = {}
        self.mail: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        self._function, self._results, self._store = function, [None] * self.size, dist.HashStore()
        # For what each rank waits: those that have ended have no condition.
        self._conditions: list[Callable[[], bool] | None] = [lambda: True] * self.size
        self._launching: list[list] = [[] for _ in range(self.size)]

    def __enter__(self) -> "Lockstep":
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(c10d, "_world", multi_threaded_pg.ThreadLocalWorld()))
            # One rank runs at a time, and may wait for others while it holds the lock.
            stack.enter_context(mock.patch.object(gradient_synchronizer, "_lock", contextlib.nullcontext()))
            stack.enter_context(mock.patch.object(gradient_synchronizer, "_launching", []))
            self._patches = stack.pop_all()
        for rank in range(self.size):
            threading.Thread(target=self._live, args=(rank,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.run(None)
        self._patches.close()

    def run(self, function: Callable[[int], Any] | None) -> list[Any]:
        self._begin(function)
        self._hand_over(self.size)
        if self._error is not None:
            raise self._error
        return self._results

    def wait_until(self, rank: int, condition: Callable[[], bool]) -> None:
        """Let others run until the condition holds; raise a HangError if it never will."""
        while not condition() and self.problem is None:
            self._conditions[rank] = condition
            self._hand_over(rank)
        if self.problem is not None:
            raise HangError(self.problem)

    def _hand_over(self, me: int, is_done: bool = False) -> None:
        """Let the next rank run that can, else the caller of :meth:`run`; return when it is this one's turn again."""
        order = [(me + step) % self.size for step in range(1, self.size + 1)]
        waiting = [rank for rank in order if self._conditions[rank] is not None]
        ready = [rank for rank in waiting if self._conditions[rank]()]
        if waiting and not ready:
            self.problem = self.problem or f"ranks {sorted(waiting)} wait for a collective that others do not launch"
        following = (ready or waiting or [self.size])[0]
        if following != me:
            self._turns[following].release()
            if is_done:
                return
            self._turns[me].acquire()
        if me < self.size:
            gradient_synchronizer._launching = self._launching[me]

    def _live(self, rank: int) -> None:
        while True:
            self._turns[rank].acquire()
            function = self._function
            if function is not None:
                gradient_synchronizer._launching = self._launching[rank]
                try:
                    self._join(rank)
                    self._results[rank] = function(rank)
                except Exception as error:
                    self._error = error
            self._conditions[rank] = None
            self._hand_over(rank, is_done=True)
            if function is None:
                return

    def _join(self, rank: int) -> None:
        """Give the thread new process groups: the default one and another."""
        # Made anew by torch, whose releases give it different fields.
        vars(multi_threaded_pg.ThreadLocalWorld._world).clear()
        world = c10d._world._get_world()
        for name in ("second", "default"):
            world.default_pg = group = LockstepGroup(self, rank, name)
            world.pg_map[group], world.pg_names[group] = ("gloo", self._store), name
            world.pg_backend_config[group] = "cpu:gloo"
            world.pg_group_ranks[group] = {member: member for member in range(self.size)}
            world.tags_to_pg[f"ptd:{name}"], world.pg_to_tag[group] = [group], f"ptd:{name}"


def second_group() -> dist.ProcessGroup:
    """Another group of all ranks than the default one."""
    return next(group for group, name in c10d._world.pg_names.items() if name == "second")
