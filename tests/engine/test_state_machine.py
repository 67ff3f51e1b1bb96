"""The engine against a naive one: drawn programs of operations, views, in-place changes, hooks and custom functions, and drawn ways to run passes.

All numbers are small integers in float64, so every sum is exact in any order and gradients are compared for equality, also those of
passes that ran at the same time. The ``grad`` of each leaf after a failed or cancelled pass is compared by identity.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import aiograd as ag
from aiograd.errors import GraphFreedError, ModifiedError
from aiograd.testing import simulated_run
from tests.engine import reference_engine as ref
from tests.support import custom_function, leaf

SHAPE = (2, 3)
EXACT = 2.0**52
#: saved for a factor, which nobody modifies
CONSTANT = [([0], 0)]


KINDS = ["def", "inline", "async", "sleeping", "nested", "fails", "fails later"]
HOOKS = ["def", "async", "pre", "post"]
VIEWS: dict[str, Callable[[Any], Any]] = {
    "row": lambda t: t[1],
    "column": lambda t: t[:, 1:],
    "reshape": lambda t: t.reshape(-1),
    "transpose": lambda t: t.T,
}


class Injected(Exception):
    """Raised by rules that are made to fail."""


@dataclass(eq=False)
class Pair:
    """A Tensor and what it is to the reference."""

    tensor: ag.Tensor
    variable: ref.Variable
    retains: bool = False

    @property
    def node(self) -> ref.Node:
        return self.variable.node

    @property
    def requires_grad(self) -> bool:
        return self.node.requires_grad

    def is_matrix(self) -> bool:
        return self.node.value.ndim == 2 and min(self.node.value.shape) > 1

    def family(self) -> ref.Variable:
        variable = self.variable
        while variable.base is not None:
            variable = variable.base
        return variable


@dataclass
class Spec:
    """A pass to be run."""

    kind: str
    root: Pair
    inputs: list[Pair]
    retain: bool
    result: Any = None
    reference: ref.Pass | None = None
    started: bool = False
    errors: set[type[BaseException]] = field(default_factory=set)
    must_fail: bool = False

    def predict(self) -> None:
        """Run the reference, and say which errors may or must come."""
        node = self.root.node
        inputs = None if self.kind == "backward" else [pair.node for pair in self.inputs]
        self.reference = ref.Pass(node, np.ones(node.value.shape), inputs, self.kind != "grad")
        for node in self.reference.executed:
            if node.fails:
                self.errors.add(Injected)
                self.must_fail = True
            if node.freed != "no":
                self.errors.add(GraphFreedError)
                self.must_fail |= node.freed == "yes"
            if any(counter[0] != then for counter, then in node.saved):
                self.errors.add(ModifiedError)
                self.must_fail = True

    async def run(self) -> None:
        """Run the engine; `result` is what it returned or raised."""
        self.started = True
        tensor = self.root.tensor
        seed = ag.tensor(np.ones(tensor.shape))
        options: dict[str, Any] = {"retain_graph": self.retain}
        try:
            if self.kind == "grad":
                self.result = await ag.grad(tensor, [pair.tensor for pair in self.inputs], seed, allow_unused=True, **options)
            elif self.kind == "inputs":
                self.result = await ag.backward(tensor, seed, inputs=[pair.tensor for pair in self.inputs], **options)
            else:
                self.result = await tensor.backward(seed, **options)
        except BaseException as error:
            self.result = error


class EngineMachine(RuleBasedStateMachine):
    """Builds a graph in both, runs passes in both, compares."""

    def __init__(self) -> None:
        super().__init__()
        ref.largest = 0.0
        self.pairs: list[Pair] = []
        self.leaves: list[Pair] = []
        #: a leaf that nested passes add to, and how often they have
        self.side = leaf(1.0)
        self.nested = 0
        self.post_hooks: dict[int, int] = {}

    # ---------------------------------------------------------------- building

    @initialize(seed=st.integers(0, 2**32), count=st.integers(4, 14))
    def first_graph(self, seed: int, count: int) -> None:
        for i in range(2):
            self.new_leaf([i + 1, -1, 2, 0, 1, -2], True)
        self.grow(seed, count)

    @rule(values=st.lists(st.integers(-2, 2), min_size=6, max_size=6), requires_grad=st.booleans())
    def new_leaf(self, values: list[int], requires_grad: bool) -> None:
        array = np.array(values, dtype=np.float64).reshape(SHAPE)
        tensor = ag.tensor(array, requires_grad=requires_grad)
        pair = Pair(tensor, ref.Variable(ref.Node(array, requires_grad=requires_grad)))
        self.pairs.append(pair)
        if requires_grad:
            self.leaves.append(pair)
            key = len(self.leaves) - 1
            tensor.register_post_accumulate_grad_hook(lambda t: self.post_hooks.update({key: self.post_hooks.get(key, 0) + 1}))

    def _add(self, tensor: ag.Tensor, node: ref.Node, base: Pair | None = None, indices: Any = None) -> Pair:
        variable = ref.Variable(node) if base is None else ref.Variable(node, base.variable, indices)
        pair = Pair(tensor, variable)
        assert np.array_equal(tensor.detach().numpy(), node.value)
        assert tensor.requires_grad == node.requires_grad
        if tensor.grad_fn is not None and not node.saved and not node.is_vague:
            node.keeps_facts = bool(tensor.grad_fn._saved)
            node.saved = CONSTANT if node.keeps_facts and tensor.grad_fn.holds_data else []
        self.pairs.append(pair)
        return pair

    def _small(self, *pairs: Pair) -> bool:
        return all(np.max(np.abs(pair.node.value), initial=0.0) < 1e4 for pair in pairs)

    @rule(data=st.data(), operation=st.sampled_from(["add", "mul", "sub", "no_grad"]))
    def binary(self, data: st.DataObject, operation: str) -> None:
        a = data.draw(st.sampled_from(self.pairs), label="a")
        same = [pair for pair in self.pairs if pair.node.value.shape in (a.node.value.shape, ())]
        b = data.draw(st.sampled_from(same or [a]), label="b")
        if not self._small(a, b):
            return
        if operation == "no_grad":
            with ag.no_grad():
                tensor = a.tensor * b.tensor
            self._add(tensor, ref.Node(a.node.value * b.node.value))
        elif operation == "mul":
            self._multiply(a, b)
        elif operation == "add":
            self._add(a.tensor + b.tensor, ref.add(a.node, b.node))
        else:
            self._add(a.tensor - b.tensor, ref.add(a.node, ref.scale(b.node, -1.0)))

    @rule(seed=st.integers(0, 2**32), count=st.integers(2, 8))
    def grow(self, seed: int, count: int) -> None:
        """Several operations on recent tensors at once."""
        draws = Random(seed)
        for _ in range(count):
            a = draws.choice(self.pairs[-4:])
            b = draws.choice([pair for pair in self.pairs if pair.node.value.shape in (a.node.value.shape, ())])
            kind = draws.choice(["add", "add", "mul", "custom", "view", "hook"])
            if not self._small(a, b):
                continue
            if kind == "mul":
                self._multiply(a, b)
            elif kind == "custom" and a.requires_grad:
                self._apply(a, draws.choice(KINDS[:5] * 3 + KINDS[5:]), draws.choice([2.0, -1.0]))
            elif kind == "view" and a.is_matrix():
                self._view(a, draws.choice(list(VIEWS)))
            elif kind == "hook" and a.requires_grad and len(a.node.hooks) < 2:
                self._hook(a, draws.choice(HOOKS), draws.choice([2.0, -1.0]))
            else:
                self._add(a.tensor + b.tensor, ref.add(a.node, b.node))

    def _multiply(self, a: Pair, b: Pair) -> None:
        node = ref.mul(a.node, b.node)
        node.saved = [(p.variable.counter, p.variable.counter[0]) for p, other in ((b, a), (a, b)) if other.requires_grad]
        self._add(a.tensor * b.tensor, node)

    @rule(data=st.data(), factor=st.sampled_from([2.0, -1.0, 3.0]))
    def scale(self, data: st.DataObject, factor: float) -> None:
        a = data.draw(st.sampled_from(self.pairs))
        if self._small(a):
            self._add(a.tensor * factor, ref.scale(a.node, factor))

    @rule(data=st.data())
    def total(self, data: st.DataObject) -> None:
        a = data.draw(st.sampled_from(self.pairs))
        if self._small(a):
            self._add(a.tensor.sum(), ref.total(a.node))

    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        a = data.draw(st.sampled_from(self.pairs))
        self._add(a.tensor.detach().clone(), ref.Node(a.node.value))

    @rule(data=st.data(), how=st.sampled_from(list(VIEWS)))
    def view(self, data: st.DataObject, how: str) -> None:
        self._view(data.draw(st.sampled_from([pair for pair in self.pairs if pair.is_matrix()])), how)

    def _view(self, base: Pair, how: str) -> None:
        indices = VIEWS[how](np.arange(base.node.value.size).reshape(base.node.value.shape))
        tensor = VIEWS[how](base.tensor)
        shares = np.shares_memory(tensor.detach().numpy(), base.tensor.detach().numpy())  # reshape may have to copy
        self._add(tensor, ref.take(base.node, indices), base if shares else None, indices)

    @rule(data=st.data(), how=st.sampled_from(["mul_", "add_", "fill"]))
    def in_place(self, data: st.DataObject, how: str) -> None:
        allowed = [pair for pair in self.pairs if not pair.family().node.is_leaf and not self._retained(pair) and self._small(pair)]
        if not allowed:
            return
        a = data.draw(st.sampled_from(allowed), label="a")
        others = [p for p in self.pairs if p.node.value.shape == a.node.value.shape and p.family() is not a.family()]
        b = data.draw(st.sampled_from(others or [a]), label="b")
        if how == "mul_":
            a.tensor.mul_(2.0)
            node = ref.scale(a.node, 2.0)
            node.saved = CONSTANT
            a.variable.replace(node)
        elif how == "add_" and b is not a:
            if not a.requires_grad and not a.family().node.requires_grad and b.requires_grad and a.variable.base is not None:
                return  # a view of a constant
            a.tensor.add_(b.tensor)
            a.variable.replace(ref.add(a.node, b.node))
        else:
            a.tensor[...] = 3.0
            shape = a.node.value.shape
            a.variable.replace(ref.put(a.node, ref.Node(np.full(shape, 3.0)), np.arange(int(np.prod(shape))).reshape(shape)))

    def _retained(self, pair: Pair) -> bool:
        return any(other.retains and other.family() is pair.family() for other in self.pairs)

    @rule(data=st.data(), kind=st.sampled_from(KINDS), factor=st.sampled_from([2.0, -1.0]))
    def custom(self, data: st.DataObject, kind: str, factor: float) -> None:
        a = data.draw(st.sampled_from(self.pairs))
        if a.requires_grad and self._small(a):
            self._apply(a, kind, factor)

    def _apply(self, a: Pair, kind: str, factor: float) -> None:
        machine = self

        @custom_function(lambda x: x * factor, inline=kind == 'inline', saves=True)
        def F(ctx: Any, g: ag.Tensor) -> Any:
            _ = ctx.saved_tensors
            if kind == "fails":
                raise Injected
            return g * factor

        class Later(F):
            @staticmethod
            async def backward(ctx: Any, g: ag.Tensor) -> Any:
                _ = ctx.saved_tensors
                if kind != "async":
                    await asyncio.sleep(0.01)
                if kind == "fails later":
                    raise Injected
                if kind == "nested":
                    with ag.enable_grad():
                        await (machine.side * 1.0).backward()
                    await asyncio.sleep(0)
                return g * factor

        node = ref.scale(a.node, factor)
        node.saved = [(a.variable.counter, a.variable.counter[0])]
        node.fails = kind.startswith("fails")
        node.nests = kind == "nested"
        self._add((F if kind in ("def", "inline", "fails") else Later).apply(a.tensor), node)

    @rule(data=st.data(), kind=st.sampled_from(HOOKS), factor=st.sampled_from([2.0, -1.0]))
    def hook(self, data: st.DataObject, kind: str, factor: float) -> None:
        candidates = [pair for pair in self.pairs if pair.requires_grad and len(pair.node.hooks) < 3]
        if candidates:
            self._hook(data.draw(st.sampled_from(candidates)), kind, factor)

    def _hook(self, a: Pair, kind: str, factor: float) -> None:
        async def later(g: Any) -> Any:
            await asyncio.sleep(0.01)
            return g * factor

        async def watches(*_: Any) -> None:
            await asyncio.sleep(0)

        if kind in ("def", "async"):
            a.tensor.register_hook(later if kind == "async" else lambda g: g * factor)
            a.node.hooks.append(lambda g: ref.scale(g, factor))
        elif a.tensor.grad_fn is not None:
            if kind == "pre":
                a.tensor.grad_fn.register_prehook(watches)
            else:
                a.tensor.grad_fn.register_hook(watches)

    @rule(data=st.data())
    def retain_grad(self, data: st.DataObject) -> None:
        candidates = [p for p in self.pairs if p.requires_grad and not p.node.is_leaf and p.variable.counter == [0] and not p.retains]
        if candidates:
            pair = data.draw(st.sampled_from(candidates))
            pair.tensor.retain_grad()
            pair.retains = True

    # ---------------------------------------------------------------- running

    def _root(self, data: st.DataObject) -> Pair:
        """The latest tensor that has a graph, or any."""
        candidates = [pair for pair in self.pairs if pair.requires_grad]
        return data.draw(st.one_of(st.just(candidates[-1]), st.sampled_from(candidates)), label="root")

    def _draw(self, data: st.DataObject, *, retain: bool | None = None) -> Spec:
        kind = data.draw(st.sampled_from(["backward", "backward", "inputs", "grad"]), label="kind")
        root = self._root(data)
        candidates = [pair for pair in self.pairs if pair.requires_grad and (kind == "grad" or pair.node.is_leaf)]
        inputs = data.draw(st.lists(st.sampled_from(candidates), min_size=1, max_size=3, unique_by=lambda p: id(p.node)), label="inputs")
        spec = Spec(kind, root, inputs, data.draw(st.booleans(), label="retain") if retain is None else retain)
        spec.predict()
        return spec

    @staticmethod
    def _engine(data: st.DataObject) -> dict[str, Any]:
        options: dict[str, Any] = {"concurrency": data.draw(st.sampled_from([None, 1, 2]), label="concurrency")}
        if data.draw(st.booleans(), label="offload"):
            options["inline_ns"] = 1.0
        if data.draw(st.booleans(), label="slices"):
            options.update(budget=2, clock=itertools.count().__next__)
        return options

    def _simulate(self, data: st.DataObject, specs: list[Spec], cancel_at: int | None = None) -> None:
        options = self._engine(data)
        seed = data.draw(st.integers(0, 2**16), label="seed")
        order: Any = data.draw(st.sampled_from(["fifo", "permuted"]), label="order")

        async def main() -> None:
            async with ag.Engine(**options):
                if len(specs) == 1:
                    await specs[0].run()
                else:
                    await asyncio.gather(*(spec.run() for spec in specs))

        try:
            simulation = simulated_run(main, seed=seed, order=order, cancel_at=cancel_at)
            assert simulation.leftover_tasks == ()
        except asyncio.CancelledError:
            assert cancel_at is not None

    def _grads(self) -> list[Any]:
        return [pair.tensor.grad for pair in self.pairs]

    def _settle(self, spec: Spec, unchanged: bool) -> None:
        """Check one pass, and do to the reference what it did."""
        result, reference = spec.result, spec.reference
        assert reference is not None
        nests = sum(node.nests for node in reference.executed)
        committed = getattr(result, "committed", False)  # cancelled between the commit and the end
        if (isinstance(result, BaseException) and not committed) or not spec.started:
            if spec.started and not isinstance(result, asyncio.CancelledError):
                assert type(result) in spec.errors, result
            assert unchanged or not isinstance(result, BaseException)
            happened = int(self.side.grad.item()) - self.nested if self.side.grad is not None else 0
            assert 0 <= happened <= nests
            self.nested += happened
            if spec.started and not spec.retain:
                self._spend(reference.seen, "perhaps" if isinstance(result, GraphFreedError) else "yes", failed=True)
            return
        assert not spec.must_fail, f"expected one of {spec.errors}"
        self.nested += nests
        if not spec.retain:
            self._spend(reference.executed, "yes", failed=False)
        if committed:
            assert isinstance(result, asyncio.CancelledError)
        if spec.kind == "grad" and not committed:
            for pair, gradient in zip(spec.inputs, result, strict=True):
                self._compare(gradient, reference.grads.get(pair.node))
        elif spec.kind != "grad":
            for i, pair in enumerate(self.leaves):
                if pair.node in reference.executed:
                    if committed:
                        assert self.post_hooks.get(i, 0) in (0, 1)  # its turn may not have come
                        self.post_hooks[i] = 1
                    gradient = reference.grads[pair.node].value
                    pair.variable.grad = gradient if pair.variable.grad is None else pair.variable.grad + gradient
                    self.post_hooks[i] = self.post_hooks.get(i, 0) - 1
        for pair in self.pairs:
            if pair.retains and pair.node in reference.seen:
                gradient = reference.grads[pair.node].value
                pair.variable.grad = gradient if pair.variable.grad is None else pair.variable.grad + gradient

    @staticmethod
    def _spend(nodes: Iterable[ref.Node], how: str, failed: bool) -> None:
        for node in nodes:
            if node.freed != "yes" and (node.saved or node.is_vague or (failed and node.keeps_facts)):
                node.freed = "perhaps" if node.is_vague else how

    def _compare(self, gradient: ag.Tensor | None, node: ref.Node | None) -> None:
        if node is None:
            assert gradient is None
            return
        found = gradient.detach().numpy()
        if ref.largest < EXACT:
            assert np.array_equal(found, node.value), (found, node.value)
        else:
            assert np.allclose(found, node.value, rtol=1e-9)

    def _check_grads(self) -> None:
        for pair in self.pairs:
            found, expected = pair.tensor.grad, pair.variable.grad
            self._compare(found, None if expected is None else ref.Node(expected))
        assert all(count == 0 for count in self.post_hooks.values()), "post-accumulate hooks"
        side = 0 if self.side.grad is None else int(self.side.grad.item())
        assert side == self.nested

    @rule(data=st.data())
    def run_one(self, data: st.DataObject) -> None:
        spec = self._draw(data)
        before = self._grads()
        self._simulate(data, [spec])
        self._settle(spec, all(a is b for a, b in zip(before, self._grads(), strict=True)))
        self._check_grads()

    @rule(data=st.data(), count=st.integers(2, 4))
    def run_several_at_once(self, data: st.DataObject, count: int) -> None:
        specs = [self._draw(data, retain=True) for _ in range(count)]
        if any(node.nests for spec in specs if spec.must_fail for node in spec.reference.executed):
            return
        self._simulate(data, specs)
        for spec in sorted(specs, key=lambda spec: isinstance(spec.result, BaseException)):
            if isinstance(spec.result, BaseException):
                assert type(spec.result) in spec.errors, spec.result
            else:
                self._settle(spec, True)
        self._check_grads()

    @rule(data=st.data(), share=st.floats(0, 1))
    def run_and_cancel(self, data: st.DataObject, share: float) -> None:
        spec = self._draw(data)
        before = self._grads()
        steps = 6 + 3 * len(spec.reference.executed)
        self._simulate(data, [spec], cancel_at=1 + int(share * steps))
        if spec.started and spec.result is None and spec.kind == "grad":
            raise AssertionError("a pass that was started ended without a result")
        self._settle(spec, all(a is b for a, b in zip(before, self._grads(), strict=True)))
        self._check_grads()

    @rule(data=st.data())
    def run_second_order(self, data: st.DataObject) -> None:
        """Gradients of the sum of the squared gradients."""
        root = self._root(data)
        inputs = data.draw(st.lists(st.sampled_from(self.leaves), min_size=1, max_size=2, unique_by=id), label="inputs")
        spec = Spec("backward", root, [], True)
        spec.predict()
        executed = spec.reference.executed
        if spec.errors or not self._small(root) or any(node.nests for node in executed):
            return
        first = ref.Pass(root.node, np.ones(root.node.value.shape), [pair.node for pair in inputs], False, create_graph=True)
        found = [first.grads.get(pair.node) for pair in inputs]
        squares = [ref.mul(g, g) for g in found if g is not None and g.requires_grad]
        if len(squares) != len(inputs):
            return
        loss = ref.total(squares[0])
        for square in squares[1:]:
            loss = ref.add(loss, ref.total(square))
        second = ref.Pass(loss, np.ones(()), [pair.node for pair in self.leaves], False)
        retained = [(pair, [p.grads[pair.node].value for p in (first, second) if pair.node in p.seen]) for pair in self.pairs if pair.retains]
        if not all(np.max(np.abs(node.value), initial=0.0) < 1e12 for p in (first, second) for node in p.grads.values()):
            return
        options = self._engine(data)

        async def main() -> Any:
            async with ag.Engine(**options):
                seed = ag.tensor(np.ones(root.tensor.shape))
                grads = await ag.grad(root.tensor, [pair.tensor for pair in inputs], seed, create_graph=True)
                total = (grads[0] * grads[0]).sum()
                for g in grads[1:]:
                    total = total + (g * g).sum()
                return grads, await ag.grad(total, [pair.tensor for pair in self.leaves], allow_unused=True, retain_graph=True)

        grads, seconds = simulated_run(main, seed=data.draw(st.integers(0, 99), label="seed"), order="permuted").value
        for gradient, node in zip(grads, found, strict=True):
            self._compare(gradient, node)
        for gradient, pair in zip(seconds, self.leaves, strict=True):
            self._compare(gradient, second.grads.get(pair.node))
        for pair, values in retained:
            for value in values:
                pair.variable.grad = value if pair.variable.grad is None else pair.variable.grad + value
        self._check_grads()

    @precondition(lambda self: any(pair.tensor.grad is not None for pair in self.leaves))
    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        pair = data.draw(st.sampled_from(self.leaves))
        pair.tensor.grad = None
        pair.variable.grad = None


# A run repeats the same programs; HYPOTHESIS_PROFILE=dev explores others, and AIOGRAD_STATE_MACHINES says how many. `make test` runs a fifth.
MACHINES = int(os.environ.get("AIOGRAD_STATE_MACHINES", "300"))
TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(
    max_examples=max(MACHINES // 5, 1),
    stateful_step_count=30,
    suppress_health_check=list(HealthCheck),
    deadline=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
)


@pytest.mark.sweep
class TestEngineAtLength(TestEngine):
    settings = settings(TestEngine.settings, max_examples=MACHINES)
