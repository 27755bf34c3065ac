"""Temporary folders: removed when their process was killed, and never while it lives."""

import os
import subprocess
import sys
import tempfile

import pytest

from cs336sys.processes import folders
from cs336sys.processes.folders import OwnedFolder, remove_abandoned

OWNER = (
    "import os, sys; from cs336sys.processes.folders import OwnedFolder; folder = OwnedFolder()\n"
    "print(folder.path, flush=True); sys.stdin.read(); os.kill(os.getpid(), 9)"
)
REMOVER = (
    "import tempfile, sys; from cs336sys.processes.folders import remove_abandoned; tempfile.tempdir = sys.argv[1]\n"
    "print('begun', flush=True)\nwhile True: remove_abandoned()"
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
        elsewhere.setattr(folders, "_prefix", lambda: "cs336sys-0badf00d-")
        path, lock = folders._make()
        os.close(lock)
    remove_abandoned()
    assert path.exists()


def test_a_new_folder_is_never_taken_for_abandoned(temporary_directory):
    """Another process removes without pause, and so between the making of a folder and its lock, too."""
    with subprocess.Popen(
        [sys.executable, "-c", REMOVER, str(temporary_directory)], stdout=subprocess.PIPE, text=True
    ) as remover:
        remover.stdout.readline()
        for _ in range(150):
            with OwnedFolder() as path:
                (path / "file").write_text("x")
        remover.kill()
