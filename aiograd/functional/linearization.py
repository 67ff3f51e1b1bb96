"""`linearize` and `hvp`: forward mode at one point for many tangents, and over a backward pass."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias

from aiograd.coordination.device_copies import LevelArrayError
from aiograd.errors import NoRuleError
from aiograd.forward.dual import ForwardLevel
from aiograd.forward.rows import keep
from aiograd.functional.arguments import Fn, call, detached, packed, refuse_complex, scalar_of, stand_ins_for, vectors_for
from aiograd.functional.derivatives import pull_back, push_forward, tangents_of, value_and_gradient
from aiograd.running.modes import ModeScope, enable_grad

Push: TypeAlias = Callable[..., Coroutine[Any, Any, Any]]


async def linearize(fn: Fn, inputs: Any) -> tuple[Any, Push]:
    """The outputs of `fn`, and its derivative at `inputs` as a function of tangents. `fn` runs once.

    The steps of forward mode are kept and run for every tangent, so that a product costs no more than `jvp` without the values. Saved values are
    kept for as long as `push`, as they were when what the function takes, makes or returns is written later. Tensors from outside, such as
    parameters, are saved as they are: write into those after the last product. An ``async def jvp`` of a custom `Function` is awaited. Cancelling
    stops `fn`, or one product.

    Args:
        fn: function of the inputs.
        inputs: a Tensor or a tuple of Tensors, real.

    Returns:
        ``(outputs, push)``. ``await push(*tangents)`` takes one Tensor per input, of its shape and dtype, and returns the tangents of the outputs,
        structured like them; several may run at once, and `vmap` of it pushes many.

    Raises:
        ArgumentError, ShapeError: the arguments or the outputs of `fn` do not fit; of `push`: the tangents do not. NoRuleError: `fn` runs an
        operation without a tangent.

    >>> outputs, push = await ag.linearize(lambda x: x * x, ag.tensor([1.0, 2.0]))
    >>> outputs, await push(ag.ones(2)), await push(ag.tensor([0.0, 1.0]))
    (tensor([1., 4.]), tensor([2., 4.]), tensor([0., 4.]))

    Source: JAX ``jax.linearize``, which keeps the same in a program.
    """
    values, _ = stand_ins_for("linearize", inputs, False, leaves=False)
    refuse_complex("linearize", values)
    with ForwardLevel(deferred=True) as level:
        places = [level.later() for _ in values]
        duals = [level.dual(value, place) for value, place in zip(values, places, strict=True)]
        with ModeScope(grad=False, tangents=True):
            returned, one_output = await call(fn, duals, "linearize")
        outputs, tangents, _ = zip(*map(level.parts, returned), strict=True)
        keep(level, *[level.own(tensor) for tensor in (*values, *outputs)])  # the caller may write into them
    refuse_complex("linearize", outputs)
    outputs = detached(outputs, False)

    async def push(*given: Any) -> Any:
        """The tangents of the outputs for one tangent per input."""
        vectors = vectors_for("push", given, values, "input")
        with ModeScope(grad=False, tangents=True):
            known = await level.settle({place.number: level.own(vector) for place, vector in zip(places, vectors, strict=True)})
        return packed(tangents_of(outputs, tangents, known), one_output)

    return packed(outputs, one_output), push


async def _pulled_twice(fn: Fn, inputs: Any, vectors: Sequence[Any], create_graph: bool) -> tuple[Any, tuple[Any, ...]]:
    """The value of `fn` and the products, by a pass over a recorded pass: a Hessian is symmetric."""
    stand_ins, _ = stand_ins_for("hvp", inputs, create_graph)
    with enable_grad():
        outputs, _ = await call(fn, stand_ins, "hvp")
    value = scalar_of("hvp", outputs)
    gradients = await pull_back("hvp", (value,), stand_ins, (None,), True, False)
    return value, await pull_back("hvp", gradients, stand_ins, vectors, create_graph, False)


async def hvp(fn: Fn, inputs: Any, v: Any = None, *, create_graph: bool = False) -> tuple[Any, Any]:
    """The value of `fn` and the product of its Hessian with a vector: forward over reverse. One run of `fn` and of its backward pass on dual arrays.

    Where forward mode cannot follow, as in a remote call, `fn` runs again, for a backward pass over a recorded one. Cancelling stops the pass
    (or `fn`).

    Args:
        fn: function of the inputs that returns a real Tensor of one element.
        inputs: a Tensor or a tuple of Tensors, real.
        v: one Tensor per input, of its shape; may be left out for a single input of one element.
        create_graph: let the results be differentiated.

    Returns:
        ``(value, products)``; `products` like `inputs`.

    Raises:
        ShapeError: not a single element. ArgumentError: the arguments or the output of `fn` do not fit.
        NoRuleError: `fn` runs an operation with a gradient that has no tangent.

    >>> await ag.hvp(lambda x: (x**3).sum(), ag.tensor([1.0, 2.0]), ag.tensor([1.0, 0.0]))
    (tensor(9.), tensor([6., 0.]))

    Source: Pearlmutter, "Fast exact multiplication by the Hessian" (1994).
    """
    values, one_input = stand_ins_for("hvp", inputs, create_graph, leaves=False)
    refuse_complex("hvp", values)
    vectors = vectors_for("hvp", v, values, "input")

    async def gradient(*xs: Any) -> tuple[Any, ...]:
        value, gradients = await value_and_gradient("hvp", fn, xs)
        return value, *gradients

    try:
        outputs, tangents, _ = await push_forward("hvp", gradient, values, vectors, create_graph, False)
        value, products = outputs[0], tangents[1:]
    except (NoRuleError, LevelArrayError):
        value, products = await _pulled_twice(fn, inputs, vectors, create_graph)
    return detached((value,), create_graph)[0], packed(detached(products, create_graph), one_input)
