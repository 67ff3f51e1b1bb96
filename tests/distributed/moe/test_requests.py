"""Which rows of a batch travel together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.distributed.moe.runtime.requests import MOST_BYTES, requests_for


def places(experts: Any, *, width: int = 2, max_rows: int = 1024) -> list[tuple[Any, list[tuple[int, int]]]]:
    return [(request.expert, request.places) for request in requests_for(experts, [ag.zeros((len(experts), width))], max_rows)]


def test_there_is_one_request_per_expert_in_the_order_of_the_samples() -> None:
    assert places([["a", "b"], [], ["b", "a"], ["c", "b"]]) == [
        ("a", [(0, 0), (2, 1)]),
        ("b", [(0, 1), (2, 0), (3, 1)]),
        ("c", [(3, 0)]),
    ]
    assert places([]) == places([[], []]) == []


def test_an_expert_that_a_sample_asks_twice_gets_its_row_twice() -> None:
    assert places([["a", "a"]]) == [("a", [(0, 0), (0, 1)])]


@pytest.mark.parametrize(("most", "sizes"), [(1, [1, 1, 1, 1, 1]), (2, [2, 2, 1]), (5, [5]), (100, [5])])
def test_a_request_has_no_more_rows_than_asked_for(most: int, sizes: list[int]) -> None:
    found = places([["a"]] * 5, max_rows=most)
    assert [len(rows) for _, rows in found] == sizes
    assert [place for _, rows in found for place in rows] == [(sample, 0) for sample in range(5)]


def test_requests_of_large_rows_stay_well_below_what_a_message_holds() -> None:
    row = MOST_BYTES // 3  # bytes
    inputs = [ag.asarray(np.broadcast_to(np.float32(0), (7, row // 4))), ag.zeros((7, 1))]
    assert [len(request.samples) for request in requests_for([["a"]] * 7, inputs, 1024)] == [2, 2, 2, 1]
    huge = [ag.asarray(np.broadcast_to(np.float32(0), (2, MOST_BYTES)))]
    assert [len(request.samples) for request in requests_for([["a"]] * 2, huge, 1024)] == [1, 1]


class Model:
    async def __call__(self, x: Any) -> Any:
        return x

    async def forward(self, x: Any) -> Any:
        return x


class Incomparable(Model):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")


def test_methods_of_one_object_are_one_expert() -> None:
    one, other = Model(), Model()
    assert one.forward is not one.forward
    assert [rows for _, rows in places([[one.forward], [other.forward], [one.forward]])] == [[(0, 0), (2, 0)], [(1, 0)]]


def test_experts_that_cannot_be_hashed_are_told_apart_by_identity() -> None:
    one, other = Incomparable(), Incomparable()
    assert [rows for _, rows in places([[one], [other], [one]])] == [[(0, 0), (2, 0)], [(1, 0)]]


def test_rows_can_be_left_out() -> None:
    (request,) = requests_for([["a"], ["b", "a"], ["a"]], [ag.zeros((3, 1))], 8)[:1]
    assert request.only(np.array([True, False, True])).places == [(0, 0), (2, 0)]
