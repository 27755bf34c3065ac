"""A stand-in for a measurement: does what its configuration says. Imported by name in the worker process."""

import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from cs336sys.errors import CapabilityError, CaptureError
from cs336sys.measure.cells import Outcome
from cs336sys.processes.folders import OwnedFolder
from cs336sys.results import Samples


def _write_half_and_die(handle, data):
    os.write(handle, bytes(data)[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def measure(configuration, progress):
    progress("forward")
    action = configuration["action"]
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
