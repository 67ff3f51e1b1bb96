"""aiograd's functions in JAX programs: a callback to the host, with derivatives that are callbacks themselves.

Note [Derivatives of callbacks]
    JAX may drop, repeat and reorder callbacks, so none leaves anything behind for another. A derivative is the callback of another aiograd function,
    which calls the first one and runs a pass over the graph that it recorded; it is given its derivative in the same way.

Note [The loop of a callback]
    JAX calls back from threads of its own, while the thread that runs the program waits. If that is an event loop's, coroutines on this loop could
    not go on: so they run on a loop in the background, unless another one is named.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiograd.errors import ArgumentTypeError, ShapeError
from aiograd.functional.isolation.passes import call_in_place
from aiograd.interop.background import AnyLoop, LoopChoice, run_on
from aiograd.interop.extras import from_extra
from aiograd.interop.jax.conversion import check_dtype, host_of, is_numeric
from aiograd.interop.jax.host_call import host_call
from aiograd.running.modes import enable_grad, is_grad_enabled, no_grad
from aiograd.tensors.core import TensorCore, make
from aiograd.tensors.passes import grad

if TYPE_CHECKING:
    import jax
    import jax.numpy as jnp
else:
    jax, jnp = from_extra("jax", "jax"), from_extra("jax.numpy", "jax")

#: how many signatures of a function are remembered
MOST_SIGNATURES = 1_000
#: stands for an array among the leaves of arguments
_ARRAY = object()

#: a flat function: Tensors in, Tensors out
Flat = Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]


def function(f: Callable[..., Any], *, result_shape_dtypes: Any = None, loop: AnyLoop | None = None) -> Callable[..., Any]:
    """An aiograd function, ``def`` or ``async def``, as a function of JAX arrays: in ``jax.jit``, ``jax.grad`` and under ``jax.vmap``.

    It is called back by the program, as by ``jax.pure_callback``, and runs on an event loop in another thread; its derivative, of any order, is
    a backward pass there. JAX may leave out and repeat calls, and every derivative calls `f` again: it has to be pure, and Tensors that it closes
    over, such as the parameters of a module, get no gradients: pass them as arguments to train them. It must not run JAX programs itself, whose
    threads may all be waiting for it.

    Args:
        f: takes Tensors in the places of the arrays and numbers in pytrees of arguments; other arguments, such as strings, reach it as they are. It
            returns Tensors, one or nested in pytrees.
        result_shape_dtypes: ``jax.ShapeDtypeStruct`` of each result, nested as the results are, or a function that returns them, of the arguments
            with such structs in the places of arrays. By default `f` is called with zeros, once for each trace, to find out.
        loop: where `f` runs; by default on a background loop of the process. An event loop that runs in a thread which itself waits for JAX
            cannot answer: a program that is called from there waits forever.

    Returns:
        The function on JAX arrays. Where `f` raises, or its results are not as announced, JAX raises an error with the text of that error.
        `ArgumentTypeError`: a result is no Tensor, or of a dtype that JAX would change in silence.

    Raises:
        ArgumentTypeError: `f` cannot be called, or `loop` is no loop.
    """
    if not callable(f):
        raise ArgumentTypeError(f"interop.jax.function: expected a function on Tensors, found {type(f).__name__}")
    return functools.update_wrapper(FunctionInJax(f, result_shape_dtypes, LoopChoice(loop, at_home=False)), f, updated=())


class FunctionInJax:
    """An aiograd function on JAX arrays, made by `function`.

    Args:
        f: the function.
        announced: as `result_shape_dtypes` of `function`.
        choice: where it runs.
    """

    def __init__(self, f: Callable[..., Any], announced: Any, choice: LoopChoice) -> None:
        self._f = f
        self._name = getattr(f, "__name__", type(f).__name__)
        self._announced = announced
        self._choice = choice
        #: by structure of the arguments, and shapes and dtypes of the arrays
        self._made: dict[Any, tuple[HostFunction, Any]] = {}

    def __repr__(self) -> str:
        return f"<{self._name} of aiograd on JAX arrays>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = [jnp.asarray(leaf) for leaf in leaves if is_numeric(leaf)]
        structs = tuple([jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays])
        fixed = tuple([_ARRAY if is_numeric(leaf) else leaf for leaf in leaves])
        key: Any = tree, tuple([(struct.shape, struct.dtype) for struct in structs]), fixed
        try:
            made = self._made.get(key)
        except TypeError:  # something in it cannot be hashed
            made, key = None, None
        if made is None:
            made = self._make(tree, fixed, structs)
            if key is not None:
                if len(self._made) >= MOST_SIGNATURES:
                    self._made.clear()
                self._made[key] = made
        host, outline = made
        return jax.tree.unflatten(outline, host(*arrays))

    def _make(self, tree: Any, fixed: Sequence[Any], structs: Sequence[Any]) -> tuple[HostFunction, Any]:
        """The flat function for such arguments, and the structure of its results."""

        def arguments(values: Sequence[Any]) -> tuple[Any, Any]:
            given = iter(values)
            return jax.tree.unflatten(tree, [next(given) if leaf is _ARRAY else leaf for leaf in fixed])  # type: ignore[no-any-return]

        async def call(tensors: Sequence[Any]) -> Any:
            args, kwargs = arguments(tensors)
            return await call_in_place(self._f, functools.partial(self._f, *args, **kwargs))

        announced = self._announced
        if callable(announced):
            args, kwargs = arguments(structs)
            announced = announced(*args, **kwargs)
        elif announced is None:
            zeros = [make(np.zeros(struct.shape, struct.dtype)) for struct in structs]
            found = run_on(self._choice.pick(), _unrecorded(call, zeros))
            announced = jax.tree.map(functools.partial(_struct_of, self._name), found)
        results, outline = jax.tree.flatten(announced)

        async def flat(tensors: Sequence[Any]) -> Sequence[Any]:
            leaves, found = jax.tree.flatten(await call(tensors))
            if found != outline:
                raise ArgumentTypeError(f"{self._name}: expected results nested as {outline}, found {found}")
            return leaves  # type: ignore[no-any-return]

        return HostFunction(self._name, flat, structs, results, self._choice), outline


class HostFunction:
    """A flat function of JAX arrays that is computed by a flat function of Tensors. See Note [Derivatives of callbacks].

    Args:
        name: for messages.
        flat: the function of Tensors.
        inputs: shape and dtype of each argument.
        structs: shape and dtype of each result.
        choice: where it runs.
    """

    def __init__(self, name: str, flat: Flat, inputs: Sequence[Any], structs: Sequence[Any], choice: LoopChoice) -> None:
        self.name = name
        self.flat = flat
        self.inputs = list(inputs)
        self.structs = list(structs)
        self.choice = choice
        #: the numbers of the arguments that have gradients
        self.wanted = [i for i, struct in enumerate(self.inputs) if _carries(struct.dtype)]
        self.call: Any = jax.custom_vjp(host_call(self._on_host, self.structs))
        self.call.defvjp(lambda *arrays: (self.call(*arrays), arrays), self._backward)

    def __call__(self, *arrays: Any) -> Any:
        return self.call(*arrays)

    def _on_host(self, *arrays: Any) -> tuple[np.ndarray[Any, Any], ...]:
        """Compute the results: JAX calls this with memory of its own, which is valid until this returns."""
        tensors = [make(np.array(array)) for array in arrays]
        results = run_on(self.choice.pick(), _unrecorded(self.flat, tensors))
        found: list[np.ndarray[Any, Any]] = []
        for i, (result, struct) in enumerate(zip(results, self.structs, strict=True)):
            have = _struct_of(self.name, result)
            if (have.shape, have.dtype) != (struct.shape, struct.dtype):
                raise ShapeError(
                    f"{self.name}: result {i} was announced as {struct.dtype} {list(struct.shape)}, found {have.dtype} {list(have.shape)}: "
                    "results have the shapes and dtypes that result_shape_dtypes says, or that a call with zeros has"
                )
            found.append(host_of(result, self.name))
        return tuple(found)

    def _backward(self, arrays: Sequence[Any], grads: Sequence[Any]) -> tuple[Any, ...]:
        sources = [_conjugate(grad) for grad, struct in zip(grads, self.structs, strict=True) if _carries(struct.dtype)]
        pulled = map(_conjugate, self.gradients(*arrays, *sources)) if self.wanted and sources else iter(())
        found = dict(zip(self.wanted, pulled, strict=False))
        return tuple(found.get(i, _no_gradient(struct)) for i, struct in enumerate(self.inputs))

    @functools.cached_property
    def gradients(self) -> HostFunction:
        """The function of the arguments and the gradients of results: the gradients of arguments."""
        sources = [struct for struct in self.structs if _carries(struct.dtype)]
        return HostFunction(f"{self.name} backward", self._pull, [*self.inputs, *sources], [self.inputs[i] for i in self.wanted], self.choice)

    async def _pull(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """The gradients of the wanted arguments, of arguments and the gradients of results."""
        records, count = is_grad_enabled(), len(self.inputs)
        inputs = list(tensors[:count])
        for i in self.wanted:
            if not inputs[i].requires_grad:
                inputs[i] = inputs[i].detach().requires_grad_()
        with enable_grad():
            results = await self.flat(inputs)
        carriers = [result for result in results if _carries(result.dtype)]
        pairs = [(result, grad) for result, grad in zip(carriers, tensors[count:], strict=True) if result.requires_grad]
        if not pairs:
            return [make(np.zeros(self.inputs[i].shape, self.inputs[i].dtype)) for i in self.wanted]
        outputs, seeds = zip(*pairs, strict=True)
        found: Sequence[Any] = await grad(outputs, [inputs[i] for i in self.wanted], seeds, create_graph=records, materialize_grads=True)
        return found


def _carries(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _conjugate(array: Any) -> Any:
    """aiograd's gradient, as PyTorch's, is the conjugate of JAX's."""
    return jnp.conj(array) if jnp.iscomplexobj(array) else array


def _no_gradient(struct: Any) -> Any:
    """The gradient of an argument that has none: zeros, in JAX's own dtype where it is no floating one."""
    return np.zeros(struct.shape, struct.dtype if _carries(struct.dtype) else jax.dtypes.float0)


def _struct_of(name: str, result: Any) -> Any:
    """Shape and dtype of a result.

    Raises:
        ArgumentTypeError: it is no Tensor, or JAX would change its dtype.
    """
    if not isinstance(result, TensorCore):
        raise ArgumentTypeError(f"{name} returned a {type(result).__name__}; expected a Tensor, or Tensors nested in a pytree")
    check_dtype(result.dtype, f"{name}: a result")
    return jax.ShapeDtypeStruct(result.shape, result.dtype)


async def _unrecorded(call: Callable[..., Awaitable[Any]], tensors: Sequence[Any]) -> Any:
    with no_grad():
        return await call(tensors)
