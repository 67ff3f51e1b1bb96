"""How stable each public name is, and the decorator of names that will go away.

A level belongs to a module, or to a name where it differs from its module's; the longest entry that fits a name counts. The promises of the levels
stand in ``docs/reference/stability.md``.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from aiograd.running.caller import warn_caller

Named = TypeVar("Named", bound=Callable[..., Any])


class Stability(enum.Enum):
    """The promise of a public name: which changes a release may make to it without a new major version."""

    #: nothing, until it was deprecated for two minor releases
    STABLE = "stable"
    #: signature and behaviour, with a line in the changelog
    PROVISIONAL = "provisional"
    #: anything; public for tests and tools of the project
    INTERNAL = "internal"


LEVELS: Mapping[str, Stability] = {
    name: level
    for level, names in (
        (
            Stability.STABLE,
            "aiograd aiograd.linalg aiograd.fft aiograd.special aiograd.nn aiograd.nn.functional aiograd.nn.init aiograd.optim aiograd.data "
            "aiograd.distributions aiograd.distributed aiograd.errors aiograd.interop aiograd.interop.torch aiograd.testing aiograd.graph",
        ),
        (
            Stability.PROVISIONAL,
            "aiograd.stats aiograd.parallel aiograd.profiler aiograd.viz aiograd.kernels aiograd.cuda aiograd.pipeline aiograd.serving "
            "aiograd.interop.jax aiograd.implicit aiograd.distributed.moe aiograd.compile "
            "aiograd.distributed.LocalSteps aiograd.distributed.DataParallel "
            "aiograd.distributed.ZeroRedundancyOptimizer aiograd.distributed.TopK aiograd.distributed.Blockwise",
        ),
        (Stability.INTERNAL, "aiograd.transaction"),
    )
    for name in names.split()
}


def stability_of(name: str) -> Stability:
    """The level of a public name.

    Args:
        name: dotted, such as ``aiograd.nn.Linear``.

    Raises:
        KeyError: no entry fits it.
    """
    entry = name
    while entry not in LEVELS:
        entry, _, last = entry.rpartition(".")
        if not last:
            raise KeyError(f"{name} has no level of stability: add its module to aiograd.running.stability.LEVELS")
    return LEVELS[entry]


def deprecated(*, instead: str, since: str, removed_in: str) -> Callable[[Named], Named]:
    """Decorator of a function, coroutine function or class that will be removed: each line that uses it gets a `DeprecationWarning`.

    Where the pytest plugin `aiograd.testing` is loaded, as it is wherever both are installed, the warning is an error.

    Args:
        instead: the name to use, for the message.
        since: the first version that warns.
        removed_in: the first version without it.

    Returns:
        The decorator. Its result has an attribute ``__deprecated__``, the message.
    """

    def decorate(named: Named) -> Named:
        message = f"{named.__qualname__} is deprecated since aiograd {since} and goes away in {removed_in}: use {instead}"
        if inspect.isclass(named):
            changed: Any = named
            changed.__init__ = _warning(changed.__init__, message)
        else:
            changed = _warning(named, message)
        changed.__deprecated__ = message
        changed.__removed_in__ = removed_in
        return changed  # type: ignore[no-any-return]

    return decorate


def _warning(function: Any, message: str) -> Any:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            warn_caller(message, DeprecationWarning)
            return await function(*args, **kwargs)

        return awaited

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        warn_caller(message, DeprecationWarning)
        return function(*args, **kwargs)

    return called
