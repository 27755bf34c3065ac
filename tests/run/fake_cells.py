"""A stand-in for a measurement: does what its configuration says. Imported by name in the worker process.

That has no torch, then, unless the configuration wants it: to import that takes it ten times as long as all the rest.
"""

import gc
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
import types
import uuid
from pathlib import Path

from cs336sys.errors import CapabilityError, CaptureError
from cs336sys.processes.files import OwnedFolder
from cs336sys.results.model import Run, Samples
from cs336sys.run import cells
from cs336sys.run.cells import Outcome


def _new_run(arguments):
    settings = {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
    settings["source_digest"] = "0123456789abcdef"
    return Run(str(uuid.uuid4()), "2026-01-01T00:00:00+00:00", tuple(arguments), {"torch": "2.13"}, settings)


if "torch" not in sys.modules:
    environment = types.ModuleType("cs336sys.machine.environment")
    environment.new_run = _new_run
    sys.modules[environment.__name__] = environment
    cells.release_memory = gc.collect


def _write_half_and_die(handle, data):
    os.write(handle, bytes(data)[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def measure(configuration, progress):
    action = configuration["action"]
    if action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    progress("forward")
    if action == "raise":
        raise RuntimeError("the kernel is wrong. Second sentence. Third sentence")
    if action == "out of memory":
        import torch

        torch.empty(2**62, dtype=torch.uint8)
    if action == "wrapped out of memory":
        try:
            raise MemoryError("no room")
        except MemoryError as error:
            raise RuntimeError("the compiler failed") from error
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "exit":
        os._exit(7)
    if action == "kill while sending":
        multiprocessing.connection.Connection._send.__defaults__ = (_write_half_and_die,)
        return Outcome("ok", derived={"text": "x" * 1_000_000})
    if action == "sleep":
        time.sleep(600)
    if action == "sleep beside others":
        program = Path(__file__).parents[1] / "processes" / "stubborn.py"
        subprocess.Popen([sys.executable, program, configuration["folder"]], start_new_session=True)
        progress(str(OwnedFolder().path))
        time.sleep(600)
    if action == "tell for ever":
        while True:
            progress("another step")
    if action == "unsupported":
        raise CapabilityError("no such unit here")
    if action == "capture":
        raise CaptureError("phase 'forward' cannot be captured in a CUDA graph")
    if action == "print":
        print("a line of a cell")
    return Outcome("ok", {"step": Samples("ms", "cpu clock", (1.0, 3.0))}, {"pid": os.getpid()})
