"""Checks that all clusters make of their arguments."""

from __future__ import annotations

from collections.abc import Sequence

from aiograd.errors import ArgumentError


def check_names(kind: str, n: int, names: Sequence[str] | None) -> tuple[str, ...]:
    """The names of `n` workers: those given, or ``worker0`` and so on.

    Raises:
        ArgumentError: too few, the same twice, or the coordinator's; the message begins with `kind`.
    """
    chosen = tuple(f"worker{i}" for i in range(n)) if names is None else tuple(names)
    if n < 1 or len(chosen) != n:
        raise ArgumentError(f"{kind}({n}, names={names}): expected at least one worker, and a name for each")
    if len({*chosen, "driver"}) != len(chosen) + 1:
        raise ArgumentError(f"{kind}(names={list(chosen)}): expected different names, none of them 'driver'")
    return chosen


def check_service(kind: str, service: str) -> None:
    """See that `service` has the form ``"module:name"``.

    Raises:
        ArgumentError: it has not.
    """
    if not isinstance(service, str) or ":" not in service:
        raise ArgumentError(f"{kind}(service={service!r}): expected 'module:name' of a Service, for example 'my_package.serving:service'")
