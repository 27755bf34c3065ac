"""A started Python process, from its first moment to its last."""

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import multiprocessing.connection
import os
import signal
import sys
import threading
from typing import Any

from cs336sys.processes.guard import SET_PARENT_DEATH_SIGNAL, prctl

# Set for programs that run under a profiler, which writes what it has seen when they exit.
_PROFILER_VARIABLES = ("NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "LD_PRELOAD")


def run_guarded(connection: multiprocessing.connection.Connection) -> None:
    """Run the process of :func:`cs336sys.processes.parent.call_guarded`."""
    # What this process starts would keep it open.
    os.set_inheritable(connection.fileno(), False)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        # Of 1000, how much sooner than others it is killed where memory runs out: sooner than the user's shell.
        file.write("500")
    function, args = connection.recv()
    imported(function)(connection, *args)
    _exit()


def run_spawned(parent: int, function: str, *args: Any) -> None:
    """Run a process that multiprocessing has spawned: call a function, and die with the parent.

    It leads a process group that can be killed as a whole, and its standard output becomes standard error.

    Args:
        parent: id of the process that started this one, in a thread that lives as long.
        function: where to find it, as ``package.module:function``. To unpickle a function would import its module
            before this process asks to die with its parent.
    """
    os.setsid()
    prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    os.dup2(2, 1)
    if os.getppid() != parent:
        return
    imported(function)(*args)
    _exit()


def imported(name: str) -> Any:
    """Import what ``package.module:name`` names, in a process that keeps it to its end.

    Nothing imported becomes garbage. That Python does not look for any meanwhile saves a tenth of the time torch takes;
    that it leaves out what was imported whenever it looks later saves 0.15 s each time.
    """
    module, attribute = name.split(":")
    gc.disable()
    try:
        value = getattr(importlib.import_module(module), attribute)
        gc.freeze()
    finally:
        gc.enable()
    return value


def _exit() -> None:
    """End this process as Python does, less the freeing of all that torch consists of, which takes 0.5 s.

    Threads end, functions of ``atexit`` run (and with them what multiprocessing and temporary folders have to do), and
    what was written to files reaches them, also where nobody has closed them.
    """
    if any(name in os.environ for name in _PROFILER_VARIABLES):
        return
    threading._shutdown()  # type: ignore[attr-defined]  # what Python begins its end with, and multiprocessing
    atexit._run_exitfuncs()
    _flush_files()
    os._exit(0)


def _flush_files() -> None:
    # Of all objects those that were there before imported() ended are left out: to look at them takes 0.1 s.
    for candidate in (sys.stdout, sys.stderr, *gc.get_objects()):
        if issubclass(type(candidate), io.IOBase):
            with contextlib.suppress(Exception):
                candidate.flush()
    # What C and C++ have printed, and kernels.
    ctypes.CDLL(None).fflush(None)
