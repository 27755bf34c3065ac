"""Ranks spawned on this machine, and what happens to them when one fails."""

import contextlib
import datetime
import faulthandler
import itertools
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import re
import signal
import socket
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cs336sys.errors import CapabilityError, LostProcessError, UsageError, UserCodeError
from cs336sys.processes import RankIdentity
from cs336sys.processes.child import run_spawned
from cs336sys.processes.files import OwnedFolder, remove_abandoned
from cs336sys.processes.parent import cause_of_death, ctrl_c_ignored, out_of_memory_kills, start_for_good

_CONTEXT = multiprocessing.get_context("spawn")

# Gloo: "Timed out waiting 4000ms for recv operation"; stores: "wait timeout after 4000ms".
_TIMEOUT_TEXT = re.compile(r"tim(ed|e) ?out", re.IGNORECASE)


@dataclass(frozen=True)
class Failure:
    """The failure of a rank, and why, in one line.

    Attributes:
        details: the traceback, or where the rank was when a signal killed it; may be empty.
        time_s: when, on the system's monotonic clock, which all processes share.
        is_timeout: whether another rank did not reach a collective in time.
        exit_code: that of a process that died without sending a failure, else None.
        pickled_errors: the exception and its chain of causes, as far as they can be pickled.
    """

    rank: int
    reason: str
    details: str = ""
    time_s: float = field(default_factory=time.monotonic)
    is_timeout: bool = False
    exit_code: int | None = None
    pickled_errors: tuple[bytes, ...] = ()


def join_process_group(identity: RankIdentity, backend: str, store: dist.Store, timeout_s: float) -> None:
    """Initialize the default process group and, for NCCL, this process's GPU and the communicator."""
    timeout = datetime.timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    device = None
    if backend == "nccl":
        device = torch.device("cuda", identity.local_rank)
        torch.cuda.set_device(device)
        # A rank whose collective timed out sleeps for four times this (by default a minute), for a flight recorder.
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "250")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        # Otherwise ranks connect in their first collective, where no watchdog sees that one waits for another.
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    else:
        _require_interface()
    dist.init_process_group(
        backend, store=store, rank=identity.rank, world_size=identity.world_size, timeout=timeout, device_id=device
    )


def _require_interface() -> None:
    """Refuse to start where Gloo would find no network interface: its own error is a page for each rank."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    try:
        for name in names:
            dist.ProcessGroupGloo.create_device(interface=name)
        if not names:
            dist.ProcessGroupGloo.create_default_device()
    except RuntimeError as error:
        choices = ", ".join(name for _, name in socket.if_nameindex())
        raise CapabilityError(
            f"Gloo finds no address on {'interface ' + ','.join(names) if names else 'any interface'}: set "
            f"GLOO_SOCKET_IFNAME to one that is up (this machine has {choices})"
        ) from error


def leave_process_group() -> None:
    """Destroy the default process group, after which this process may exit. Never after an error: it may hang."""
    if dist.is_initialized():  # The function that ran may have destroyed it, as scripts do at their end.
        dist.destroy_process_group()
    # Gloo's threads may still be releasing the last work, which needs Python. Of processes that exited immediately,
    # about 1 in 100 were aborted on two busy cores (torch 2.13, "terminate called without an active exception").
    time.sleep(0.05)


def stacks_path(directory: Path, rank: int) -> Path:
    """Return the file to which a rank writes its Python stacks when it crashes or gets SIGUSR1."""
    return directory / f"stacks-of-rank-{rank}"


def serve(connection: Connection, identity: RankIdentity, backend: str, timeout_s: float, directory: Path) -> None:
    """Run pickled ``(function, args)`` jobs until an empty one; answer each with its pickled result or a Failure."""
    # Neither Gloo nor NCCL's bootstrap asks who connects, and by default both listen on an address of the network.
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    stacks = stacks_path(directory, identity.rank).open("w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // identity.world_size))

    try:
        store = dist.FileStore(str(directory / "store"), identity.world_size)
        join_process_group(identity, backend, store, timeout_s)
        while job := connection.recv_bytes():
            function, args = pickle.loads(job)
            connection.send_bytes(pickle.dumps(function(*args)))
        leave_process_group()
    except BaseException as error:
        # Stay until the parent kills all ranks, or the pipe breaks because it has died. To exit now would break the
        # connections of other ranks, and their errors would hide this one.
        with contextlib.suppress(EOFError, OSError):
            connection.send_bytes(pickle.dumps(_failure(identity.rank, error)))
            connection.recv_bytes()
        os._exit(1)


def _failure(rank: int, error: BaseException) -> Failure:
    """Describe what a rank has raised, with the collective that it was in, for the parent."""
    frames = error.__traceback__ and error.__traceback__.tb_next  # Without the first frame, which is serve().
    lines = str(error).strip().splitlines()
    reason = ": ".join([type(error).__name__, *lines[:1]])
    collectives = [frame.name for frame in traceback.extract_tb(frames) if "distributed_c10d" in frame.filename]
    notes = [f"in {name}" for name in collectives[-1:]] + list(getattr(error, "__notes__", []))  # The innermost.
    return Failure(
        rank,
        reason=f"{reason} ({', '.join(notes)})" if notes else reason,
        details="".join(traceback.format_exception(type(error), error, frames)),
        is_timeout=_TIMEOUT_TEXT.search(str(error)) is not None,
        pickled_errors=tuple(_pickled_chain(error)),
    )


def _pickled_chain(error: BaseException | None) -> list[bytes]:
    """Pickle an exception and its causes, those aside that cannot be pickled."""
    chain = []
    while error is not None:
        # Tried here: an exception with its own constructor may be pickled and fail to be unpickled.
        with contextlib.suppress(Exception):
            data = pickle.dumps(error)
            pickle.loads(data)
            chain.append(data)
        error = error.__cause__
    return chain


# How long to wait after the first failure for one that explains it: the peers of a killed rank report broken
# connections, which may reach the parent some milliseconds before it learns of the death.
_GRACE_S = 0.3

# How long ranks may take to exit after success, and to write where they are if they hang.
_EXIT_TIMEOUT_S = 10.0
_STACKS_S = 3.0

# The main thread is written last, being the oldest, and its stack ends with the line that started the process.
_END_OF_STACKS = "in <module>"


class RankError(RuntimeError):
    """A rank failed: the first line says which and how, then comes its traceback; ``__cause__`` is what it raised."""

    def __init__(self, message: str, rank: int):
        super().__init__(message)
        self.rank = rank


class LostRankError(RankError, LostProcessError):
    """A rank died without a word, or did not come to where others waited for it: behind the first line, its stack."""


@dataclass
class _Rank:
    """A rank's process, seen by its parent; ``out_of_memory_kills`` is the system's count before it was started."""

    number: int
    process: multiprocessing.process.BaseProcess
    connection: Connection
    out_of_memory_kills: int | None = None

    @property
    def pid(self) -> int:
        assert self.process.pid is not None, "it was started"
        return self.process.pid

    def send(self, job: bytes) -> None:
        with contextlib.suppress(OSError):  # That a rank has died is noticed when its answer is read.
            self.connection.send_bytes(job)

    def receive(self) -> Any:
        """Return the rank's result, or a Failure. Call it when there is an answer or the process has ended."""
        answer = None
        with contextlib.suppress(EOFError, OSError):  # A rank may have died in the middle of its answer.
            if self.connection.poll():
                answer = self.connection.recv_bytes()
        if answer is None:
            self.process.join(_EXIT_TIMEOUT_S)
            code = self.process.exitcode
            reason = "closed its connection" if code is None else cause_of_death(code, self.out_of_memory_kills)
            return Failure(self.number, reason, exit_code=code)
        try:
            return pickle.loads(answer)
        except Exception as error:
            return Failure(self.number, f"its result cannot be read here: {type(error).__name__}: {error}")

    def kill(self) -> None:
        """Kill the process and all that it started."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.process.kill()  # It has not created its own process group yet, or has already ended.
        self.process.join()
        self.connection.close()


class SpawnedRanks(contextlib.AbstractContextManager["SpawnedRanks"]):
    """Processes that run one function after another, each as one rank; they find each other through a file."""

    def __init__(self, world_size: int, backend: str, timeout_s: float):
        self._timeout_s = timeout_s
        self._ranks: list[_Rank] = []
        # A fresh one, because ranks that find the file of an earlier run would wait for the ranks of that run.
        folder = OwnedFolder()
        self._directory = folder.path
        # Also at interpreter exit, which would otherwise wait for ranks that nobody has ended.
        self._end = weakref.finalize(self, _kill_all, self._ranks, folder)
        remove_abandoned()  # Folders of processes that were killed.
        kills_before, service = out_of_memory_kills(), f"{serve.__module__}:{serve.__name__}"
        try:
            with ctrl_c_ignored():
                for number in range(world_size):
                    ours, theirs = _CONTEXT.Pipe()
                    identity = RankIdentity(number, world_size, local_rank=number)
                    # The process dies with this one, and calls serve() with the other arguments.
                    args = (os.getpid(), service, theirs, identity, backend, timeout_s, self._directory)
                    process = _CONTEXT.Process(target=run_spawned, args=args)
                    start_for_good(process)  # Otherwise it would die with the thread that made this object.
                    theirs.close()  # Otherwise the pipe would not break when the rank dies.
                    self._ranks.append(_Rank(number, process, ours, kills_before))
        except BaseException:
            self._end()
            raise

    @property
    def alive(self) -> bool:
        """Return whether ranks can run something: not after :meth:`run` raised, nor after the ``with`` block."""
        return self._end.alive

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(*args)`` on every rank and return the ranks' results, in rank order.

        Errors are those of :func:`cs336sys.parallel.ranks.launch.run`; any of them ends all ranks.
        """
        if not self.alive:
            raise UsageError("these ranks have ended: start new ones")
        try:
            job = pickle.dumps((function, args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(
                f"{function} with its arguments cannot be sent to another process ({error}): "
                "choose a function defined at the top level of a module, and plain values"
            ) from error
        try:
            for rank in self._ranks:
                rank.send(job)
            return self._results()
        except BaseException:
            self._end()
            raise

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        try:
            if error_type is None and self.alive:
                for rank in self._ranks:
                    rank.send(b"")  # An empty job lets serve() return.
                deadline = time.monotonic() + _EXIT_TIMEOUT_S
                for rank in self._ranks:
                    rank.process.join(max(0.0, deadline - time.monotonic()))
        finally:
            self._end()

    def _results(self) -> list[Any]:
        """Return all ranks' results; after the first, the others have the timeout to follow."""
        results: dict[int, Any] = {}
        deadline = math.inf  # The first may take as long as it wants.
        while missing := [rank for rank in self._ranks if rank.number not in results]:
            ready = _wait(missing, deadline)
            if not ready:
                heading = (
                    f"rank {', '.join(str(rank.number) for rank in missing)} of {len(self._ranks)} hangs: "
                    f"not done {self._timeout_s:g} s after rank {', '.join(map(str, sorted(results)))}"
                )
                raise LostRankError(f"{heading}\n\n{self._stacks_now(missing)}", missing[0].number)
            for rank in ready:
                result = rank.receive()
                if isinstance(result, Failure):
                    raise self._error(result, [other for other in missing if other is not rank])
                results[rank.number] = result
            deadline = min(deadline, time.monotonic() + self._timeout_s)
        return [results[number] for number in range(len(self._ranks))]

    def _error(self, first: Failure, others: list[_Rank]) -> Exception:
        """Return the exception to raise for the first failure, or for another one that explains it."""
        failures = [first]
        deadline = time.monotonic() + _GRACE_S
        while ready := _wait(others, deadline):
            answers = [rank.receive() for rank in ready]
            failures += [answer for answer in answers if isinstance(answer, Failure)]
            others = [rank for rank in others if rank not in ready]
        # Those left in ``others`` are still running.
        cause, *consequences = sorted(failures, key=_cause_before_consequence)

        raised = _exception_chain(cause)
        if isinstance(raised, UsageError | CapabilityError | UserCodeError):
            raised.add_note(f"on rank {cause.rank} of {len(self._ranks)}")
            return raised
        heading = f"rank {cause.rank} of {len(self._ranks)}: {cause.reason}"
        stacks = self._written_stacks(cause.rank) if cause.exit_code is not None else ""  # It sent no traceback.
        # The NCCL watchdog ends a rank that waited too long with SIGABRT.
        if others and (cause.is_timeout or cause.exit_code == -signal.SIGABRT):
            heading += f"; still running: rank {', '.join(str(rank.number) for rank in others)}"
            stacks += self._stacks_now(others)
        also = "\n".join(f"rank {failure.rank}: {failure.reason}" for failure in consequences)
        parts = (heading, cause.details, stacks, also)
        is_lost = cause.exit_code is not None or cause.is_timeout
        text = "\n\n".join(part.strip() for part in parts if part)
        error = (LostRankError if is_lost else RankError)(text, cause.rank)
        error.__cause__ = raised
        return error

    def _stacks_now(self, ranks: list[_Rank]) -> str:
        """Ask running ranks where they are: they react to SIGUSR1 even inside a collective or an endless loop."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _STACKS_S
        while True:
            stacks = [self._written_stacks(rank.number) for rank in ranks]
            if time.monotonic() > deadline or all(stack.rstrip().endswith(_END_OF_STACKS) for stack in stacks):
                return "".join(stacks)
            time.sleep(0.05)

    def _written_stacks(self, number: int) -> str:
        try:
            stacks = stacks_path(self._directory, number).read_text()
        except FileNotFoundError:
            return ""
        return f"rank {number} was here:\n{stacks}\n" if stacks else ""


def _cause_before_consequence(failure: Failure) -> tuple[int, float]:
    """Sort key: ranks that vanished, then errors by time, then ranks that aborted, perhaps because others were gone."""
    if failure.exit_code is None:
        return 1, failure.time_s
    return (2 if failure.exit_code == -signal.SIGABRT else 0), failure.time_s


def _exception_chain(failure: Failure) -> BaseException | None:
    """Return the exception that the rank raised, with its causes; None if nothing of it can be unpickled."""
    chain: list[BaseException] = []
    for data in failure.pickled_errors:
        with contextlib.suppress(Exception):
            chain.append(pickle.loads(data))
    for error, cause in itertools.pairwise(chain):
        error.__cause__ = cause
    return chain[0] if chain else None


def _wait(ranks: list[_Rank], deadline: float) -> list[_Rank]:
    """Return the ranks that have answered or died; none if the time is up or there are no ranks."""
    handles: dict[Any, _Rank] = {handle: rank for rank in ranks for handle in (rank.connection, rank.process.sentinel)}
    timeout_s = None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
    ready = multiprocessing.connection.wait(handles, timeout_s) if handles else []
    numbers = {handles[handle].number for handle in ready}
    return [rank for rank in ranks if rank.number in numbers]


def _kill_all(ranks: list[_Rank], folder: OwnedFolder) -> None:
    for rank in ranks:
        rank.kill()
    folder.remove()
