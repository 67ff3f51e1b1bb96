"""JAX functions as nodes of aiograd's graphs, and aiograd's functions in JAX programs. Needs the extra ``jax``.

::

    @jax.jit
    def model(params, x):
        return jnp.tanh(x @ params["w"]) + params["b"]

    layer = interop.jax.wrap(model)
    loss = (layer({"w": w, "b": b}, x) ** 2).sum()      # w, b and x are Tensors
    await loss.backward()
"""

from __future__ import annotations

from aiograd.interop.jax.callback import function as function
from aiograd.interop.jax.conversion import from_jax as from_jax
from aiograd.interop.jax.conversion import to_jax as to_jax
from aiograd.interop.jax.wrapping import WrappedFunction as WrappedFunction
from aiograd.interop.jax.wrapping import wrap as wrap
