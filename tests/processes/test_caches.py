"""Compiled code is loaded from folders that nobody else can write to."""

import getpass
import os
import stat
import tempfile
from pathlib import Path

import pytest

from cs336sys.errors import CapabilityError
from cs336sys.processes import caches
from cs336sys.processes.caches import require_private, use_private_caches
from cs336sys.processes.parent import call_guarded


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_inductor_caches_below_the_home_folder_unless_the_user_says_otherwise(home, monkeypatch):
    use_private_caches()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(home / ".cache/torchinductor")
    assert stat.S_IMODE((home / ".cache/torchinductor").stat().st_mode) == 0o700
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(home / "mine"))
    use_private_caches()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(home / "mine")


@pytest.mark.parametrize("home_folder", ["file/home", "~"])
def test_without_a_home_folder_inductor_caches_in_a_private_temporary_folder(home_folder, home, monkeypatch):
    (home / "file").write_text("no folder")
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    monkeypatch.setenv("HOME", home_folder if home_folder == "~" else str(home / home_folder))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(home / "triton"))
    use_private_caches()
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert folder.parent == home
    folder.chmod(0o777)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    with pytest.raises(CapabilityError, match=f"other users can write to {folder}"):
        use_private_caches()


@pytest.mark.parametrize(
    ("variable", "folder"),
    [
        ("TORCHINDUCTOR_CACHE_DIR", ".cache/torchinductor"),
        ("TRITON_CACHE_DIR", ".triton/cache"),
        ("TRITON_CACHE_DIR", "elsewhere/.triton/cache"),
        ("TMPDIR", f"tmp/torchinductor_{getpass.getuser()}"),
    ],
)
@pytest.mark.parametrize("fault", ["writable", "writable above", "another owner", "link of another owner"])
def test_a_cache_that_others_can_write_to_is_refused_before_a_start(variable, folder, fault, home, monkeypatch):
    path = home / folder
    path.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(home / "tmp"))
    if folder.startswith("elsewhere"):
        monkeypatch.setenv("TRITON_HOME", str(home / "elsewhere"))
    if fault == "writable":
        path.chmod(0o777)
    elif fault == "writable above":
        path.parent.chmod(0o777)
    else:
        if os.geteuid() != 0:
            pytest.skip("only root can give files away")
        if fault == "link of another owner":
            path.rename(home / "target")
            path.symlink_to(home / "target")
        os.chown(path, 4711, 4711, follow_symlinks=False)
    with pytest.raises(
        CapabilityError, match=f"cached files are not loaded from this folder, because .* set {variable}"
    ):
        call_guarded("os:getpid")


@pytest.mark.parametrize(
    ("mode", "members", "is_private"), [(0o775, [], True), (0o775, ["eve"], False), (0o1777, [], 0)]
)
def test_only_a_group_of_this_user_alone_may_write(mode, members, is_private, tmp_path, monkeypatch):
    group = caches.grp.struct_group((caches.pwd.getpwuid(os.geteuid()).pw_name, "x", os.getegid(), members))
    monkeypatch.setattr(caches.grp, "getgrgid", lambda _: group)
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(mode)
    if is_private:
        require_private(folder, "X")
    else:
        with pytest.raises(CapabilityError, match="set X to a folder that only you can write to"):
            require_private(folder, "X")
