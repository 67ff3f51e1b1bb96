"""Messages put together from fragments."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiograd.distributed.rpc.reassembly import CLEARED, Assembly
from aiograd.errors import ProtocolError


@pytest.mark.parametrize("offset", [0, 3, 5, 9])
def test_fragments_come_one_after_the_other(offset):
    assembly = Assembly(10)
    assert not assembly.add(0, memoryview(b"what"))
    with pytest.raises(ProtocolError) as caught:
        assembly.add(offset, memoryview(b"?"))
    assert caught.value.code == "order"
    assert assembly.filled == 4 and assembly.add(4, memoryview(b" else?"))
    assert bytes(assembly.message) == b"what else?"


@pytest.mark.parametrize("total", [CLEARED - 1, CLEARED])
def test_the_message_is_the_receivers_own_and_writable(total):
    assembly = Assembly(total)
    assert assembly.add(0, memoryview(bytes(total)))
    message = assembly.message
    assert np.frombuffer(message, np.uint8).flags.writeable
    assert len(message) == total


@pytest.mark.parametrize("in_place", [False, True], ids=["none in place", "some in place"])
@given(st.integers(1, 200), st.data())
def test_any_cut(in_place, total, data):
    message = Random(total).randbytes(total)
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=12)))
    assembly = Assembly(total)
    for start, end in zip([0, *cuts], [*cuts, total], strict=True):
        body = memoryview(message[start:end])
        if in_place and data.draw(st.booleans()) and (place := assembly.place(start, end - start)) is not None:
            place[:] = body
            body = place
        assert assembly.add(start, body) is (end == total)
    assert bytes(assembly.message) == message


def test_only_the_next_fragment_has_a_place_and_what_was_written_there_counts_when_it_is_added():
    assembly = Assembly(10)
    assert not assembly.add(0, memoryview(b"what"))
    for offset, length in ((0, 4), (3, 4), (5, 4), (4, 0), (4, 7), (4, 2**40), (2**40, 1)):
        assert assembly.place(offset, length) is None
    forged = assembly.place(4, 6)
    forged[:] = b"forged"
    assert assembly.filled == 4 and assembly.message[:4] == b"what"
    place = assembly.place(4, 3)
    place[:] = b" el"
    with pytest.raises(ProtocolError):
        assembly.add(5, place)
    assert not assembly.add(4, memoryview(b" El")), "other memory than the place: it is copied"
    assert assembly.add(7, memoryview(b"se?"))
    assert bytes(assembly.message) == b"what Else?"


def test_an_empty_message_is_complete():
    assert Assembly(0).add(0, memoryview(b""))
