"""map_with_parallel_backward: one graph node for many calls of one function, all of them at the same time, forward and backward.

Source: hivemind, ``map_with_parallel_backward`` (May 2020) and the later fixes of its contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiograd.engine.run.together import together
from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.functional.function import Function, once_differentiable
from aiograd.functional.isolation import IsolatedContext, isolate
from aiograd.graph.current import CURRENT
from aiograd.graph.node import _next_sequence
from aiograd.running.modes import is_grad_enabled
from aiograd.running.trees import leaves_of, map_tree
from aiograd.tensors.core import TensorCore


class ParallelMap(Function):
    """The one node of all calls: its arguments are the arguments of every call, and the other Tensors that the function depends on."""

    @staticmethod
    def forward(ctx: Any, runs: Sequence[IsolatedContext], outputs: Sequence[Any], *inputs: Any) -> tuple[Any, ...]:
        """Hand out the Tensors that were computed."""
        ctx.runs = runs
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    async def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Backward of all calls at once."""
        current = CURRENT.get()
        keep = current is not None and current.task.keep_graph
        passes = []
        position = 0
        for run in ctx.runs:
            count = run.num_tensors
            passes.append(run.run(grads[position : position + count], keep))
            position += count
        captured = await together(passes)
        flat: list[Any] = [None, None]
        for run, found in zip(ctx.runs, captured, strict=True):
            flat += run.of_arguments(found)
        for run, found in zip(ctx.runs, captured, strict=True):
            flat += [found[number] for number, _ in run.closure]
        return tuple(flat)


async def map_with_parallel_backward(fn: Any, *args_per_call: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
    """Apply one function to several argument sets, at the same time; backward of all of them runs at the same time as well.

    The calls are one node of the graph: what depends on any output waits for all calls, and backward begins when the gradients of all outputs
    are there. Arguments reach the function detached. Parameters that the function uses besides its arguments get their gradients too.
    The result can be differentiated once. Where a call has called other workers with what requires grad, the calls are an ordinary part of the graph
    instead, which `Context.backward` takes through these workers; their backward overlaps all the same.

    Cancelling cancels the calls and waits for the ``async def`` ones, for the engine's `cancel_grace` at most. If a call raises, the other calls are
    cancelled likewise, and its error is raised.

    Args:
        fn: a `Function` class, or a callable on Tensors, ``def`` (runs on the executor) or ``async def`` (on the loop).
        args_per_call: one tuple of arguments per call, all of the same length; values that are no Tensors pass through.

    Returns:
        One tuple of outputs per call, in the order of the calls; a result that is no tuple or list is a tuple of one. Outputs may be nested in
        tuples, lists and dicts.

    Raises:
        ArgumentError: the tuples differ in length. ArgumentTypeError: arguments that are no tuple; a call returned None. The error of a call.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> (y,), (z,) = await ag.parallel.map_with_parallel_backward(lambda x: x * x, (x,), (x + 1,))
    >>> await (y + z).sum().backward()
    >>> x.grad
    tensor([ 6., 10.])
    """
    for number, args in enumerate(args_per_call):
        if not isinstance(args, Sequence) or isinstance(args, str):
            raise ArgumentTypeError(
                f"map_with_parallel_backward: the arguments of call {number} are a {type(args).__name__}; expected a tuple, (x,) for a function of x"
            )
    calls = [tuple(args) for args in args_per_call]
    if len({len(args) for args in calls}) > 1:
        lengths = ", ".join(str(len(args)) for args in calls)
        raise ArgumentError(f"All input sets must have the same number of arguments, found {lengths}")
    numbers = [_next_sequence() for _ in calls]  # lower than the numbers of the nodes that the calls record
    done = await together([isolate(fn, *args) for args in calls])
    runs = [context for context, _ in done]
    outputs = [outputs for _, outputs in done]
    if is_grad_enabled() and any(run.is_crossed for run in runs):
        for run, args, each, number in zip(runs, calls, outputs, numbers, strict=True):
            run.join(args, each, number)
    elif is_grad_enabled():
        arguments = [arg for args in calls for arg in args]
        closure = [run.stand_in(number) for run in runs for number, _ in run.closure]
        recorded = iter(ParallelMap.apply(tuple(runs), leaves_of(outputs, TensorCore), *arguments, *closure))
        outputs = [map_tree(lambda _: next(recorded), each, TensorCore) for each in outputs]
    return tuple(outputs)
