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

# Set for programs that run under a profiler, which writes its report when they exit.
_PROFILER_VARIABLES = ("NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "LD_PRELOAD")


def run_guarded(connection: multiprocessing.connection.Connection) -> None:
    """Run the process of :func:`cs336sys.processes.parent.call_guarded`."""
    os.set_inheritable(connection.fileno(), False)  # Processes that this one starts would keep it open.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        # Up to 1000; the higher, the sooner it is killed where memory runs out: sooner than the user's shell.
        file.write("500")
    function, args = connection.recv()
    imported(function)(connection, *args)
    _exit()


def run_spawned(parent: int, function: str, *args: Any) -> None:
    """Call a function in a process that multiprocessing has spawned, and that dies with its parent.

    The process leads a process group that can be killed as a whole, and its standard output becomes standard error.

    Args:
        parent: id of the process that started this one, in a thread that lives as long.
        function: where to find it, as ``package.module:function``. To unpickle a function would import its module
            before this process asks to die with its parent.
    """
    os.setsid()
    prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    os.dup2(2, 1)
    if os.getppid() != parent:
        return  # The parent died before this process could ask to die with it.
    imported(function)(*args)
    _exit()


def imported(name: str) -> Any:
    """Import the object ``package.module:name``, in a process that keeps it to its end.

    Nothing imported becomes garbage. Not to collect any meanwhile saves a tenth of the time that torch takes; to leave
    imported objects out of later collections saves 0.15 s each time.
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
    """End this process as Python does, but do not free all objects of torch, which takes 0.5 s.

    Threads end, functions of ``atexit`` run (also of multiprocessing and temporary folders), and files are flushed.
    """
    if any(name in os.environ for name in _PROFILER_VARIABLES):
        return  # To Python's own end, at which profilers write.
    threading._shutdown()  # type: ignore[attr-defined]  # as Python and multiprocessing begin to exit
    atexit._run_exitfuncs()
    # gc leaves out objects from before imported() ended: to look at those takes 0.1 s.
    for candidate in (sys.stdout, sys.stderr, *gc.get_objects()):
        if issubclass(type(candidate), io.IOBase):
            with contextlib.suppress(Exception):
                candidate.flush()
    ctypes.CDLL(None).fflush(None)  # For text that C, C++ and kernels have printed.
    os._exit(0)
