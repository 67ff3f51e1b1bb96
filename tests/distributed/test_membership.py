"""Membership: a worker does as the driver of its cluster says, and as nobody else says."""

from __future__ import annotations

from typing import Any

import pytest

import aiograd as ag
from aiograd.distributed.messages.library import Dismiss, JoinRequest, Restart, SetPeers
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.errors import ArgumentError, ClusterError, NotExposedError, UnknownPeerError
from tests.distributed.workers import two_principals, until, workers

#: what a leader may ask, and with what
ASKED = [(SetPeers.form.name, [{"x": "memory://nowhere"}]), (Dismiss.form.name, []), (Restart.form.name, [])]


async def test_the_leader_says_where_peers_are_and_what_becomes_of_the_worker() -> None:
    async with workers("driver", "w", "x") as (driver, w, x):
        w.membership.leader = "driver"
        w.remove_peer("x")
        assert await driver.call_apart("w", SetPeers.form.name, {"x": x.url})
        assert "x" in w.endpoint.peers
        assert await driver.call_apart("w", SetPeers.form.name, {"x": None}) and "x" not in w.endpoint.peers
        with pytest.raises(UnknownPeerError):
            await w.call("x", "anything")
        assert not w.membership.dismissed.is_set() and not w.membership.restarting.is_set()
        assert await driver.call_apart("w", Dismiss.form.name) and w.membership.dismissed.is_set()
        assert await driver.call_apart("w", Restart.form.name) and w.membership.restarting.is_set()


@pytest.mark.parametrize("who", ["another worker", "a tenant", "anybody"])
async def test_nobody_else_may(who: str) -> None:
    both, tenant = two_principals()
    name = "driver" if who == "a tenant" else "other"
    async with workers(name, "w", secrets={"w": both, name: tenant if who == "a tenant" else both}) as (asking, w):
        w.membership.leader = None if who == "anybody" else "driver"
        for function, arguments in ASKED:
            with pytest.raises(NotExposedError, match="worker w (belongs to no cluster|is led by driver); (other|driver) does not lead it"):
                await asking.call_apart("w", function, *arguments)
        assert "x" not in w.endpoint.peers and not w.membership.dismissed.is_set() and not w.membership.restarting.is_set()


@pytest.mark.parametrize("peers", [["x"], {"x": "no url"}, {"x": 1}, None])
async def test_what_makes_no_sense_is_refused(peers: Any) -> None:
    async with workers("driver", "w") as (driver, w):
        w.membership.leader = "driver"
        with pytest.raises((ArgumentError, ag.errors.ProtocolError, ag.errors.RemoteError)):
            await driver.call_apart("w", SetPeers.form.name, peers)
        assert "x" not in w.endpoint.peers


async def test_only_the_driver_of_a_cluster_takes_workers_in_and_only_those_of_its_principal() -> None:
    both, tenant = two_principals()
    joined: list[tuple[str, str, str]] = []

    async def on_join(caller: PeerIdentity, url: str, version: str) -> None:
        if len(joined) == 1:
            raise ClusterError("one too many")
        joined.append((caller.name, url, version))

    async with workers("driver", "w", "t", secrets={"driver": both, "t": tenant}) as (driver, w, t):
        with pytest.raises(NotExposedError, match="it is not the coordinator of a JoinCluster"):
            await w.call_apart("driver", JoinRequest.form.name, w.url, "1")
        driver.membership.on_join = on_join
        with pytest.raises(NotExposedError):
            await t.call_apart("driver", JoinRequest.form.name, t.url, "1")
        with pytest.raises(ag.errors.AiogradError, match="malformed"):
            await w.call_apart("driver", JoinRequest.form.name, 1, 2)
        assert await w.call_apart("driver", JoinRequest.form.name, w.url, "1") and joined == [("w", w.url, "1")]
        with pytest.raises(ClusterError, match="one too many"):
            await w.call_apart("driver", JoinRequest.form.name, w.url, "1")


async def test_a_worker_learns_that_its_leader_is_lost_and_the_leader_that_a_worker_is() -> None:
    lost: list[tuple[str, bytes]] = []
    async with workers("driver", "w", "x", idle=False) as (driver, w, x):
        driver.membership.on_peer_lost = lambda name, incarnation: lost.append((name, incarnation))
        w.membership.leader = x.membership.leader = "driver"
        for each in (w, x):
            await driver.call_apart(each.name, SetPeers.form.name, {})
        await x.aclose()
        await until(lambda: lost)
        assert lost == [("x", x.endpoint.incarnation)] and not w.membership.leader_lost.is_set()
        await driver.aclose()
        await until(w.membership.leader_lost.is_set)


async def test_a_call_apart_takes_no_part_in_the_context_it_is_made_in() -> None:
    async with workers("driver", "w") as (driver, w):
        w.membership.leader = "driver"
        async with driver.context():
            assert await driver.call_apart("w", SetPeers.form.name, {})
            assert w.statistics().contexts == 0
