"""What the processes of test_child do."""

import atexit
import concurrent.futures
import ctypes
import multiprocessing
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path

kept = []


def end_with_work_left(connection, folder):
    unclosed = open(f"{folder}/unclosed", "w")  # noqa: SIM115
    unclosed.write("text")
    kept.extend([unclosed, tempfile.TemporaryDirectory(dir=folder)])
    threading.Thread(target=_write_late, args=(f"{folder}/thread", 0.6)).start()
    pool = concurrent.futures.ThreadPoolExecutor(1)
    pool.submit(_write_late, f"{folder}/pool", 0.6)
    atexit.register(_write_late, f"{folder}/atexit", 0)
    context = multiprocessing.get_context("fork")
    context.Process(target=_reach, args=(f"{folder}/process that it started",)).start()
    print("printed by Python", end="")
    ctypes.CDLL(None).printf(b"printed by C")
    connection.send("done")


def _write_late(path, delay_s):
    time.sleep(delay_s)
    Path(path).write_text("text")


def _reach(path):
    time.sleep(0.2)
    Path(path).write_text("reached")


def end_with_abort(connection):
    """What C registers for the end of the process, as profilers do, ends it with SIGABRT here."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc = ctypes.CDLL(None)
    libc.__cxa_atexit(libc.abort, None, None)


def wait(connection):
    """Say that it has begun, and end when it is told to."""
    connection.send("begun")
    connection.recv()


def spawn_another(connection):
    """Say where this process, and one that it spawns, would import from."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_send_path, args=(connection,))
    process.start()
    process.join()


def _send_path(connection):
    connection.send((sys.path, tempfile.__file__))
