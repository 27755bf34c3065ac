"""Temporary folders: removed when their process was killed, and never while it lives."""

import fcntl
import os
import subprocess
import sys
import tempfile

import pytest

from cs336sys.processes import files
from cs336sys.processes.files import OwnedFolder, remove_abandoned

OWNER = (
    "import os, sys; from cs336sys.processes.files import OwnedFolder; folder = OwnedFolder()\n"
    "print(folder.path, flush=True); sys.stdin.read(); os.kill(os.getpid(), 9)"
)


@pytest.fixture(autouse=True)
def temporary_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_removed_by_its_owner(temporary_directory):
    with OwnedFolder() as path:
        (path / "file").write_text("x")
        remove_abandoned()
        assert (path / "file").exists()
    assert list(temporary_directory.iterdir()) == []


def test_a_folder_is_removed_after_its_owner_was_killed(temporary_directory):
    environment = os.environ | {"TMPDIR": str(temporary_directory)}
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        path = owner.stdout.readline().strip()
        remove_abandoned()
        assert os.path.isdir(path), "its owner lives"
        owner.stdin.close()
        owner.wait()
        assert os.path.isdir(path)
        remove_abandoned()
        assert not os.path.isdir(path)


def test_a_folder_of_another_kernel_stays(temporary_directory, monkeypatch):
    """Whose locks this one does not know, in a file system that both use."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(files, "_prefix", lambda: "cs336sys-0badf00d-")
        folder = OwnedFolder()
        os.close(folder._lock)
    remove_abandoned()
    assert folder.path.exists()


@pytest.mark.parametrize(("module", "function"), [(os, "open"), (fcntl, "flock")])
def test_a_new_folder_that_was_taken_for_abandoned_is_made_again(temporary_directory, monkeypatch, module, function):
    """Another process finds it between two lines of the one that makes it: once before each of the two calls."""
    real = getattr(module, function)
    removed = []

    def after_removal(*arguments):
        if not removed:
            removed.extend(temporary_directory.iterdir())
            monkeypatch.setattr(module, function, real)
            remove_abandoned()
        return real(*arguments)

    monkeypatch.setattr(module, function, after_removal)
    with OwnedFolder() as path:
        assert not removed[0].exists()
        assert path.is_dir()
        remove_abandoned()
        assert path.is_dir()
