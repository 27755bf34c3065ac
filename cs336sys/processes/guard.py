"""A guard that runs a program, and kills all that this has started, at any depth, when it ends.

The program is killed when its owner writes to a pipe or dies, which closes the pipe. The guard is run by its path: it
needs nothing but the standard library, without the rest of which Python starts in a fraction of the time::

    python -I -S guard.py PIPE DESCRIPTORS PROGRAM ARGUMENTS...

The program inherits DESCRIPTORS besides standard input and output; the guard keeps none of them open. It ends as the
program did, with its exit code or by its signal.

On Linux the guard adopts orphans, and so finds processes in other sessions; and the kernel kills the program if the
guard is killed. Elsewhere the guard kills the program's process group alone.
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

# A killed process needs seconds to give a GPU's memory back. One that a driver or a dead file system keeps longer dies
# when it leaves the kernel, for which we need not wait.
_KILL_S = 30.0


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process as prctl(2) does; do nothing where that is not Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def main(pipe: int, descriptors: list[int], command: list[str]) -> None:
    """Run a command, wait for its end or the owner's, kill what it has started, and end as it did."""
    prctl(SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        _execute(command, pipe, guard)
    for descriptor in descriptors:
        os.close(descriptor)

    def kill_child(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for number in signals:
        signal.signal(number, kill_child)
    _thread.start_new_thread(_wait_for_owner, (pipe, _thread.get_ident()))  # Which signals this thread.
    # Orphans that this process has adopted may end before the program.
    ended, status = os.waitpid(-1, 0)
    while ended != child:
        ended, status = os.waitpid(-1, 0)
    for number in signals:
        signal.signal(number, signal.SIG_IGN)  # Killing the rest is not interrupted.
    _kill_descendants(child)
    code = os.waitstatus_to_exitcode(status)
    if code != 0:
        # A program that was killed has left its temporary folders. The import takes time that other endings save.
        sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))
        from cs336sys.processes.files import remove_abandoned

        remove_abandoned()
    _end_like(code)


def _execute(command: list[str], pipe: int, guard: int) -> None:
    """Replace this child of the guard by the command, which is killed when the guard ends."""
    try:
        os.close(pipe)  # The guard alone reads it, so that its owner sees by it when the guard has ended.
        os.setpgid(0, 0)  # The group that _kill_descendants() kills.
        prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        # Python ignores these signals, as programs that it starts would.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        if os.getppid() == guard:  # It has not died before the call of prctl().
            os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)  # As a shell does that finds no such command.


def _wait_for_owner(pipe: int, main_thread: int) -> None:
    os.read(pipe, 1)  # Returns when the owner has written, or has died.
    signal.pthread_kill(main_thread, signal.SIGTERM)  # Its handler kills the program.


def _kill_descendants(group: int) -> None:
    """Kill a process group, and then all descendants of this process again and again, until none is left."""
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_S
    # A process that another one started just before it was killed is adopted as a child of this one.
    while _has_children() and time.monotonic() < deadline:
        for process in _descendants():
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.001)


def _has_children() -> bool:
    """Return whether this process still has children, after reaping those that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:  # 0 if none of them has ended.
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
                with open(f"/proc/{name}/stat", "rb") as file:  # ID (NAME) STATE PARENT ...
                    _, parent = file.read().rpartition(b")")[2].split()[:2]
                children.setdefault(int(parent), []).append(int(name))
    processes: list[int] = [os.getpid()]
    for process in processes:  # Also through those that are added meanwhile.
        processes += children.get(process, ())
    return processes[1:]


def _end_like(code: int) -> None:
    """End with an exit code, or where it is negative, by that signal."""
    if code < 0:
        # The program has dumped core already.
        prctl(SET_DUMPABLE, 0)
        with contextlib.suppress(OSError):  # SIGKILL cannot be set.
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(number) for number in sys.argv[2].split(",") if number], sys.argv[3:])
