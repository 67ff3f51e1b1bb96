"""Backward through one stage of a pipeline: whole, or the gradients of its inputs first and of its weights later.

The halves are passes of the engine (`aiograd.engine.split_backward`); here is the code around them: nested outputs and gradients, gradients lined up
with inputs, and errors that name the stage's arguments.

Source: PyTorch ``distributed/pipelining/_backward.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from aiograd.engine.run import current_engine, new_graph_task
from aiograd.engine.split_backward import InputPlan, ParameterGroup, WeightPlan
from aiograd.errors import ArgumentError, ArgumentTypeError, ModifiedError, StageBackwardError
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.graph.gradient_edge import GradientEdge
from aiograd.graph.node import Node
from aiograd.pipeline.tree import describe, differentiable_outputs
from aiograd.running.exceptions import text_of
from aiograd.tensors.core import TensorCore, extra_of, make, move_to
from aiograd.tensors.passes import edge_of, roots_and_seeds


async def stage_backward(stage_output: Any, output_grads: Any, input_values: Sequence[Any]) -> tuple[Any, ...]:
    """Backward through a stage: gradients are added to every leaf, and the inputs' gradients are returned.

    Args:
        stage_output: the outputs of the stage: a Tensor, or nested tuples, lists and dicts of Tensors and anything else. A GradientEdge may stand for
            a Tensor, which then need not be kept. Tensors without a graph are skipped.
        output_grads: nested in the same way; a Tensor (or None) for each Tensor, None for a whole branch leaves it out. None is enough for a
            loss of one element.
        input_values: the arguments that the stage was called with, in order.

    Returns:
        One entry per input: its ``grad``, which is None afterwards; None for an input that is no Tensor or got no gradient. A Tensor that is listed
        several times has its gradient at the first place.

    Raises:
        StageBackwardError: the backward failed; the cause is chained; no gradient has changed unless its ``committed`` is True. Cancelling stops the
            pass.

    >>> layer = ag.nn.Linear(2, 1)
    >>> x = ag.ones(3, 2).requires_grad_()
    >>> (grad,) = await ag.pipeline.stage_backward(layer(x), ag.ones(3, 1), [x])
    >>> grad.shape, layer.weight.grad
    ((3, 2), tensor([[3., 3.]]))
    """
    try:
        return await _whole(stage_output, output_grads, _inputs(input_values))
    except Exception as error:
        raise _failure("stage backward", error, stage_output, output_grads, input_values) from error


async def stage_backward_input(
    outputs: Any, output_grads: Any, inputs: Sequence[Any], weights: Iterable[Any], *, retain_graph: bool = False
) -> tuple[tuple[Any, ...], list[ParameterGroup]]:
    """The first half of a backward pass: gradients of the stage's inputs only.

    No weight's ``grad`` changes. The values that the weights need are kept in groups for `stage_backward_weight`; the other saved values are freed,
    and the outputs are detached in place.

    Args:
        outputs: as `stage_output` of `stage_backward`; a list of Tensors, or a loss.
        output_grads: as for `stage_backward`; None: ones for every output.
        inputs: the arguments that the stage was called with, in order.
        weights: the parameters of the stage. Tensors other than leaves that require grad are skipped.
        retain_graph: free nothing.

    Returns:
        ``(dinputs, param_groups)``: one gradient (or None) per input, which has also been added to the input's ``grad``, as `stage_backward` lines
        them up; and the groups, in the order of `weights`.

    Raises:
        StageBackwardError: the backward failed; the cause is chained; no gradient has changed. Cancelling stops the pass.

    >>> layer = ag.nn.Linear(2, 1)
    >>> x = ag.ones(3, 2).requires_grad_()
    >>> (grad,), groups = await ag.pipeline.stage_backward_input([layer(x)], [ag.ones(3, 1)], [x], layer.parameters())
    >>> grad.shape, len(groups), layer.weight.grad
    ((3, 2), 1, None)
    """
    try:
        return await _first_half(outputs, output_grads, _inputs(inputs), _leaves(weights), retain_graph)
    except Exception as error:
        raise _failure("stage backward for its inputs", error, outputs, output_grads, inputs) from error


async def stage_backward_weight(
    weights: Iterable[Any], param_groups: Iterable[ParameterGroup], retain_graph: bool = False
) -> tuple[Any, ...]:
    """The second half of a backward pass: gradients of the weights, all committed at once.

    Args:
        weights: the weights with wanted gradients: all that `stage_backward_input` took, or the weights of some of its groups; other groups stay for
        later.
        param_groups: the results of `stage_backward_input` for one or several microbatches. They are emptied.
        retain_graph: leave the groups as they are, for another pass.

    Returns:
        The ``grad`` of each weight, in order; None for a value that is no Tensor or has no gradient.

    Raises:
        StageBackwardError: the backward failed; the cause is chained; no gradient has changed unless its ``committed`` is True. Cancelling stops the
            pass.

    >>> layer = ag.nn.Linear(2, 1)
    >>> x = ag.ones(3, 2).requires_grad_()
    >>> _, groups = await ag.pipeline.stage_backward_input([layer(x)], [ag.ones(3, 1)], [x], layer.parameters())
    >>> await ag.pipeline.stage_backward_weight([layer.weight, layer.bias], groups)
    (tensor([[3., 3.]]), tensor([3.]))
    """
    listed: Any = weights
    try:
        if not isinstance(weights, TensorCore):  # which would be taken apart
            listed = list(weights)
        return await _second_half(listed, list(param_groups), retain_graph)
    except Exception as error:
        raise _failure("stage backward for its weights", error, None, None, listed) from error


# -------------------------------------------------------------------- the passes


async def _whole(output: Any, output_grads: Any, inputs: list[TensorCore | None]) -> tuple[Any, ...]:
    outputs, grads = differentiable_outputs(output, output_grads)
    if outputs:
        roots, seeds = roots_and_seeds("stage_backward()", outputs, grads, False)
        retained = [(tensor, _retain(tensor)) for _, tensor in _first_of_each(inputs) if tensor.requires_grad and not tensor.is_leaf]
        try:
            running = current_engine().run(new_graph_task(roots, seeds))
            del roots, seeds, outputs, grads
            await running
        finally:
            for tensor, node in retained:
                if node is not None:
                    _stop_retaining(tensor, node)
    return tuple([_take_grad(tensor) for tensor in inputs])


async def _first_half(
    output: Any, output_grads: Any, inputs: list[TensorCore | None], weights: list[AccumulateGrad | None], retain_graph: bool
) -> tuple[tuple[Any, ...], list[ParameterGroup]]:
    found = [(i, tensor) for i, tensor in _first_of_each(inputs) if tensor.requires_grad]
    if output_grads is None:
        output_grads = _ones(output)
    outputs, grads = differentiable_outputs(output, output_grads)
    dinputs: list[Any] = [None] * len(inputs)
    if not outputs:
        return tuple(dinputs), []
    roots, seeds = roots_and_seeds("stage_backward_input()", outputs, grads, False)
    wanted = [edge_of("stage_backward_input()", i, tensor) for i, tensor in found]
    leaves = [leaf for leaf in weights if leaf is not None]
    plan = InputPlan(roots, seeds, wanted, leaves)
    results = await current_engine().run(new_graph_task(plan=plan, keep_graph=retain_graph))
    groups = plan.groups()
    del plan
    _watch(groups, [*grads, *results])
    while found:
        (i, tensor), grad = found.pop(), results.pop()
        dinputs[i] = grad
        if grad is not None:
            _add_grad(tensor, grad)
    for item in outputs:
        if isinstance(item, TensorCore):
            _leave_graph(item)
    return tuple(dinputs), groups


async def _second_half(weights: list[Any], groups: list[ParameterGroup], retain_graph: bool) -> tuple[Any, ...]:
    wanted = {leaf for leaf in _leaves(weights) if leaf is not None}
    run: list[ParameterGroup] = []
    for i, group in enumerate(groups):
        if not isinstance(group, ParameterGroup):
            raise ArgumentTypeError(f"param_groups[{i}] is a {type(group).__name__}; expected what stage_backward_input() has returned")
        if wanted.isdisjoint(group.nodes):
            continue
        if not wanted.issuperset(group.nodes):
            raise ArgumentError(
                f"param_groups[{i}] has {len(group.nodes)} weights, and {len(wanted.intersection(group.nodes))} of them are listed; they can only be "
                "computed together: list all of them"
            )
        for tensor, version in group.watched:
            if tensor.version != version:
                raise ModifiedError(
                    f"a gradient of shape {list(tensor.shape)} that stage_backward_input() was given or has returned has been modified by an inplace "
                    "operation, and the weights still need it: modify a clone of it"
                )
        run.append(group)
    if run:
        await current_engine().run(new_graph_task(plan=WeightPlan(run, keep_graph=retain_graph), keep_graph=retain_graph))
    return tuple([weight.grad if isinstance(weight, TensorCore) else None for weight in weights])


# -------------------------------------------------------------------- arguments


def _inputs(values: Sequence[Any]) -> list[TensorCore | None]:
    if isinstance(values, TensorCore) or not isinstance(values, (tuple, list)):
        raise ArgumentTypeError(f"the inputs are a {type(values).__name__}; expected a tuple or list of what the stage was called with")
    return [value if isinstance(value, TensorCore) else None for value in values]


def _first_of_each(inputs: list[TensorCore | None]) -> list[tuple[int, TensorCore]]:
    seen: set[int] = set()
    found: list[tuple[int, TensorCore]] = []
    for i, tensor in enumerate(inputs):
        if tensor is not None and id(tensor) not in seen:
            seen.add(id(tensor))
            found.append((i, tensor))
    return found


def _leaves(weights: Iterable[Any]) -> list[AccumulateGrad | None]:
    if isinstance(weights, TensorCore):
        raise ArgumentTypeError("the weights are a Tensor; expected an iterable of them")
    leaves: list[AccumulateGrad | None] = []
    for i, weight in enumerate(weights):
        if weight is not None and not isinstance(weight, TensorCore):
            raise ArgumentTypeError(f"weights[{i}] is a {type(weight).__name__}; expected a Tensor")
        if weight is not None and not weight.is_leaf:
            raise ArgumentError(f"weights[{i}], of shape {list(weight.shape)}, was made by an operation; expected a leaf, such as a parameter")
        leaves.append(None if weight is None else weight._node)  # type: ignore[arg-type]
    return leaves


def _ones(output: Any) -> Any:
    """A gradient of ones for every Tensor of `output`, nested as it is.

    Raises:
        ArgumentError: a GradientEdge is among them; its values are not known.
    """
    if isinstance(output, GradientEdge):
        raise ArgumentError("a GradientEdge as an output requires output gradients: pass the gradient of each output")
    if isinstance(output, TensorCore):
        return make(np.ones_like(output._data)) if output.requires_grad else None
    if isinstance(output, (tuple, list)):
        return [_ones(item) for item in output]
    return {key: _ones(item) for key, item in output.items()} if isinstance(output, dict) else None


# -------------------------------------------------------------------- gradients


def _take_grad(tensor: TensorCore | None) -> Any:
    if tensor is None:
        return None
    grad = tensor.grad
    if grad is not None:
        tensor.grad = None
    return grad


def _add_grad(tensor: TensorCore, grad: Any) -> None:
    """Add to a tensor's ``grad``, out of place."""
    have = tensor.grad
    tensor.grad = grad.detach() if have is None else have.detach() + grad


def _retain(tensor: TensorCore) -> Node | None:
    """Make a non-leaf retain its gradient; returns the node where the gradient arrives, None if it is retained already."""
    if tensor.retains_grad:
        return None
    tensor.retain_grad()
    return tensor._node


def _stop_retaining(tensor: TensorCore, node: Node) -> None:
    node.extra.retain_hooks.pop(tensor._nr, None)
    extra_of(tensor).retains = None


def _watch(groups: list[ParameterGroup], grads: list[Any]) -> None:
    """Note in each group the gradients that the caller has and that share memory with the group's arrays, each with its version."""
    given = [grad for grad in grads if grad is not None and isinstance(grad._data, np.ndarray)]
    for group in groups:
        kept = [term.grad for term in group.terms]
        for start in group.starts:
            kept += start.grads
        for grad in given:
            for array in kept:
                if isinstance(array, np.ndarray) and _may_share_memory(grad._data, array):
                    group.watched.append((grad, grad.version))
                    break


def _may_share_memory(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """As `numpy.may_share_memory`, which takes ten times as long: quick answers for an array and itself, and for two arrays that own their memory."""
    return one is other or ((one.base is not None or other.base is not None) and np.may_share_memory(one, other))


def _leave_graph(tensor: TensorCore) -> None:
    """Detach in place, a view as well."""
    if tensor._node is None or tensor._node.is_leaf:
        return
    if tensor._x is not None:
        tensor._x.view = None
    move_to(tensor, None, 0)


def _failure(what: str, error: Exception, outputs: Any, grads: Any, inputs: Any) -> StageBackwardError:
    text = f"Failed to run {what}: {type(error).__name__}: {text_of(error)}\n"
    if outputs is not None:
        text += f"stage output: {describe(outputs)}\noutput gradient: {describe(grads)}\ninput: {describe(inputs)}"
    else:
        text += f"weights: {describe(inputs)}"
    failure = StageBackwardError(text)
    failure.committed = getattr(error, "committed", False)
    return failure
