"""einops on Tensors: its functions, and a backend by which einops knows Tensors wherever it is used in the process from then on.

::

    from aiograd.interop.einops import rearrange

    rows = rearrange(images, "n (h p) (w q) -> (n h w) (p q)", p=8, q=8)

einops looks for backends among the subclasses of its ``AbstractBackend``; importing this module makes one. Needs the extra ``einops``.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from aiograd.errors import MissingExtraError, UnknownNameError
from aiograd.interop.extras import from_extra
from aiograd.tensors.creation import asarray
from aiograd.tensors.tensor import Tensor

if TYPE_CHECKING:
    import einops
    from einops import _backends
else:
    einops, _backends = from_extra("einops", "einops"), from_extra("einops._backends", "einops")

#: einops' own functions, which this module gives on
FUNCTIONS = ("einsum", "pack", "parse_shape", "rearrange", "reduce", "repeat", "unpack")


@functools.cache
def register() -> None:
    """Make the backend, a subclass by which einops finds it; done when this module is imported where einops is installed.

    Raises:
        MissingExtraError: einops is not installed.
    """

    class EinopsBackend(_backends.NumpyBackend):
        """einops' numpy backend; Tensors take its functions over by numpy's protocols."""

        framework_name = "aiograd"

        def is_appropriate_type(self, tensor: Any) -> bool:
            return isinstance(tensor, Tensor)

        def from_numpy(self, x: Any) -> Tensor:
            return asarray(x)

        def to_numpy(self, x: Tensor) -> np.ndarray[Any, Any]:
            return x.detach().numpy()

        def is_float_type(self, x: Tensor) -> bool:
            return x.dtype.kind in "fc"

    register.backend = EinopsBackend  # type: ignore[attr-defined]  # subclasses are found as long as something refers to them


def __getattr__(name: str) -> Any:
    if name not in FUNCTIONS:
        raise UnknownNameError(f"module {__name__!r}", name, lambda: FUNCTIONS)
    register()
    return getattr(einops, name)


with contextlib.suppress(MissingExtraError):
    register()
