"""Errors of numpy about an operation's arguments, turned into aiograd's errors.

The rows are plain numpy, so numpy finds shapes that do not broadcast or an axis that does not exist. Its message is right but names
neither the operation nor its arguments, and its error types are not subclasses of `AiogradError`. Rejected: checking beforehand, which costs time in
every call and helps only the wrong ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from aiograd.errors import AiogradError, ArgumentError, ArgumentTypeError, IndexRangeError, ShapeError, refused

#: exceptions that numpy raises for unsuitable arguments
REFUSALS = (ValueError, TypeError, IndexError, AttributeError, OverflowError)

#: words of numpy's messages about shapes
_SHAPE_WORDS = ("shape", "broadcast", "dimension", "size", "mismatch", "axes", "operand")


#: the advice for an argument that is None instead of a Tensor
NONE_ADVICE = "is None; expected a Tensor, array or number. Was `return` forgotten in what computes it?"


def raise_op_error(name: str, arrays: Iterable[Any], statics: Mapping[str, Any], error: Exception, names: Sequence[str] = ()) -> NoReturn:
    """Raise the error for an operation that numpy refused with `error`; aiograd's own errors pass as they are.

    Args:
        name: name of the row or function.
        arrays: its array arguments; other values among them are ignored.
        statics: its other arguments by name.
        names: names of the array arguments, where they are known.
    """
    if isinstance(error, AiogradError):
        raise error
    if isinstance(error, np.linalg.LinAlgError):
        raise refused(name, arrays, error) from error
    if isinstance(error, AttributeError):
        missing = next((known for known, array in zip(names, arrays, strict=False) if array is None), None)
        if missing is None or error.obj is not None:
            raise error
        raise ArgumentTypeError(f"{name}: its argument {missing!r} {NONE_ADVICE}") from error
    text = str(error).rstrip(". ")
    described = ", ".join([f"{a.dtype} {list(a.shape)}" for a in arrays if hasattr(a, "dtype") and hasattr(a, "shape")])
    options = "".join(f", {key}={value!r}" for key, value in statics.items() if isinstance(value, (int, float, str, tuple)) and len(repr(value)) < 80)
    what = f"{name}({described}{options}): {text}."
    if isinstance(error, IndexError):
        raise IndexRangeError(f"{what} Use an index or axis that the shape has.") from error
    if isinstance(error, TypeError):
        raise ArgumentTypeError(f"{what} Cast the arguments with .astype(), or see the function's documentation for what it takes.") from error
    if any(word in text for word in _SHAPE_WORDS):
        raise ShapeError(f"{what} Reshape the arguments so that their shapes fit.") from error
    raise ArgumentError(f"{what} See the function's documentation for what it takes.") from error
