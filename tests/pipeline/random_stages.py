"""Random stages of a pipeline: small programs over 4 by 4 matrices that use everything a graph can contain."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import aiograd as ag
from aiograd.nn import functional as F
from tests.support import custom_function

SIZE = 4


@dataclass
class Calls:
    """The computations of the custom functions of one stage: (instruction, kind)."""

    log: list[tuple[int, str]] = field(default_factory=list)


def asking(calls: Calls, where: int, is_async: bool) -> Any:
    """``a @ b`` that computes what is needed only."""

    def rule(ctx: Any, g: Any) -> Any:
        a, b = ctx.saved_tensors
        da = db = None
        if ctx.needs_input_grad[0]:
            calls.log.append((where, "a"))
            da = g @ b.T
        if ctx.needs_input_grad[1]:
            calls.log.append((where, "b"))
            db = a.T @ g
        return da, db

    async def async_rule(ctx: Any, g: Any) -> Any:
        return rule(ctx, g)

    return custom_function(lambda a, b: a @ b, inline=True, saves=True)(async_rule if is_async else rule).apply


def heedless(calls: Calls, where: int) -> Any:
    """``(a * b, a + b)``; computes everything, needed or not."""

    @custom_function(lambda a, b: (a * b, a + b), inline=True, saves=True)
    def function(ctx: Any, g: Any, h: Any) -> Any:
        calls.log.append((where, "all"))
        a, b = ctx.saved_tensors
        return g * b + h, g * a + h

    return function.apply


def _in_place(a: Any, b: Any) -> Any:
    c = a * 1.5
    c += b
    c[0] = b[1]
    return c


def _hooked(a: Any) -> Any:
    b = a * 2.0
    if b.requires_grad:
        b.register_hook(lambda g: g * 1.5)
        b.grad_fn.register_prehook(lambda grads: tuple(None if g is None else g * 0.5 for g in grads))
        b.grad_fn.register_hook(lambda inputs, outputs: tuple(None if g is None else g * 3.0 for g in inputs))
    return b


def _product_hooked(a: Any, b: Any) -> Any:
    """Both kinds of hooks on a node that may belong to both halves."""
    c = a @ b
    if c.requires_grad:
        c.register_hook(lambda g: g * 1.5)
        c.grad_fn.register_prehook(lambda grads: tuple(None if g is None else g * 0.5 for g in grads))
        c.grad_fn.register_hook(lambda inputs, outputs: tuple(None if g is None else g * 3.0 for g in inputs))
    return c


ONE: dict[str, Callable[[Any], Any]] = {
    "tanh": np.tanh,
    "relu": lambda a: np.maximum(a, 0.0),
    "scale": lambda a: a * 0.5,
    "turn": lambda a: a.T,
    "flat": lambda a: ag.reshape(ag.reshape(a, (SIZE * SIZE,)), (SIZE, SIZE)),
    "detach": lambda a: a.detach(),
    "hooked": _hooked,
    "rows": lambda a: ag.stack(list(ag.unstack(a))),
    "sort": lambda a: ag.sort(a, axis=0),
    "checkpoint": lambda a: ag.checkpoint(lambda v: np.tanh(v) * v, a),
}
TWO: dict[str, Callable[[Any, Any], Any]] = {
    "matmul": lambda a, b: a @ b,
    "product": _product_hooked,
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "row": lambda a, b: a + b[0],
    "halves": lambda a, b: ag.concat([a[:2], b[2:]], axis=0),
    "in_place": _in_place,
    "linear": lambda a, b: F.linear(a, b, b[0]),
    "norm": lambda a, b: F.layer_norm(a, (SIZE,), b[0], b[1]),
    "attention": lambda a, b: F.scaled_dot_product_attention(a, b, a + b),
    "checkpointed": lambda a, b: ag.checkpoint(lambda v, w: np.tanh(v @ w) @ w, a, b),
}
CUSTOM = ("asking", "async asking", "heedless")
#: what holds code of the user's
WITH_USER_CODE = ("hooked", "product", "checkpoint", "checkpointed", *CUSTOM)


@dataclass
class Stage:
    """One program and the values it runs on.

    Args:
        is_plain: it holds no code of the user's, so that its passes are swept.
    """

    seed: int
    is_plain: bool = False
    inputs: list[Any] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    calls: Calls = field(default_factory=Calls)
    #: what the inputs of the stage were made from, where they are no leaves
    sources: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        values = np.random.default_rng(self.seed)

        def matrix() -> Any:
            return ag.tensor(values.uniform(-1.0, 1.0, (SIZE, SIZE)))

        none_requires = draw.random() < 0.2
        for _ in range(draw.randint(0, 3)):
            kind = draw.random()
            if kind < 0.15:
                self.inputs.append(draw.choice([None, "text", 3]))
                continue
            tensor = matrix()
            if not none_requires and kind < 0.85:
                tensor.requires_grad_()
                if kind < 0.3:
                    self.sources.append(tensor)
                    tensor = tensor * 2.0
            self.inputs.append(tensor)
        if self.inputs and draw.random() < 0.1:
            self.inputs.append(self.inputs[0])
        self.weights = [matrix().requires_grad_() for _ in range(draw.randint(1, 4))]
        if draw.random() < 0.2 and not self.is_plain:
            self.weights[0].register_hook(lambda g: g * 0.25)
        self.order = draw.sample(range(len(self.weights)), len(self.weights))
        self.draw = draw

    def run(self) -> tuple[Any, Any]:
        """Nested outputs, and nested gradients of them."""
        draw = self.draw
        names = [name for name in (*ONE, *TWO, *TWO, *CUSTOM) if not self.is_plain or name not in WITH_USER_CODE]
        pool: list[Any] = [value for value in self.inputs if isinstance(value, ag.Tensor)] + list(self.weights)
        for where in range(draw.randint(1, 14)):
            a = draw.choice(pool[-4:] if draw.random() < 0.6 else pool)
            b = draw.choice(self.weights) if draw.random() < 0.6 else draw.choice(pool)
            name = draw.choice(names)
            if name in ONE:
                made = ONE[name](a)
            elif name in TWO:
                made = TWO[name](a, b)
            elif name == "heedless":
                both = heedless(self.calls, where)(a, b)
                made = both[draw.randint(0, 1)] if draw.random() < 0.5 else both[0] - both[1]
            else:
                made = asking(self.calls, where, name == "async asking")(a, b)
            pool.append(made)
        values = np.random.default_rng(self.seed + 1)
        outputs: list[Any] = []
        grads: list[Any] = []
        for _ in range(draw.randint(1, 3)):
            output = draw.choice(pool[-3:])
            kind = draw.random()
            if kind < 0.2:
                outputs.append(output.sum())
                grads.append(None)
            else:
                if kind < 0.35:
                    output = output[1:]
                outputs.append(output)
                grads.append(ag.tensor(values.uniform(-1.0, 1.0, output.shape)))
                if kind > 0.85 and output.requires_grad:
                    outputs[-1] = ag.graph.get_gradient_edge(output)
        if draw.random() < 0.3:
            outputs.append(draw.choice([None, 7, ag.tensor(1.0)]))
            grads.append(None)
        if draw.random() < 0.3:
            return {"y": outputs, "n": 3}, {"y": grads, "n": None}
        return outputs, grads

    def weight_grads(self) -> list[Any]:
        """The gradients of the weights."""
        return [weight.grad for weight in self.weights]

    def listed(self) -> Sequence[Any]:
        """The weights, in an order of their own."""
        return [self.weights[i] for i in self.order]
