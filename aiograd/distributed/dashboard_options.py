"""DashboardOptions: the settings of a worker's dashboard."""

from __future__ import annotations

from dataclasses import dataclass

from aiograd.distributed.rpc.limits import check_number
from aiograd.errors import ArgumentError, ArgumentTypeError

#: bytes of randomness in a token that is drawn
TOKEN_BYTES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardOptions:
    """Settings of a worker's dashboard: ``Worker(dashboard=DashboardOptions(...))``. ``dashboard=True`` takes the defaults.

    Args:
        token: opens the page and, from other machines, ``/metrics``; at least 16 letters, digits, ``-`` and ``_``. None: drawn.
        interval: seconds between two looks at the other workers while the page is open.
        events_per_second: how many events each worker records while the page is open, on average; fewer where there are many workers. More show
            more and cost more: some 50 µs each.

    Raises:
        ArgumentTypeError, ArgumentError: a setting cannot be used.

    >>> dist.DashboardOptions(interval=1.0)
    DashboardOptions(token=None, interval=1.0, events_per_second=250)
    """

    token: str | None = None
    interval: float = 0.5
    events_per_second: int = 250

    def __post_init__(self) -> None:
        check_number("DashboardOptions: interval", self.interval, 60.0)
        check_number("DashboardOptions: events_per_second", self.events_per_second, 100_000, whole=True)
        if self.token is not None:
            if not isinstance(self.token, str):
                raise ArgumentTypeError(f"DashboardOptions(token=...): expected text, found {type(self.token).__name__}")
            if len(self.token) < 16 or not all(c.isascii() and (c.isalnum() or c in "-_") for c in self.token):
                raise ArgumentError("DashboardOptions(token=...): expected at least 16 letters, digits, '-' and '_'")


def read_options(dashboard: bool | DashboardOptions) -> DashboardOptions | None:
    """The settings for a worker's argument `dashboard`; None: no dashboard.

    Raises:
        ArgumentTypeError: it is neither a bool nor DashboardOptions.
    """
    if isinstance(dashboard, DashboardOptions):
        return dashboard
    if not isinstance(dashboard, bool):
        raise ArgumentTypeError(f"Worker(dashboard=...): expected True, False or dist.DashboardOptions, found {type(dashboard).__name__}")
    return DashboardOptions() if dashboard else None
