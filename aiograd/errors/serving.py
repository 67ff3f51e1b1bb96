"""Errors of a service that serves and learns: of its queue, its versions, their log and their deltas."""

from __future__ import annotations

from aiograd.errors.local import AiogradError

__all__ = [
    "DeltaError", "DrainingError", "ForwardError", "QueueFullError", "RejectedVersionError", "ServingError", "VersionLogError",
    "VersionNotFoundError",
]  # fmt: skip


class ServingError(AiogradError, RuntimeError):
    """A call that a server, a trainer or a follower refuses in its present state."""


class _RefusedForNowError(ServingError):
    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFullError(_RefusedForNowError):
    """The queue of a server has no room for the rows of a request.

    Attributes:
        retry_after: seconds after which there is room, by the measured rate of answers.
    """


class DrainingError(_RefusedForNowError):
    """A server answers the requests that it has admitted and refuses others, because it closes.

    Attributes:
        retry_after: seconds after which to try again, elsewhere or on the restarted service.
    """


class ForwardError(ServingError, ValueError):
    """The forward of a server refuses arguments that it has taken before, or returns no rows; the cause is chained."""


class VersionNotFoundError(ServingError, LookupError):
    """A server or a log has no version of that number, or has it no more."""


class RejectedVersionError(ServingError, ValueError):
    """A version may not serve: its state is not finite."""


class DeltaError(ServingError, ValueError):
    """A delta is damaged, too large, or between other versions; nothing was applied."""


class VersionLogError(ServingError, OSError):
    """A log of versions cannot be written or read, is of another model, or is in use by another server."""
