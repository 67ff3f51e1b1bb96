"""Native functions with sizes in their texts, and without them."""

from __future__ import annotations

import pytest

from tests.compiler.native import codes


@pytest.fixture(params=[pytest.param(False, id="static"), pytest.param(True, id="dynamic", marks=pytest.mark.sweep)])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the tests of a module: they run once more with texts without sizes."""
    monkeypatch.setattr(codes, "IS_DYNAMIC", request.param)
