"""The pieces that tests of torch modules share; it can be imported where torch is not installed."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

import aiograd as ag


def same(ours: Any, theirs: Any, what: object = "") -> None:
    """The same bits, shapes and dtypes."""
    if theirs is None:
        assert ours is None, what
        return
    found, wanted = ours.detach().numpy(), theirs.detach().numpy()
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), what
    np.testing.assert_array_equal(found, wanted, err_msg=str(what))


def draw(*shape: int, dtype: Any = np.float32, at: int = 0) -> Any:
    return np.random.default_rng(at).normal(size=shape).astype(dtype)


def pair_of(make: Any) -> tuple[Any, Any]:
    """A torch module, and a wrapped copy of it."""
    import torch

    torch.manual_seed(0)
    module = make()
    return module, ag.interop.torch.wrap(copy.deepcopy(module))
