"""Files that options name: found writable before anything is measured, and written whole or not at all."""

import os
import resource
import subprocess
import sys

import pytest
from matplotlib.figure import Figure

from cs336sys.errors import OutputError
from cs336sys.tables.outputs import check_writable, write_figure, write_file

# Less than any table or picture takes.
ROOM_BYTES = 100


def _with_little_room():
    # A larger file is refused in the middle of a write, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES, ROOM_BYTES))


def test_a_disk_that_fills_leaves_the_file_of_before(tmp_path):
    path = tmp_path / "table.md"
    path.write_text("of before\n")
    ended = subprocess.run(
        [sys.executable, "-m", "cs336sys", "account", "buckets", "--output", path],
        capture_output=True,
        text=True,
        timeout=90,
        preexec_fn=_with_little_room,
        # Python does not notice that it wrote half of its compiled modules, and could not read them later.
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert (ended.returncode, ended.stderr) == (1, f"error: cannot write --output {path}: File too large\n")
    assert path.read_text() == "of before\n"
    assert os.listdir(tmp_path) == ["table.md"]


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_picture_that_cannot_be_written_leaves_that_of_before(tmp_path, monkeypatch, ending):
    path = tmp_path / f"plot.{ending}"
    figure = Figure()
    figure.add_subplot().plot([1, 2])
    write_figure(figure, path)
    before = path.read_bytes()

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES, limits[1]))
    try:
        with pytest.raises(OutputError, match=f"^cannot write --plot {path}: File too large$"):
            write_figure(figure, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


def test_a_link_to_a_file_that_is_not_there_stays_a_link(tmp_path):
    link = tmp_path / "link.md"
    link.symlink_to("file.md")
    check_writable(link, "--output")
    assert os.listdir(tmp_path) == ["link.md"], "the check made a file, or took the link"
    write_file(link, b"new\n", "--output")
    assert link.is_symlink()
    assert (tmp_path / "file.md").read_bytes() == b"new\n"
