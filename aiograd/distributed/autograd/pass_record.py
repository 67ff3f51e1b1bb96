"""PassRecord: one worker's state of one distributed backward pass.

Edge discovery, the exchange of gradients and the messages about its end read it and write to it; `participant` carries the pass out.

Note [No cycles]
    A participant keeps its piece of the graph, with saved tensors, until the pass is over. Then it has to be free at once, not when the garbage
    collector runs. So the helpers that a participant owns, and its drive, refer to it weakly.
"""

from __future__ import annotations

import asyncio
import weakref
from abc import ABC, abstractmethod
from typing import Any

from aiograd.distributed.autograd.context import Context, PassId
from aiograd.distributed.autograd.crossing import Crossing
from aiograd.distributed.autograd.nodes import SendNode
from aiograd.distributed.worker_core import WorkerCore
from aiograd.transaction import TransactionEvent


class PassRecord(ABC):
    """One worker's state of one pass.

    Args:
        core: the worker.
        context, pass_id: the context and id of the pass.
        retain_graph: keep the graph for another pass.
        smart: True if gradients come at marked send nodes only.
        deadline: the deadline, as a time of the loop.
        create_graph: record the pass itself.
        place: with `create_graph`, the place of the pass in the order of recording; see Note [Places] in `context`, without its infinities.
        is_selective: see Note [Passes over wanted inputs] in `participant`.
        crossing: in a selective pass, on its initiator: decides which recv nodes of other contexts matter.
    """

    def __init__(
        self,
        core: WorkerCore,
        context: Context,
        pass_id: PassId,
        *,
        retain_graph: bool,
        smart: bool,
        deadline: float,
        create_graph: bool = False,
        place: tuple[float, ...] = (),
        is_selective: bool = False,
        crossing: Crossing | None = None,
    ) -> None:
        self.core = core
        self.context = context
        self.pass_id = pass_id
        self.initiator = pass_id[0]
        self.retain_graph = retain_graph
        self.create_graph = create_graph
        self.place = place
        self.smart = smart
        self.is_selective = is_selective
        self.crossing = crossing
        self.deadline = deadline
        #: the known workers that take part
        self.others: list[str] = []
        #: the worker with the first gradients, which made this one begin
        self.parent = ""
        #: workers behind this one that have answered, and workers to which requests or gradients were sent
        self.behind: set[str] = set()
        self.downstream: set[str] = set()
        #: the ones of them that have nothing to commit; see Note [Nothing to commit] in `participant`
        self.idle: set[str] = set()
        #: the send nodes with gradients from other workers
        self.sends: dict[SendNode, None] = {}
        #: on the initiator: worker -> its edges that take part, where that was known without asking; see Note [Predicted edges] in `discovery`
        self.predicted: dict[str, list[int]] = {}
        #: this worker's GraphTask, once it runs
        self.task: Any = None
        self.error: BaseException | None = None
        self.has_ended = False
        self._loop = asyncio.get_running_loop()
        self.began_at = self._loop.time()

    @property
    def is_initiator(self) -> bool:
        """True if the pass was started here."""
        return self.initiator == self.core.name

    def left(self) -> float:
        """Seconds to the deadline."""
        return max(self.deadline - self._loop.time(), 0.001)

    def address(self) -> tuple[bytes, str, int]:
        """The first values of every message about the pass."""
        return (self.context.key, *self.pass_id)

    @abstractmethod
    def fail(self, error: BaseException, event: TransactionEvent | None = None) -> bool:
        """Abort the pass here, unless it is prepared or decided."""

    @abstractmethod
    def stop(self, error: BaseException) -> None:
        """End the pass here, prepared or not."""

    @abstractmethod
    def describe(self) -> str:
        """A description of the events that the pass waits for here."""

    @abstractmethod
    def _end(self) -> None:
        """The pass is over here."""

    @abstractmethod
    def changed(self) -> None:
        """Wake all tasks that wait for a change."""


class ParticipantHelper:
    """Does some of the work of one participant, which owns it. See Note [No cycles].

    Args:
        participant: the worker's record of the pass.
    """

    __slots__ = ("_participant_ref",)

    def __init__(self, participant: PassRecord) -> None:
        self._participant_ref = weakref.ref(participant)

    @property
    def _participant(self) -> PassRecord:
        participant = self._participant_ref()
        if participant is None:
            raise ReferenceError(f"{type(self).__name__} was used after its pass was over")
        return participant
