"""LocalStepsStatistics: how much a training with local steps has computed, waited and sent. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiograd.distributed.local_steps.round_record import RoundRecord
from aiograd.distributed.rpc.statistics import PeerStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStepsStatistics:
    """Figures of a training since it was made.

    Attributes:
        rounds: rounds that were committed.
        members: members that there are now.
        late: contributions that came in a later round than the next after their base.
        lost: members that were lost.
        rows: rows in the committed rounds.
        bytes_sent, bytes_received: by this process, to and from workers with members that are connected now, heartbeats included.
        seconds_computing: of the local steps of all members together.
        seconds_waiting: of all members together, while a round was under way and they did not compute.

    >>> record = await training.round()
    >>> figures = training.statistics()
    >>> figures.rounds, figures.members, figures.rows, figures.lost
    (1, 2, 8, 0)
    """

    rounds: int
    members: int
    late: int
    lost: int
    rows: int
    bytes_sent: int
    bytes_received: int
    seconds_computing: float
    seconds_waiting: float

    @property
    def utilisation(self) -> float:
        """The part of the time of rounds in which members computed, from 0 to 1; 0 before the first."""
        seconds = self.seconds_computing + self.seconds_waiting
        return self.seconds_computing / seconds if seconds else 0.0

    def scalars(self, record: RoundRecord) -> dict[str, float]:
        """The figures that a round logs, by name.

        Args:
            record: of the round.

        Returns:
            Numbers.

        >>> training.statistics().scalars(await training.round())["rounds"]
        0
        """
        names = "rounds members late lost bytes_sent bytes_received seconds_computing seconds_waiting utilisation".split()
        return {"loss": record.loss, **{name: getattr(self, name) for name in names}}


class RoundFigures:
    """The counts of a training."""

    def __init__(self) -> None:
        self.rounds: int = 0
        self.late: int = 0
        self.lost: int = 0
        self.rows: int = 0
        self.computing: float = 0.0
        #: of all members, while a round was under way
        self.elapsed: float = 0.0

    def committed(self, record: RoundRecord) -> None:
        """A round is committed."""
        self.rounds += 1
        self.late += sum(began < record.number - 1 for began in record.began.values())
        self.rows += sum(record.rows.values())

    def frozen(self, names: Sequence[str], peers: Sequence[PeerStatistics]) -> LocalStepsStatistics:
        """The figures at this moment.

        Args:
            names: of the workers with members.
            peers: of this process.
        """
        mine = [each for each in peers if each.name in names]
        return LocalStepsStatistics(
            rounds=self.rounds,
            members=len(names),
            late=self.late,
            lost=self.lost,
            rows=self.rows,
            bytes_sent=sum(each.bytes_out for each in mine),
            bytes_received=sum(each.bytes_in for each in mine),
            seconds_computing=self.computing,
            seconds_waiting=max(self.elapsed - self.computing, 0.0),
        )
