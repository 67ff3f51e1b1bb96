"""The geometry of a sliding window over the last two axes of an NCHW array.

Convolution, pooling and im2col share it, so that one place says how many windows fit and where each begins.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, TypeAlias

from aiograd.errors import ArgumentError, ShapeError

Pair: TypeAlias = int | tuple[int, int]


def pair(value: Pair | list[int], name: str) -> tuple[int, int]:
    """``3`` means ``(3, 3)``.

    Raises:
        ArgumentError: `value` is neither an int nor two ints.
    """
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise ArgumentError(f"{name}={value!r}: expected an int or two ints (height, width)")
        return int(value[0]), int(value[1])
    return int(value), int(value)


class Window(NamedTuple):
    """Kernel size, stride, zero padding on both sides, and dilation; each (height, width)."""

    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def outputs(self, height: int, width: int) -> tuple[int, int]:
        """How many windows fit an input of `height` x `width`.

        Raises:
            ShapeError: none fits.
        """
        fits = tuple(
            (length + 2 * p - d * (k - 1) - 1) // s + 1
            for length, k, s, p, d in zip((height, width), self.size, self.stride, self.padding, self.dilation, strict=True)
        )
        if fits[0] <= 0 or fits[1] <= 0:
            raise ShapeError(
                f"a window of {self.size} with padding {self.padding} and dilation {self.dilation} does not fit an input of {(height, width)}: "
                "use a smaller window or more padding"
            )
        return fits[0], fits[1]

    @property
    def taps(self) -> int:
        """Positions in the window."""
        return self.size[0] * self.size[1]


@lru_cache(maxsize=256)
def _window(size: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int]) -> Window:
    if min(size) < 1 or min(stride) < 1 or min(dilation) < 1 or min(padding) < 0:
        raise ArgumentError(
            f"window of {size} with stride {stride}, padding {padding}, dilation {dilation}: "
            "sizes, strides and dilations are at least 1, padding at least 0"
        )
    return Window(size, stride, padding, dilation)


def window(size: Pair, stride: Pair = 1, padding: Pair = 0, dilation: Pair = 1) -> Window:
    """A checked `Window`; each argument is an int or (height, width).

    Raises:
        ArgumentError: a value is out of range.
    """
    return _window(pair(size, "kernel_size"), pair(stride, "stride"), pair(padding, "padding"), pair(dilation, "dilation"))
