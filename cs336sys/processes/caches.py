"""Caches of compiled code and of its settings, in folders that no other user can write to. No torch."""

import getpass
import grp
import os
import pwd
import re
import stat
import tempfile
from pathlib import Path

from cs336sys.errors import CapabilityError

_INDUCTOR_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def use_private_caches() -> None:
    """Set Inductor's cache unless the user has, and raise a CapabilityError if others can write to it or to Triton's.

    Inductor's own default is in the system's temporary folder, where another user may have made it. Ours is in the
    user's cache folder, or where that takes no files, in the default one, which is checked in any case.
    """
    try:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    default = Path(tempfile.gettempdir(), f"torchinductor_{user}")  # As Inductor names it.
    if _INDUCTOR_VARIABLE not in os.environ:
        folder = _user_cache() / "torchinductor"
        if not folder.is_absolute() or not _can_write(folder):
            folder = default
        os.environ[_INDUCTOR_VARIABLE] = str(folder)
    require_private(Path(os.environ[_INDUCTOR_VARIABLE]), _INDUCTOR_VARIABLE)
    # Inductor keeps the headers that it precompiles in its default folder, whatever the variable says.
    require_private(default, "TMPDIR")
    triton_home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    require_private(Path(os.environ.get("TRITON_CACHE_DIR") or f"{triton_home}/.triton/cache"), "TRITON_CACHE_DIR")


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))


def kept_settings_file(gpu_name: str) -> Path:
    """Return where ``flash --keep-settings`` keeps settings of a GPU, which need not be there."""
    return _user_cache() / f"cs336sys/attention-{re.sub('[^A-Za-z0-9]+', '-', gpu_name)}.json"


def require_private(folder: Path, variable: str) -> None:
    """Make a folder for cached files unless it is there; raise a CapabilityError if others can replace its files.

    It may belong to another user, or its permissions, or those of a folder above it, may let others write. The error
    names the ``variable`` by which another folder is chosen.
    """
    _can_write(folder)  # Makes it if it can.
    named, resolved = folder.absolute(), folder.resolve()
    for path in dict.fromkeys((named, *named.parents, resolved, *resolved.parents)):
        try:
            status = path.lstat()
        except OSError:
            continue  # It is not there.
        is_link = stat.S_ISLNK(status.st_mode)
        if (is_link or path == resolved) and status.st_uid not in (os.geteuid(), 0):  # Who owns it can replace it.
            reason = f"{path} belongs to another user, {status.st_uid}"
        # In a folder with the sticky bit, as /tmp has, others cannot replace what is not theirs.
        elif not is_link and _is_writable_by_others(status, may_be_sticky=path != resolved):
            reason = f"other users can write to {path}"
        else:
            continue
        raise CapabilityError(
            f"{folder}: cached files are not loaded from this folder, because {reason}; set {variable} to a folder "
            "that only you can write to"
        )


def _can_write(folder: Path) -> bool:
    """Make a folder unless it is there, and return whether files can be made in it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _is_writable_by_others(status: os.stat_result, *, may_be_sticky: bool) -> bool:
    """Return whether all may write to a folder, or a group with members other than this user and root."""
    if may_be_sticky and status.st_mode & stat.S_ISVTX:
        return False
    if status.st_mode & stat.S_IWOTH:
        return True
    if not status.st_mode & stat.S_IWGRP:
        return False
    try:
        user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(status.st_gid)
    except KeyError:
        return True  # A group without an entry may have any members.
    # Distributions make a group for each user, and let it write.
    return group.gr_name not in (user, "root") or not set(group.gr_mem) <= {user, "root"}
