"""Arrays that stand for more than one value, which no other library takes."""

from __future__ import annotations

from typing import Any

from aiograd.coordination.device_copies import LevelArrayError


def refuse_level(array: Any, library: str) -> None:
    """Raise for a batch of `vmap`, or a value with a tangent, that would go to another library. `jacobian` and others go on one by one then.

    Raises:
        LevelArrayError: always.
    """
    raise LevelArrayError(
        f"calling {library} with a tensor of shape {list(array.shape)} that is a batch of vmap(), or has a tangent of forward mode: {library} takes "
        "plain arrays. Call it with the whole batch, outside of the transform; jacobian(), jacrev() and hessian() take chunk_size=1."
    )
