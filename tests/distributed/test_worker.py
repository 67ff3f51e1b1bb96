"""The worker's own arguments: URLs of peers, secrets, names it answers to; and what it says of itself."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.errors import ArgumentError, ArgumentTypeError, AuthenticationError, HostRefusedError
from aiograd.testing import SimulatedNetwork
from tests.distributed.memory import Switchboard
from tests.distributed.workers import PATIENT, SECRET, workers

service = dist.Service()


@service.function
def double(x: ag.Tensor) -> ag.Tensor:
    return x * 2


@pytest.mark.parametrize(
    "url",
    ["left:7000", "10.0.0.2:7000", "localhost", "", "http://", "http://:7000", "http://h:99999", "ftp://h:1", "http://h:1/x", "sim://left", " http://h"],
)
def test_a_url_that_is_none_is_refused_when_it_is_given(url: str) -> None:
    with pytest.raises(ArgumentError, match=r"peer 'left': .*expected http://host:port"):
        dist.Worker("me", peers={"left": url})
    with pytest.raises(ArgumentError, match=r"peer 'left': .*expected http://host:port"):
        dist.Worker("me").add_peer("left", url)


@pytest.mark.parametrize("watchdog", ["x", 1, None])
def test_the_watchdog_is_on_or_off(watchdog: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"Worker\(watchdog=.*\): expected True or False"):
        dist.Worker("me", watchdog=watchdog)


def test_urls_of_other_transports() -> None:
    network = SimulatedNetwork(seed=0)
    worker = dist.Worker("me", peers={"left": "sim://left"}, transport=network.transport("me"))
    worker.add_peer("right", "sim://right")
    for url in ("right", "sim:right", "://right", "http://[", ""):
        with pytest.raises(ArgumentError, match="expected a URL with a scheme and a host"):
            worker.add_peer("right", url)
    with pytest.raises(ArgumentTypeError, match="found bytes"):
        worker.add_peer("right", b"sim://right")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="secrets belong in the keyring") as caught:
        dist.Worker("me", peers={"left": "http://me:hunter2@left:7000"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("secret", [SECRET.hex(), base64.b64encode(SECRET).decode(), SECRET], ids=["hex", "base64", "bytes"])
async def test_a_secret_may_be_text(secret: Any) -> None:
    async with workers("a", "b", service=service, secrets={"a": secret}) as (a, _):
        assert (await a.call("b", "double", ag.tensor([1.0]))).tolist() == [2.0]


def test_text_that_is_no_secret_is_not_shown() -> None:
    with pytest.raises(ArgumentError, match=r"Worker\(secret=\.\.\.\): expected 32 bytes as 64 hexadecimal digits") as caught:
        dist.Worker("me", secret="hunter2")
    assert "hunter2" not in str(caught.value)


def test_the_secret_of_a_file_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    path.touch(mode=0o600)
    path.write_text(SECRET.hex())
    assert dist.read_secret_file(path) == SECRET


async def test_another_secret_is_an_error_that_names_where_secrets_come_from() -> None:
    async with workers("a", "b", service=service, secrets={"a": b"x" * 32}) as (a, _):
        with pytest.raises(AuthenticationError, match="AIOGRAD_SECRET_FILE"):
            await a.call("b", "double", ag.tensor([1.0]), timeout=5.0)


def test_statistics_show_each_peer_once() -> None:
    async def main() -> str:
        async with workers("a", "b", service=service, board=Switchboard()) as (a, _):
            await a.call("b", "double", ag.tensor([1.0]))
            assert a.statistics().peers == a.statistics().network.peers
            return repr(a.statistics())

    assert ag.run(main()).count("PeerStatistics(name='b'") == 1


@pytest.mark.net
async def test_a_worker_is_dialled_by_names_that_it_trusts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async def here(peer: Any) -> list[str]:
        return ["127.0.0.1"]

    monkeypatch.setattr("aiograd.distributed.rpc.http.transport.resolve", here)
    plain = dist.Worker("p", service=service, secret=SECRET)
    trusting = dist.Worker("t", service=service, secret=SECRET, trusted_hosts=["gpu1.example"])
    async with plain, trusting, dist.Worker("me", secret=SECRET, limits=PATIENT) as me:
        for worker in (plain, trusting):
            me.add_peer(worker.name, f"http://gpu1.example:{worker.url.rpartition(':')[2]}")
        assert (await me.call("t", "double", ag.tensor([1.0]))).tolist() == [2.0]
        with pytest.raises(HostRefusedError, match=r"--trusted-host gpu1\.example` or Worker\(trusted_hosts=\['gpu1\.example'\]\)"):
            await me.call("p", "double", ag.tensor([1.0]))
