"""The text of a kernel follows from its recipe alone."""

from __future__ import annotations

import inspect
from typing import Any

from aiograd.cuda.reduce_generate import kernel, recipe_for
from aiograd.cuda.tiles import Tile


def test_one_text_for_all_sizes() -> None:
    fields: dict[str, Any] = {
        "fold": "sum", "steps": (), "dtypes": ("f4",), "varies": "a", "kept": 1, "reduced": 1, "scalars": 0, "taken": "f4", "accumulator": "f4",
        "result": "f4", "finish": "", "stage": "whole", "wide": False,
    }  # fmt: skip
    one, other = (recipe_for(Tile(2, 4, True, 1, n, 1), **fields) for n in (5, 500))
    assert kernel(one) is kernel(other)
    assert "syncthreads" in inspect.getsource(kernel(one))
    alone = recipe_for(Tile(8, 1, True, 1, 5, 1), **fields)
    assert "syncthreads" not in inspect.getsource(kernel(alone))  # a lane by itself waits for nobody
