"""Progress of a loop, on tqdm where that is installed."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable
from typing import Any, TypeVar, overload

T = TypeVar("T")


@overload
def progress(iterable: Iterable[T], description: str | None = None, *, total: int | None = None) -> Iterable[T]: ...
@overload
def progress(iterable: AsyncIterable[T], description: str | None = None, *, total: int | None = None) -> AsyncIterable[T]: ...


def progress(iterable: Any, description: str | None = None, *, total: int | None = None) -> Any:
    """The same items, with a bar that says how far the loop is and how long it has to go.

    The bar is tqdm's: text on standard error in a terminal, a widget in a notebook that has ipywidgets. Where tqdm is not installed (extra ``demo``)
    the iterable itself is returned, so a script runs with and without.

    Args:
        iterable: anything for ``for``, or for ``async for``.
        description: a word before the bar.
        total: how many items there will be; None: ``len(iterable)`` where it has one.

    Returns:
        An iterable of the same items, asynchronous if `iterable` is. tqdm's ``set_postfix`` and ``close`` are there where tqdm is.

    Example:
        >>> import aiograd as ag
        >>> sum(ag.progress(range(4), "adding"))
        6
    """
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return iterable
    # without tqdm's thread, which would outlive the loop: it only serves bars that are not drawn at each change
    bar = type("tqdm", (tqdm,), {"monitor_interval": 0})
    return bar(iterable, desc=description, total=total, dynamic_ncols=True, miniters=1)
