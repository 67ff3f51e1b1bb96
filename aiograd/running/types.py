"""Aliases shared by every layer.

An "array" is a value that the engine computes with: a ``numpy.ndarray``, a device array that implements numpy's protocols, or a Tensor while a
pass is itself being recorded. The engine relies only on ``shape``, ``dtype`` and arithmetic, which all of them have.
"""

from __future__ import annotations

from typing import Any, TypeAlias

Array: TypeAlias = Any
Shape: TypeAlias = tuple[int, ...]
