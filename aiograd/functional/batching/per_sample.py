"""Gradients of every example of a batch, and their norms.

Note [Stand-ins of parameters]
    The loss runs once, on the hidden batch axis of `vmap`, and is differentiated within it: gradients there have the batch in front. A parameter that
    meets an example is taken over by the level (`AdoptsTensors`): a leaf of the level's own stands for it, so the loss may reach its parameters in
    any way and nothing is swapped. A Tensor that was computed from parameters alone, such as ``weight.T``, is taken over likewise; its gradients are
    then led on to the parameters, example by example.

Note [Norms without gradients]
    Where a matrix meets examples in products only, its gradient is a sum of outer products, and the rows of these products name the factors
    (``norm=`` of `aiograd.ops.op.define`). The pass then ends at the products: the factors are what it brings there. Of one pair the norm is the
    product of both norms; of T pairs it follows from two Gram matrices, T x T, or from the gradient of one example at a time, whichever is smaller.
    Sums are of float64: in float32 the terms of a Gram matrix cancel, and a norm that comes out too small would break a privacy promise.

Source: Goodfellow, Efficient per-example gradient computations (2015); Li et al., Large language models can be strong differentially private
learners (2022), for the Gram matrices; Bu et al., Differentially private optimization on large model at small cost (2023), for the one pass.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from aiograd.array_functions import conversion
from aiograd.errors import ArgumentError, ArgumentTypeError, ModifiedError, ShapeError
from aiograd.functional.batching import rules as rules
from aiograd.functional.batching.array import BatchedArray, BatchLevel
from aiograd.graph.gradient_edge import GradientEdge
from aiograd.kernels.layout import scatter_rows
from aiograd.ops.op import rule_names
from aiograd.running.devices import register_device, unregister_device
from aiograd.running.modes import enable_grad, no_grad
from aiograd.running.offloading import ready
from aiograd.running.random_streams import RefusedDraws
from aiograd.tensors.core import TensorCore, counter_of, make
from aiograd.tensors.op_node import OpNode
from aiograd.tensors.passes import grad

Loss = Callable[..., Any]
#: below this, squares of float32 may have been rounded to 0
_SMALL = 1e-25


class PerSampleLevel(BatchLevel):
    """A call of a loss: its Tensors that require grad are leaves of the level; see Note [Stand-ins of parameters].

    Args:
        size: examples.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.records = False
        #: by the place in the caller's graph: the Tensor, its leaf, and how often it had been modified when the loss read it
        self.leaves: dict[tuple[int, int], tuple[Any, Any, int]] = {}

    def adopt(self, tensor: Any) -> Any:
        """A leaf of the level for a Tensor that requires grad, the same at every use; else an array as for `vmap`."""
        if not tensor.requires_grad:
            return super().adopt(tensor)
        key = (id(tensor._node), tensor._nr)
        if key not in self.leaves:
            self.leaves[key] = (tensor, make(super().adopt(tensor.detach())).requires_grad_(), counter_of(tensor)[0])
        return self.leaves[key][1]

    def host(self, array: Any) -> Any:
        """The values of all examples, with the batch in front."""
        value = array.value if isinstance(array, BatchedArray) else make(array)
        batched = isinstance(array, BatchedArray) and array.batched
        return np.asarray((value if batched else value.broadcast_to((self.size, *value.shape))).cpu()._data)


class Factors(NamedTuple):
    """Per example, T pairs of vectors with outer products that add up to the gradient; arrays of the host.

    ``a``: (B, T, m), or integers (B, T) for rows of zeros with a one there. ``b``: (B, T, n).
    """

    a: Any
    b: Any
    shape: tuple[int, ...]

    def squares(self) -> Any:
        """The squared norm of the gradient of each example, (B,) of float64; see Note [Norms without gradients]."""
        a, b = self.a, self.b
        examples, pairs = b.shape[:2]
        if a.ndim == 2:  # add the vectors of one row of one example
            keys, place = np.unique(np.arange(examples)[:, None] * self.shape[0] + a, return_inverse=True)
            rows = scatter_rows(b.reshape(-1, b.shape[-1]).astype(np.float64), place.reshape(-1), len(keys))
            return np.bincount(keys // self.shape[0], weights=_squares(rows), minlength=examples)
        if pairs == 1:
            return _squares(a) * _squares(b)
        if 2 * pairs**2 <= math.prod(self.shape):
            grams = ((x @ x.T for x in (u.astype(np.float64), v.astype(np.float64))) for u, v in zip(a, b, strict=True))
            return np.array([np.vdot(first, second) for first, second in grams])
        return np.concatenate([_squares((u.T @ v)[None]) for u, v in zip(a, b, strict=True)])

    def weighted(self, weights: Any) -> Any:
        """The sum of the gradients, each times its weight (B,)."""
        a, b = self.a, (self.b * weights.astype(self.b.dtype)[:, None, None]).reshape(-1, self.b.shape[-1])
        total = scatter_rows(b, a.reshape(-1), self.shape[0]) if a.ndim == 2 else a.reshape(-1, a.shape[-1]).T @ b
        return total.reshape(self.shape)


class Formed(NamedTuple):
    """Gradients as they are, (B, *shape), of the host."""

    each: Any

    def squares(self) -> Any:
        """The squared norm of each, (B,) of float64."""
        return _squares(self.each)

    def weighted(self, weights: Any) -> Any:
        """Their sum, each times its weight (B,)."""
        return np.tensordot(weights.astype(self.each.dtype), self.each, 1)


def _pairs(factor: Any, has_vectors: bool, dtype: Any) -> Any:
    """A factor with the axes between the batch and the vectors as one, in the dtype of the gradient; integers that stand for vectors as they are."""
    ends = factor.shape[1:-1] if has_vectors else factor.shape[1:]
    folded = factor.reshape(len(factor), math.prod(ends), *factor.shape[1 + len(ends) :])
    return folded.astype(dtype, copy=False) if has_vectors else folded


def _squares(x: Any) -> Any:
    """The sum of squares of each example, (B,) of float64; sums that leave the range of the dtype are made anew."""
    flat = x.reshape(len(x), -1)
    sums = np.vecdot(flat, flat).astype(np.float64)
    again = ~((sums > _SMALL) & (sums < math.inf))
    if again.any():
        sums[again] = [np.vdot(row, row) for row in flat[again].astype(np.float64)]
    return sums


Gradients = Formed | Factors | None


async def grad_per_sample(loss: Loss, params: Any, batch: Any, *, chunk_size: int | None = None) -> tuple[Any, ...]:
    """The gradient of `loss` for every example of a batch: `vmap` of the pass, for any graph. No ``grad`` is touched.

    Cancelling stops the loss or the pass. The functions that a loss may use are those of `vmap`: it reads no values of an example, and draws nothing.

    Args:
        loss: of one example, ``loss(*example)``: a real Tensor of one element; ``def`` or ``async def``.
        params: a Tensor that requires grad, or a sequence of them, of any shape.
        batch: an array or Tensor, or a tuple or list of them, (B, ...) each.
        chunk_size: how many examples are computed together, at least 1; None: all. It bounds the memory of values in between.

    Returns:
        Per parameter a Tensor ``(B, *shape)``, zeros for one that the loss does not depend on. It belongs to no graph.

    Raises:
        ArgumentError: the arguments do not fit, the loss returns no single element, or it draws random numbers. ModifiedError: a parameter was
            modified meanwhile.

    Source: the semantics of ``vmap(grad(loss), (None, 0))`` in ``torch.func``.

    >>> w = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> await ag.grad_per_sample(lambda x: (w * x).sum() ** 2, [w], ag.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
    (tensor([[2., 0.],
            [0., 4.],
            [6., 6.]]),)
    """
    listed, chunks = checked("grad_per_sample", loss, params, batch, chunk_size)
    found: list[list[Any]] = [[np.zeros((0, *p.shape), p.dtype)] for p in listed]
    for chunk in chunks:
        gradients = (await gradients_of_examples("grad_per_sample", loss, listed, chunk, may_factor=False))[1]
        for parts, p, each in zip(found, listed, gradients, strict=True):
            parts.append(each.each if isinstance(each, Formed) else np.zeros((len(chunk[0]), *p.shape), p.dtype))
    return tuple(make(parts[1] if len(parts) == 2 else np.concatenate(parts)).to(p.device) for parts, p in zip(found, listed, strict=True))


async def grad_norms_per_sample(loss: Loss, params: Any, batch: Any, *, chunk_size: int | None = None) -> Any:
    """The norm of the gradient of `loss` over all parameters, for every example.

    No gradient is formed of a matrix that meets examples in products only (``@``, linear layers, embeddings); others are formed and dropped. See
    Note [Norms without gradients]. Arguments, errors and cancellation as for `grad_per_sample`.

    Args:
        loss: of one example.
        params: Tensors that require grad.
        batch: arrays or Tensors, (B, ...) each.
        chunk_size: how many examples are computed together; None: all.

    Returns:
        A Tensor (B,) in the dtype of the first parameter.

    Source: see `aiograd.functional.batching.per_sample`.

    >>> w = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> await ag.grad_norms_per_sample(lambda x: (w * x).sum(), w, ag.tensor([[3.0, 4.0], [0.0, 1.0]]))
    tensor([5., 1.])
    """
    listed, chunks = checked("grad_norms_per_sample", loss, params, batch, chunk_size)
    norms = [np.zeros(0)]
    for chunk in chunks:
        _, gradients = await gradients_of_examples("grad_norms_per_sample", loss, listed, chunk)
        norms.append(norms_of(gradients, len(chunk[0])))
    return make(np.concatenate(norms).astype(listed[0].dtype))


def norms_of(gradients: Sequence[Gradients], examples: int) -> Any:
    """The norm over all parameters, (B,) of float64."""
    with np.errstate(all="ignore"):
        return np.sqrt(sum((each.squares() for each in gradients if each is not None), np.zeros(examples)))


def checked(call: str, loss: Any, params: Any, batch: Any, chunk_size: Any) -> tuple[list[Any], list[list[Any]]]:
    """The parameters, and the batch in chunks; `call` is for messages.

    Raises:
        ArgumentError: they do not fit.
    """
    listed = [params] if isinstance(params, TensorCore) else list(params) if isinstance(params, Iterable) else []
    if not callable(loss) or not listed or not all(isinstance(p, TensorCore) for p in listed):
        raise ArgumentTypeError(f"{call}: expected a loss, a function of one example, and Tensors to differentiate by, at least one")
    for i, p in enumerate(listed):
        if not p.requires_grad or p.dtype.kind != "f":
            raise ArgumentError(f"{call}: parameter {i} is {p.dtype}, requires_grad={p.requires_grad}; expected a real Tensor that requires grad")
    arrays = [conversion.as_tensor(x).detach() for x in (batch if isinstance(batch, (tuple, list)) else [batch])]
    lengths = sorted({x.shape[0] if x.ndim else -1 for x in arrays})
    if len(lengths) != 1 or lengths[0] < 0:
        raise ShapeError(f"{call}: the batch has shapes {[list(x.shape) for x in arrays]}; expected arrays with one length in front, the examples")
    if chunk_size is not None and (isinstance(chunk_size, bool) or not isinstance(chunk_size, (int, np.integer)) or chunk_size < 1):
        raise ArgumentError(f"{call}(chunk_size={chunk_size!r}): expected a whole number of at least 1, or None")
    size = int(chunk_size or max(lengths[0], 1))
    return listed, [[x[i : i + size] if size < lengths[0] else x for x in arrays] for i in range(0, lengths[0], size)]


async def gradients_of_examples(
    call: str, loss: Loss, params: Sequence[Any], batch: Sequence[Any], *, may_factor: bool = True
) -> tuple[Any, list[Gradients]]:
    """Losses (B,), an array of the host, and the gradients by each parameter; None for one that the loss does not depend on.

    Args:
        call: for messages.
        loss, params, batch: see `grad_per_sample`; (B, ...) each, B at least 1.
        may_factor: False: `Formed` gradients only.
    """
    level = PerSampleLevel(len(batch[0]))
    draws = RefusedDraws(f"{call}: the loss draws random numbers, which would be the same for all examples; leave dropout out, by eval()")
    register_device(level)
    try:
        with enable_grad(), draws.recording():
            value = loss(*(make(BatchedArray(level, x, True)) for x in batch))
            if inspect.isawaitable(value) and not isinstance(value, TensorCore):
                value = await value
        if not isinstance(value, TensorCore) or value.size != 1 or value.dtype.kind != "f":
            found = f"{value.dtype} {list(value.shape)}" if isinstance(value, TensorCore) else type(value).__name__
            raise ArgumentError(f"{call}: the loss returned {found}; expected a real Tensor of one element, the loss of one example")
        if value.device != level.name:
            adopted = level.adopt(value)
            value = adopted if isinstance(adopted, TensorCore) else make(adopted)
        value = await ready(value)
        losses = level.host(value._data).reshape(level.size)
        if value._node is None:
            return losses, [None] * len(params)
        return losses, await _pull_back(call, level, value, params, may_factor)
    finally:
        unregister_device(level.name)


async def _pull_back(call: str, level: PerSampleLevel, value: Any, params: Sequence[Any], may_factor: bool) -> list[Gradients]:
    derived = [(tensor, leaf) for tensor, leaf, _ in level.leaves.values() if not tensor.is_leaf]
    reached = {id(node) for node, _, _ in _edges([tensor._node for tensor, _ in derived])}
    wanted_nodes = {id(p._node) for p in params}
    leaves = {id(tensor._node): leaf for tensor, leaf, _ in level.leaves.values() if tensor.is_leaf and id(tensor._node) in wanted_nodes}
    uses: dict[int, list[tuple[Any, int]]] = {}
    for child, node, i in _edges([value._node]):
        uses.setdefault(id(child), []).append((node, i))
    factored: dict[int, list[tuple[Any, Any, Any]]] = {}
    for key, leaf in leaves.items():
        products = _products(uses.get(id(leaf._node), [])) if may_factor and leaf.ndim <= 2 and key not in reached else []
        if products:
            factored[key] = products
    whole = {id(leaf._node): leaf for key, leaf in leaves.items() if key not in factored} | {id(leaf._node): leaf for _, leaf in derived}
    edges = {id(node): GradientEdge(node, 0) for products in factored.values() for node, _, _ in products}
    wanted = {**whole, **edges}
    arrived = dict(zip(wanted, await grad(value, list(wanted.values()), allow_unused=True) if wanted else (), strict=True))
    for tensor, _, version in level.leaves.values():
        if counter_of(tensor)[0] != version:
            raise ModifiedError(f"{call}: a parameter of shape {list(tensor.shape)} was modified in place before its pass had ended; wait for it")
    found: list[Gradients] = []
    for p in params:
        key = id(p._node)
        mine = arrived.get(id(leaves[key]._node)) if key in leaves and key not in factored else None
        found.append(None if mine is None else Formed(level.host(mine._data)))
        if key in factored:
            with no_grad():
                pairs = [rule(arrived[id(node)]._data, *values) for node, rule, values in factored[key] if arrived[id(node)] is not None]
            if pairs:
                has_vectors = pairs[0][0].ndim == pairs[0][1].ndim
                firsts = [_pairs(level.host(first), has_vectors, p.dtype) for first, _ in pairs]
                seconds = [_pairs(level.host(second), True, p.dtype) for _, second in pairs]
                a, b = (side[0] if len(side) == 1 else np.concatenate(side, axis=1) for side in (firsts, seconds))
                found[-1] = Factors(a, b, p.shape)
    sources = [(tensor, level.host(arrived[id(leaf._node)]._data)) for tensor, leaf in derived if arrived[id(leaf._node)] is not None]
    return await _led_on(sources, params, found, level.size) if sources else found


async def _led_on(sources: list[tuple[Any, Any]], params: Sequence[Any], found: list[Gradients], examples: int) -> list[Gradients]:
    """Gradients, and added to them the gradients that reach parameters through Tensors computed from these, example by example."""
    totals: dict[int, Any] = {}
    for i in range(examples):
        seeds = [make(each[i]).to(tensor.device) for tensor, each in sources]
        led = await grad([tensor for tensor, _ in sources], params, seeds, retain_graph=True, allow_unused=True)
        for k, each in enumerate(led):
            if each is None:
                continue
            if k not in totals:
                own = found[k]
                totals[k] = np.array(own.each) if isinstance(own, Formed) else np.zeros((examples, *params[k].shape), params[k].dtype)
            totals[k][i] += each.cpu()._data
    return [Formed(totals[k]) if k in totals else own for k, own in enumerate(found)]


def _edges(roots: Sequence[Any]) -> Iterator[tuple[Any, Any, int]]:
    """The edges of a graph: a node, the node whose rule brings its gradient, and the number of the argument there; for roots None and -1."""
    stack = list(roots)
    yield from ((root, None, -1) for root in roots)
    seen = set(map(id, roots))
    while stack:
        node = stack.pop()
        for i, child in enumerate(node.next_nodes):
            if child is not None:
                yield child, node, i
                if id(child) not in seen:
                    seen.add(id(child))
                    stack.append(child)


def _products(uses: list[tuple[Any, int]]) -> list[tuple[Any, Any, Any]]:
    """The nodes of the products in which a matrix takes part, with the rule of its factors and what the rule names; empty where it has other uses."""
    found: list[tuple[Any, Any, Any]] = []
    for node, i in uses:
        row = node.row.op if isinstance(node, OpNode) and isinstance(node._saved, tuple) else None
        rule = row.norm.get(row.arrays[i]) if row is not None and not row.variadic else None
        if rule is None or (found and found[0][1] is not rule):
            return []
        node.check_versions()
        names = node._environment(node._saved, False)
        found.append((node, rule, [names[name] for name in rule_names(rule)]))
    return found
