"""Runs a program and leaves nothing of it behind: when it ends, all that it has started is killed, at any depth.

It is killed, too, when its owner says so through a pipe or dies, which closes the pipe. Run by its path, because it
needs nothing but the standard library and starts in a fraction of the time without the rest::

    python -I -S guard.py PIPE DESCRIPTORS PROGRAM ARGUMENTS...

DESCRIPTORS are what the program inherits besides standard input and output; the guard keeps none of them open. It ends
as the program did, with its exit code or by its signal.

On Linux the guard adopts orphans and so finds what is in sessions of its own; and the kernel kills the program should
the guard be killed. Elsewhere the guard kills the program's process group, and no more.
"""

import _thread
import contextlib
import ctypes
import os
import signal
import sys
import time

# Of prctl(2).
SET_PARENT_DEATH_SIGNAL = 1
SET_DUMPABLE = 4
SET_CHILD_SUBREAPER = 36

# To give a GPU's memory back takes seconds. A process that a driver or a dead file system holds longer dies when it
# leaves the kernel, for which nobody need wait.
_LIMIT_S = 30.0


def prctl(option: int, value: int) -> None:
    """Ask the kernel for something about this process; nothing happens where that is not Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def main(pipe: int, descriptors: list[int], command: list[str]) -> None:
    prctl(SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        _become(command, pipe, guard)
    for descriptor in descriptors:
        os.close(descriptor)

    def kill_child(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for number in signals:
        signal.signal(number, kill_child)
    _thread.start_new_thread(_wait_for_owner, (pipe, _thread.get_ident()))
    ended, status = os.waitpid(-1, 0)
    while ended != child:
        ended, status = os.waitpid(-1, 0)
    for number in signals:
        signal.signal(number, signal.SIG_IGN)
    _kill_rest(child)
    code = os.waitstatus_to_exitcode(status)
    if code != 0:
        _remove_folders()
    _end_like(code)


def _become(command: list[str], pipe: int, guard: int) -> None:
    """Run the command in place of this child of the guard; it is killed when the guard ends."""
    try:
        os.close(pipe)
        os.setpgid(0, 0)
        prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        # Python ignores these signals, and a program that it starts would inherit that.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        if os.getppid() == guard:
            os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)


def _wait_for_owner(pipe: int, main_thread: int) -> None:
    os.read(pipe, 1)
    signal.pthread_kill(main_thread, signal.SIGTERM)


def _kill_rest(group: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + _LIMIT_S
    # What a process started just before it was killed is adopted. All are gone when nothing is left to adopt.
    while _has_children() and time.monotonic() < deadline:
        for process in _descendants():
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.001)


def _has_children() -> bool:
    """Return whether this process still has children; those that have ended are done with here."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _descendants() -> list[int]:
    """Return the ids of all processes that descend from this one; none without /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError):
            if name.isdigit():
                with open(f"/proc/{name}/stat", "rb") as file:
                    _, parent = file.read().rpartition(b")")[2].split()[:2]
                children.setdefault(int(parent), []).append(int(name))
    processes: list[int] = [os.getpid()]
    for process in processes:
        processes += children.get(process, ())
    return processes[1:]


def _remove_folders() -> None:
    """Remove the temporary folders of what was killed; only then this costs time."""
    sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))
    from cs336sys.processes.folders import remove_abandoned

    remove_abandoned()


def _end_like(code: int) -> None:
    if code < 0:
        # One core dump is enough.
        prctl(SET_DUMPABLE, 0)
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(number) for number in sys.argv[2].split(",") if number], sys.argv[3:])
