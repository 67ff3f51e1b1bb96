"""Isolated passes: forward and backward of one call, outside of the caller's graph.

Source: hivemind, ``run_isolated_forward`` and ``run_isolated_backward`` of its ``moe/client`` as of May 2020, with the contract its docstrings
state; see Note [What upstream meant].

Note [What upstream meant]
    The forward returns the context first and then the outputs; a function that returns a bare Tensor has one output; the backward returns one
    gradient per argument, None for an argument that is no Tensor. Here the function may also be any callable on Tensors, differentiated by
    the engine, and may be ``async def``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiograd.engine.run import current_engine, new_graph_task
from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.functional.function import Function
from aiograd.functional.function_node import FunctionNode
from aiograd.functional.isolation.graph_boundary import GraphBoundary, edge_of
from aiograd.graph.current import CURRENT
from aiograd.graph.node import Node
from aiograd.running.modes import ModeScope, current_mode, is_grad_enabled
from aiograd.running.offloading import offload
from aiograd.running.trees import leaves_of, map_tree
from aiograd.tensors.core import TensorCore, make, outside


class Output:
    """A Tensor among what an isolated forward returned."""

    __slots__ = ("edge",)

    def __init__(self, edge: tuple[Node, int] | None) -> None:
        #: its gradient edge; None: it does not require grad
        self.edge = edge


class IsolatedContext:
    """The graph that an isolated forward has recorded for its backward, separated from the caller's graph.

    For a `Function` class, ``saved_tensors`` and the attributes that its forward set belong to its own context.

    Args:
        needs: as `needs_input_grad`.
        outputs: the outputs, nested as they were.
        boundary: where the recorded graph ends.
        arguments: for each argument the number of the boundary's input where its gradient arrives, or None.
        function: the context of a `Function`, or None.

    Attributes:
        needs_input_grad: per argument, True if it is a Tensor that required grad.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> context, (y,) = await ag.parallel.run_isolated_forward(ag.sin, x)
    >>> type(context).__name__, y.requires_grad
    ('IsolatedContext', False)
    """

    __slots__ = ("needs_input_grad", "_outputs", "_boundary", "_arguments", "_function")

    def __init__(
        self, needs: tuple[bool, ...], outputs: tuple[Any, ...], boundary: GraphBoundary, arguments: tuple[int | None, ...], function: Any
    ) -> None:
        self.needs_input_grad: tuple[bool, ...] = needs
        #: the outputs, nested as they were, with an `Output` in the place of each Tensor
        self._outputs = outputs
        self._boundary = boundary
        #: per argument: the number of the boundary's input where its gradient arrives
        self._arguments = arguments
        #: the context of the `Function`, if the function is one
        self._function = function

    def __getattr__(self, name: str) -> Any:
        function = object.__getattribute__(self, "_function")
        if name.startswith("__") or function is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(function, name)

    @property
    def num_tensors(self) -> int:
        """The number of Tensors among the outputs."""
        return len(leaves_of(self._outputs, Output))

    @property
    def carries_gradients(self) -> list[bool]:
        """For each Tensor among the outputs, True if it requires grad."""
        return [output.edge is not None for output in leaves_of(self._outputs, Output)]

    @property
    def closure(self) -> list[tuple[int, tuple[Node, int]]]:
        """Dependencies of the function besides its arguments: inputs of the boundary, and the edges they stand for."""
        own = set(self._arguments)
        return [(number, target) for number, target in enumerate(self._boundary.targets) if number not in own]

    def stand_in(self, number: int) -> Any:
        """A Tensor without values; its gradient edge is the target of a boundary input; used as an argument of a new node to give it that edge.

        Args:
            number: number of the boundary's input.

        Returns:
            The Tensor.
        """
        node, nr = self._boundary.targets[number]
        metadata = node.metadata_of(nr)
        dtype = np.dtype(np.float32) if metadata is None else metadata.dtype
        tensor = make(np.broadcast_to(np.zeros((), dtype), () if metadata is None else metadata.shape))
        tensor._node, tensor._nr = node, nr
        return tensor

    def run(self, grads: Sequence[Any], keep_graph: bool) -> Any:
        """A coroutine that returns the gradients at every input of the boundary; `grads` belong to the Tensors among the outputs, in order.

        Args:
            grads: one for each Tensor among the outputs, None where there is none.
            keep_graph: keep what backward needs, for another run.

        Returns:
            A coroutine; cancelling it stops the pass.
        """
        roots: list[tuple[Node, int]] = []
        seeds: list[Any] = []
        for output, grad in zip(leaves_of(self._outputs, Output), grads, strict=True):
            if output.edge is not None and grad is not None:
                roots.append(output.edge)
                seeds.append((grad if isinstance(grad, TensorCore) else make(grad))._data)
        return self._run(roots, seeds, keep_graph)

    async def _run(self, roots: list[tuple[Node, int]], seeds: list[Any], keep_graph: bool) -> list[Any]:
        self._boundary.check_local()
        wanted = [(self._boundary, number) for number in range(self._boundary.num_inputs)]
        if not roots or not wanted:
            return [None] * len(wanted)
        return await current_engine().run(new_graph_task(roots, seeds, inputs=wanted, keep_graph=keep_graph))

    @property
    def is_crossed(self) -> bool:
        """True if the function has called other workers with what requires grad."""
        return self._boundary.is_crossed

    def check_local(self) -> None:
        """Raise if the function has called other workers; see `is_crossed`."""
        self._boundary.check_local()

    def join(self, args: Sequence[Any], outputs: Any, sequence: int) -> None:
        """Make the recorded graph a part of the graph of the arguments, and attach the detached outputs to it.

        Args:
            sequence: as for `GraphBoundary.open`.
            args: the arguments of the call.
            outputs: its detached outputs.
        """
        targets = list(self._boundary.targets)
        for arg, number in zip(args, self._arguments, strict=True):
            if number is not None:
                targets[number] = (arg._node, arg._nr)
        self._boundary.open(targets, sequence)
        collect = current_mode().collect
        if collect is not None:
            collect(self._boundary)
        for tensor, output in zip(leaves_of(outputs, TensorCore), leaves_of(self._outputs, Output), strict=True):
            if output.edge is not None:
                tensor._node, tensor._nr = output.edge

    def of_arguments(self, captured: Sequence[Any]) -> tuple[Any, ...]:
        """The gradients of the arguments among those at the boundary.

        Args:
            captured: the result of `run`.

        Returns:
            One for each argument, None where it has none.
        """
        return tuple(None if number is None else captured[number] for number in self._arguments)


async def run_isolated_forward(fn: Any, *args: Any) -> tuple[IsolatedContext, tuple[Any, ...]]:
    """Run a function on detached arguments; the caller's graph and modes see nothing of it.

    A `Function` class or plain function runs on the executor (a Function with ``inline = True`` on the loop), an ``async def`` on the loop.
    Cancelling cancels an ``async def``; a function on the executor runs to its end and its result is dropped.

    Args:
        fn: a `Function` class, or a callable on Tensors, ``def`` or ``async def``.
        args: Tensors (their ``requires_grad`` counts, their graph does not), and anything else, which passes through untouched.

    Returns:
        The context for `run_isolated_backward`, and a tuple of the function's outputs, Tensors detached. A result that is no tuple or list is one
        output; outputs may be nested.

    Raises:
        ArgumentTypeError: `fn` cannot be called, or returned None. ContextError: `fn` has called another worker with a Tensor that requires grad.
        Exceptions of `fn` pass through.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> context, (y,) = await ag.parallel.run_isolated_forward(lambda x: x * x, x)
    >>> y
    tensor([1., 4.])
    """
    context, outputs = await isolate(fn, *args)
    if is_grad_enabled():
        context.check_local()
    return context, outputs


async def isolate(fn: Any, *args: Any) -> tuple[IsolatedContext, tuple[Any, ...]]:
    """Run a function as `run_isolated_forward` does, but allow it to call other workers; the caller checks for that."""
    call = _callable(fn)
    needs = tuple(isinstance(arg, TensorCore) and arg.requires_grad for arg in args)
    detached = [outside(arg).requires_grad_(need) if isinstance(arg, TensorCore) else arg for arg, need in zip(args, needs, strict=True)]
    nodes: list[Node] = []
    with ModeScope(grad=True, collect=nodes.append):
        result = await call_in_place(fn, call, *detached)
    if result is None:
        raise ArgumentTypeError(f"{_name(fn)} returned None; expected a Tensor or several. Was `return` forgotten?")
    outputs = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    if not any(node.is_inlet for node in nodes):
        nodes = [node for node in nodes if not node.is_outlet]  # a value fetched with nothing sent belongs to the graph around
    elif (collect := current_mode().collect) is not None:
        for each in nodes:
            collect(each)
    boundary = GraphBoundary(nodes)
    inside = set(nodes)

    def output_of(tensor: Any) -> Output:
        edge = edge_of(tensor)
        return Output(edge if edge is None or edge[0] in inside else (boundary, boundary.number_of(*edge)))

    outline = map_tree(output_of, outputs, TensorCore)
    arguments = tuple(boundary.number_of(*edge_of(tensor)) if need else None for tensor, need in zip(detached, needs, strict=True))  # type: ignore[misc]
    made_by = (tensor._node for tensor in leaves_of(outputs, TensorCore))
    node = next((node for node in made_by if isinstance(node, FunctionNode)), None)
    own = node.context.for_run(node, None) if node is not None and node.function is fn else None
    return IsolatedContext(needs, outline, boundary, arguments, own), map_tree(lambda tensor: make(tensor._data), outputs, TensorCore)


async def call_in_place(fn: Any, call: Callable[..., Any], *args: Any) -> Any:
    """Call a function where it belongs: an ``async def`` on the loop, another on the executor, or on the loop if it says ``inline = True``.

    Cancelling cancels an ``async def``; a function on the executor runs to its end and its result is dropped.

    Args:
        fn: the function; it says where it belongs.
        call: called in its place.
        args: its arguments.

    Returns:
        The result, awaited where it is a coroutine.
    """
    if _is_async(fn):
        return await call(*args)
    if getattr(fn, "inline", False) is True:
        return call(*args)
    result = await offload(_keep_coroutine(call), *args)
    return await result.coroutine if isinstance(result, _Later) else result


async def run_isolated_backward(fn: Any, ctx: IsolatedContext, *grads: Any) -> tuple[Any, ...]:
    """The gradients of the arguments of an isolated forward.

    Parameters that the function uses besides its arguments accumulate into their ``grad``, as in any backward pass. Runs once, unless the
    pass that it is part of keeps its graph. Cancelling stops the pass; nothing is accumulated then.

    Args:
        fn: the function of the forward.
        ctx: the context that the forward returned.
        grads: one per output, Tensor or None; nested as the output is.

    Returns:
        One gradient per argument: a Tensor, or None for an argument that is no Tensor, required no grad or got no gradient.

    Raises:
        ArgumentError: not one gradient per output. ArgumentTypeError: `ctx` is no such context. Exceptions of the function's backward pass through.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> square = lambda x: x * x
    >>> context, _ = await ag.parallel.run_isolated_forward(square, x)
    >>> await ag.parallel.run_isolated_backward(square, context, ag.ones(2))
    (tensor([2., 4.]),)
    """
    flat = gradients_of(ctx, grads)
    current = CURRENT.get()
    keep = current is not None and current.task.keep_graph
    captured = await ctx.run(flat, keep)
    rest = [(target, captured[number]) for number, target in ctx.closure if captured[number] is not None]
    if rest:
        task = new_graph_task([target for target, _ in rest], [grad._data for _, grad in rest], keep_graph=keep)
        await current_engine().run(task)
    return ctx.of_arguments(captured)


def gradients_of(ctx: Any, grads: Sequence[Any]) -> list[Any]:
    """The gradient of each Tensor among the outputs of an isolated forward, in order.

    Raises:
        ArgumentTypeError: `ctx` is no such context. ArgumentError: `grads` do not fit its outputs.
    """
    if not isinstance(ctx, IsolatedContext):
        raise ArgumentTypeError(f"run_isolated_backward: expected the context that run_isolated_forward returned first, found {type(ctx).__name__}")
    if len(grads) != len(ctx._outputs):
        raise ArgumentError(f"run_isolated_backward: got {len(grads)} gradients for {len(ctx._outputs)} outputs; pass one (or None) per output")
    found: list[Any] = []
    for i, (output, grad) in enumerate(zip(ctx._outputs, grads, strict=True)):
        _collect(output, grad, f"gradient {i}", found)
    return found


def _collect(output: Any, grad: Any, place: str, found: list[Any]) -> None:
    if grad is None:
        found += [None] * len(leaves_of(output, Output))
    elif isinstance(output, Output):
        metadata = None if output.edge is None else output.edge[0].metadata_of(output.edge[1])
        if metadata is not None and (not isinstance(grad, (TensorCore, np.ndarray)) or tuple(grad.shape) != metadata.shape):
            has = f"shape {list(grad.shape)}" if hasattr(grad, "shape") else type(grad).__name__
            raise ArgumentError(f"run_isolated_backward: {place} has {has}, its output has shape {list(metadata.shape)}")
        found.append(grad)
    elif isinstance(output, (tuple, list, dict)):
        keys = list(output) if isinstance(output, dict) else list(range(len(output)))
        given = set(grad if isinstance(grad, dict) else range(len(grad))) if isinstance(grad, (tuple, list, dict)) else None
        if given != set(keys) or isinstance(grad, dict) != isinstance(output, dict):
            raise ArgumentError(
                f"run_isolated_backward: {place} is not nested as its output, a {type(output).__name__} of {len(output)}; pass one or None per entry"
            )
        for key in keys:
            _collect(output[key], grad[key], f"{place}[{key!r}]", found)


class _Later:
    """A coroutine that a plain function returned, on its way back from the executor."""

    __slots__ = ("coroutine",)

    def __init__(self, coroutine: Any) -> None:
        self.coroutine = coroutine


def _keep_coroutine(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        result = call(*args)
        return _Later(result) if inspect.iscoroutine(result) else result

    return run


def _callable(fn: Any) -> Callable[..., Any]:
    if inspect.isclass(fn) and issubclass(fn, Function):
        return fn.apply
    if not callable(fn) or inspect.isclass(fn):
        found = f"the class {fn.__name__}" if inspect.isclass(fn) else type(fn).__name__
        raise ArgumentTypeError(f"expected a Function class or a callable on Tensors, found {found}")
    return fn  # type: ignore[no-any-return]


def _name(fn: Any) -> str:
    return f"{fn.__name__}.forward" if inspect.isclass(fn) else getattr(fn, "__qualname__", None) or type(fn).__name__


def _is_async(fn: Any) -> bool:
    target = getattr(fn, "forward", fn) if inspect.isclass(fn) else fn
    return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(getattr(target, "__call__", None))  # noqa: B004
