"""``ag.fft``: the Fourier transforms of the standard, each with gradients. ``norm`` is "backward", "ortho" or "forward", as in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiograd.array_functions.conversion import ArrayLike, as_tensor
from aiograd.array_functions.creation import _finished
from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.ops import fft as rows
from aiograd.running.lazy import on_first_use
from aiograd.running.modes import get_default_dtype
from aiograd.tensors.tensor import Tensor

if not TYPE_CHECKING:  # an unknown name is told with the nearest one
    __getattr__, __dir__ = on_first_use(__name__)

__all__ = [
    "fft", "fft2", "fftfreq", "fftn", "fftshift", "hfft", "ifft", "ifft2", "ifftn", "ifftshift", "ihfft", "irfft", "irfft2", "irfftn", "rfft",
    "rfft2", "rfftfreq", "rfftn",
]  # fmt: skip

Sizes = Sequence[int] | None


def _signal(name: str, x: Any, *, real: bool = False) -> Tensor:
    source = as_tensor(x)
    if source.dtype.kind not in ("f" if real else "fc"):
        raise ArgumentTypeError(f"fft.{name}() of dtype {source.dtype}: expected a {'real floating' if real else 'floating'} dtype")
    return source


def fft(x: ArrayLike, /, n: int | None = None, axis: int = -1, norm: str = "backward") -> Tensor:
    """The discrete Fourier transform along an axis, cut or filled with zeros to `n` elements."""
    return rows.np_fft(_signal("fft", x), n, axis, norm)  # type: ignore[no-any-return]


def ifft(x: ArrayLike, /, n: int | None = None, axis: int = -1, norm: str = "backward") -> Tensor:
    """The inverse of `fft`."""
    return rows.np_ifft(_signal("ifft", x), n, axis, norm)  # type: ignore[no-any-return]


def fftn(x: ArrayLike, /, s: Sizes = None, axes: Sizes = None, norm: str = "backward") -> Tensor:
    """`fft` over several axes, all if none are given."""
    return rows.np_fftn(_signal("fftn", x), s, axes, norm)  # type: ignore[no-any-return]


def ifftn(x: ArrayLike, /, s: Sizes = None, axes: Sizes = None, norm: str = "backward") -> Tensor:
    """The inverse of `fftn`."""
    return rows.np_ifftn(_signal("ifftn", x), s, axes, norm)  # type: ignore[no-any-return]


def rfft(x: ArrayLike, /, n: int | None = None, axis: int = -1, norm: str = "backward") -> Tensor:
    """The frequencies 0 to n // 2 of the transform of a real array."""
    return rows.np_rfft(_signal("rfft", x, real=True), n, axis, norm)  # type: ignore[no-any-return]


def irfft(x: ArrayLike, /, n: int | None = None, axis: int = -1, norm: str = "backward") -> Tensor:
    """The inverse of `rfft`: a real array of `n` elements, an even number if None."""
    return rows.np_irfft(_signal("irfft", x), n, axis, norm)  # type: ignore[no-any-return]


def rfftn(x: ArrayLike, /, s: Sizes = None, axes: Sizes = None, norm: str = "backward") -> Tensor:
    """`rfft` over the last of several axes, `fft` over the others."""
    return rows.np_rfftn(_signal("rfftn", x, real=True), s, axes, norm)  # type: ignore[no-any-return]


def irfftn(x: ArrayLike, /, s: Sizes = None, axes: Sizes = None, norm: str = "backward") -> Tensor:
    """The inverse of `rfftn`."""
    return rows.np_irfftn(_signal("irfftn", x), s, axes, norm)  # type: ignore[no-any-return]


def hfft(x: ArrayLike, /, n: int | None = None, axis: int = -1, norm: str = "backward") -> Tensor:
    """The real spectrum of a signal of which one half is given, the other being its mirrored conjugate."""
    return rows.np_hfft(_signal("hfft", x), n, axis, norm)  # type: ignore[no-any-return]


def ihfft(x: ArrayLike, /, n: int | None = None, axis: int = -1, norm: str = "backward") -> Tensor:
    """The inverse of `hfft`."""
    return rows.np_ihfft(_signal("ihfft", x, real=True), n, axis, norm)  # type: ignore[no-any-return]


def fft2(x: ArrayLike, /, s: Sizes = None, axes: Sequence[int] = (-2, -1), norm: str = "backward") -> Tensor:
    """`fftn` over two axes."""
    return fftn(x, s=s, axes=axes, norm=norm)


def ifft2(x: ArrayLike, /, s: Sizes = None, axes: Sequence[int] = (-2, -1), norm: str = "backward") -> Tensor:
    """`ifftn` over two axes."""
    return ifftn(x, s=s, axes=axes, norm=norm)


def rfft2(x: ArrayLike, /, s: Sizes = None, axes: Sequence[int] = (-2, -1), norm: str = "backward") -> Tensor:
    """`rfftn` over two axes."""
    return rfftn(x, s=s, axes=axes, norm=norm)


def irfft2(x: ArrayLike, /, s: Sizes = None, axes: Sequence[int] = (-2, -1), norm: str = "backward") -> Tensor:
    """`irfftn` over two axes."""
    return irfftn(x, s=s, axes=axes, norm=norm)


def _frequencies(name: str, values: Any, n: int, d: float, dtype: Any, device: str | None) -> Tensor:
    wanted = get_default_dtype() if dtype is None else np.dtype(dtype)
    if wanted.kind != "f":
        raise ArgumentTypeError(f"fft.{name}(dtype={wanted}): expected a real floating dtype")
    return _finished((values / (n * d)).astype(wanted), device, False)


def fftfreq(n: int, /, d: float = 1.0, *, dtype: Any = None, device: str | None = None) -> Tensor:
    """The frequencies of `fft` of `n` samples, `d` apart."""
    _check_length("fftfreq", n)
    return _frequencies("fftfreq", np.concatenate([np.arange((n - 1) // 2 + 1), np.arange(-(n // 2), 0)]), n, d, dtype, device)


def rfftfreq(n: int, /, d: float = 1.0, *, dtype: Any = None, device: str | None = None) -> Tensor:
    """The frequencies of `rfft` of `n` samples, `d` apart."""
    _check_length("rfftfreq", n)
    return _frequencies("rfftfreq", np.arange(n // 2 + 1), n, d, dtype, device)


def _check_length(name: str, n: int) -> None:
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
        raise ArgumentError(f"fft.{name}({n!r}): expected an int of at least 1")


def fftshift(x: ArrayLike, /, axes: int | Sequence[int] | None = None) -> Tensor:
    """Move frequency 0 from the first place to the middle."""
    return rows.np_fftshift(_signal("fftshift", x), axes)  # type: ignore[no-any-return]


def ifftshift(x: ArrayLike, /, axes: int | Sequence[int] | None = None) -> Tensor:
    """The inverse of `fftshift`."""
    return rows.np_ifftshift(_signal("ifftshift", x), axes)  # type: ignore[no-any-return]
