"""Bytes held for peers: refused before they are taken, given back once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiograd.distributed.rpc.budget import Budget
from aiograd.errors import ArgumentError


def test_a_peer_takes_up_to_its_limit():
    peer = Budget(100, 1000).child()
    assert peer.reserve(60)
    assert not peer.reserve(41)
    assert peer.held == 60  # refused whole, not in part
    assert peer.reserve(40)
    assert peer.reserve(0)
    assert not peer.reserve(1)


def test_peers_share_the_total():
    budget = Budget(100, 150)
    one, two = budget.child(), budget.child()
    assert one.reserve(100)
    assert not two.reserve(51)
    assert (two.held, budget.held) == (0, 100)
    assert two.reserve(50)
    one.release(100)
    assert two.reserve(50)
    assert budget.held == 100


def test_the_limit_of_a_peer_is_at_most_the_total():
    assert Budget(100, 60).child().limit == 60


def test_more_than_is_held_cannot_be_given_back():
    budget = Budget(100, 100)
    peer, other = budget.child(), budget.child()
    assert peer.reserve(10)
    assert other.reserve(10)
    with pytest.raises(ArgumentError, match="release of 11 bytes from a budget that holds 10"):
        peer.release(11)
    assert (peer.held, budget.held) == (10, 20)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60)), max_size=60))
def test_against_sums(steps):
    budget = Budget(100, 200)
    peers = [budget.child() for _ in range(3)]
    taken: list[list[int]] = [[], [], []]
    for which, count in steps:
        if taken[which] and count % 3 == 0:
            peers[which].release(taken[which].pop())
        else:
            fits = sum(taken[which]) + count <= 100 and sum(map(sum, taken)) + count <= 200
            assert peers[which].reserve(count) is fits
            if fits:
                taken[which].append(count)
        assert [peer.held for peer in peers] == [sum(each) for each in taken]
        assert budget.held == sum(map(sum, taken))
