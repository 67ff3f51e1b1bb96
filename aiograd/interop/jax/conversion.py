"""Arrays of the host for JAX and from it, without an unasked change of dtype.

Note [Shared memory]
    JAX takes an array to be immutable and may go on reading the memory of one that it was given. So an array of a program's own is copied
    before JAX gets it, and of a Tensor the version is checked where its values may be read again. The other way a Tensor of JAX's memory is
    read-only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aiograd.errors import ArgumentTypeError, DeviceError
from aiograd.interop.extras import from_extra
from aiograd.interop.levels import refuse_level
from aiograd.tensors.core import TensorCore, make
from aiograd.tensors.levels import LevelArray

if TYPE_CHECKING:
    import jax
    import jax.numpy as jnp
else:
    jax, jnp = from_extra("jax", "jax"), from_extra("jax.numpy", "jax")

#: dtypes that JAX makes others of unless its 64-bit mode is on
WIDE = {"float64": "float32", "complex128": "complex64", "int64": "int32", "uint64": "uint32"}


def is_numeric(leaf: Any) -> bool:
    """True of what JAX makes an array of."""
    return isinstance(leaf, (bool, int, float, complex, jax.Array, np.ndarray, np.generic))


def check_dtype(dtype: Any, what: str) -> None:
    """Raise for a dtype that JAX would change.

    Raises:
        ArgumentTypeError: it would.
    """
    narrow = WIDE.get(dtype.name)
    if narrow is not None and not jax.config.jax_enable_x64:
        raise ArgumentTypeError(
            f"{what} is {dtype.name}, which JAX would make {narrow} in silence: cast it with .astype({narrow!r}), "
            'or let JAX have it as it is: jax.config.update("jax_enable_x64", True)'
        )


def host_of(tensor: Any, what: str) -> np.ndarray[Any, Any]:
    """The array of a Tensor of the host.

    Raises:
        DeviceError: it is elsewhere. ArgumentTypeError: JAX would change its dtype. LevelArrayError: it is a batch of `vmap`, or has a tangent.
    """
    if isinstance(tensor._data, LevelArray):
        refuse_level(tensor._data, "JAX")
    if tensor.device != "cpu":
        raise DeviceError(f"{what} is on {tensor.device}; aiograd shares memory with JAX on the host only: move it with .to('cpu')")
    check_dtype(tensor.dtype, what)
    return tensor._data  # type: ignore[no-any-return]


def check_on_host(array: Any, what: str) -> None:
    """Raise for a JAX array that is not on one device of the host.

    Raises:
        DeviceError: it is elsewhere, or spread over devices. ArgumentTypeError: it stands for an array in a JAX transformation.
    """
    if isinstance(array, jax.core.Tracer):
        raise ArgumentTypeError(
            f"{what} is being traced by JAX: a wrapped function takes arrays with values. "
            "In a JAX program call the JAX function itself, and aiograd's functions by interop.jax.function()"
        )
    devices = array.devices()
    if len(devices) != 1 or next(iter(devices)).platform != "cpu":
        found = ", ".join(sorted(map(str, devices)))
        raise DeviceError(f"{what} is on {found}; aiograd shares memory with JAX on one device of the host: jax.device_put(x, jax.devices('cpu')[0])")


def has_numpy_dtype(array: Any) -> bool:
    """True if numpy has the dtype of a JAX array, which it does not have for bfloat16 and random keys."""
    return isinstance(array.dtype, np.dtype) and array.dtype.kind in "biufc"


def array_from_jax(array: Any, what: str) -> np.ndarray[Any, Any]:
    """A read-only array of the memory of a JAX array, once that is computed.

    Raises:
        DeviceError: it is not on the host. ArgumentTypeError: numpy has no such dtype.
    """
    check_on_host(array, what)
    if not has_numpy_dtype(array):
        raise ArgumentTypeError(f"{what} is of dtype {array.dtype}, which numpy does not have: cast it, as with .astype('float32'), in JAX")
    return np.asarray(array)


def to_jax(tree: Any) -> Any:
    """JAX arrays with the values of Tensors of the host, without their graph. They are copies: JAX relies on arrays that never change.

    Args:
        tree: a Tensor, or a pytree with Tensors among its leaves; other leaves stay as they are.

    Returns:
        The same with JAX arrays.

    Raises:
        ArgumentTypeError: a dtype that JAX would change in silence. DeviceError: a Tensor is not on the host. MissingExtraError: no JAX.
    """

    def convert(leaf: Any) -> Any:
        return jnp.array(host_of(leaf, "to_jax: a Tensor")) if isinstance(leaf, TensorCore) else leaf

    return jax.tree.map(convert, tree)


def from_jax(tree: Any) -> Any:
    """Tensors that share the memory of JAX arrays of the host, which is read-only; ``.clone()`` is a copy of one's own.

    Args:
        tree: a JAX array, or a pytree with JAX arrays among its leaves; other leaves stay as they are.

    Returns:
        The same with Tensors, which require no gradient.

    Raises:
        ArgumentTypeError: numpy has no such dtype. DeviceError: an array is not on the host. MissingExtraError: no JAX.
    """

    def convert(leaf: Any) -> Any:
        return make(array_from_jax(leaf, "from_jax: an array")) if isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(convert, tree)
