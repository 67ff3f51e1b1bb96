"""Gating over a grid of experts: a score per coordinate, an expert's score is the sum over its coordinates, the best ones by beam search.

With grids of 32³ places there are more experts than a linear layer should have outputs; a score per coordinate needs 3 × 32 of them.

Source: hivemind ``moe/client/moe.py`` and ``beam_search.py``; Lample et al., Large memory layers with product keys, 2019.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from aiograd.array_functions import public as af
from aiograd.distributed.moe.uid import ExpertUid
from aiograd.errors import ArgumentError, ArgumentTypeError, ShapeError
from aiograd.tensors.core import TensorCore, host_array, make

#: score of a place where there is no expert
NOWHERE = -np.inf


class Grid:
    """The experts that there are, by their places.

    Args:
        shape: how many coordinates there are in each dimension.
        experts: the existing experts.

    Raises:
        ArgumentError: an expert has other coordinates. ArgumentTypeError: no tuple of ints.

    >>> grid = dist.moe.Grid((2,), [dist.moe.ExpertUid("ffn", (0,)), dist.moe.ExpertUid("ffn", (1,))])
    >>> grid.beam_search([np.array([[0.5, 2.0]])], k=1)
    [[(1,)]]
    """

    def __init__(self, shape: Sequence[int], experts: Iterable[ExpertUid]) -> None:
        try:
            self.shape: tuple[int, ...] = tuple(map(operator.index, shape))
        except TypeError:
            raise ArgumentTypeError(f"grid of shape {shape!r}: expected a tuple of ints, the extent of each dimension") from None
        if not self.shape or any(size < 1 for size in self.shape):
            raise ArgumentError(f"grid of shape {self.shape}: expected at least one dimension of at least one")
        self.children: dict[tuple[int, ...], list[int]] = {}
        self.size: int = 0
        for uid in experts:
            place = uid.coordinates
            if len(place) != len(self.shape) or any(c >= size for c, size in zip(place, self.shape, strict=False)):
                raise ArgumentError(f"expert {uid} does not fit into a grid of shape {self.shape}")
            self.size += 1
            for depth in range(len(place)):
                siblings = self.children.setdefault(place[:depth], [])
                if place[depth] not in siblings:
                    siblings.append(place[depth])

    def beam_search(self, scores: Sequence[np.ndarray[Any, Any]], k: int, beam: int | None = None) -> list[list[tuple[int, ...]]]:
        """The `k` best experts for each sample, the best first (fewer where there are fewer).

        Args:
            scores: per dimension an array ``(batch, size)``.
            beam: prefixes kept per sample and dimension; `k` is enough where the grid is full.
            k: how many.

        Returns:
            For each sample its experts, as coordinates.
        """
        return [self._search([dimension[i] for dimension in scores], k, max(beam or k, k)) for i in range(len(scores[0]))]

    def _search(self, scores: list[np.ndarray[Any, Any]], k: int, beam: int) -> list[tuple[int, ...]]:
        best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for depth, dimension in enumerate(scores):
            longer = [
                (score + float(dimension[child]), (*prefix, child)) for score, prefix in best for child in self.children.get(prefix, ())
            ]
            longer.sort(key=lambda entry: (-entry[0], entry[1]))
            best = longer[: beam if depth + 1 < len(scores) else k]
        return [place for _, place in best]


def split_scores(scores: Any, shape: Sequence[int]) -> list[Any]:
    """One score per coordinate, ``(batch, sum of shape)``, as one Tensor ``(batch, size)`` per dimension.

    Raises:
        ShapeError: another number of scores.
    """
    if scores.ndim != 2 or scores.shape[1] != sum(shape):
        raise ShapeError(f"gate gave scores of shape {list(scores.shape)}; expected [batch, {sum(shape)}] for a grid of shape {tuple(shape)}")
    parts, start = [], 0
    for size in shape:
        parts.append(scores[:, start : start + size])
        start += size
    return parts


def expert_scores(scores: Sequence[Any], places: Sequence[Sequence[tuple[int, ...]]]) -> Any:
    """Scores of chosen experts, differentiable with respect to the coordinates' scores.

    Args:
        scores: per dimension a Tensor ``(batch, size)``.
        places: per sample the experts; samples may have different numbers of them.

    Returns:
        A Tensor ``(batch, most experts of a sample)``, minus infinity where a sample has fewer.
    """
    batch, most = len(places), max(map(len, places), default=0)
    index = np.zeros((len(scores), batch, most), np.int64)
    there = np.zeros((batch, most), bool)
    for i, chosen in enumerate(places):
        for j, place in enumerate(chosen):
            there[i, j] = True
            index[:, i, j] = place
    rows = np.broadcast_to(np.arange(batch)[:, None], (batch, most))
    total = sum((part[rows, index[d]] for d, part in enumerate(scores[1:], 1)), start=scores[0][rows, index[0]])
    return af.where(make(there), total, make(np.full((batch, most), NOWHERE, total.dtype)))


def combine_experts(logits: Any, outputs: Any, alive: Any, *, allow_zero_outputs: bool = False) -> Any:
    """The sum of experts' outputs, weighted by a softmax over the answers. The weights are never NaN, for any logits.

    Args:
        logits: scores ``(batch, k)``; scores of experts that did not answer have no influence. As limits of the softmax have it, an expert with minus
            infinity has the weight 0, and experts with infinity share everything; where all of a sample have minus infinity they share alike.
        outputs: ``(batch, k, ...)``.
        alive: booleans ``(batch, k)``: True for the experts that answered.
        allow_zero_outputs: a sample without any answer gives zeros, instead of an error.

    Returns:
        A Tensor ``(batch, ...)``, differentiable with respect to `logits` and `outputs`.

    Raises:
        ShapeError: shapes that do not fit. ArgumentError: a sample without any answer, or NaN as the logit of an expert that answered.
    """
    mask = np.asarray(host_array(alive) if isinstance(alive, TensorCore) else alive, bool)
    if tuple(logits.shape) != mask.shape or tuple(outputs.shape[:2]) != mask.shape:
        raise ShapeError(
            f"combine_experts: logits {list(logits.shape)}, outputs {list(outputs.shape)} and alive {list(mask.shape)} do not agree in their first "
            "two dimensions"
        )
    silent = np.flatnonzero(~mask.any(axis=1))
    if silent.size and not allow_zero_outputs:
        raise ArgumentError(f"combine_experts: no expert answered for sample {silent[0]} ({silent.size} in all); allow_zero_outputs=True gives zeros")
    values = host_array(logits) if isinstance(logits, TensorCore) else np.asarray(logits)
    unknown = np.argwhere(mask & np.isnan(values))
    if len(unknown):
        raise ArgumentError(f"combine_experts: the logit of sample {unknown[0, 0]} for its expert {unknown[0, 1]} is NaN; expected numbers")
    most = np.where(mask, values, -np.inf).max(axis=1, keepdims=True, initial=-np.inf)
    is_finite = np.isfinite(most)
    counts = mask & np.where(is_finite, values > -np.inf, values == most)
    most = np.where(is_finite, most, 0).astype(values.dtype)
    zeros = make(np.zeros(mask.shape, values.dtype))
    shifted = af.where(make(counts & is_finite), logits - make(most), zeros)
    weights = af.where(make(counts), af.exp(shifted), zeros)
    total = af.sum(weights, axis=1, keepdims=True)
    weights = weights / (total + make((~mask.any(axis=1, keepdims=True)).astype(values.dtype)))
    extra = (1,) * (outputs.ndim - 2)
    spread = af.reshape(weights, (*mask.shape, *extra))
    kept = af.where(make(counts.reshape(*mask.shape, *extra)), outputs, make(np.zeros((), outputs.dtype)))
    return af.sum(spread * kept, axis=1)
