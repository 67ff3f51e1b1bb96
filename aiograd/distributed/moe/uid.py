"""Names of experts: ``name.i.j``, a place in a grid; prefixes of such names end with a dot.

Source: hivemind ``expert_uid.py``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from aiograd.errors import ArgumentError

_UID = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(\.(0|[1-9][0-9]*))+")
_PREFIX = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\.((0|[1-9][0-9]*)\.)*")


class ExpertUid(NamedTuple):
    """A parsed name.

    >>> uid = dist.moe.ExpertUid("ffn", (3, 14))
    >>> str(uid)
    'ffn.3.14'
    """

    name: str
    #: place in the grid
    coordinates: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name}.{'.'.join(map(str, self.coordinates))}"


def parse_uid(text: str) -> ExpertUid:
    """Read ``"ffn.3.14"``.

    Args:
        text: a name and coordinates.

    Returns:
        The two, apart.

    Raises:
        ArgumentError: it is no name of an expert.
    """
    if not isinstance(text, str) or _UID.fullmatch(text) is None:
        raise ArgumentError(f"expert uid {text!r}: expected a name and coordinates without leading zeros, such as 'ffn.3.14'")
    name, *coordinates = text.split(".")
    return ExpertUid(name, tuple(map(int, coordinates)))


def check_prefix(text: str) -> str:
    """`text`, if it is the beginning of experts' names.

    Raises:
        ArgumentError: it is not.
    """
    if not isinstance(text, str) or _PREFIX.fullmatch(text) is None:
        raise ArgumentError(f"expert prefix {text!r}: expected a name, perhaps coordinates, and a dot at the end, such as 'ffn.'")
    return text
