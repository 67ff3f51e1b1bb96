"""RoundRecord: the rounds of a training with local steps, as they are committed. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aiograd.distributed.local_steps.batch_order import BatchOrder
from aiograd.errors import ArgumentError


@dataclass(frozen=True)
class RoundRecord:
    """A round that was committed.

    Attributes:
        number: rounds that were committed, this one included.
        epoch: of the first batch that was read.
        members: names of the contributors, in the order in which their values were added up.
        late: names of the members that compute on, and contribute to a later round.
        lost: names of the workers of members that were lost since the round before.
        losses: by contributor, the mean loss over the rows of its local steps.
        rows: by contributor.
        began: by contributor, the version of the base at which it began.
        batches: by contributor, epoch and number of each batch, in reading order.

    >>> record.number, record.members, record.rows
    (1, ('left', 'right'), {'left': 4, 'right': 4})
    >>> record.batches["right"], record.indices("right")
    (((0, 2), (0, 3)), (4, 5, 6, 7))
    """

    number: int
    epoch: int
    members: tuple[str, ...]
    late: tuple[str, ...]
    lost: tuple[str, ...]
    losses: Mapping[str, float]
    rows: Mapping[str, int]
    began: Mapping[str, int]
    batches: Mapping[str, tuple[tuple[int, int], ...]]
    _order: BatchOrder | None = field(default=None, repr=False, compare=False)
    _sampled: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def loss(self) -> float:
        """The mean loss over the rows of all contributors; NaN without contributors."""
        rows = sum(self.rows.values())
        return sum(self.losses[name] * self.rows[name] for name in self.members) / rows if rows else math.nan

    def indices(self, name: str) -> tuple[int, ...]:
        """The examples that a contributor has read, in order.

        Args:
            name: of the contributor.

        Returns:
            Indices into the data set.

        Raises:
            ArgumentError: it is no contributor.
        """
        if name not in self.batches:
            raise ArgumentError(f"RoundRecord.indices({name!r}): round {self.number} has the contributors {', '.join(self.members) or 'none'}")
        found = self._sampled.get(name)
        if found is None and self._order is not None:
            found = [self._order.indices(*batch) for batch in self.batches[name]]
        return tuple(index for batch in found or () for index in batch)
