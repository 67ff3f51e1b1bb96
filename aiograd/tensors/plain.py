"""Plain arrays for numpy scalars and for instances of ndarray's subclasses."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.errors import ArgumentTypeError


def plain_array(data: Any) -> Any:
    """A plain ndarray for an instance of an ndarray subclass or a numpy scalar; anything else as it is. Memory is shared.

    The rules of the rows rely on ndarray's own arithmetic, and a Tensor holds only numbers. So ``*`` of a Tensor and an ``np.matrix``
    is elementwise.

    Raises:
        ArgumentTypeError: the subclass has state or arithmetic of its own that would be lost, such as a masked array with masked elements.
    """
    if data.__class__ is np.ndarray:
        return data
    if isinstance(data, np.generic):
        return np.asarray(data)
    if not isinstance(data, np.ndarray):
        return data
    if isinstance(data, np.ma.MaskedArray):
        if np.ma.is_masked(data):
            raise ArgumentTypeError(
                f"making a tensor of a masked array of shape {list(data.shape)}: expected no masked elements, for a tensor can't keep a mask. "
                "Choose numbers for them with .filled(), or leave them out with .compressed()."
            )
    elif type(data).__array_ufunc__ is not np.ndarray.__array_ufunc__:
        raise ArgumentTypeError(
            f"making a tensor of a {type(data).__name__}: expected an ndarray, found a subclass with arithmetic of its own, which a tensor can't "
            "keep. Pass .view(numpy.ndarray) of it where its plain numbers are meant."
        )
    return data.view(np.ndarray)
