"""Where compiled kernels are kept between processes: a directory that only its user can have written.

A cache entry is a pickle, so a user with write access runs code as the user that reads it. The directory is therefore used only if it is
the user's own, no other user may enter it, and none can replace it through a parent; otherwise kernels are compiled afresh in each
process. It is given to numba for aiograd's kernels alone: numba's own settings, which other code in the process may use, stay as
they are.

Rejected: ``__pycache__`` beside the sources, numba's default: often not writable, and often writable by others.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path


def cache_base() -> Path | None:
    """The platform's directory for a user's caches, or None when there is no home."""
    override = os.environ.get("AIOGRAD_CACHE_DIR")
    if override:
        return Path(override)
    try:
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "aiograd"
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aiograd"
    except RuntimeError:
        return None


def _trusted(path: Path) -> bool:
    """True if only this user or root can replace the file or directory at `path`."""
    state = path.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid not in (0, os.geteuid()):
        return False
    return not state.st_mode & 0o022 or bool(state.st_mode & stat.S_ISVTX)


def private_directory(name: str = "kernels") -> Path | None:
    """A directory of this user's own, mode 0700, made if need be.

    Args:
        name: of the directory within the user's cache directory.

    Returns:
        Its path, or None when other users could have changed every candidate.
    """
    base = cache_base()
    if base is None or not hasattr(os, "geteuid"):
        return None
    try:
        directory = base.resolve() / name
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        state = directory.lstat()
        private = stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & 0o077
        return directory if private and os.access(directory, os.W_OK) and all(map(_trusted, directory.parents)) else None
    except OSError:
        return None
