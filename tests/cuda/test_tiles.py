"""Tiles: every element belongs to one lane, neighbours go together, and large devices are kept busy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiograd.cuda.driver.protocol import Properties
from aiograd.cuda.tiles import tile

LARGE = Properties("large", (9, 0), 80 * 2**30, 132, 48 * 1024, 256, 132 * 16, is_simulated=False)
SMALL = Properties("small", (9, 0), 2**28, 2, 48 * 1024, 8, 2, is_simulated=True)


@given(st.integers(1, 10**6), st.integers(1, 10**7), st.booleans(), st.booleans(), st.sampled_from([LARGE, SMALL]))
def test_every_element_has_its_place(m: int, n: int, along: bool, cut: bool, properties: Properties) -> None:
    found = tile(properties, m, n, along=along, cut=cut)
    assert found.block == properties.threads
    assert found.lanes & (found.lanes - 1) == 0  # a tree halves them
    assert (found.blocks - 1) * found.columns < m <= found.blocks * found.columns
    assert found.parts * found.chunk >= n and 1 <= found.parts <= 65535  # what a grid may have along its second axis
    assert cut or found.parts == 1
    assert found == tile(properties, m, n, along=along, cut=cut)


@pytest.mark.parametrize(
    ("m", "n", "along", "columns", "lanes"),
    [
        (8192, 1024, True, 1, 256), (8192, 64, True, 16, 16), (10**6, 3, True, 256, 1),
        (1024, 8192, False, 32, 8), (3, 10**6, False, 4, 64), (5000, 2, False, 256, 1),
    ],
)  # fmt: skip
def test_how_blocks_are_laid(m: int, n: int, along: bool, columns: int, lanes: int) -> None:
    found = tile(LARGE, m, n, along=along)
    assert (found.columns, found.lanes) == (columns, lanes)


def test_few_long_rows_are_cut_and_many_are_not() -> None:
    for m, n, along in ((1, 10**7, True), (4, 10**6, True), (64, 10**6, False)):
        found = tile(LARGE, m, n, along=along)
        assert found.parts > 1 and LARGE.multiprocessors <= found.blocks * found.parts <= LARGE.multiprocessors * 8
    assert tile(LARGE, 8192, 10**5, along=True).parts == 1
    assert tile(LARGE, 1, 4096, along=True).parts == 1  # a second launch costs more than it saves
