"""Axes that arrays pass through in one go are made one, and elements stay where they lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiograd.cuda.layout import contiguous_strides, merged


@pytest.mark.parametrize(
    ("extents", "strides", "wanted"),
    [
        ((2, 3, 4), [(12, 4, 1)], ((24,), [(1,)])), ((2, 3, 4), [(12, 4, 1), (0, 4, 1)], ((2, 12), [(12, 1), (0, 1)])),
        ((2, 1, 4), [(4, 99, 1)], ((8,), [(1,)])), ((2, 3), [(1, 2)], ((2, 3), [(1, 2)])), ((3, 4), [(-4, -1)], ((12,), [(-1,)])),
        ((1, 1), [(5, 7), (0, 0)], ((1,), [(0,), (0,)])), ((), [(), ()], ((1,), [(0,), (0,)])),
    ],
)  # fmt: skip
def test_merging(extents: tuple[int, ...], strides: list[tuple[int, ...]], wanted: Any) -> None:
    assert merged(extents, strides) == wanted


@given(st.lists(st.integers(1, 3), max_size=4), st.data())
def test_merging_keeps_where_elements_lie(extents: list[int], data: st.DataObject) -> None:
    shape = tuple(extents)
    whole = contiguous_strides(shape, 1)
    other = tuple(data.draw(st.sampled_from([0, stride, -stride])) for stride in whole)
    found, strides = merged(shape, [whole, other])
    for before, after in zip((whole, other), strides, strict=True):
        assert _offsets(shape, before) == _offsets(found, after)


def _offsets(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    return [sum(i * stride for i, stride in zip(index, strides, strict=True)) for index in np.ndindex(*shape)]
