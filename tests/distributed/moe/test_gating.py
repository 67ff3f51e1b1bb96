"""Names of experts, scores over a grid, beam search, and how answers are combined."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.distributed.moe import ExpertUid, Grid, combine_experts, expert_scores, parse_uid
from aiograd.distributed.moe.gating import split_scores
from aiograd.distributed.moe.uid import check_prefix
from aiograd.errors import ArgumentError, ShapeError


@pytest.mark.parametrize("text", ["ffn.0", "ffn.3.14", "a_b-c.10.0.7"])
def test_uids_are_read_and_written(text: str) -> None:
    assert str(parse_uid(text)) == text


@pytest.mark.parametrize("text", ["ffn", "ffn.", "ffn.01", "ffn.-1", ".1", "3.1", "ffn.1.x", "ffn 1", "", None])
def test_other_texts_are_no_uids(text: Any) -> None:
    with pytest.raises(ArgumentError):
        parse_uid(text)


@pytest.mark.parametrize(("text", "good"), [("ffn.", True), ("ffn.3.", True), ("ffn", False), ("ffn.03.", False), (".", False)])
def test_prefixes_end_with_a_dot(text: str, good: bool) -> None:
    if good:
        assert check_prefix(text) == text
    else:
        with pytest.raises(ArgumentError):
            check_prefix(text)


def uids(*sizes: int) -> list[ExpertUid]:
    return [ExpertUid("e", place) for place in itertools.product(*map(range, sizes))]


@pytest.mark.parametrize("seed", range(25))
def test_beam_search_finds_what_exhaustive_search_finds(seed: int) -> None:
    random = np.random.default_rng(seed)
    grid = Grid((32, 32, 32), uids(10, 10, 10))
    scores = [random.normal(size=(2, 32)) for _ in range(3)]
    for i, found in enumerate(grid.beam_search(scores, 4)):
        best = sorted(itertools.product(range(10), repeat=3), key=lambda place: -sum(scores[d][i][c] for d, c in enumerate(place)))[:4]
        assert found == best


def test_experts_that_do_not_exist_are_not_found_and_few_are_few() -> None:
    grid = Grid((4, 4), [ExpertUid("e", (0, 1)), ExpertUid("e", (2, 3))])
    scores = [np.array([[0.0, 9.0, 1.0, 9.0]]), np.array([[9.0, 0.0, 9.0, 0.0]])]
    assert grid.beam_search(scores, 5) == [[(2, 3), (0, 1)]]


@pytest.mark.parametrize("place", [(0,), (4, 0), (0, 0, 0)])
def test_an_expert_outside_of_the_grid_is_refused(place: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match="does not fit"):
        Grid((4, 4), [ExpertUid("e", place)])


async def test_scores_are_sums_over_coordinates_padded_and_differentiable() -> None:
    random = np.random.default_rng(0)
    scores = ag.tensor(random.normal(size=(3, 7)), requires_grad=True)
    parts = split_scores(scores, (3, 4))
    places = [[(0, 1), (2, 3)], [(1, 1)], []]
    found = expert_scores(parts, places)
    values = scores.detach().numpy()
    want = np.full((3, 2), -np.inf)
    for i, chosen in enumerate(places):
        for j, (a, b) in enumerate(chosen):
            want[i, j] = values[i, a] + values[i, 3 + b]
    np.testing.assert_array_equal(found.detach().numpy(), want)
    await found[0].sum().backward()
    np.testing.assert_array_equal(scores.grad.numpy()[0], [1, 0, 1, 0, 1, 0, 1])
    assert not scores.grad.numpy()[1:].any()


def test_a_gate_with_another_number_of_scores_is_refused() -> None:
    with pytest.raises(ShapeError, match="expected \\[batch, 7\\]"):
        split_scores(ag.zeros((2, 6)), (3, 4))


async def test_combining_is_a_softmax_over_those_that_answered() -> None:
    random = np.random.default_rng(0)
    logits = ag.tensor(random.normal(size=(3, 4)), requires_grad=True)
    outputs = ag.tensor(random.normal(size=(3, 4, 5)), requires_grad=True)
    alive = np.array([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 1]], bool)
    got = combine_experts(logits, outputs, alive)
    for i in range(3):
        weights = np.exp(logits.detach().numpy()[i][alive[i]])
        weights /= weights.sum()
        np.testing.assert_allclose(got.detach().numpy()[i], weights @ outputs.detach().numpy()[i][alive[i]], rtol=1e-12)
    assert await ag.gradcheck(lambda a, b: combine_experts(a, b, alive), [logits, outputs])
    await got.sum().backward()
    assert not logits.grad.numpy()[~alive].any() and not outputs.grad.numpy()[~alive].any()


@pytest.mark.parametrize("dead", [np.nan, np.inf, -np.inf])
async def test_what_the_dead_left_behind_has_no_influence(dead: float) -> None:
    logits = ag.tensor([[1.0, dead]], requires_grad=True)
    outputs = ag.tensor([[[2.0], [dead]]], requires_grad=True)
    got = combine_experts(logits, outputs, [[True, False]])
    np.testing.assert_array_equal(got.detach().numpy(), [[2.0]])
    await got.sum().backward()
    assert np.isfinite(logits.grad.numpy()).all() and np.isfinite(outputs.grad.numpy()).all()


async def test_a_sample_that_nobody_answered_is_an_error_or_zero_and_never_nan() -> None:
    logits, outputs = ag.zeros((2, 2)).requires_grad_(), ag.ones((2, 2, 3)).requires_grad_()
    alive = np.array([[True, True], [False, False]])
    with pytest.raises(ArgumentError, match="no expert answered for sample 1"):
        combine_experts(logits, outputs, alive)
    got = combine_experts(logits, outputs, alive, allow_zero_outputs=True)
    np.testing.assert_array_equal(got.detach().numpy(), [[1, 1, 1], [0, 0, 0]])
    await got.sum().backward()
    assert np.isfinite(logits.grad.numpy()).all()


def test_large_scores_do_not_overflow() -> None:
    got = combine_experts(ag.tensor([[1000.0, 0.0]]), ag.tensor([[[1.0], [2.0]]]), [[True, True]])
    np.testing.assert_array_equal(got.numpy(), [[1.0]])


def test_shapes_that_do_not_agree_are_refused() -> None:
    with pytest.raises(ShapeError, match="do not agree"):
        combine_experts(ag.zeros((2, 3)), ag.zeros((2, 2, 1)), np.ones((2, 2), bool))


INF = np.inf


@pytest.mark.parametrize(
    ("row", "alive", "weights"),
    [
        ((-INF, -INF, -INF), (1, 1, 1), (1 / 3, 1 / 3, 1 / 3)),
        ((-INF, -INF, 5.0), (1, 1, 0), (0.5, 0.5, 0)),
        ((INF, 1.0, INF), (1, 1, 1), (0.5, 0, 0.5)),
        ((INF, 1.0, -INF), (1, 1, 1), (1, 0, 0)),
        ((INF, 1.0, 1.0), (0, 1, 1), (0, 0.5, 0.5)),
        ((np.nan, 1.0, 1.0), (0, 1, 1), (0, 0.5, 0.5)),
        ((-INF, 1.0, 1.0), (1, 1, 1), (0, 0.5, 0.5)),
    ],
)
async def test_infinite_logits_are_limits_and_never_nan(row: Any, alive: Any, weights: Any) -> None:
    logits = ag.tensor([row, (0.0, 0.0, 0.0)], dtype=np.float64, requires_grad=True)
    values = np.array([[[1.0], [2.0], [4.0]]] * 2)
    values[0, np.array(weights) == 0] = INF
    outputs = ag.tensor(values, requires_grad=True)
    got = combine_experts(logits, outputs, [alive, (1, 1, 1)])
    want = sum(w * v for w, v in zip(weights, (1, 2, 4), strict=True))
    np.testing.assert_allclose(got.detach().numpy(), [[want], [7 / 3]], rtol=1e-12)
    await got.sum().backward()
    np.testing.assert_allclose(outputs.grad.numpy()[0, :, 0], weights, rtol=1e-12)
    assert np.isfinite(logits.grad.numpy()).all()


def test_a_logit_that_is_nan_is_refused() -> None:
    with pytest.raises(ArgumentError, match="sample 1 for its expert 0 is NaN"):
        combine_experts(ag.tensor([[0.0, 1.0], [np.nan, 1.0]]), ag.zeros((2, 2, 1)), np.ones((2, 2), bool))
