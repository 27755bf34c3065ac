#!/usr/bin/env python3
"""A program as nsys is: it starts its target in a session of its own and a daemon, and all three ignore SIGTERM.

``stubborn.py FOLDER`` writes the three process ids into the folder and waits; ``stubborn.py FOLDER end`` ends and
leaves the other two behind. As long as one of them lives, the file ``held`` in that folder is locked.
"""

import fcntl
import os
import signal
import subprocess
import sys
import time


def main(folder, role="program"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if role == "daemon" and os.fork():
        os._exit(0)
    if role in ("program", "end"):
        held = open(f"{folder}/held", "w")  # noqa: SIM115
        fcntl.flock(held, fcntl.LOCK_SH)
        for other in ("target", "daemon"):
            command = [sys.executable, "-I", "-S", __file__, folder, other]
            other_process = subprocess.Popen(command, start_new_session=True, stdin=held)
        other_process.wait()
    with open(f"{folder}/{role}", "w") as file:
        print(os.getpid(), file=file)
    if role == "end":
        while not {"target", "daemon"} <= set(os.listdir(folder)):
            time.sleep(0.01)
        return
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
