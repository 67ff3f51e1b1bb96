"""Where stages live."""

from __future__ import annotations

import pytest

from aiograd.errors import ArgumentError
from aiograd.pipeline import stage_layout


@pytest.mark.parametrize(
    ("ranks", "stages", "layout", "expected"),
    [
        (2, 4, "loop", "0101"),
        (4, 12, "loop", "012301230123"),
        (2, 4, "v", "0110"),
        (4, 12, "v", "012332100123"),
        (4, 16, "v", "0123321001233210"),
        (1, 3, "v", "000"),
        (3, 3, "v", "012"),
    ],
)
def test_layouts(ranks, stages, layout, expected):
    assert stage_layout(ranks, stages, layout) == tuple(map(int, expected))


@pytest.mark.parametrize(("ranks", "stages", "layout"), [(2, 3, "loop"), (0, 2, "loop"), (2, 0, "v"), (-1, 2, "v"), (2, 4, "w")])
def test_what_does_not_fit_is_refused(ranks, stages, layout):
    with pytest.raises(ArgumentError, match=r"cannot lay|no layout"):
        stage_layout(ranks, stages, layout)
