"""Files are written whole or not at all, links and pipes stay what they are; abandoned folders are removed."""

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cs336sys.processes import files
from cs336sys.processes.files import OwnedFolder, remove_abandoned, written_whole


@pytest.fixture
def umask():
    earlier = os.umask(0o027)
    yield
    os.umask(earlier)


@pytest.fixture
def path(tmp_path):
    """A file with longer content than what is written."""
    path = tmp_path / "table.md"
    path.write_text("old, and longer\n")
    return path


def write(path):
    with written_whole(path) as whole:
        whole.write_text("new\n")


def write_half(path, raised):
    with written_whole(path) as whole:
        whole.write_text("ne")
        raise raised


def refuse(code):
    """A function that fails as the system does with this code."""

    def fail(*arguments):
        raise OSError(code, os.strerror(code))

    return fail


def in_process(script, *arguments, **more):
    start = "import os, signal, sys\nfrom pathlib import Path\nfrom cs336sys.processes.files import written_whole\n"
    return subprocess.run([sys.executable, "-c", start + script, *map(str, arguments)], timeout=60, **more)


def test_new_content_takes_the_place_of_the_file(path):
    """Written into it, a reader would see half of it."""
    before = path.stat().st_ino
    write(path)
    assert path.read_text() == "new\n"
    assert path.stat().st_ino != before


@pytest.mark.parametrize("raised", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_an_error_half_way_leaves_what_was_there_and_nothing_else(path, raised):
    with pytest.raises(type(raised)):
        write_half(path, raised)
    assert path.read_text() == "old, and longer\n"
    assert os.listdir(path.parent) == ["table.md"]


def test_a_process_killed_half_way_leaves_what_was_there(path):
    script = (
        "with written_whole(Path(sys.argv[1])) as whole:\n    whole.write_text('ne')\n    os.kill(os.getpid(), 9)\n"
    )
    assert in_process(script, path).returncode == -signal.SIGKILL
    assert path.read_text() == "old, and longer\n"


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize(("existing", "expected"), [(0o604, 0o604), (0o755, 0o755), (None, 0o640)])
def test_permissions_stay_and_those_of_a_new_file_are_the_umasks(tmp_path, existing, expected):
    path = tmp_path / "script.sh"
    if existing is not None:
        path.write_text("old\n")
        path.chmod(existing)
    write(path)
    assert path.read_text() == "new\n"
    assert stat.S_IMODE(path.stat().st_mode) == expected


def test_a_name_as_long_as_the_file_system_allows(tmp_path):
    path = tmp_path / ("ü" * 125 + ".json")
    with written_whole(path) as whole:
        assert whole.name.endswith("ü.json"), "writers choose a format by it"
        whole.write_text("new\n")
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("is_there", [True, False])
def test_links_stay_and_the_file_they_lead_to_is_replaced(tmp_path, is_there):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    if is_there:
        (folder / "file.md").write_text("old\n")
    (tmp_path / "second.md").symlink_to("elsewhere/file.md")
    (tmp_path / "first.md").symlink_to(tmp_path / "second.md")
    with written_whole(tmp_path / "first.md") as whole:
        assert whole.parent == folder
        whole.write_text("new\n")
    assert (tmp_path / "first.md").is_symlink()
    assert (tmp_path / "second.md").is_symlink()
    assert (folder / "file.md").read_text() == "new\n"
    assert os.listdir(folder) == ["file.md"]


def test_all_names_of_a_file_stay_names_of_it(tmp_path):
    path, other = tmp_path / "a.md", tmp_path / "b.md"
    path.write_text("old\n")
    other.hardlink_to(path)
    write(path)
    assert other.read_text() == "new\n"
    assert sorted(os.listdir(tmp_path)) == ["a.md", "b.md"]


def test_pipes_and_devices_are_written_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        write(tmp_path / "pipe")
        assert os.read(reader, 100) == b"new\n"
    finally:
        os.close(reader)
    assert os.listdir(tmp_path) == ["pipe"]
    write(Path("/dev/null"))
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(OSError, match="No space left"):
        write(Path("/dev/full"))


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_standard_output_that_is_a_file_is_written_on_after_it(tmp_path, name):
    """A file in its place would get none of what is said later: that goes to the descriptor."""
    path = tmp_path / "output"
    script = "with written_whole(Path(sys.argv[1])) as whole:\n    whole.write_text('new\\n')\nprint('later')\n"
    with path.open("ab") as stdout:
        in_process(script, name, stdout=stdout, check=True)
    assert path.read_text() == "new\nlater\n"
    assert os.listdir(tmp_path) == ["output"]


def test_standard_output_that_is_a_pipe():
    script = "with written_whole(Path('/dev/stdout')) as whole:\n    whole.write_text('new\\n')\n"
    assert in_process(script, capture_output=True, check=True).stdout == b"new\n"


@pytest.mark.parametrize(
    ("place", "name", "code"),
    [(files.os, "open", errno.EACCES), (Path, "replace", errno.EBUSY)],
    ids=["a folder that takes no new files", "a mount point"],
)
def test_a_file_that_no_other_can_take_the_place_of_is_written_in_place(path, monkeypatch, place, name, code):
    monkeypatch.setattr(place, name, refuse(code))
    write(path)
    assert path.read_text() == "new\n"
    assert os.listdir(path.parent) == ["table.md"]


def test_a_folder_without_room_for_a_file_keeps_what_was_there(path, monkeypatch):
    monkeypatch.setattr(files.os, "open", refuse(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        write(path)
    assert path.read_text() == "old, and longer\n"


def test_a_file_that_may_not_be_written_is_not_replaced(path, monkeypatch):
    # Root may write everything, so that its tests cannot do without.
    monkeypatch.setattr(files.os, "access", lambda path, mode: False)
    with written_whole(path) as whole:
        assert whole == path


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("owner", [(4321, -1), (-1, 4321)])
def test_a_file_of_another_owner_or_group_stays_theirs(path, owner):
    os.chown(path, *owner)
    before = path.stat()
    write(path)
    assert path.read_text() == "new\n"
    assert (path.stat().st_uid, path.stat().st_gid) == (before.st_uid, before.st_gid)
    assert os.listdir(path.parent) == ["table.md"]


def test_a_folder_and_a_file_in_no_folder_are_refused_as_open_would(tmp_path):
    with pytest.raises(IsADirectoryError):
        write(tmp_path)
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "none" / "table.md")
    assert os.listdir(tmp_path) == []


OWNER = (
    "import os, sys; from cs336sys.processes.files import OwnedFolder; folder = OwnedFolder()\n"
    "print(folder.path, flush=True); sys.stdin.read(); os.kill(os.getpid(), 9)"
)


@pytest.fixture
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
