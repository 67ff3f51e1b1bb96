"""The version of the library: one place, which workers compare and packaging reads."""

from __future__ import annotations

import re

from aiograd.errors import VersionMismatch

__version__ = "0.1.0rc1"


def check_release(where: str, release: str) -> None:
    """Refuse a worker whose minor release is not that of this process, which coordinates.

    Args:
        where: the worker, in words.
        release: its version.

    Raises:
        VersionMismatch: it has another minor release; says which of the two to upgrade.
    """
    theirs, ours = ([int(number) for number in re.findall(r"\d+", version)[:2]] for version in (release, __version__))
    if theirs != ours:
        older = where if theirs < ours else "the coordinator"
        raise VersionMismatch(f"{where} has aiograd {release}, the coordinator {__version__}; expected the same minor release: upgrade {older}")
