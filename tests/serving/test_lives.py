"""Random lives of a server."""

from __future__ import annotations

from collections import Counter

import pytest

from aiograd import serving
from aiograd.serving.publisher import Publisher
from tests.serving.scenario import run_life
from tests.sweeps import swept


@pytest.mark.parametrize("first", swept(range(0, 400, 20), keep=1))
def test_every_answer_is_one_versions(first: int) -> None:
    counts: Counter[str] = sum((run_life(seed) for seed in range(first, first + 20)), Counter())
    assert counts["answered"] > 300 and counts["late"] and counts["unknown"] and counts["cancelled"], counts
    assert counts["steps"] > 20 and counts["candidates dropped"] and counts["promotions taken back"], counts


def test_an_answer_of_two_versions_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that exchanges arrays in place tears answers, and lives notice."""
    before = Publisher._serve

    def in_place(self: Publisher) -> None:
        old = self._serving
        before(self)
        if old is not None and self._serving is not None:
            for tensor, newer in zip(old.tensors, self._serving.tensors, strict=True):
                tensor._data = newer._data

    monkeypatch.setattr(Publisher, "_serve", in_place)
    with pytest.raises(AssertionError, match=r"torn|of the version"):
        for seed in range(40):
            run_life(seed)
    assert serving.Server
