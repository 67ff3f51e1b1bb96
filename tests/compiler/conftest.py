"""Programs of every size compute in arenas, so that all suites of the compiler try them."""

from __future__ import annotations

import pytest

from aiograd.compiler.passes import arenas


@pytest.fixture(autouse=True)
def _arenas_for_all(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.module.__name__.endswith("test_arenas"):
        monkeypatch.setattr(arenas, "FEWEST", 1)
