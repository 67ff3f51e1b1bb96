"""Messages put together from fragments, however they arrive."""

from __future__ import annotations

import tracemalloc
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiograd.distributed.reassembly import BYTES_PER_PIECE, CLEARED, PIECES, Assembly
from aiograd.errors import ProtocolError


@given(st.integers(1, 200), st.data())
def test_any_cut_order_and_repetition(total, data):
    message = Random(total).randbytes(total)
    places = st.integers(0, total)
    fragments = data.draw(st.lists(st.tuples(places, places).map(sorted), max_size=12))
    # whatever came before, these complete it
    cuts = sorted(data.draw(st.lists(places, max_size=6)))
    fragments += data.draw(st.permutations([*zip([0, *cuts], [*cuts, total], strict=True)]))
    assembly, there = Assembly(total), set()
    for start, end in fragments:
        there.update(range(start, end))
        complete = assembly.add(start, memoryview(message[start:end]))
        assert complete is (len(there) == total)
    assert bytes(assembly.message) == message


@pytest.mark.parametrize("total", [CLEARED - 1, CLEARED])
def test_the_message_is_the_receivers_own_and_writable(total):
    assembly = Assembly(total)
    assert assembly.add(0, memoryview(bytes(total)))
    message = assembly.message
    assert np.frombuffer(message, np.uint8).flags.writeable
    assert len(message) == total


def test_an_empty_message_is_complete():
    assert Assembly(0).add(0, memoryview(b""))


def test_pieces_are_bounded():
    total = 20_000
    assembly = Assembly(total)
    with pytest.raises(ProtocolError, match="separate pieces") as caught:
        for offset in range(0, total, 2):
            assembly.add(offset, memoryview(b"x"))
    assert caught.value.code == "pieces"
    assert offset == 2 * (PIECES + total // BYTES_PER_PIECE)


def test_notes_about_pieces_take_a_tenth_of_the_message_at_most():
    total = 64 << 20
    assembly = Assembly(total)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            for offset in range(0, total, 2):
                assembly.add(offset, memoryview(b"x"))
        assert tracemalloc.get_traced_memory()[1] < total / 10
    finally:
        tracemalloc.stop()


def test_fragments_in_reverse_and_with_gaps():
    message = bytes(range(100))
    assembly = Assembly(100)
    for start in (90, 50, 10, 70, 30, 0, 80, 40, 60):
        assert not assembly.add(start, memoryview(message[start : start + 10]))
    assert assembly.add(20, memoryview(message[20:30]))
    assert bytes(assembly.message) == message
