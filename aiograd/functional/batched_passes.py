"""Rows of a Jacobian by backward passes over one graph, and columns by runs in forward mode, as many together as fit.

Note [Rows together]
    The rows of a Jacobian are passes over one graph that differ in the gradient they start from. So the graph is recorded once, on plain arrays, and
    one call of `vmap` runs the pass for a block of one-hot gradients: rules of rows get arrays with a hidden batch axis, by the rules on Tensors that
    a pass with ``create_graph`` uses, since fused kernels take plain arrays. A rule that `vmap` cannot batch runs in its loop over the examples.

Note [Columns together]
    The columns of a Jacobian differ in the tangents of the inputs alone. One call of `vmap` around forward mode gives a block of unit tangents to one
    run of the function: values stay plain arrays, so it may read them, and tangents have a hidden batch axis.

Note [Rows one by one]
    Not everything is a computation on arrays that can be batched: gradients go to another worker, and a `Function` reads the values of its gradients
    (``numpy()``, ``if``). A graph with a part of another worker has passes for single rows from the beginning; where a value is read, the block
    that did so is run again row by row, or column by column. So is one with results that a `Function` recorded in its backward: that graph
    belongs to the batch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from aiograd.coordination.device_copies import LevelArrayError
from aiograd.errors import ArgumentError, UnusedInputError
from aiograd.functional.batching.array import BatchedArray, ValueOfBatchError
from aiograd.functional.batching.vmap import with_batch_axis
from aiograd.graph.node import Node
from aiograd.running.modes import ModeScope, enable_grad
from aiograd.tensors.core import make
from aiograd.tensors.passes import grad

#: computes tangents of a function's outputs from tangents of its inputs
Push: TypeAlias = Callable[[Sequence[Any]], Coroutine[Any, Any, tuple[Any, ...]]]


def checked_chunk_size(what: str, chunk_size: Any) -> int | None:
    """`chunk_size`, which is None or a positive integer.

    Raises:
        ArgumentError: it is something else.
    """
    if chunk_size is None or (isinstance(chunk_size, int) and not isinstance(chunk_size, bool) and chunk_size > 0):
        return chunk_size
    raise ArgumentError(f"{what}(chunk_size={chunk_size!r}): expected a positive integer, the most rows or columns at a time, or None")


def one_hot_blocks(like: Any, chunk_size: int | None) -> Iterator[Any]:
    """The unit vectors of a Tensor's elements in order: Tensors (k, *like.shape) on its device, k at most `chunk_size`."""
    step = chunk_size or max(like.size, 1)
    for start in range(0, like.size, step):
        stop = min(start + step, like.size)
        host = np.zeros((stop - start, like.size), like.dtype)
        host[np.arange(stop - start), np.arange(start, stop)] = 1
        yield make(host.reshape(stop - start, *like.shape)).to(like.device)


async def rows(
    what: str, index: int, output: Any, inputs: Sequence[Any], create_graph: bool, strict: bool, chunk_size: int | None
) -> tuple[Any, ...]:
    """The Jacobian of one output, a block per input; see Note [Rows together].

    Args:
        what: name of the calling function, for messages.
        index: number of the output.
        output: a Tensor with its graph.
        inputs: the Tensors to differentiate by.
        create_graph: let the blocks be differentiated.
        strict: raise where the output does not depend on an input, instead of returning zeros.
        chunk_size: the most rows of one pass; None: all.

    Returns:
        Per input a Tensor of shape ``output.shape + input.shape``. Cancelling stops the pass that runs.

    Raises:
        UnusedInputError: with `strict`.
    """
    found: list[Sequence[Any]] = []
    if output.requires_grad:
        together = _is_local(output._node)
        for seeds in one_hot_blocks(output, chunk_size):
            found.append(await _pass(output, inputs, seeds, create_graph, together))
    blocks: list[Any] = []
    for j, tensor in enumerate(inputs):
        pieces = [block[j] for block in found if block[j] is not None]
        if strict and not pieces:
            raise UnusedInputError(f"{what}: output {index} does not depend on input {j}. Leave out strict=True to get zeros.")
        shape = (*output.shape, *tensor.shape)
        if not pieces:
            blocks.append(make(np.zeros_like(tensor._data, shape=shape)))
            continue
        with ModeScope(grad=create_graph):
            whole: Any = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            blocks.append(whole.reshape(shape))
    return tuple(blocks)


async def columns(push: Push, values: Sequence[Any], create_graph: bool, chunk_size: int | None) -> list[tuple[Any, ...]]:
    """The Jacobian of a function, a block per input for each output; see Note [Columns together].

    Args:
        push: computes tangents of the outputs from tangents of the inputs.
        values: Tensors of the shapes of the inputs.
        create_graph: let the blocks be differentiated.
        chunk_size: the most columns of one run; None: all.

    Returns:
        Per output a tuple, per input a Tensor of shape ``output.shape + input.shape``. Cancelling stops the run.
    """
    found: list[Sequence[Any]] = []
    for tangents in _unit_tangents(values, chunk_size):
        found.append(await _run(push, tangents, create_graph))
    blocks: list[tuple[Any, ...]] = []
    with ModeScope(grad=create_graph):
        for pieces in zip(*found, strict=True):
            whole: Any = np.moveaxis(pieces[0] if len(pieces) == 1 else np.concatenate(pieces), 0, -1)
            ends = np.cumsum([tensor.size for tensor in values])
            parts = [whole[..., end - x.size : end].astype(x.dtype, copy=False) for x, end in zip(values, map(int, ends), strict=True)]
            blocks.append(tuple([part.reshape((*whole.shape[:-1], *tensor.shape)) for tensor, part in zip(values, parts, strict=True)]))
    return blocks


def _unit_tangents(values: Sequence[Any], chunk_size: int | None) -> Iterator[list[Any]]:
    """Unit tangents of all inputs together: per input a Tensor (k, *shape), zeros where it is the turn of another; one of zeros if all are empty."""
    total = sum(tensor.size for tensor in values)
    step = chunk_size or max(total, 1)
    for start in range(0, max(total, 1), step):
        stop = min(start + step, max(total, 1))
        tangents, begin = [], 0
        for tensor in values:
            host = np.zeros((stop - start, tensor.size), tensor.dtype)
            mine = np.arange(max(start, begin), min(stop, begin + tensor.size))
            host[mine - start, mine - begin] = 1
            tangents.append(make(host.reshape(stop - start, *tensor.shape)).to(tensor.device))
            begin += tensor.size
        yield tangents


async def _run(push: Push, tangents: Sequence[Any], create_graph: bool) -> Sequence[Any]:
    """The tangents (k, *output.shape) of the outputs for k tangents of the inputs."""

    async def batch(*pushed: Any) -> tuple[Any, ...]:
        return await push(pushed)

    if len(tangents[0]) > 1:
        try:
            with ModeScope(grad=create_graph):
                return await with_batch_axis(batch)(*tangents)  # type: ignore[no-any-return]
        except (ValueOfBatchError, LevelArrayError):
            pass
    single = [await push([tangent[i] for tangent in tangents]) for i in range(len(tangents[0]))]
    with ModeScope(grad=create_graph):
        return [np.stack(entries) for entries in zip(*single, strict=True)]


async def _pass(output: Any, inputs: Sequence[Any], seeds: Any, create_graph: bool, together: bool) -> Sequence[Any]:
    """The gradients (k, *input.shape) for k gradients of the output, None for an input that gets none."""

    async def pull(seed: Any) -> Sequence[Any]:
        found = await grad(output, inputs, seed, retain_graph=True, create_graph=create_graph, allow_unused=True)
        if create_graph and any(isinstance(getattr(g, "_data", None), BatchedArray) and g._node is not None for g in found):
            raise ValueOfBatchError("a gradient has a graph of its own")
        return found

    if together and len(seeds) > 1:
        try:
            with ModeScope(grad=create_graph):
                return await with_batch_axis(pull)(seeds)  # type: ignore[no-any-return]
        except (ValueOfBatchError, LevelArrayError):
            pass
    single = [await pull(seeds[i]) for i in range(len(seeds))]
    with enable_grad():
        return [None if entries[0] is None else np.stack(entries) for entries in zip(*single, strict=True)]


def _is_local(root: Node) -> bool:
    """True if no node behind this one exchanges gradients with another worker."""
    seen, stack = {root}, [root]
    while stack:
        node = stack.pop()
        if node.is_outlet or node.is_inlet:
            return False
        for child in node.next_nodes:
            if child is not None and not child.is_leaf and child not in seen:
                seen.add(child)
                stack.append(child)
    return True
