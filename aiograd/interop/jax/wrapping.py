"""A JAX function as a node: forward and backward are two compiled functions, and their values are saved as any node's.

Note [Flat functions]
    A call is made flat: its Tensors that carry gradients, its other arrays, and a `CallOutline` of everything else, by which JAX caches what it
    compiles. The result is flat too: arrays that carry gradients, the others, and a `ResultOutline`. The gradients of a flat function are again
    a flat function, of its arguments and the gradients of its results; this is how a backward that is recorded is differentiated.

Note [Residuals]
    ``jax.vjp`` inside ``jax.jit`` returns a pytree of the values that backward needs. They are saved as Tensors, so that they are released with
    the graph and seen by hooks for saved tensors; arrays of a dtype that numpy does not have stay with the context. The Tensors among the arguments
    are saved beside them: JAX may read their memory again, so they must not have been modified.

Note [Complex gradients]
    aiograd's gradient, as PyTorch's, is the conjugate of JAX's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from aiograd.errors import ArgumentTypeError
from aiograd.functional.function import Function
from aiograd.interop.extras import from_extra
from aiograd.interop.jax.conversion import array_from_jax, check_dtype, check_on_host, has_numpy_dtype, host_of, is_numeric
from aiograd.running.modes import current_mode
from aiograd.tensors.core import TensorCore, make
from aiograd.tensors.followed import has_tangent

if TYPE_CHECKING:
    import jax
    import jax.numpy as jnp
else:
    jax, jnp = from_extra("jax", "jax"), from_extra("jax.numpy", "jax")

#: the places of the leaves of a call's arguments
CARRIES, IS_ARRAY, IS_STATIC = range(3)


@dataclass(frozen=True, slots=True)
class CallOutline:
    """Everything of a call but its arrays; two calls with the same outline are compiled once.

    Attributes:
        tree: the structure of arguments and keywords.
        places: of each leaf; see Note [Flat functions].
        constants: type and value of each static leaf: 1, 1.0 and True are different.
    """

    tree: Any
    places: tuple[int, ...]
    constants: tuple[tuple[type[Any], Any], ...]


@dataclass(frozen=True, slots=True)
class ResultOutline:
    """The structure of a call's results, and for each leaf True if it carries gradients."""

    tree: Any
    carries: tuple[bool, ...]


@functools.cache
def _register() -> None:
    """Tell JAX that a `ResultOutline` is a pytree without leaves."""
    jax.tree_util.register_static(ResultOutline)


class FlatFunction:
    """A flat function with its compiled forms; see Note [Flat functions].

    Args:
        flat: ``flat(outline, carriers, others)`` returns the arrays that carry gradients, and a pair of the others and a `ResultOutline`.
    """

    def __init__(self, flat: Callable[..., Any]) -> None:
        _register()
        self.flat = flat
        #: its values
        self.plain = jax.jit(flat, static_argnums=0)
        #: its values, and the function that turns gradients of the former into gradients of the carriers
        self.forward = jax.jit(self._forward, static_argnums=0)
        #: calls that function
        self.backward = jax.jit(_pull_back)

    def _forward(self, outline: Any, carriers: Sequence[Any], others: Sequence[Any]) -> Any:
        return jax.vjp(lambda *given: self.flat(outline, given, others), *carriers, has_aux=True)

    @functools.cached_property
    def gradients(self) -> FlatFunction:
        """The function of the same arguments and, behind the carriers, the gradients of the results: the gradients of the carriers."""
        return FlatFunction(self._gradients)

    def _gradients(self, outline: tuple[Any, int], carriers: Sequence[Any], others: Sequence[Any]) -> Any:
        inner, count = outline
        _, pull_back, _ = self._forward(inner, carriers[:count], others)
        return _pull_back(pull_back, list(carriers[count:])), ((), None)


def _pull_back(pull_back: Any, grads: list[Any]) -> list[Any]:
    """The gradients of the carriers; see Note [Complex gradients]."""
    return [_conjugate(grad) for grad in pull_back([_conjugate(grad) for grad in grads])]


def _conjugate(grad: Any) -> Any:
    return jnp.conj(grad) if jnp.iscomplexobj(grad) else grad


class JaxCall(Function):
    """The node of a call."""

    @staticmethod
    def forward(ctx: Any, flat: FlatFunction, outline: Any, count: int, name: str, *leaves: Any) -> Any:
        """Args: the flat function and its outline, the number of leaves that carry gradients, a name for messages, all leaves."""
        arrays = [host_of(leaf, name) if isinstance(leaf, TensorCore) else leaf for leaf in leaves]
        carriers, others = arrays[:count], arrays[count:]
        if not count:
            values, (rest, result) = flat.plain(outline, carriers, others)
        else:
            values, pull_back, (rest, result) = flat.forward(outline, carriers, others)
            ctx.residuals, ctx.structure = jax.tree.flatten(pull_back)
        outputs = tuple(array_from_jax(value, f"{name}: a result") for value in (*values, *rest))
        ctx.result = result
        if count:
            ctx.call = flat, outline, count, name, leaves[count:]
            ctx.is_wide = jax.config.jax_enable_x64
            ctx.carrying = len(values)
            _save(ctx, leaves)
        return (*outputs, Opaque(result))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Pull the gradients back, recorded where the pass is."""
        flat, outline, count, name, others = ctx.call
        grads, saved = grads[: ctx.carrying], ctx.saved_tensors
        with jax.enable_x64(ctx.is_wide):
            if current_mode().grad or any(map(has_tangent, (*grads, *saved[:count]))):
                found = JaxCall.apply(flat.gradients, (outline, count), count + len(grads), name, *saved[:count], *grads, *others)[:-1]
            else:
                kept = iter(saved[ctx.first :])
                residuals = [next(kept)._data if residual is None else residual for residual in ctx.residuals]
                pulled = flat.backward(jax.tree.unflatten(ctx.structure, residuals), [host_of(grad, name) for grad in grads])
                found = [array_from_jax(grad, f"{name}: a gradient") for grad in pulled]
        return (None,) * 4 + (*found, *[None] * len(others))


class Opaque:
    """Holds an object that no tree is looked for in: a static argument, or something beside the outputs of a Function."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _save(ctx: Any, leaves: Sequence[Any]) -> None:
    """Save the Tensors among the arguments, and the residuals; see Note [Residuals]."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, TensorCore)]
    ctx.first = len(tensors)
    for i, residual in enumerate(ctx.residuals):
        if has_numpy_dtype(residual):
            tensors.append(make(np.asarray(residual)))
            ctx.residuals[i] = None
    ctx.save_for_backward(*tensors)


def wrap(function: Callable[..., Any], *, static_argnames: Sequence[str] = ()) -> WrappedFunction:
    """A JAX function as a function of Tensors: each call records one node; its backward is ``jax.vjp`` on the engine's executor.

    Arguments and results are pytrees. In the arguments Tensors of the host stand for arrays; JAX arrays, numpy arrays and Python numbers are
    constants, and other objects, such as strings, are static. In the results every array is a Tensor, which shares JAX's memory and is therefore
    read-only; arrays of integers and bools carry no gradient. A Tensor's memory is shared where it is aligned as JAX wants it, else it is copied.

    JAX compiles the function, and what differentiates it, once for each structure, dtype and shape of its arguments, in the first call and the
    first backward; `aiograd.offload` keeps that, and long calls, off the event loop. The call returns when the results are computed.

    Args:
        function: a function that JAX can trace, jitted or not. It is pure: a Tensor that it closes over gets no gradient.
        static_argnames: names of parameters that JAX must not trace, as of ``jax.jit``; needed here also where `function` is jitted with them.

    Returns:
        The function on Tensors. It raises `ArgumentTypeError` for a dtype that JAX would change in silence (64 bits while ``jax_enable_x64`` is off),
        for results of a dtype that numpy does not have, and inside a JAX transformation, where `function` is for; `DeviceError` for Tensors and JAX
        arrays elsewhere than on the host. Exceptions of the function pass through.

    Raises:
        ArgumentTypeError: `function` cannot be called, or is ``async def``. MissingExtraError: JAX is not installed.
    """
    return WrappedFunction(function, static_argnames)


class WrappedFunction:
    """A JAX function on Tensors, made by `wrap`.

    Args:
        function, static_argnames: as of `wrap`.

    Raises:
        ArgumentTypeError: as of `wrap`.

    >>> import jax.numpy as jnp
    >>> sines = ag.interop.jax.wrap(jnp.sin)
    >>> x = ag.tensor([0.0], requires_grad=True)
    >>> await sines(x).sum().backward()
    >>> x.grad
    tensor([1.])
    """

    def __init__(self, function: Callable[..., Any], static_argnames: Sequence[str] = ()) -> None:
        if not callable(function) or inspect.iscoroutinefunction(function):
            found = "a coroutine function" if callable(function) else type(function).__name__
            raise ArgumentTypeError(f"interop.jax.wrap: expected a function that JAX can trace, found {found}")
        functools.update_wrapper(self, function)
        self._function = function
        self._name = getattr(function, "__name__", type(function).__name__)
        self._static = frozenset((static_argnames,) if isinstance(static_argnames, str) else static_argnames)
        self._positions = self._static_positions()
        self._flat = FlatFunction(self._call)

    def __repr__(self) -> str:
        return f"<{self._name} of JAX>"

    def _static_positions(self) -> frozenset[int]:
        """The numbers of the positional parameters that are static."""
        if not self._static:
            return frozenset()
        names = list(inspect.signature(self._function).parameters)
        missing = self._static - {*names}
        if missing:
            raise ArgumentTypeError(f"interop.jax.wrap({self._name}): static_argnames {sorted(missing)} are no parameters of it")
        return frozenset(i for i, name in enumerate(names) if name in self._static)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._static:
            args = tuple(Opaque(arg) if i in self._positions else arg for i, arg in enumerate(args))
            kwargs = {key: Opaque(value) if key in self._static else value for key, value in kwargs.items()}
        leaves, tree = jax.tree.flatten((args, kwargs))
        records = current_mode().grad
        places: list[int] = []
        constants: list[tuple[type[Any], Any]] = []
        carriers: list[Any] = []
        others: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, TensorCore):
                carries = (records and leaf.requires_grad) or has_tangent(leaf)
                places.append(CARRIES if carries else IS_ARRAY)
                (carriers if carries else others).append(leaf)
            elif is_numeric(leaf):
                places.append(IS_ARRAY)
                others.append(self._constant(leaf))
            else:
                places.append(IS_STATIC)
                value = leaf.value if isinstance(leaf, Opaque) else leaf
                constants.append((type(value), value))
        outline = CallOutline(tree, tuple(places), tuple(constants))
        try:
            hash(outline)
        except TypeError:
            found = ", ".join(sorted({kind.__name__ for kind, value in constants if kind.__hash__ is None}))
            raise ArgumentTypeError(
                f"{self._name}: an argument ({found or 'a part of one'}) is neither an array nor a number, and cannot be hashed: "
                "JAX cannot tell calls apart by it. Register its class as a pytree, or close over it."
            ) from None
        *outputs, kept = JaxCall.apply(self._flat, outline, len(carriers), self._name, *carriers, *others)
        result = kept.value
        values, rest = iter(outputs[: sum(result.carries)]), iter(outputs[sum(result.carries) :])
        return jax.tree.unflatten(result.tree, [next(values) if carries else next(rest) for carries in result.carries])

    def _constant(self, leaf: Any) -> Any:
        """An array or number that is no Tensor, as JAX gets it."""
        what = f"{self._name}: an argument"
        if isinstance(leaf, jax.Array):
            check_on_host(leaf, what)
        elif isinstance(leaf, (np.ndarray, np.generic)):
            check_dtype(leaf.dtype, what)
            leaf = np.array(leaf)
        return leaf

    def _call(self, outline: CallOutline, carriers: Sequence[Any], others: Sequence[Any]) -> Any:
        """The flat function; JAX traces it."""
        sources = iter(carriers), iter(others), (value for _, value in outline.constants)
        args, kwargs = jax.tree.unflatten(outline.tree, [next(sources[place]) for place in outline.places])
        leaves, tree = jax.tree.flatten(self._function(*args, **kwargs))
        carries = tuple(bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)) for leaf in leaves)
        values = [leaf for leaf, carrying in zip(leaves, carries, strict=True) if carrying]
        rest = [leaf for leaf, carrying in zip(leaves, carries, strict=True) if not carrying]
        return values, (rest, ResultOutline(tree, carries))
