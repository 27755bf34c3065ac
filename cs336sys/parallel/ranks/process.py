"""What a spawned rank does: it joins the process group, runs what its parent sends, and never outlives it."""

import contextlib
import datetime
import faulthandler
import multiprocessing.connection
import os
import pickle
import re
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from cs336sys.processes import RankIdentity

# Gloo: "Timed out waiting 4000ms for recv operation"; stores: "wait timeout after 4000ms".
_TIMEOUT_TEXT = re.compile(r"tim(ed|e) ?out", re.IGNORECASE)


@dataclass(frozen=True)
class Failure:
    """How a rank failed.

    Attributes:
        reason: one line.
        details: the traceback, or where the rank was when a signal killed it; may be empty.
        time_s: when, on the system's monotonic clock, which all processes share.
        is_timeout: whether another rank did not reach a collective in time.
        exit_code: that of a process that died without sending a failure, else None.
        pickled_errors: the exception and its chain of causes, as far as they can be pickled.
    """

    rank: int
    reason: str
    details: str
    time_s: float
    is_timeout: bool = False
    exit_code: int | None = None
    pickled_errors: tuple[bytes, ...] = ()


def join_process_group(
    identity: RankIdentity, backend: str, store: dist.Store, timeout_s: float, high_priority: bool = False
) -> None:
    """Initialize the default process group and, for NCCL, this process's GPU and the communicator."""
    timeout = datetime.timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    device = options = None
    if backend == "nccl":
        device = torch.device("cuda", identity.local_rank)
        torch.cuda.set_device(device)
        # A rank whose collective timed out sleeps for four times this before it aborts, to let a flight recorder write.
        # By default that is a minute.
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "250")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        # Otherwise ranks connect in their first collective, where no watchdog sees that one waits for another.
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high_priority)
        options._timeout = timeout
    dist.init_process_group(
        backend,
        store=store,
        rank=identity.rank,
        world_size=identity.world_size,
        timeout=timeout,
        device_id=device,
        pg_options=options,
    )


def leave_process_group() -> None:
    """Destroy the default process group, after which this process may exit. Never after an error: it may hang."""
    dist.destroy_process_group()
    # Gloo's threads may still be releasing the last work, which needs Python. Of processes that exited immediately,
    # about 1 in 100 were aborted on two busy cores (torch 2.13, "terminate called without an active exception").
    time.sleep(0.05)


def stacks_path(directory: Path, rank: int) -> Path:
    """The file to which a rank writes its Python stacks when it crashes or gets SIGUSR1."""
    return directory / f"stacks-of-rank-{rank}"


def serve(
    connection: multiprocessing.connection.Connection,
    identity: RankIdentity,
    backend: str,
    timeout_s: float,
    high_priority: bool,
    directory: Path,
) -> None:
    """Run pickled ``(function, args)`` jobs until an empty one; answer each with its pickled result or a Failure."""
    stacks = stacks_path(directory, identity.rank).open("w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // identity.world_size))

    try:
        store = dist.FileStore(str(directory / "store"), identity.world_size)
        join_process_group(identity, backend, store, timeout_s, high_priority)
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
    # The first frame is serve().
    frames = error.__traceback__ and error.__traceback__.tb_next
    lines = str(error).strip().splitlines()
    reason = ": ".join([type(error).__name__, *lines[:1]])
    collectives = [frame.name for frame in traceback.extract_tb(frames) if "distributed_c10d" in frame.filename]
    where = [f"in {name}" for name in collectives[-1:]] + list(getattr(error, "__notes__", []))
    return Failure(
        rank,
        reason=f"{reason} ({', '.join(where)})" if where else reason,
        details="".join(traceback.format_exception(type(error), error, frames)),
        time_s=time.monotonic(),
        is_timeout=_TIMEOUT_TEXT.search(str(error)) is not None,
        pickled_errors=tuple(_pickled_chain(error)),
    )


def _pickled_chain(error: BaseException | None) -> list[bytes]:
    chain = []
    while error is not None:
        # An exception with its own constructor may be pickled and fail to be unpickled.
        with contextlib.suppress(Exception):
            data = pickle.dumps(error)
            pickle.loads(data)
            chain.append(data)
        error = error.__cause__
    return chain
