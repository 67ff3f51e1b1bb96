"""Derivatives of functions: `vjp`, `jvp`, `jacobian`, `hessian`, `value_and_grad`.

`fn` maps Tensors to a Tensor or a tuple of them, and may be ``def`` or ``async def``. `inputs` is one Tensor or a tuple, and the results have
the same structure. No ``grad`` is changed.

Note [The differentiated function]
    ``fn`` is called with copies of the inputs that are leaves of their own, so the derivative is with respect to its arguments, for any other use
    of the inputs. Without ``create_graph`` these stand-ins and the results are detached from the caller's graph; with it, stand-ins of
    inputs that require grad stay connected to them, and the results can be differentiated again.

Note [Forward mode]
    `jvp` runs ``fn`` once on dual arrays (`aiograd.forward`): every operation gives its value and its tangent. No graph is recorded for it; a pass
    inside ``fn`` (`value_and_grad`, `vjp`) records its own, on dual arrays, and its results have tangents too. `detach` and `no_grad` stop tangents,
    as they stop gradients, so that J is one matrix in both directions. Hessians are Jacobians of gradients, exact for every function made of rows.

Note [Jacobians of Jacobians]
    `jacrev` and `jacfwd` have no ``create_graph``: their results are recorded where gradients are and an input requires grad, so that one of them
    within another, or within a loss, is never a constant by mistake.

Source: PyTorch ``autograd/functional.py`` and ``torch.func``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from aiograd.coordination.device_copies import LevelArrayError
from aiograd.errors import ArgumentTypeError, NoRuleError, UnusedInputError
from aiograd.forward.dual import ForwardLevel, Pending
from aiograd.functional.arguments import Fn as Fn
from aiograd.functional.arguments import call as call
from aiograd.functional.arguments import (
    detached,
    outputs_of,
    packed,
    refuse_complex,
    returned_by,
    scalar_of,
    stand_ins_for,
    vectors_for,
    zeros,
)
from aiograd.functional.batched_passes import checked_chunk_size, columns, rows
from aiograd.running.modes import ModeScope, current_mode, enable_grad
from aiograd.tensors.core import TensorCore, make, outside
from aiograd.tensors.passes import grad


async def vjp(fn: Fn, inputs: Any, v: Any = None, *, create_graph: bool = False, strict: bool = False) -> tuple[Any, Any]:
    """The product of a vector with the Jacobian of `fn`: ``vᵀ J``. One backward pass.

    Cancelling stops the pass (or `fn`).

    Args:
        fn: function of the inputs.
        inputs: a Tensor or a tuple of Tensors, floating point or complex.
        v: one Tensor per output of `fn`, of its shape; may be left out for a single output of one element.
        create_graph: let the results be differentiated.
        strict: raise where an output does not depend on an input, instead of returning zeros.

    Returns:
        ``(outputs, products)``; `products` like `inputs`.

    Raises:
        ArgumentError, ShapeError: the arguments or the outputs of `fn` do not fit. UnusedInputError: with `strict`.

    >>> x = ag.tensor([1.0, 2.0])
    >>> await ag.vjp(lambda x: x * x, x, ag.ones(2))
    (tensor([1., 4.]), tensor([2., 4.]))
    """
    stand_ins, one_input = stand_ins_for("vjp", inputs, create_graph)
    with enable_grad():
        outputs, one_output = await call(fn, stand_ins, "vjp")
    products = await pull_back("vjp", outputs, stand_ins, vectors_for("vjp", v, outputs, "output"), create_graph, strict)
    return packed(detached(outputs, create_graph), one_output), packed(detached(products, create_graph), one_input)


async def jvp(fn: Fn, inputs: Any, v: Any = None, *, create_graph: bool = False, strict: bool = False) -> tuple[Any, Any]:
    """The product of the Jacobian of `fn` with a vector: ``J v``. One run of `fn`, no backward pass; see Note [Forward mode].

    Cancelling stops `fn`.

    Args:
        fn: function of the inputs.
        inputs: a Tensor or a tuple of Tensors, real.
        v: one Tensor per input, of its shape; may be left out for a single input of one element.
        create_graph: let the results be differentiated.
        strict: raise where no output depends on an input, instead of returning zeros.

    Returns:
        ``(outputs, products)``; `products` like the outputs of `fn`.

    Raises:
        ArgumentError, ShapeError: the arguments or the outputs of `fn` do not fit. UnusedInputError: with `strict`.
        NoRuleError: `fn` runs an operation without a derivative.

    >>> x = ag.tensor([1.0, 2.0])
    >>> await ag.jvp(lambda x: x * x, x, ag.ones(2))
    (tensor([1., 4.]), tensor([2., 4.]))
    """
    values, _ = stand_ins_for("jvp", inputs, create_graph, leaves=False)
    refuse_complex("jvp", values)
    outputs, products, one_output = await push_forward("jvp", fn, values, vectors_for("jvp", v, values, "input"), create_graph, strict)
    return packed(detached(outputs, create_graph), one_output), packed(detached(products, create_graph), one_output)


async def push_forward(
    what: str, fn: Fn, values: Sequence[Any], vectors: Sequence[Any], create_graph: bool, strict: bool
) -> tuple[tuple[Any, ...], tuple[Any, ...], bool]:
    """Outputs of `fn`, their tangents, and True if `fn` returned one Tensor rather than a sequence."""
    with ForwardLevel(records=create_graph, follows=strict) as level:
        duals = [level.input(value, vector, i) for i, (value, vector) in enumerate(zip(values, vectors, strict=True))]
        with ModeScope(grad=False, tangents=True):
            returned, one_output = await call(fn, duals, what)
        outputs, tangents, seen = zip(*map(level.parts, returned), strict=True)
        refuse_complex(what, outputs)
        if strict:
            reached = functools.reduce(operator.or_, seen)
            for i in range(len(values)):
                if not reached >> i & 1:
                    raise UnusedInputError(f"{what}: the outputs of fn do not depend on input {i}. Leave out strict=True to get zeros.")
        known = await level.settle() if level.steps else {}
    return outputs, tangents_of(outputs, tangents, known), one_output


async def value_and_grad(fn: Fn, inputs: Any, *, has_aux: bool = False, create_graph: bool = False, strict: bool = False) -> tuple[Any, Any]:
    """The value of `fn` and its gradient.

    Cancelling stops the pass (or `fn`).

    Args:
        fn: function of the inputs that returns a real Tensor of one element; with `has_aux`, a pair of it and anything.
        inputs: a Tensor or a tuple of Tensors.
        has_aux: see `fn`; the pair comes back as it is.
        create_graph: let value and gradient be differentiated.
        strict: raise where the value does not depend on an input, instead of returning zeros.

    Returns:
        ``(value, gradients)``, or ``((value, aux), gradients)``; `gradients` like `inputs`.

    Raises:
        ShapeError: not a single element. UnusedInputError: with `strict`.
        ArgumentTypeError: with `has_aux`, the result of `fn` is no pair.

    >>> await ag.value_and_grad(lambda x: (x * x).sum(), ag.tensor([1.0, 2.0]))
    (tensor(5.), tensor([2., 4.]))
    """
    stand_ins, one_input = stand_ins_for("value_and_grad", inputs, create_graph)
    aux: Any = None
    with enable_grad():
        returned = await returned_by("value_and_grad", fn, stand_ins)
        if has_aux:
            if not isinstance(returned, tuple) or len(returned) != 2:
                raise ArgumentTypeError(f"value_and_grad(has_aux=True): fn returned {type(returned).__name__}; expected a pair (value, aux)")
            returned, aux = returned
    value = scalar_of("value_and_grad", outputs_of("value_and_grad", returned)[0])
    gradients = await pull_back("value_and_grad", (value,), stand_ins, (None,), create_graph, strict)
    value = detached((value,), create_graph)[0]
    return (value, aux) if has_aux else value, packed(detached(gradients, create_graph), one_input)


async def jacobian(fn: Fn, inputs: Any, *, create_graph: bool = False, strict: bool = False, chunk_size: int | None = None) -> Any:
    """The Jacobian of `fn` by its shorter side: `jacrev` for no more outputs than inputs, else `jacfwd`; each in blocks that run together.

    `fn` runs once, and again for each block of columns where there are more outputs than inputs. Where an operation has no tangent, rows are taken
    all the same, and with `strict`. Cancelling stops the pass (or `fn`).

    Args:
        fn: function of the inputs with real outputs.
        inputs: a Tensor or a tuple of Tensors, real.
        create_graph: let the Jacobian be differentiated.
        strict: raise where an output does not depend on an input, instead of returning zeros.
        chunk_size: the most rows or columns at a time, which bounds memory; None: all.

    Returns:
        A Tensor of shape ``output.shape + input.shape``; a tuple of them where there is a tuple of outputs or of inputs, and a tuple (per
        output) of tuples (per input) where there are both.

    Raises:
        ArgumentError: an input or output is complex, `chunk_size` is no positive integer, or they do not fit. UnusedInputError: with `strict`.

    >>> await ag.jacobian(lambda x: x * x, ag.tensor([1.0, 2.0]))
    tensor([[2., 0.],
            [0., 4.]])
    """
    return await _jacobian("jacobian", fn, inputs, create_graph, strict, chunk_size)


async def jacrev(fn: Fn, inputs: Any, *, chunk_size: int | None = None) -> Any:
    """The Jacobian of `fn` by rows: `fn` runs once, and one backward pass carries all rows of an output, or `chunk_size` of them, together.

    Where an input requires grad (and not within `no_grad`), the result can be differentiated. Cancelling stops the pass (or `fn`).

    Args:
        fn: function of the inputs with real outputs.
        inputs: a Tensor or a tuple of Tensors, real.
        chunk_size: the most rows at a time, which bounds memory; None: all.

    Returns:
        As `jacobian`.

    Raises:
        ArgumentError: as `jacobian`.

    >>> await ag.jacrev(lambda x: (x * x).sum(), ag.tensor([1.0, 2.0]))
    tensor([2., 4.])
    """
    return await _jacobian("jacrev", fn, inputs, _is_recorded(inputs), False, chunk_size)


async def jacfwd(fn: Fn, inputs: Any, *, chunk_size: int | None = None) -> Any:
    """The Jacobian of `fn` by columns, in forward mode: one run of `fn` carries the tangents of all columns, or of `chunk_size` of them, together.

    Where an input requires grad (and not within `no_grad`), the result can be differentiated. Cancelling stops `fn`.

    Args:
        fn: function of the inputs with real outputs.
        inputs: a Tensor or a tuple of Tensors, real.
        chunk_size: the most columns at a time, which bounds memory; `fn` runs once for each block. None: all.

    Returns:
        As `jacobian`.

    Raises:
        ArgumentError: as `jacobian`. NoRuleError: `fn` runs an operation without a tangent.

    >>> await ag.jacfwd(lambda t: t * ag.tensor([1.0, 2.0]), ag.tensor(3.0))
    tensor([1., 2.])
    """
    chunk_size = checked_chunk_size("jacfwd", chunk_size)
    create_graph = _is_recorded(inputs)
    values, one_input = stand_ins_for("jacfwd", inputs, create_graph, leaves=False)
    return await _by_columns("jacfwd", fn, values, one_input, create_graph, chunk_size)


def _is_recorded(inputs: Any) -> bool:
    """See Note [Jacobians of Jacobians]."""
    listed = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    return current_mode().grad and any(isinstance(tensor, TensorCore) and tensor.requires_grad for tensor in listed)


async def _jacobian(what: str, fn: Fn, inputs: Any, create_graph: bool, strict: bool, chunk_size: int | None) -> Any:
    chunk_size = checked_chunk_size(what, chunk_size)
    stand_ins, one_input = stand_ins_for(what, inputs, create_graph)
    with enable_grad():
        outputs, one_output = await call(fn, stand_ins, what)
    refuse_complex(what, (*stand_ins, *outputs))
    if what == "jacobian" and not strict and sum(output.size for output in outputs) > sum(tensor.size for tensor in stand_ins):
        try:
            return await _by_columns(what, fn, stand_ins_for(what, inputs, create_graph, leaves=False)[0], one_input, create_graph, chunk_size)
        except (NoRuleError, LevelArrayError):
            pass
    blocks = [packed(await rows(what, i, output, stand_ins, create_graph, strict, chunk_size), one_input) for i, output in enumerate(outputs)]
    return packed(tuple(blocks), one_output)


async def _by_columns(what: str, fn: Fn, values: Sequence[Any], one_input: bool, create_graph: bool, chunk_size: int | None) -> Any:
    """The Jacobian at `values` by columns."""
    refuse_complex(what, values)
    one_output = False

    async def push(tangents: Sequence[Any]) -> tuple[Any, ...]:
        nonlocal one_output
        _, products, one_output = await push_forward(what, fn, values, tangents, create_graph, False)
        return products

    blocks = [packed(block, one_input) for block in await columns(push, values, create_graph, chunk_size)]
    return packed(tuple(blocks), one_output)


async def hessian(fn: Fn, inputs: Any, *, create_graph: bool = False, strict: bool = False, chunk_size: int | None = None) -> Any:
    """The second derivatives of `fn`: `jacfwd` of its gradient, forward over reverse. With `strict` rows of a recorded gradient.

    `fn` and its backward pass run once for each block of columns. Where forward mode cannot follow, as in a remote call, rows are taken as well.
    Cancelling stops the pass (or `fn`).

    Args:
        fn: function of the inputs that returns a real Tensor of one element.
        inputs: a Tensor or a tuple of Tensors, real.
        create_graph: let the Hessian be differentiated.
        strict: raise where the gradient of an input does not depend on another, instead of returning zeros.
        chunk_size: the most columns at a time, which bounds memory; None: all.

    Returns:
        A Tensor of shape ``input.shape + input.shape``; for a tuple of inputs a tuple of tuples, entry ``[i][j]`` of shape
        ``inputs[i].shape + inputs[j].shape``.

    Raises:
        ShapeError: not a single element. ArgumentError: an input is complex, or `chunk_size` is no positive integer.
        UnusedInputError: with `strict`.

    >>> await ag.hessian(lambda x: (x**3).sum(), ag.tensor([1.0, 2.0]))
    tensor([[ 6.,  0.],
            [ 0., 12.]])
    """
    chunk_size = checked_chunk_size("hessian", chunk_size)
    if not strict:
        values, one_input = stand_ins_for("hessian", inputs, create_graph, leaves=False)

        async def gradient(*xs: Any) -> Any:
            return (await value_and_gradient("hessian", fn, xs))[1]

        try:
            return packed(await _by_columns("hessian", gradient, values, one_input, create_graph, chunk_size), one_input)
        except (NoRuleError, LevelArrayError):  # a pass in forward mode does not go on on another worker; one over a recorded pass does
            pass
    stand_ins, one_input = stand_ins_for("hessian", inputs, create_graph)
    refuse_complex("hessian", stand_ins)
    with enable_grad():
        outputs, _ = await call(fn, stand_ins, "hessian")
    gradients = await pull_back("hessian", (scalar_of("hessian", outputs),), stand_ins, (None,), True, strict)
    blocks = [packed(await rows("hessian", i, g, stand_ins, create_graph, strict, chunk_size), one_input) for i, g in enumerate(gradients)]
    return packed(tuple(blocks), one_input)


async def value_and_gradient(what: str, fn: Fn, inputs: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """The value of `fn` and its gradients, of which forward mode follows both."""
    stand_ins, _ = stand_ins_for(what, inputs, False)
    with enable_grad():
        outputs, _ = await call(fn, stand_ins, what)
    value = scalar_of(what, outputs)
    return outside(value), detached(await pull_back(what, (value,), stand_ins, (None,), False, False), False)


# -------------------------------------------------------------------- passes and tangents


def tangents_of(outputs: Sequence[Any], tangents: Sequence[Any], known: Mapping[int, Any]) -> tuple[Any, ...]:
    """The tangents of outputs as Tensors, zeros for None.

    Args:
        outputs: Tensors of the caller.
        tangents: as the level holds them.
        known: tangents that were pending, by number.
    """
    settled = [known[t.number] if isinstance(t, Pending) else t for t in tangents]
    made = zip(outputs, settled, strict=True)
    return tuple([zeros(output) if t is None else t if isinstance(t, TensorCore) else make(t) for output, t in made])


async def pull_back(
    what: str, outputs: Sequence[Any], inputs: Sequence[Any], vectors: Sequence[Any], create_graph: bool, strict: bool
) -> tuple[Any, ...]:
    """Gradients of the inputs, with zeros for inputs that got none."""
    through = [(output, vector) for output, vector in zip(outputs, vectors, strict=True) if output.requires_grad]
    gradients: Sequence[Any] = [None] * len(inputs)
    if through:
        roots, seeds = zip(*through, strict=True)
        gradients = await grad(roots, inputs, seeds, retain_graph=True, create_graph=create_graph, allow_unused=True)
    if strict:
        for i, gradient in enumerate(gradients):
            if gradient is None:
                raise UnusedInputError(f"{what}: the outputs of fn do not depend on input {i}. Leave out strict=True to get zeros.")
    return tuple(zeros(tensor) if gradient is None else gradient for tensor, gradient in zip(inputs, gradients, strict=True))
