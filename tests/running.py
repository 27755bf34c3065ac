"""Which processes run, for tests of how they end."""

import fcntl
import time
from pathlib import Path


def is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_held(folder: Path) -> bool:
    """Whether a process of ``processes/stubborn.py`` lives that was given this folder."""
    if not (folder / "held").exists():
        return False
    with (folder / "held").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def wait_until(condition, limit_s):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not so after {limit_s} s"
        time.sleep(0.02)


def wait_for_ids(folder: Path, names) -> list[int]:
    """The process ids that processes write to files of these names, once all are there."""

    def written():
        return all((folder / name).exists() and (folder / name).read_text().endswith("\n") for name in names)

    wait_until(written, 60)
    return [int((folder / name).read_text()) for name in names]


def left_in(temporary: Path) -> list[Path]:
    """Return what processes have left in their temporary folder, besides the private one of Inductor's caches."""
    return [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]
