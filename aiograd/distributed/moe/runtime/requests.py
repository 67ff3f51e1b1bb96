"""Which rows travel together: one request for all samples of a batch that ask the same expert.

Rejected: a request per sample and expert. A batch of 32 that asks two experts per sample sent 64 of them each way, and the time went into requests,
not into experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

#: a sample, and the position of an expert in its list
Place: TypeAlias = tuple[int, int]

#: most bytes of inputs in a request, unless a single row has more: gradients come on top, and a message holds 256 MiB
MOST_BYTES: Final = 32 * 2**20


class Request(NamedTuple):
    """Rows that one expert is asked about at once, by sample.

    Attributes:
        expert: the expert that is asked.
        samples: integers ``(rows,)``: the sample of each row.
        positions: integers ``(rows,)``: where the expert is in that sample's list.
    """

    expert: Any
    samples: np.ndarray[Any, np.dtype[np.int64]]
    positions: np.ndarray[Any, np.dtype[np.int64]]

    @property
    def places(self) -> list[Place]:
        """Sample and position of each row."""
        return list(zip(self.samples.tolist(), self.positions.tolist(), strict=True))

    def only(self, rows: np.ndarray[Any, np.dtype[np.bool_]]) -> Request:
        """The request for some of the rows."""
        return Request(self.expert, self.samples[rows], self.positions[rows])


def requests_for(experts: Sequence[Sequence[Any]], inputs: Sequence[Any], max_rows: int) -> list[Request]:
    """The requests of a batch, by the first place that each is for.

    Args:
        experts: for each sample the experts it asks. Experts that compare equal are one, or that are the same object where they cannot be hashed.
        inputs: Tensors with a row per sample.
        max_rows: most rows of a request, further limited by `MOST_BYTES`.
    """
    row_bytes = sum(tensor.dtype.itemsize * tensor.size // max(tensor.shape[0], 1) for tensor in inputs)
    most = max(1, min(max_rows, MOST_BYTES // max(row_bytes, 1)))
    groups: dict[Any, tuple[Any, list[Place]]] = {}
    for sample, asked in enumerate(experts):
        for position, expert in enumerate(asked):
            groups.setdefault(_identity(expert), (expert, []))[1].append((sample, position))
    requests = []
    for expert, places in groups.values():
        samples, positions = np.array(places, np.int64).T
        requests += [Request(expert, samples[start : start + most], positions[start : start + most]) for start in range(0, len(places), most)]
    return sorted(requests, key=lambda request: (request.samples[0], request.positions[0]))


def _identity(expert: Any) -> Any:
    try:
        hash(expert)
    except TypeError:
        return id(expert)
    return expert
