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

Rejected: rows of a Jacobian as concurrent passes. They compete for the same cores (independent expensive nodes of one pass run at the same
time already), and hold all rows' intermediate gradients at once.

Source: PyTorch ``autograd/functional.py`` and ``torch.func``.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError, ShapeError, UnusedInputError
from aiograd.forward.dual import ForwardLevel, Pending
from aiograd.running.caller import type_found
from aiograd.running.modes import ModeScope, enable_grad
from aiograd.running.offloading import ready
from aiograd.tensors.core import TensorCore, make, outside
from aiograd.tensors.passes import grad

Fn = Callable[..., Any]


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
    stand_ins, one_input = _stand_ins("vjp", inputs, create_graph)
    with enable_grad():
        outputs, one_output = await call(fn, stand_ins, "vjp")
    products = await _pull_back("vjp", outputs, stand_ins, _vectors("vjp", v, outputs, "output"), create_graph, strict)
    return _packed(_result(outputs, create_graph), one_output), _packed(_result(products, create_graph), one_input)


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
    values, _ = _stand_ins("jvp", inputs, create_graph, leaves=False)
    _refuse_complex("jvp", values)
    vectors = _vectors("jvp", v, values, "input")
    with ForwardLevel(records=create_graph, follows=strict) as level:
        duals = [level.input(value, vector, i) for i, (value, vector) in enumerate(zip(values, vectors, strict=True))]
        with ModeScope(grad=False, tangents=True):
            returned, one_output = await call(fn, duals, "jvp")
        outputs, tangents, seen = zip(*map(level.parts, returned), strict=True)
        _refuse_complex("jvp", outputs)
        if strict:
            reached = functools.reduce(operator.or_, seen)
            for i in range(len(values)):
                if not reached >> i & 1:
                    raise UnusedInputError(f"jvp: the outputs of fn do not depend on input {i}. Leave out strict=True to get zeros.")
        known = await level.settle() if level.steps else {}
    tangents = tuple([known[t.number] if isinstance(t, Pending) else t for t in tangents])
    made = zip(outputs, tangents, strict=True)
    products = tuple([_zeros(output) if t is None else t if isinstance(t, TensorCore) else make(t) for output, t in made])
    return _packed(_result(outputs, create_graph), one_output), _packed(_result(products, create_graph), one_output)


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
    stand_ins, one_input = _stand_ins("value_and_grad", inputs, create_graph)
    aux: Any = None
    with enable_grad():
        returned = await _returned("value_and_grad", fn, stand_ins)
        if has_aux:
            if not isinstance(returned, tuple) or len(returned) != 2:
                raise ArgumentTypeError(f"value_and_grad(has_aux=True): fn returned {type(returned).__name__}; expected a pair (value, aux)")
            returned, aux = returned
    value = _scalar("value_and_grad", _checked("value_and_grad", returned)[0])
    gradients = await _pull_back("value_and_grad", (value,), stand_ins, (None,), create_graph, strict)
    value = _result((value,), create_graph)[0]
    return (value, aux) if has_aux else value, _packed(_result(gradients, create_graph), one_input)


async def jacobian(fn: Fn, inputs: Any, *, create_graph: bool = False, strict: bool = False) -> Any:
    """The Jacobian of `fn`, one backward pass per element of its outputs.

    Cancelling stops the pass (or `fn`).

    Args:
        fn: function of the inputs with real outputs.
        inputs: a Tensor or a tuple of Tensors, real.
        create_graph: let the Jacobian be differentiated.
        strict: raise where an output does not depend on an input, instead of returning zeros.

    Returns:
        A Tensor of shape ``output.shape + input.shape``; a tuple of them where there is a tuple of outputs or of inputs, and a tuple (per
        output) of tuples (per input) where there are both.

    Raises:
        ArgumentError: an input or output is complex, or they do not fit. UnusedInputError: with `strict`.

    >>> await ag.jacobian(lambda x: x * x, ag.tensor([1.0, 2.0]))
    tensor([[2., 0.],
            [0., 4.]])
    """
    stand_ins, one_input = _stand_ins("jacobian", inputs, create_graph)
    with enable_grad():
        outputs, one_output = await call(fn, stand_ins, "jacobian")
    _refuse_complex("jacobian", (*stand_ins, *outputs))
    blocks = [_packed(await _rows("jacobian", i, output, stand_ins, create_graph, strict), one_input) for i, output in enumerate(outputs)]
    return _packed(tuple(blocks), one_output)


async def hessian(fn: Fn, inputs: Any, *, create_graph: bool = False, strict: bool = False) -> Any:
    """The second derivatives of `fn`, one backward pass per element of its gradient.

    Cancelling stops the pass (or `fn`).

    Args:
        fn: function of the inputs that returns a real Tensor of one element.
        inputs: a Tensor or a tuple of Tensors, real.
        create_graph: let the Hessian be differentiated.
        strict: raise where the gradient of an input does not depend on another, instead of returning zeros.

    Returns:
        A Tensor of shape ``input.shape + input.shape``; for a tuple of inputs a tuple of tuples, entry ``[i][j]`` of shape
        ``inputs[i].shape + inputs[j].shape``.

    Raises:
        ShapeError: not a single element. ArgumentError: an input is complex. UnusedInputError: with `strict`.

    >>> await ag.hessian(lambda x: (x**3).sum(), ag.tensor([1.0, 2.0]))
    tensor([[ 6.,  0.],
            [ 0., 12.]])
    """
    stand_ins, one_input = _stand_ins("hessian", inputs, create_graph)
    with enable_grad():
        outputs, _ = await call(fn, stand_ins, "hessian")
    _refuse_complex("hessian", stand_ins)
    value = _scalar("hessian", outputs)
    gradients = await _pull_back("hessian", (value,), stand_ins, (None,), True, strict)
    blocks = [_packed(await _rows("hessian", i, gradient, stand_ins, create_graph, strict), one_input) for i, gradient in enumerate(gradients)]
    return _packed(tuple(blocks), one_input)


# -------------------------------------------------------------------- calling the function


async def call(fn: Fn, args: Sequence[Any], what: str, *, beside: bool = False) -> tuple[tuple[Any, ...], bool]:
    """Call `fn`, wait for its result, and check that it consists of Tensors.

    Args:
        fn: ``def`` or ``async def``.
        args: its arguments.

        what: name of the calling function, for messages.
        beside: True if integer and boolean outputs are allowed beside floating ones.

    Returns:
        The outputs, and True if `fn` returned one Tensor rather than a sequence.

    Raises:
        ArgumentTypeError: `fn` returned something else.
    """
    return _checked(what, await _returned(what, fn, args), beside)


async def _returned(what: str, fn: Fn, args: Sequence[Any]) -> Any:
    if not callable(fn):
        raise ArgumentTypeError(f"{what}: expected a function of the inputs, found {type_found(fn)}; pass the function, not its result")
    returned = fn(*args)
    if inspect.isawaitable(returned):
        returned = await returned
    return await ready(returned)


def _checked(what: str, returned: Any, beside: bool = False) -> tuple[tuple[Any, ...], bool]:
    one = not isinstance(returned, (tuple, list))
    outputs = (returned,) if one else tuple(returned)
    beside = beside and any(isinstance(output, TensorCore) and output.dtype.kind in "fc" for output in outputs)
    for i, output in enumerate(outputs):
        if not isinstance(output, TensorCore):
            raise ArgumentTypeError(f"{what}: output {i} of fn is a {type(output).__name__}; expected fn to return a Tensor or a tuple of Tensors")
        if output.dtype.kind not in "fc" and not beside:
            raise ArgumentTypeError(f"{what}: output {i} of fn has dtype {output.dtype}; expected floating point or complex")
    if not outputs:
        raise ArgumentError(f"{what}: fn returned no outputs; expected a Tensor or a tuple of Tensors")
    return outputs, one


def _scalar(what: str, outputs: tuple[Any, ...]) -> Any:
    if len(outputs) != 1 or outputs[0].size != 1:
        found = ", ".join(str(list(output.shape)) for output in outputs)
        raise ShapeError(f"{what}: fn returned {len(outputs)} output(s) of shape {found}; expected a single element. Use jacobian().")
    if outputs[0].dtype.kind != "f":
        raise ArgumentTypeError(f"{what}: fn returned dtype {outputs[0].dtype}; expected a real number")
    return outputs[0]


# -------------------------------------------------------------------- arguments and results


def _stand_ins(what: str, inputs: Any, create_graph: bool, *, leaves: bool = True) -> tuple[tuple[Any, ...], bool]:
    """The stand-ins for the inputs (see Note [The differentiated function]), and True if there was one input rather than a sequence.

    Args:
        what, inputs, create_graph: as of the caller.
        leaves: they require grad.
    """
    one = not isinstance(inputs, (tuple, list))
    listed = (inputs,) if one else tuple(inputs)
    if not listed:
        raise ArgumentError(f"{what}: expected at least one input")
    made: list[Any] = []
    for i, tensor in enumerate(listed):
        if not isinstance(tensor, TensorCore):
            raise ArgumentTypeError(f"{what}: input {i} is a {type(tensor).__name__}; expected a Tensor. Make one with aiograd.tensor().")
        if tensor.dtype.kind not in "fc":
            raise ArgumentTypeError(f"{what}: input {i} has dtype {tensor.dtype}; expected floating point or complex: others have no derivative")
        if create_graph and tensor.requires_grad:
            with enable_grad():
                made.append(tensor.reshape(tensor.shape))  # type: ignore[attr-defined]
        else:
            made.append(outside(tensor).requires_grad_(leaves))
    return tuple(made), one


def _vectors(what: str, v: Any, targets: Sequence[Any], kind: str) -> tuple[Any, ...]:
    """The vectors to multiply with, one per target."""
    if v is None:
        if len(targets) != 1 or targets[0].size != 1:
            raise ShapeError(f"{what}: v may be left out for a single {kind} of one element only; give one Tensor per {kind}, of its shape")
        return (make(np.ones_like(targets[0]._data)),)
    listed = tuple(v) if isinstance(v, (tuple, list)) else (v,)
    if len(listed) != len(targets):
        raise ArgumentError(f"{what}: got {len(listed)} vectors for {len(targets)} {kind}s; expected one each")
    for i, (vector, target) in enumerate(zip(listed, targets, strict=True)):
        if not isinstance(vector, TensorCore):
            raise ArgumentTypeError(f"{what}: vector {i} is a {type(vector).__name__}; expected a Tensor")
        if vector.shape != target.shape or vector.dtype != target.dtype:
            raise ShapeError(
                f"{what}: vector {i} is {vector.dtype}{list(vector.shape)}; expected {target.dtype}{list(target.shape)}, as {kind} {i}. "
                "Reshape it, or cast it with .astype()."
            )
    return listed


def _refuse_complex(what: str, tensors: Sequence[Any]) -> None:
    if any(tensor.dtype.kind == "c" for tensor in tensors):
        raise ArgumentTypeError(f"{what}: expected real inputs and outputs, found complex ones. Split them with np.real and np.imag.")


def _result(tensors: Sequence[Any], create_graph: bool) -> tuple[Any, ...]:
    return tuple(tensors) if create_graph else tuple(outside(tensor) for tensor in tensors)


def _packed(results: Any, one: bool) -> Any:
    return results[0] if one else results


def _zeros(like: Any) -> Any:
    return make(np.zeros_like(like._data))


async def _pull_back(
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
    return tuple(_zeros(tensor) if gradient is None else gradient for tensor, gradient in zip(inputs, gradients, strict=True))


async def _rows(what: str, index: int, output: Any, inputs: Sequence[Any], create_graph: bool, strict: bool) -> tuple[Any, ...]:
    """The Jacobian of one output, a block per input."""
    rows: list[Sequence[Any]] = []
    if output.requires_grad:
        for position in range(output.size):
            rows.append(await grad(output, inputs, _one_hot(output, position), retain_graph=True, create_graph=create_graph, allow_unused=True))
    blocks: list[Any] = []
    for j, tensor in enumerate(inputs):
        column = [row[j] for row in rows]
        if strict and all(entry is None for entry in column):
            raise UnusedInputError(f"{what}: output {index} does not depend on input {j}. Leave out strict=True to get zeros.")
        if not rows:
            column = [None] * output.size
        shape = (*output.shape, *tensor.shape)
        if not column:
            blocks.append(make(np.zeros_like(tensor._data, shape=shape)))
            continue
        with enable_grad():
            stacked: Any = np.stack([_zeros(tensor) if entry is None else entry for entry in column])
            blocks.append(stacked.reshape(shape))
    return tuple(blocks)


def _one_hot(output: Any, position: int) -> Any:
    """Zeros like an output, with a one at a flat position."""
    host = np.zeros(output.shape, output.dtype)
    host.reshape(-1)[position] = 1
    return make(host).to(output.device)
