"""Aliases shared by every layer.

An "array" here is whatever the engine carries: a ``numpy.ndarray``, a device array that speaks numpy's protocols, or a Tensor while a
pass is itself being differentiated. They have in common ``shape``, ``dtype`` and arithmetic, so that is all the engine relies on.
"""

from __future__ import annotations

from typing import Any, TypeAlias

Array: TypeAlias = Any
Shape: TypeAlias = tuple[int, ...]
