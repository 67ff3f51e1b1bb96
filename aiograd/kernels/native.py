"""The question if programs of compiled functions can be native; `aiograd.compiler.native`, which lies above this package, answers it."""

from __future__ import annotations

from collections.abc import Callable

#: gives the reason why no program can be native in this process; appended by the top of the package
NATIVE_PROBLEM: list[Callable[[], str | None]] = []


def native_problem() -> str | None:
    """The reason why no program of a compiled function can be native in this process. The first call loads llvmlite.

    Returns:
        The reason, or None if they can be.
    """
    return NATIVE_PROBLEM[0]()


def native_available() -> bool:
    """True if programs of compiled functions can be native in this process. The first call loads llvmlite, which the extra ``kernels`` brings.

    Returns:
        True or False; ``aiograd doctor`` says why.

    >>> ag.kernels.native_available() is (ag.kernels.native_problem() is None)
    True
    """
    return native_problem() is None
