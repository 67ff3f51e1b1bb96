"""Limits: limits on the requests that a worker accepts from its peers, and timeouts.

Every limit is checked before memory is allocated. Limits apply to requests of peers; a worker's own local passes
queue and are never refused.
"""

from __future__ import annotations

import dataclasses
import numbers
from dataclasses import dataclass
from typing import Any

from aiograd.errors import ArgumentError, ArgumentTypeError

MIB = 1 << 20
#: the largest value of a limit without another bound: timers of every loop and fields of every header can hold it
LONGEST = 1e9
MOST = 1 << 62
#: the largest values that frames, numpy and the codec support
MOST_OF = {"frame_bytes": 0xFFFF_FFFF, "dimensions": 64, "depth": 255}


def check_number(what: str, value: Any, most: float = LONGEST, of: str = "", *, whole: bool = False) -> None:
    """Raise unless `value` is a number above 0.

    Args:
        what: the argument's name, for errors.
        most: the largest allowed value.
        of: the origin of `most`, for errors.
        whole: True for an integer (a count); otherwise it is a number of seconds.

    Raises:
        ArgumentTypeError: it is no number, or no whole one. ArgumentError: it is NaN or out of range.
    """
    kind = "a whole number" if whole else "seconds"
    numeric: Any = numbers.Integral if whole else numbers.Real
    bound = f"{most:g}{f' ({of})' if of else ''}"
    if isinstance(value, bool) or not isinstance(value, numeric):
        raise ArgumentTypeError(f"{what}={_brief(value)}: expected {kind} above 0 and at most {bound}, found {type(value).__name__}")
    if not 0 < value <= most:
        raise ArgumentError(f"{what}={_brief(value)}: expected {kind} above 0 and at most {bound}")


def _brief(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # a number of too many digits, or anything at all
        return f"({type(value).__name__})"
    return text if len(text) <= 100 else f"{text[:100]}..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one worker. Sizes in bytes, times in seconds.

    Args:
        message_bytes: one message (a call, a reply, the gradients of one edge) with all its tensors. The members of a group have the same
            `message_bytes` and `bytes_per_peer` where these are below 5 MiB.
        frame_bytes: one frame, at most: a message is cut into frames, which are shorter on a slow link.
        head_bytes: the part of a message that is not tensor data: names, numbers, strings, descriptions of tensors.
        tensors: tensors in one message.
        dimensions: dimensions of a tensor.
        depth: how deep arguments may be nested.
        bytes_per_peer: messages that are on their way in from one peer; a sender is held back by `bytes_per_peer` of its own.
        bytes_total: messages that are on their way in.
        shared_bytes: shared memory through which peers of the same machine send large frames, four frames for each peer; 0: none, and
            nothing is sent through shared memory either.
        requests_per_peer: requests of one peer that run at the same time.
        contexts_per_principal: open contexts of one principal.
        contexts: open contexts.
        edges_per_context: messages with gradients in one context.
        references_per_principal: objects held for remote references.
        executor_queue: functions of peers that are handed to the executor at the same time, per thread; further ones wait.
        default_deadline: deadline of calls and passes that name none.
        max_deadline: the longest deadline that a peer may ask for.
        heartbeat: time without sending after which a worker sends a heartbeat.
        missed_heartbeats: the number of missed heartbeats after which a worker is lost.
        held: time for which a worker's event loop may be held up, where the worker can tell its peers so, before it is lost.
        lease: time that a context lives after its opener is lost; None: twice `default_deadline`.
        connections: connections of peers. Connections without a completed handshake are counted separately, and the oldest of them is closed to
            make room.
        connections_per_address: connections from one address.
        handshake_timeout: time for a handshake.
        keepalive_timeout: time after which an idle HTTP connection is closed.
        unread_bytes: output that a peer does not read: its connection is closed when there is this much.
        unread_seconds: ... or after this time.

    Raises:
        ArgumentTypeError: a limit is no number, or no whole one where it counts something. ArgumentError: it is not above 0, or too large.

    >>> limits = dist.Limits(heartbeat=2.0, missed_heartbeats=5)
    >>> limits.silence
    10.0
    """

    message_bytes: int = 256 * MIB
    frame_bytes: int = MIB
    head_bytes: int = MIB
    tensors: int = 1024
    dimensions: int = 16
    depth: int = 16
    bytes_per_peer: int = 256 * MIB
    bytes_total: int = 1024 * MIB
    shared_bytes: int = 256 * MIB
    requests_per_peer: int = 1024
    contexts_per_principal: int = 256
    contexts: int = 4096
    edges_per_context: int = 65536
    references_per_principal: int = 65536
    executor_queue: int = 64
    default_deadline: float = 60.0
    max_deadline: float = 3600.0
    heartbeat: float = 0.5
    missed_heartbeats: int = 3
    held: float = 30.0
    lease: float | None = None
    connections: int = 1024
    connections_per_address: int = 64
    handshake_timeout: float = 5.0
    keepalive_timeout: float = 60.0
    unread_bytes: int = 64 * MIB
    unread_seconds: float = 10.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, is_whole = getattr(self, field.name), isinstance(field.default, int)
            if field.name == "shared_bytes" and value == 0 and type(value) is int:
                continue
            if value is not None or field.default is not None:
                check_number(f"Limits: {field.name}", value, MOST_OF.get(field.name, MOST if is_whole else LONGEST), whole=is_whole)
        if self.default_deadline > self.max_deadline:
            raise ArgumentError(f"Limits: default_deadline={self.default_deadline} is above max_deadline={self.max_deadline}")

    @property
    def silence(self) -> float:
        """Seconds after which a silent peer is lost."""
        return self.heartbeat * self.missed_heartbeats

    @property
    def lease_seconds(self) -> float:
        """Seconds that a context outlives its opener."""
        return 2 * self.default_deadline if self.lease is None else self.lease
