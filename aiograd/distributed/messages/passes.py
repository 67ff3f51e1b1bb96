"""Messages about backward passes and about the contexts in which they run."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from aiograd.coordination.message_code import Bound
from aiograd.coordination.message_form import Count, WireMessage, message
from aiograd.distributed.failpoints import RequestPoints
from aiograd.distributed.messages.fields import ContextKey, Place, TraceContext
from aiograd.distributed.rpc.codec import WireTensor

#: directions of edge discovery in a pass that wants some inputs of its initiator only
DOWN, UP = 0, 1
#: flags of GRADIENT
RETAIN, SMART, CREATE = 1, 2, 4
ANOMALY, NAN, SELECTIVE = 8, 16, 32
_FLAGS: Final = RETAIN | SMART | CREATE | ANOMALY | NAN | SELECTIVE

Direction: TypeAlias = Annotated[int, Bound(f"{DOWN} or {UP}", (DOWN, UP).__contains__)]
Flags: TypeAlias = Annotated[int, Bound(f"flags from 0 to {_FLAGS}", lambda flags: not flags & ~_FLAGS)]


@message(code="pass")
class PassMessage(WireMessage):
    """The first fields of every message about a pass."""

    key: ContextKey
    #: name of the worker that has started the pass
    initiator: str
    #: of the pass on that worker
    number: int

    @property
    def pass_id(self) -> tuple[str, int]:
        """The id of the pass."""
        return (self.initiator, self.number)


@message(code="mark")
class Marked(WireMessage):
    """The answer to `Mark`."""

    #: names of the workers that take part behind the edges
    names: list[str]
    #: edges of the asker that were reached: send edges, on the way up recv edges
    edges: list[int]


@message(kind=2, name="MARK", code="mark", answer=Marked)
class Mark(PassMessage):
    """Let edges take part in a pass, and discover the edges behind them."""

    #: send edges of the receiver; on the way up recv edges that lead to the wanted inputs
    edges: list[int]
    #: `DOWN` or `UP` where the pass wants some inputs of its initiator only
    direction: Direction | None = None


@message(code="gradient")
class Bundle(WireMessage):
    """The gradients of one edge."""

    #: the send edge of the receiver
    edge: int
    #: by value of the edge; None: no gradient
    gradients: list[WireTensor | None]
    #: the edge that the message itself makes in a pass that records a graph; 0: none
    recorded_edge: int


@message(code="gradient")
class GradientsTaken(WireMessage):
    """The answer to `Gradient`."""

    #: names of the workers that are prepared: the receiver and those behind it
    names: list[str]
    #: gradients for the asker
    bundles: list[Bundle]
    #: True if the receiver has nothing to commit and has left the pass
    has_left: bool


@message(kind=3, name="GRADIENT", code="gradient", answer=GradientsTaken, failpoints=RequestPoints(request_sent="bwd.after_send"))
class Gradient(PassMessage):
    """Gradients of one send edge.

    The first one of a pass is answered when the receiver and everything behind it is prepared to commit, later ones at once.
    """

    bundle: Bundle
    #: `RETAIN`, `SMART`, `CREATE`, `ANOMALY`, `NAN`, `SELECTIVE` together
    flags: Flags
    #: names of workers that take part, which the receiver can ask for the outcome
    others: list[str]
    #: send edges of the receiver that take part, where no `Mark` has told it
    edges: list[int] | None = None
    #: place of the pass, where it records a graph
    place: Place | None = None
    trace: TraceContext | None = None

    @property
    def retain_graph(self) -> bool:
        """True if the pass keeps the graph."""
        return bool(self.flags & RETAIN)

    @property
    def smart(self) -> bool:
        """True if gradients come at marked send nodes only."""
        return bool(self.flags & SMART)

    @property
    def create_graph(self) -> bool:
        """True if the pass records a graph."""
        return bool(self.flags & CREATE)

    @property
    def anomaly(self) -> bool | None:
        """None unless the pass runs in anomaly mode; True if it checks for NaN."""
        return bool(self.flags & NAN) if self.flags & ANOMALY else None

    @property
    def is_selective(self) -> bool:
        """True if the pass wants some inputs of its initiator only."""
        return bool(self.flags & SELECTIVE)


@message(kind=4, name="COMMIT", code="pass", answer=bool)
class Commit(PassMessage):
    """Make the gradients of a pass visible. The answer is True."""


@message(kind=5, name="ABORT", code="pass", answer=bool)
class Abort(PassMessage):
    """Drop a pass. The answer is True."""

    #: in a word
    reason: str


@message(kind=6, name="OUTCOME", code="pass", answer=str)
class PassOutcome(PassMessage):
    """Ask for the outcome of a pass. The answer is the value of an `Outcome`."""


@message(kind=7, name="RELEASE", code="release", answer=bool)
class Release(WireMessage):
    """Drop a context. The answer is True."""

    key: ContextKey


@message(code="renew")
class Lease(WireMessage):
    """A lease that is renewed; see Note [Leases] in `autograd.context_table`."""

    key: ContextKey
    #: the latest value of the context's counter that the sender knows
    counter: Count


@message(kind=8, name="RENEW", code="renew", answer=bool)
class Renew(WireMessage):
    """Keep contexts that are still in use. The answer is True."""

    leases: list[Lease]
