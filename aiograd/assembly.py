"""Joins parts of the package that do not know each other, once one of them has been imported.

The parts on one level of the package import none of each other. What one of them needs of another, such as the classes that a worker may
make on request, the top of the package hands over. It does not import the part for that: it leaves word here, and the part, when it has
been imported by whomever, has it carried out.
"""

from __future__ import annotations

from collections.abc import Callable

_errands: dict[str, Callable[[], None]] = {}


def when_imported(part: str, errand: Callable[[], None]) -> None:
    """Leave word what is to be done once a part has been imported."""
    _errands[part] = errand


def imported(part: str) -> None:
    """Carry out what was left for this part, which calls this as the last thing of its import."""
    errand = _errands.pop(part, None)
    if errand is not None:
        errand()
