"""States that hypothesis draws."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from aiograd.running.digest import state_digest
from aiograd.serving.versions import Version, snapshot

DTYPES = ("float32", "float64", "float16", "int64", "uint8", "bool", "complex64", "complex128")
State = dict[str, np.ndarray[Any, Any]]


def states(paths: tuple[str, ...] = ("a", "b", "c")) -> st.SearchStrategy[State]:
    """States of up to three arrays, of any bits: NaN, -0.0 and 0-d and empty arrays among them."""
    array = st.sampled_from(DTYPES).flatmap(lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0, max_side=7)))
    return st.dictionaries(st.sampled_from(paths), array)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[State, State]:
    """Two states of one model; arrays differ in no, some or all words."""
    old = draw(states())
    new = {}
    for path, array in old.items():
        fresh = draw(arrays.arrays(array.dtype, array.shape))
        differs = draw(st.one_of(st.just(False), st.just(True), arrays.arrays("bool", array.shape)))
        new[path] = np.where(differs, fresh, array)
    return old, new


def version_of(number: int, state: State, base: Version | None = None, **others: Any) -> Version:
    """A version of a snapshot of `state`, with its digest."""
    copies = snapshot(state, base)
    return Version.of(number, copies, digest=state_digest(copies), **others)


def bits_of(state: Any) -> list[tuple[Any, ...]]:
    """Everything that a digest covers."""
    return [(path, array.dtype, array.shape, array.tobytes()) for path, array in state.items()]
