"""Event: one thing that took time.

Note [Tracks]
    On an event loop many tasks take turns on one thread, so the events of a thread do not nest. The events of one task on one
    thread do: that pair is a track. A rule that is a coroutine is waited for while its task does other things, so each such wait is a
    track of its own.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from aiograd.running.types import Shape

Category: TypeAlias = Literal["forward", "backward", "pass", "scope", "lag", "call", "serve", "send", "receive", "commit"]
#: thread id, and serial number of the asyncio task (0 outside of one)
Track: TypeAlias = tuple[int, int]


class Event(NamedTuple):
    """One thing that took time. Times are nanoseconds of ``time.perf_counter_ns``.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> with ag.profiler.profile() as profile:
    ...     y = x * x
    >>> event = profile.events[0]
    >>> event.name, event.category, event.duration > 0
    ('mul', 'forward', True)
    """

    #: the displayed name: ``mul``, ``MulBackward``, the name of a scope
    name: str
    #: ``forward``: an operation ran; ``backward``: a node's rule ran; ``pass``: a whole backward pass; ``scope``; ``lag``: the event loop was late
    #: ``call``: a remote call was waited for; ``serve``: one was served; ``send``: gradients were sent and their answer was waited for; ``receive``:
    #: gradients were received and answered; ``commit``: the commit of a pass was told or carried out
    category: Category
    #: the same for an operation and for its backward
    operation: str
    start: int
    duration: int
    thread_id: int
    thread_name: str
    #: serial number of the asyncio task, 0 outside of one
    task: int
    task_name: str | None
    #: of the node that was recorded, or that ran a rule
    sequence_nr: int | None = None
    #: number of the backward pass
    graph_task: int | None = None
    #: of the outputs of an operation, where asked for
    shapes: tuple[Shape, ...] | None = None
    #: bytes of the outputs of an operation, where asked for
    nbytes: int | None = None
    #: ``file:line`` of the user's code that ran an operation, where asked for
    line: str | None = None
    #: the other worker, of an exchange with one
    peer: str | None = None

    @property
    def track(self) -> Track:
        """Events of one track nest, see Note [Tracks]."""
        return self.thread_id, self.task

    @property
    def end(self) -> int:
        """When it was over."""
        return self.start + self.duration
