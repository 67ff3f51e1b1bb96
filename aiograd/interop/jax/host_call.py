"""A call of a Python function in a JAX program, by a primitive of its own.

Note [Not jax.pure_callback]
    ``jax.pure_callback`` puts the arguments back into JAX before it calls the function, which then reads them. The copy is made by a thread of the
    pool whose threads make the callbacks: as many programs at once as there are cores, and all of them wait forever (jax-ml/jax issues 24255
    and 25861). Here the function gets numpy arrays over the program's memory, and waits for nothing of JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aiograd.interop.extras import from_extra

if TYPE_CHECKING:
    import jax
    import jax.extend.core as jax_core
    from jax.interpreters import batching, mlir
else:
    jax, jax_core = from_extra("jax", "jax"), from_extra("jax.extend.core", "jax")
    batching, mlir = from_extra("jax.interpreters.batching", "jax"), from_extra("jax.interpreters.mlir", "jax")


def host_call(function: Callable[..., Any], structs: Sequence[Any]) -> Callable[..., Any]:
    """A function of numpy arrays as one of JAX arrays, without derivatives.

    Args:
        function: pure; JAX may drop and repeat calls. Its arguments are valid until it returns; it returns a tuple of numpy arrays.
        structs: ``jax.ShapeDtypeStruct`` of each result.

    Returns:
        The function in JAX; it returns a list.
    """
    results = tuple((tuple(struct.shape), struct.dtype) for struct in structs)
    return jax.jit(functools.partial(_primitive().bind, function=function, results=results))  # type: ignore[no-any-return]


@functools.cache
def _primitive() -> Any:
    """The primitive: parameters `function` and `results`, their shapes and dtypes."""
    primitive = jax_core.Primitive("aiograd_host_call")
    primitive.multiple_results = True

    @primitive.def_abstract_eval
    def _(*_: Any, function: Any, results: Any) -> Any:
        return [jax.core.ShapedArray(shape, dtype) for shape, dtype in results]

    def lower(ctx: Any, *operands: Any, function: Any, results: Any) -> Any:
        values, _, _ = mlir.emit_python_callback(ctx, function, None, list(operands), ctx.avals_in, ctx.avals_out, has_side_effect=False)
        return values

    def batch(arrays: Any, axes: Any, **parameters: Any) -> Any:
        mapped = [jax.numpy.moveaxis(array, axis, 0) for array, axis in zip(arrays, axes, strict=True) if axis is not None]

        def one(rows: Any) -> Any:
            given = iter(rows)
            return primitive.bind(*[array if axis is None else next(given) for array, axis in zip(arrays, axes, strict=True)], **parameters)

        found = jax.lax.map(one, mapped)
        return found, [0] * len(found)

    mlir.register_lowering(primitive, lower)
    batching.primitive_batchers[primitive] = batch
    return primitive
