"""What the ranks of test_launch run: functions that spawned processes can import."""

import contextlib
import multiprocessing.util
import os
import pathlib
import signal
import sys
import time

import torch
import torch.distributed as dist

from cs336sys.errors import UsageError
from cs336sys.parallel.collectives import group_device
from cs336sys.parallel.ranks import launch


def rank_and_sum(base):
    total = torch.tensor([base + dist.get_rank()], device=group_device())
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.cpu()


def process_id():
    return os.getpid()


def listening_addresses():
    """The addresses, as in /proc/net/tcp, at which this process waits for others to connect, after a second group."""
    dist.new_group(backend="gloo").barrier()
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{name}"))
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in pathlib.Path("/proc/net", table).read_text().splitlines()
    ]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]


def environment_and_threads():
    return {name: os.environ.get(name) for name in ("NCCL_NVLS_ENABLE", "RANK")}, torch.get_num_threads()


def say(text):
    print(text, flush=True)


def touch_at_exit(folder, seconds):
    """Leave a file when this process ends, so long after it was asked to; and the group now, as scripts do."""
    leave = (folder / str(dist.get_rank())).touch
    dist.destroy_process_group()
    multiprocessing.util.Finalize(None, lambda: time.sleep(seconds) or leave(), exitpriority=0)


class WrongAnswer(ValueError):
    """Comes back from pickle only with both of its arguments."""

    def __init__(self, question, answer):
        super().__init__(f"{question} is not {answer}")


def fail(how, rank=1):
    """Go wrong on one rank while the others wait for it in an all-reduce."""
    if dist.get_rank() == rank:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(7)
        if how == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "hang":
            time.sleep(600)
        if how == "unpicklable result":
            return lambda: None
        go_wrong(how)
    total = torch.ones(1000, device=group_device())
    dist.all_reduce(total)
    return total.sum().item()


def go_wrong(how):
    if how == "raise":
        raise ValueError("the numbers are wrong\nin every column")
    if how == "raise unpicklable":
        raise WrongAnswer("6 x 7", 43)
    if how == "usage":
        raise UsageError("3 sequences: 2 ranks do not divide them")
    if how == "out of memory":
        try:
            raise MemoryError("no room")
        except MemoryError as error:
            raise RuntimeError("the compiler failed") from error


def hang_after_the_last_collective():
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(600)


def say_and_hang(path):
    """Tell this process's id through a file, then hang."""
    with open(f"{path}/{dist.get_rank()}.partial", "w") as file:
        file.write(str(os.getpid()))
    os.rename(file.name, f"{path}/{dist.get_rank()}")
    time.sleep(600)


def main():
    """A script that torchrun starts, or that is started alone: runs ranks twice and prints on rank 0."""
    world_size = int(sys.argv[1])
    for base in (10, 20):
        results = launch.run(rank_and_sum, base, world_size=world_size, backend="gloo", timeout_s=60)
        identity = launch.started_outside()
        if identity is None or identity.rank == 0:
            print([(rank, size, total.item()) for rank, size, total in results], flush=True)
    if sys.argv[2:] == ["fail"]:
        launch.run(fail, "raise", world_size=world_size, backend="gloo", timeout_s=60)


if __name__ == "__main__":
    main()
