"""The parameters and buffers of modules that are to be alike on several workers, as they are compared. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def tensors_of(module: Any) -> dict[str, Any]:
    """Parameters and buffers of a module by name, also outside of its state dict."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def outline_of(module: Any) -> list[list[Any]]:
    """The module's parameters and buffers as replicas compare them: name, kind, shape, dtype."""
    parameters = {name: "parameter" if each.requires_grad else "parameter without gradient" for name, each in module.named_parameters()}
    return [
        [name, parameters.get(name, "buffer"), list(each.shape), np.dtype(each.dtype).str] for name, each in tensors_of(module).items()
    ]


def difference(expected: Sequence[Any], found: Sequence[Any]) -> str | None:
    """The first difference between the outlines of two replicas, in words; None if there is none."""
    for index, (mine, theirs) in enumerate(zip(expected, found, strict=False)):
        if mine != theirs:
            return f"number {index} is {_described(theirs)}, expected {_described(mine)}"
    if len(expected) != len(found):
        longer = max(expected, found, key=len)
        which = "has no" if longer is expected else "has a further"
        return f"it {which} {_described(longer[min(len(expected), len(found))])}"
    return None


def _described(entry: Any) -> str:
    name, kind, shape, dtype = entry
    return f"{kind} {name} of {np.dtype(dtype)}{list(shape)}"
