"""Custom functions in forward mode: their values from ``forward``, their tangents from ``jvp`` or from ``backward``, transposed.

Note [Layers]
    ``forward`` runs once, on Tensors that no call of forward mode follows: it may do anything with them. Then every level among the arguments,
    from the outermost inwards, gets its outputs and its context: arguments and outputs that ``forward`` saved stand for those of the level,
    so that rules run on them are followed by the levels around. A saved value that is neither is a constant there, as where a pass is
    differentiated.

Note [Backward, transposed]
    ``backward`` is linear in the gradients, so run on recording zeros its own pass gives J t. That pass is a loop where ``backward`` is ``def`` and
    made of rows; otherwise it is awaited when the function that is differentiated has returned (see Note [Pending tangents] in
    `aiograd.forward.dual`).
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiograd.engine.validate import refuse_complex
from aiograd.errors import GradientError, NoRuleError
from aiograd.forward.dual import DualArray, ForwardLevel, Pending
from aiograd.forward.rows import defer
from aiograd.forward.transposing import is_pullable, pull
from aiograd.functional.function_node import FunctionCtx, nested
from aiograd.graph.node import _next_sequence
from aiograd.running.modes import ModeScope, current_mode
from aiograd.running.trees import leaves_of
from aiograd.tensors.core import TensorCore, make, outside
from aiograd.tensors.followed import follows_writes
from aiograd.tensors.inplace import check_in_place, store
from aiograd.tensors.levels import Level, LevelArray
from aiograd.tensors.passes import grad


class Layer:
    """A level among the arguments of a custom function.

    Args:
        level: the innermost level of the arguments.
        args: the arguments.
        records: True if operations on its Tensors are recorded.
    """

    __slots__ = ("level", "args", "values", "tangents", "inputs", "records")

    def __init__(self, level: Any, args: Sequence[Any], records: bool) -> None:
        level.check()
        self.level = level
        self.args = args
        self.records = records
        parts = [level.parts(arg) if isinstance(arg, TensorCore) else (arg, None, 0) for arg in args]
        self.values = [value for value, _, _ in parts]
        self.tangents = [tangent for _, tangent, _ in parts] if current_mode().tangents else [None] * len(parts)
        self.inputs = functools.reduce(lambda a, b: a | b, [inputs for _, _, inputs in parts], 0)

    def outputs(self, function: Any, context: FunctionCtx, made: Sequence[Any], nesting: Any) -> list[Any]:
        """The outputs as Tensors of the level.

        Args:
            function: the class.
            context: of `values`, with what forward has saved.
            made: outputs of forward for `values`; those that are no Tensors stay.
            nesting: of the outputs in forward's result.

        Returns:
            The outputs.
        """
        level = self.level
        fixed = {id(t) for t in context._non_differentiable}
        carriers = [i for i, out in enumerate(made) if isinstance(out, TensorCore) and id(out) not in fixed and out.dtype.kind in "fc"]
        known: Sequence[Any] = [None] * len(made)
        if any(t is not None for t in self.tangents) and carriers:
            rule = Tangents(function, context, self, made, nesting, carriers)
            if level.deferred or rule.is_async or any(t.__class__ is Pending for t in self.tangents):
                known = defer(level, rule.push_later, self.tangents, len(made), carriers)
            else:
                found = rule.push(self.tangents)
                known = found if isinstance(found, list) else defer(level, lambda _: found(), (), len(made), carriers)
        return [
            make(DualArray(level, level.own(out), tangent, self.inputs if tangent is not None else 0)) if isinstance(out, TensorCore) else out
            for out, tangent in zip(made, known, strict=True)
        ]

    def completed(self, context: FunctionCtx, raw: Sequence[Any], made: Sequence[Any]) -> FunctionCtx:
        """The context of forward before it was recorded, in terms of the outputs as they were recorded."""
        return _mapped(context, {id(a): b for a, b in zip(raw, made, strict=True)})

    def context(self, below: FunctionCtx, made: Sequence[Any], outputs: list[Any]) -> FunctionCtx:
        """The context of this level: what forward has saved, marked and set, in terms of its arguments and outputs.

        An argument that was modified in place takes the place of the output that it was returned as.
        """
        here = {id(value): arg for value, arg in zip(self.values, self.args, strict=True)}
        for i, value in enumerate(made):
            if id(value) in here and any(value is dirty for dirty in below._dirty):
                arg = here[id(value)]
                check_in_place(arg, "a custom function")
                store(arg, ..., outputs[i]._data)
                outputs[i] = arg
            else:
                here[id(value)] = outputs[i]
        return _mapped(below, here)


class Tangents:
    """Computes the tangents of a custom function's outputs."""

    def __init__(self, function: Any, context: FunctionCtx, layer: Layer, made: Sequence[Any], nesting: Any, carriers: Sequence[int]) -> None:
        self.function = function
        self.layer = layer
        self.made = made
        self.nesting = nesting
        self.carriers = carriers
        self.context = run = object.__new__(type(context))
        run.__dict__ = context.__dict__
        run._materialize, run._node, run._task = context._materialize, None, None
        run._values = context._to_save
        run._needs = tuple(t is not None for t in layer.tangents)

    @property
    def is_async(self) -> bool:
        """True if the rule has to be awaited."""
        return inspect.iscoroutinefunction(self.function.jvp if self.function.has_jvp() else self.function.rule())

    async def push_later(self, tangents: Sequence[Any]) -> list[Any]:
        """One tangent per output."""
        found = self.push(tangents)
        return found if isinstance(found, list) else await (found() if callable(found) else found)

    def push(self, tangents: Sequence[Any]) -> Any:
        """One tangent per output: a list, an awaitable, or a function that returns an awaitable."""
        if all(t is None for t in tangents):
            return [None] * len(self.made)
        level = self.layer.level
        given = [t if t is None or isinstance(t, TensorCore) else make(t) for t in tangents]
        if self.function.has_jvp():
            with ModeScope(grad=level.records):
                found = self.function.jvp(self.context, *given)
            return self._awaited(found) if inspect.isawaitable(found) and not isinstance(found, TensorCore) else self._checked(found)
        rule = self.function.rule()
        if getattr(rule, "is_once_differentiable", False):
            raise NoRuleError(
                f"{self.function.__name__}: its backward is once_differentiable, so it cannot be transposed for forward mode. "
                "Define jvp(ctx, *tangents) beside it."
            )
        start = _next_sequence()
        with ModeScope(grad=True, saved_hooks=None, collect=None):
            seeds: list[Any] = [make(np.zeros_like(out._data)) if isinstance(out, TensorCore) else None for out in self.made]
            for i in self.carriers:
                seeds[i].requires_grad_()
            found = rule(self.context, *(seeds if self.nesting is None else nested(self.nesting, seeds)))
        if inspect.isawaitable(found) and not isinstance(found, TensorCore):
            return self._transposed_later(found, seeds, given)
        roots = self._roots(found, given)
        if not is_pullable(start, [root for root, _ in roots]):
            return functools.partial(self._pulled, roots, seeds)
        sums = iter(pull(start, roots, [seeds[i] for i in self.carriers], level.records)) if roots else iter([None] * len(self.carriers))
        return self._owned([next(sums) if i in self.carriers else None for i in range(len(self.made))])

    async def _awaited(self, found: Any) -> list[Any]:
        with ModeScope(grad=self.layer.level.records):
            return self._checked(await found)

    async def _transposed_later(self, found: Any, seeds: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        with ModeScope(grad=True, saved_hooks=None, collect=None):
            grads = await found
        return await self._pulled(self._roots(grads, given), seeds)

    async def _pulled(self, roots: Sequence[tuple[Any, Any]], seeds: Sequence[Any]) -> list[Any]:
        if not roots:
            return [None] * len(self.made)
        outputs, vectors = zip(*roots, strict=True)
        records = self.layer.level.records
        with ModeScope(grad=records):
            sums = iter(await grad(outputs, [seeds[i] for i in self.carriers], vectors, create_graph=records, allow_unused=True))
        return self._owned([next(sums) if i in self.carriers else None for i in range(len(self.made))])

    def _roots(self, grads: Any, given: Sequence[Any]) -> list[tuple[Any, Any]]:
        """The gradients that backward computed of zeros, each with the tangent of its argument."""
        listed = list(grads) if isinstance(grads, (tuple, list)) else [grads]
        roots: list[tuple[Any, Any]] = []
        for i, (found, tangent) in enumerate(zip(listed, given, strict=False)):
            if tangent is None or found is None:
                continue
            if not isinstance(found, TensorCore) or found._node is None:
                raise NoRuleError(
                    f"{self.function.__name__}: its backward computes the gradient of argument {i} by operations that are not recorded, so it cannot "
                    "be transposed for forward mode. Define jvp(ctx, *tangents) beside it."
                )
            refuse_complex(f"{self.function.__name__}Backward", i, found, tangent.dtype)
            roots.append((found, make(np.astype(tangent._data, found.dtype)) if tangent.dtype != found.dtype else tangent))
        return roots

    def _checked(self, found: Any) -> list[Any]:
        """The result of jvp as a list, one for each output."""
        name = f"{self.function.__name__}.jvp"
        if self.nesting is None:
            listed = list(found) if isinstance(found, tuple) else [found]
        else:
            listed = leaves_of(found, (TensorCore, np.ndarray, LevelArray, type(None)))
        if len(listed) != len(self.made):
            raise GradientError(f"{name} returned {len(listed)} tangents for {len(self.made)} outputs of forward: return one for each, or None")
        results: list[Any] = [None] * len(listed)
        for i in self.carriers:
            tangent, out = listed[i], self.made[i]
            if tangent is None:
                continue
            if not isinstance(tangent, TensorCore):
                if not (hasattr(tangent, "shape") and hasattr(tangent, "dtype")):
                    raise GradientError(f"{name} returned {type(tangent).__name__} for output {i}; expected a Tensor, or None for zeros")
                tangent = make(np.asarray(tangent) if isinstance(tangent, np.generic) else tangent)
            if tangent.shape != out.shape or tangent.dtype != out.dtype:
                raise GradientError(
                    f"{name} returned {tangent.dtype}{list(tangent.shape)} for output {i}; expected {out.dtype}{list(out.shape)}, as the output."
                )
            results[i] = tangent
        return self._owned(results)

    def _owned(self, tangents: Sequence[Any]) -> list[Any]:
        own = self.layer.level.own
        return [None if t is None else own(t) for t in tangents]


def _mapped(context: FunctionCtx, here: dict[int, Any]) -> FunctionCtx:
    """A context with other Tensors in place of the Tensors with these ids."""
    mapped = copy.copy(context)
    mapped._to_save, mapped._non_differentiable, mapped._dirty = (
        tuple([here.get(id(t), t) for t in tensors]) for tensors in (context._to_save, context._non_differentiable, context._dirty)
    )
    return mapped


def needs_of(layer: Layer) -> tuple[bool, ...]:
    """``needs_input_grad`` of forward: per argument, True for one with a gradient or a tangent to come."""
    return tuple(
        isinstance(value, TensorCore) and (value._node is not None or tangent is not None or arg._node is not None)
        for value, tangent, arg in zip(layer.values, layer.tangents, layer.args, strict=True)
    )


#: by the kind of level what follows a custom function there; None where forward runs on arrays of the level itself
LAYERS: dict[type[Level], Callable[[Any, Sequence[Any], bool], Layer | None]] = {ForwardLevel: Layer}


def layers_of(args: Sequence[Any]) -> list[Layer]:
    """The levels of `LAYERS` that follow the arguments, the innermost first; batches of `vmap` within them stay as they are."""
    layers: list[Layer] = []
    records = current_mode().grad
    while True:
        deepest: Any = None
        for arg in args:
            data = arg._data if isinstance(arg, TensorCore) else None
            if isinstance(data, LevelArray) and (deepest is None or data.level.depth > deepest.depth):
                deepest = data.level
        layer = LAYERS[type(deepest)](deepest, args, records) if type(deepest) in LAYERS else None
        if layer is None:
            return layers
        layers.append(layer)
        args = layers[-1].values
        records = deepest.records


def through_nodes(tensors: Sequence[Any], run: Callable[[dict[int, Any]], Any], outputs_of: Callable[[Any], list[Any]]) -> tuple[Any, dict[int, Any]]:
    """Run a call that records nodes of another library on the values of Tensors that forward mode follows; its tangents are those nodes' transposed.

    Args:
        tensors: the Tensors among the arguments.
        run: calls with other Tensors in place of those with these ids, and returns the result.
        outputs_of: the Tensors in a result.

    Returns:
        The result, and by the ids of its Tensors those that take their places.

    Raises:
        NoRuleError: a pass is recorded through the call at the same time, or another call of forward mode is around it.
    """
    layer = next(iter(layers_of(tensors)), None)
    level = None if layer is None else layer.level
    if layer is None or not isinstance(level, ForwardLevel):
        raise NoRuleError(
            "another library's modules take no part in vmap(), grad_per_sample() and sparse_jacobian(); call them with the whole batch, or use jvp() "
            "or jacobian()"
        )
    if (any(tensor._node is not None for tensor in tensors if follows_writes(tensor._data)) and current_mode().grad) or len(layers_of(layer.values)):
        raise NoRuleError("forward mode goes through another library's modules once: not over a backward pass through one, nor twice")
    wanted = [i for i, tangent in enumerate(layer.tangents) if tangent is not None]
    values = list(layer.values)
    for i in wanted:
        if values[i]._node is None:
            values[i] = outside(values[i]).requires_grad_()
    with ModeScope(grad=True):
        result = run({id(tensor): value for tensor, value in zip(tensors, values, strict=True)})
    outputs = outputs_of(result)
    carriers = [k for k, output in enumerate(outputs) if output._node is not None] if wanted else []

    async def push(tangents: list[Any]) -> list[Any]:
        given = [make(t) if t is not None and not isinstance(t, TensorCore) else t for t in tangents]
        roots = [outputs[k] for k in carriers]
        targets = [values[i] for i, t in zip(wanted, given, strict=True) if t is not None]
        with ModeScope(grad=True):
            zeros = [make(np.zeros_like(root._data)).requires_grad_() for root in roots]
            pulled = await grad(roots, targets, zeros, create_graph=True, retain_graph=True, allow_unused=True)
        pairs = [(g, t) for g, t in zip(pulled, [t for t in given if t is not None], strict=True) if g is not None and g._node is not None]
        if not pairs:
            return [None] * len(outputs)
        with ModeScope(grad=level.records):
            seeds, vectors = zip(*pairs, strict=True)
            found = iter(await grad(seeds, zeros, vectors, retain_graph=True, create_graph=level.records, allow_unused=True))
        made = [next(found) if k in carriers else None for k in range(len(outputs))]
        return [None if t is None else level.own(t) for t in made]

    places = defer(level, push, [layer.tangents[i] for i in wanted], len(outputs), carriers) if carriers else [None] * len(outputs)
    own = (output if level.records else outside(output) for output in outputs)
    return result, {id(o): level.dual(value, place, layer.inputs) for o, value, place in zip(outputs, own, places, strict=True)}
