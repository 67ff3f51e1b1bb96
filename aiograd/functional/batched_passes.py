"""Rows of a Jacobian by backward passes over one graph, as many together as fit.

Note [Rows together]
    The rows of a Jacobian are passes over one graph that differ in the gradient they start from. So the graph is recorded once, on plain arrays, and
    one call of `vmap` runs the pass for a block of one-hot gradients: rules of rows get arrays with a hidden batch axis, by the rules on Tensors that
    a pass with ``create_graph`` uses, since fused kernels take plain arrays. A rule that `vmap` cannot batch runs in its loop over the examples.

Note [Rows one by one]
    What is no computation on arrays cannot be batched: gradients that go to another worker, and a `Function` that reads the values of its gradients
    (``numpy()``, ``if``). A graph with a part of another worker has passes for single rows from the beginning; where a value is read, the block
    that did so is run again row by row. So is one with results that a `Function` recorded in its backward: that graph belongs to the batch alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError, UnusedInputError
from aiograd.functional.batching.array import BatchedArray, ValueOfBatchError
from aiograd.functional.batching.vmap import vmap
from aiograd.graph.node import Node
from aiograd.running.modes import ModeScope, enable_grad
from aiograd.tensors.core import make
from aiograd.tensors.passes import grad


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
                return await vmap(pull)(seeds)  # type: ignore[no-any-return]
        except ValueOfBatchError:
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
