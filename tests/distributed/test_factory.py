"""make_cluster: a word, and the cluster that it names."""

from __future__ import annotations

import pytest

from aiograd import distributed as dist
from aiograd.errors import ArgumentError
from tests.distributed.workers import SECRET


def test_a_word_names_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    local = dist.make_cluster("local", 2, service="module:name", names=["a", "b"], max_restarts=1)
    assert isinstance(local, dist.LocalCluster) and local.workers == ("a", "b") and capsys.readouterr().out == ""
    assert isinstance(dist.make_cluster("join", 2, service="module:name", secret=SECRET), dist.JoinCluster)
    said = capsys.readouterr().out
    for name in ("worker0", "worker1"):
        assert f"aiograd worker --join http://127.0.0.1:7000 --name {name} --service module:name\n" in said


@pytest.mark.parametrize("on", ["", "slurm", None])
def test_another_word_is_refused(on: str) -> None:
    with pytest.raises(ArgumentError, match="expected one of local, ray, join"):
        dist.make_cluster(on, 2, service="module:name")


@pytest.mark.parametrize("on", ["local", "join"])
def test_what_makes_no_sense_is_refused_everywhere(on: str) -> None:
    with pytest.raises(ArgumentError):
        dist.make_cluster(on, 2, service="module:name", names=["a", "a"])
    with pytest.raises(ArgumentError):
        dist.make_cluster(on, 2, service="module")
