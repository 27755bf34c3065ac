"""A stand-in for a measurement: does what its configuration says. Imported by name in the worker process."""

import os
import signal
import time

from cs336sys.errors import CapabilityError, CaptureError
from cs336sys.measure.cells import Outcome
from cs336sys.results import Samples


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
    if action == "sleep":
        time.sleep(600)
    if action == "unsupported":
        raise CapabilityError("no such unit here")
    if action == "capture":
        raise CaptureError("phase 'forward' cannot be captured in a CUDA graph")
    if action == "print":
        print("a line of a cell")
    return Outcome("ok", {"step": Samples("ms", "cpu clock", (1.0, 3.0))}, {"pid": os.getpid()})
