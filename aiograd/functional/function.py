"""Custom functions: a forward and its backward, each ``def`` or ``async def``.

Note [Outputs and their nesting]
    Forward returns a Tensor, or a tuple of the outputs. An entry may be nested: then its Tensors are outputs of the node,
    and backward gets its gradients nested in the same way. Arrays among the outputs become Tensors and are recorded like them, just as backward
    accepts arrays as gradients.

Source: PyTorch ``autograd/function.py``, ``python_function.cpp``.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from aiograd.engine.validate import device_of
from aiograd.errors import ArgumentTypeError, GraphError, InPlaceError, OnceDifferentiableError
from aiograd.functional.function_node import FunctionCtx, FunctionNode, OutputPlaceholder
from aiograd.functional.function_tangents import Layer, layers_of, needs_of
from aiograd.graph.input_metadata import InputMetadata
from aiograd.graph.node import Node
from aiograd.running.modes import ModeScope, current_mode, no_grad
from aiograd.running.trees import leaves_of, map_tree
from aiograd.tensors.attach import note
from aiograd.tensors.core import SpecialView, TensorCore, counter_of, extra_of, make, refresh
from aiograd.tensors.creation import asarray
from aiograd.tensors.followed import has_tangent
from aiograd.tensors.inplace import check_in_place, check_view, move_with_parents


class Function:
    """Base of custom differentiable functions: define static ``forward(ctx, *args)`` and ``backward(ctx, *grads)``, call ``F.apply(*args)``.

    Either may be ``async def``; with an ``async def forward``, `apply` returns a coroutine. Forward runs without recording; it returns Tensors or
    arrays, which may be nested in tuples, lists and dicts. Backward gets one gradient per output, nested as the output is, and returns one per
    argument of forward (None for none). Arguments that are no Tensors pass through. A static ``jvp(ctx, *tangents)`` is its rule in forward mode;
    without one backward is transposed.

    >>> class Square(ag.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         ctx.save_for_backward(x)
    ...         return x * x
    ...
    ...     @staticmethod
    ...     async def backward(ctx, grad):
    ...         (x,) = ctx.saved_tensors
    ...         return 2 * x * grad
    >>> x = ag.tensor(3.0, requires_grad=True)
    >>> await Square.apply(x).backward()
    >>> x.grad
    tensor(6.)
    """

    #: run a ``def backward`` on the event loop instead of the executor
    inline: ClassVar[bool] = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Raise: a Function has no instances."""
        raise ArgumentTypeError(f"{cls.__name__}(...): a Function has no instances; call {cls.__name__}.apply(...) to run and record it")

    @staticmethod
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs; override.

        Args:
            ctx: a `FunctionCtx`: ``save_for_backward``, ``needs_input_grad``, attributes of your own.
            *args: the arguments of ``apply``, tensors and others.
            **kwargs: none; with it type checkers accept any parameters of a forward that overrides this one.

        Returns:
            A Tensor or a tuple of Tensors; of an ``async def`` a coroutine of them.
        """
        raise NotImplementedError("You must implement the forward function for custom aiograd.Function.")

    @staticmethod
    def backward(ctx: Any, *grads: Any, **kwargs: Any) -> Any:
        """Compute the gradients of the arguments; override.

        Args:
            ctx: the `FunctionCtx` that forward had.
            *grads: one for each output of forward.
            **kwargs: none, as in `forward`.

        Returns:
            One for each argument of forward, None where there is none, real for a real argument; of an ``async def`` a coroutine of them.
        """
        raise NotImplementedError("You must implement either the backward or vjp method for your custom aiograd.Function to use it with backward.")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any, **kwargs: Any) -> Any:
        """Compute the tangents of the outputs, for `aiograd.jvp`; override. Without it ``backward`` is transposed.

        Args:
            ctx: the `FunctionCtx` that forward had, as in backward.
            *tangents: one for each argument of forward, None where it has none.
            **kwargs: none, as in `forward`.

        Returns:
            One for each output of forward, of its shape and dtype, None for zeros; of an ``async def`` a coroutine of them.
        """
        raise NotImplementedError("You must implement the jvp function for custom aiograd.Function to use it with forward mode.")

    @classmethod
    def rule(cls) -> Callable[..., Any]:
        """The function's ``backward``, or ``vjp``, its other name.

        Returns:
            The function, as the class defines it.

        Raises:
            GraphError: the class defines both.
        """
        vjp = getattr(cls, "vjp", None)
        if vjp is None:
            return cls.backward
        if cls.backward is not Function.backward:
            raise GraphError(f"Implementing both 'backward' and 'vjp' for the custom Function {cls.__name__} is not allowed. Implement one of them.")
        return vjp  # type: ignore[no-any-return]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Run forward and record. Returns the result of forward, or a coroutine where it is ``async def``; cancelling that cancels forward.

        Args:
            *args: the arguments of forward.

        Returns:
            The outputs of forward, recorded, or a coroutine of them.
        """
        layers: list[Layer] | None = None
        for arg in args:
            if isinstance(arg, TensorCore):
                if arg._vc is not None:
                    refresh(arg)
                if arg._data.__class__ is not np.ndarray and layers is None:
                    layers = layers_of(args)
        trace = current_mode().trace
        if trace is not None:
            return trace.applies(f"{cls.__name__}.apply", cls.apply, args, is_async=inspect.iscoroutinefunction(cls.forward))
        context = FunctionCtx(needs_of(layers[-1]) if layers else tuple(isinstance(arg, TensorCore) and arg._node is not None for arg in args))
        frame = sys._getframe(1)
        line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        del frame
        if inspect.iscoroutinefunction(cls.forward):
            return cls._apply_async(context, layers, args, line)
        profiler = current_mode().profiler
        began = None if profiler is None else profiler.begin_forward()
        with ModeScope(grad=False):
            result = cls.forward(context, *(layers[-1].values if layers else args))
        if layers:
            result = cls._record_layers(context, layers, result, line)
        else:
            result = cls._record(context, args, result, line)
        if profiler is not None:
            profiler.end_forward(began, cls.__name__, *_made_by(cls, result))
        return result

    @classmethod
    async def _apply_async(cls, context: FunctionCtx, layers: list[Layer] | None, args: tuple[Any, ...], line: str) -> Any:
        profiler = current_mode().profiler
        began = None if profiler is None else profiler.begin_forward()
        with ModeScope(grad=False):
            result: Any = await cls.forward(context, *(layers[-1].values if layers else args))
        if layers:
            result = cls._record_layers(context, layers, result, line)
        else:
            result = cls._record(context, args, result, line)
        if profiler is not None:
            profiler.end_forward(began, cls.__name__, *_made_by(cls, result))
        return result

    @classmethod
    def _record_layers(cls, context: FunctionCtx, layers: list[Layer], result: Any, line: str) -> Any:
        """Record forward's result for the caller, and give it its tangents on every level among the arguments."""
        below = context
        args: Sequence[Any] = layers[-1].values
        records = layers[-1].level.records
        for layer in (*reversed(layers), None):
            raw, nesting = _outputs_of(result, tuple(args))
            kept = copy.copy(context)
            context._needs = tuple(isinstance(arg, TensorCore) and arg._node is not None for arg in args)
            with ModeScope(grad=records):
                result = cls._record(context, tuple(args), _in_place(result, nesting, raw), line)
            if layer is None:
                break
            made = _outputs_of(result, tuple(args))[0] if nesting is None else leaves_of(result, TensorCore)
            below = layer.completed(kept, raw, made)
            outputs = layer.outputs(cls, below, made, nesting)
            context, args, records = layer.context(below, made, outputs), layer.args, layer.records
            result = _in_place(result, nesting, outputs)
        return result

    @classmethod
    def has_jvp(cls) -> bool:
        """True if the class defines ``jvp``.

        Returns:
            True or False.
        """
        return cls.jvp is not Function.jvp

    @classmethod
    def _record(cls, context: FunctionCtx, args: tuple[Any, ...], result: Any, line: str) -> Any:
        outputs, nesting = _outputs_of(result, args)
        records = current_mode().grad and any(context._needs)
        cls._check_dirty(context._dirty, args, outputs, records)
        if result is None:
            raise ArgumentTypeError(f"{cls.__name__}.forward returned None; expected a Tensor, an array or a tuple of them. Was `return` forgotten?")
        if not records:
            context._to_save = ()
            return _in_place(result, nesting, outputs)
        context._nesting = nesting
        node = FunctionNode(cls, context, args, line)
        fixed, dirty = {id(t) for t in context._non_differentiable}, {id(t) for t in context._dirty}
        inputs = {id(arg) for arg in args}
        attached: list[Any] = []
        metadata: list[InputMetadata | None] = []
        carriers: list[tuple[Any, int]] = []
        for nr, output in enumerate(outputs):
            if not isinstance(output, TensorCore):
                attached.append(output)
                metadata.append(None)
                continue
            differentiable = id(output) not in fixed and output._data.dtype.kind in "fc"
            if id(output) not in dirty and (id(output) in inputs or output._node is not None):
                output = make(output._data, shared_with=output)
            if differentiable:
                carriers.append((output, nr))
            metadata.append(InputMetadata(output._data.shape, output._data.dtype, device_of(output)))
            attached.append(output)
        node.metadata_list = tuple(metadata)
        if carriers:
            node.stream = getattr(carriers[0][0]._data, "__aiograd_stream__", None)
        node.save(context._to_save, attached, {nr for _, nr in carriers})
        context._to_save = context._dirty = context._non_differentiable = ()
        for output, nr in carriers:
            if id(output) in dirty:
                move_with_parents(output, node, nr)
                continue
            output._node, output._nr = node, nr
            shared = next((arg for arg in args if isinstance(arg, TensorCore) and arg._vc is not None and arg._vc is output._vc), None)
            if shared is not None:
                obstacle = f"the custom Function {cls.__name__} returned"
                extra_of(output).view = SpecialView(shared, None, (), {}, shared.version, output=None, is_frozen=True, obstacle=obstacle)
            elif output._x is not None:
                output._x.view = None
        mode = current_mode()
        if not mode.plain:
            note(node, mode)
        return _in_place(result, nesting, attached)

    @classmethod
    def _check_dirty(cls, dirty: tuple[Any, ...], args: tuple[Any, ...], outputs: list[Any], records: bool) -> None:
        """Count the modifications that forward declared, and raise where the graph cannot follow them."""
        what = f"{cls.__name__}.forward"
        for tensor in dirty:
            if not any(tensor is arg for arg in args):
                raise InPlaceError(f"{what}: a tensor marked dirty is not an argument of forward; mark only arguments that forward modifies in place")
            if not any(tensor is output for output in outputs):
                raise InPlaceError(f"{what}: a tensor marked dirty was not returned; return every argument that forward modifies in place")
            counter_of(tensor)[0] += 1
            if records:
                check_in_place(tensor, what)
                check_view(tensor, what)


_ARRAYS = (np.ndarray, np.inexact)
#: types that do not go into the list of outputs as they are
_NESTED = (tuple, list, dict, *_ARRAYS)


def _outputs_of(result: Any, args: tuple[Any, ...]) -> tuple[list[Any], Any]:
    """The outputs of forward as a list, and their nesting (None: one output, or a tuple of them). See Note [Outputs and their nesting]."""
    entries = list(result) if isinstance(result, tuple) else [result]
    for entry in entries:
        if not isinstance(entry, TensorCore) and isinstance(entry, _NESTED):
            break
    else:
        return entries, None
    outputs: list[Any] = []

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, TensorCore):
            if leaf.dtype.kind in "OSUmM" or leaf.dtype.names is not None:
                return leaf
            leaf = _tensor_of(leaf, args)
        outputs.append(leaf)
        return OutputPlaceholder(len(outputs) - 1)

    return outputs, map_tree(place, result, (TensorCore, *_ARRAYS))


def _tensor_of(array: Any, args: tuple[Any, ...]) -> Any:
    """A Tensor of an array that forward returned; of a copy where it shares memory with an argument, which has its own version counter."""
    tensor = asarray(array)
    hosts = (arg._data for arg in args if isinstance(arg, TensorCore))
    return tensor.clone() if any(isinstance(host, np.ndarray) and np.may_share_memory(host, tensor._data) for host in hosts) else tensor


def _in_place(result: Any, nesting: Any, outputs: list[Any]) -> Any:
    """`outputs` nested like the result of forward."""
    if nesting is not None:
        return map_tree(lambda place: outputs[place.number], nesting, OutputPlaceholder)
    return tuple(outputs) if isinstance(result, tuple) else outputs[0]


def _made_by(function: type[Function], result: Any) -> tuple[FunctionNode | None, list[Any]]:
    """The node among the outputs of a function (None where nothing was recorded), and its Tensors."""
    outputs = leaves_of(result, TensorCore)
    nodes = (output._node for output in outputs)
    return next((node for node in nodes if isinstance(node, FunctionNode) and node.function is function), None), outputs


class _Refuse(Node):
    """Node that raises when the result of a once-differentiable backward is differentiated."""

    __slots__ = ("of",)

    def __init__(self, of: str, edges: Sequence[Any]) -> None:
        super().__init__(edges)
        self.of = of

    @property
    def name(self) -> str:
        """``OnceDifferentiableBackward``."""
        return "OnceDifferentiableBackward"

    def apply(self, grads: Any) -> Any:
        """Raise."""
        raise OnceDifferentiableError(f"trying to differentiate twice a function that was marked with @once_differentiable: {self.of}")


def once_differentiable(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for ``backward``: it runs without recording, and differentiating its result is an error.

    The result depends on the gradients it was given and on the arguments of forward, so differentiating it with respect to either raises.

    Args:
        rule: a ``backward``, ``def`` or ``async def``.

    Returns:
        The ``backward`` to use in its place.

    Raises:
        OnceDifferentiableError: when it runs, on a gradient or an argument with a tangent.
    """

    def refuse(ctx: FunctionCtx, grads: Sequence[Any], outputs: Any) -> Any:
        if any(map(has_tangent, leaves_of((grads, ctx.saved_tensors), TensorCore))):
            raise OnceDifferentiableError(f"trying to differentiate a function that was marked with @once_differentiable: {rule.__qualname__}")
        if not current_mode().grad:
            return outputs
        edges: list[Any] = [(g._node, g._nr) for g in leaves_of(grads, TensorCore) if g._node is not None]
        if ctx._node is not None:
            edges += filter(None, ctx._node.next_edges)
        node = _Refuse(getattr(rule, "__qualname__", "backward"), edges)
        results = []
        for output in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
            if isinstance(output, TensorCore) and output._data.dtype.kind in "fc":
                output = make(output._data, shared_with=output)
                output._nr = node.add_input_metadata(output._data.shape, output._data.dtype, device_of(output))
                output._node = node
            results.append(output)
        return tuple(results) if isinstance(outputs, (tuple, list)) else results[0]

    if inspect.iscoroutinefunction(rule):

        @functools.wraps(rule)
        async def asynchronous(ctx: Any, *grads: Any) -> Any:
            with no_grad():
                outputs = await rule(ctx, *grads)
            return refuse(ctx, grads, outputs)

        asynchronous.is_once_differentiable = True  # type: ignore[attr-defined]
        return asynchronous

    @functools.wraps(rule)
    def synchronous(ctx: Any, *grads: Any) -> Any:
        with no_grad():
            outputs = rule(ctx, *grads)
        return refuse(ctx, grads, outputs)

    synchronous.is_once_differentiable = True  # type: ignore[attr-defined]
    return synchronous
