"""Small graphs on one thread: what recording, differentiating and freeing a node costs when the arithmetic is next to nothing.

Every step is forward, backward and the end of the graph. The loop in which aiograd's side runs is uvloop where it is installed, as in `aiograd.run`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import aiograd as ag
from tests.benchmarks import networks
from tests.benchmarks.harness import Settings, Side, Table, Workload, compare, sides, threads, training_side

Array = np.ndarray[Any, Any]
#: of compiled functions: native from the first run on, so that no timed step is one of numpy calls; without llvmlite they are numpy calls
TIER: Any = "native" if ag.kernels.native_available() else "numpy"


def run(settings: Settings) -> Iterator[Table]:
    """Time all small graphs."""
    with threads(1):
        yield ag.run(_run(settings))


async def _run(settings: Settings) -> Table:
    length = settings.of(1000, 20)
    workloads = [
        chain(settings, length, every_leaf=False), chain(settings, length, every_leaf=True), wide(settings, length, own_leaves=True),
        wide(settings, length, own_leaves=False), mlp(settings, by_optim=False), mlp(settings, by_optim=True), lstm(settings, settings.of(100, 3)),
    ]  # fmt: skip
    return await compare("Small graphs, 1 thread: forward + backward + free", workloads, settings)


# -------------------------------------------------------------------- elementwise graphs


def chain(settings: Settings, length: int, *, every_leaf: bool, compiled: bool = False) -> Workload:
    """``y = y * a + b`` over and over on 4 floats; the gradient of x, or of x, a and b."""
    rng = np.random.default_rng(0)
    x, a, b = (rng.uniform(0.5, 0.99, 4).astype(np.float32) for _ in range(3))

    def ours() -> Side:
        leaf = ag.tensor(x, requires_grad=True)
        factor, term = (ag.tensor(value, requires_grad=every_leaf) for value in (a, b))
        leaves = (leaf, factor, term) if every_leaf else (leaf,)

        def forward(leaf: Any) -> Any:
            y = leaf
            for _ in range(length):
                y = y * factor + term
            return y.sum()

        run_forward = ag.compile(forward, tier=TIER) if compiled else forward

        async def pass_over() -> Any:
            y = run_forward(leaf)
            await y.backward()
            return y

        return aiograd_side(pass_over, leaves)

    def torch_() -> Side:
        import torch

        leaf = torch.tensor(x, requires_grad=True)
        factor, term = (torch.tensor(value, requires_grad=every_leaf) for value in (a, b))
        leaves = (leaf, factor, term) if every_leaf else (leaf,)

        def pass_over() -> Any:
            y = leaf
            for _ in range(length):
                y = y * factor + term
            y = y.sum()
            y.backward()
            return y

        return torch_side(pass_over, leaves)

    def autograd_() -> Side:
        import autograd.numpy as anp

        def forward(leaf: Any, factor: Any = a, term: Any = b) -> Any:
            y = leaf
            for _ in range(length):
                y = y * factor + term
            return anp.sum(y)

        return autograd_side(forward, (x, a, b) if every_leaf else (x,))

    what = "x, a and b" if every_leaf else "x"
    return Workload(f"chain of {length} x*a+b, 4 floats, gradient of {what}", sides(settings, ours, torch=torch_, autograd=autograd_), 0.60, 0.35)


def wide(settings: Settings, count: int, *, own_leaves: bool, compiled: bool = False) -> Workload:
    """`count` branches ``x * a + b``, each with a leaf of its own or all from one, and their sum."""
    rng = np.random.default_rng(1)
    xs = [rng.normal(size=4).astype(np.float32) for _ in range(count)] if own_leaves else [rng.normal(size=4).astype(np.float32)]
    a, b = (rng.normal(size=4).astype(np.float32) for _ in range(2))

    def ours() -> Side:
        leaves = [ag.tensor(x, requires_grad=True) for x in xs]
        starts = leaves if own_leaves else leaves * count
        factor, term = ag.tensor(a), ag.tensor(b)

        def forward() -> Any:
            return _branches(starts, factor, term).sum()

        run_forward = ag.compile(forward, tier=TIER) if compiled else forward

        async def pass_over() -> Any:
            y = run_forward()
            await y.backward()
            return y

        return aiograd_side(pass_over, leaves)

    def torch_() -> Side:
        import torch

        leaves = [torch.tensor(x, requires_grad=True) for x in xs]
        starts = leaves if own_leaves else leaves * count
        factor, term = torch.tensor(a), torch.tensor(b)

        def pass_over() -> Any:
            y = _branches(starts, factor, term).sum()
            y.backward()
            return y

        return torch_side(pass_over, leaves)

    def autograd_() -> Side:
        import autograd.numpy as anp

        return autograd_side(lambda x: anp.sum(_branches([x] * count, a, b)), (xs[0],))

    # HIPS autograd takes most of a second for a thousand leaves
    peers = {"torch": torch_} if own_leaves else {"torch": torch_, "autograd": autograd_}
    what = "own leaves" if own_leaves else "one leaf"
    return Workload(f"{count} branches summed, {what}", sides(settings, ours, **peers), 0.50, 0.30)


def _branches(starts: Sequence[Any], factor: Any, term: Any) -> Any:
    """The sum of the branches, the same expression for every peer."""
    total = starts[0] * factor + term
    for start in starts[1:]:
        total = total + (start * factor + term)
    return total


# -------------------------------------------------------------------- small networks


def mlp(settings: Settings, *, by_optim: bool, compiled: bool = False, as_step: bool = False) -> Workload:
    """A training step of 64-64-10 on a batch of 8: linear, relu, linear, cross entropy, SGD; with `as_step` the whole of it is compiled."""
    network = networks.mlp(8, (64, 64, 10))
    rate = 0.01

    def ours() -> Side:
        model = networks.on_aiograd(network, rate)
        run_forward = ag.compile(model.forward, tier=TIER) if compiled and not as_step else model.forward

        async def forward_backward() -> Any:
            loss = run_forward()
            await loss.backward()
            return loss

        async def step() -> Any:
            loss = await forward_backward()
            if by_optim:
                model.optimizer.step()
                model.optimizer.zero_grad()
            else:
                with ag.no_grad():
                    for parameter in model.parameters:
                        parameter -= rate * parameter.grad
                        parameter.grad = None
            return loss

        return training_side(forward_backward, ag.compile(step, tier=TIER) if as_step else step, model.parameters)

    def torch_() -> Side:
        import torch

        model = networks.on_torch(network, rate)

        def forward_backward() -> Any:
            loss = model.forward()
            loss.backward()
            return loss

        def step() -> None:
            forward_backward()
            if by_optim:
                model.optimizer.step()
                model.optimizer.zero_grad()
            else:
                with torch.no_grad():
                    for parameter in model.parameters:
                        parameter -= rate * parameter.grad
                        parameter.grad = None

        return training_side(forward_backward, step, model.parameters)

    def autograd_() -> Side:
        import autograd
        import autograd.numpy as anp

        (data, labels), parameters = network.data, [value.copy() for value in network.parameters]
        rows = np.arange(len(labels))

        def forward(w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
            logits = anp.dot(anp.maximum(anp.dot(data, w1.T) + b1, np.float32(0)), w2.T) + b2
            shifted = logits - anp.max(logits, axis=1, keepdims=True)
            return anp.mean(anp.log(anp.sum(anp.exp(shifted), axis=1)) - shifted[rows, labels])

        differentiate = autograd.value_and_grad(forward, (0, 1, 2, 3))

        def step() -> None:
            _, grads = differentiate(*parameters)
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter -= rate * grad

        def result() -> list[Array]:
            loss, grads = differentiate(*parameters)
            step()
            return [np.asarray(loss), *grads, *(parameter.copy() for parameter in parameters)]

        return Side(step, result)

    peers = {"torch": torch_} if by_optim else {"torch": torch_, "autograd": autograd_}
    what = "optim.SGD" if by_optim else "SGD by hand"
    one = "one compiled step" if as_step else "training step"
    return Workload(f"MLP 64-64-10, batch 8, {one}, {what}", sides(settings, ours, **peers), 0.70, 0.50)


def lstm(settings: Settings, steps: int, *, compiled: bool = False) -> Workload:
    """An LSTM of hidden size 16 unrolled over `steps` steps of a batch of 4, from elementary operations."""
    hidden, batch = 16, 4
    network = networks.lstm(steps, hidden, batch)

    def ours() -> Side:
        model = networks.on_aiograd(network)
        run_forward = ag.compile(model.forward, tier=TIER) if compiled else model.forward

        async def pass_over() -> Any:
            loss = run_forward()
            await loss.backward()
            return loss

        return aiograd_side(pass_over, model.parameters)

    def torch_() -> Side:
        model = networks.on_torch(network)

        def pass_over() -> Any:
            loss = model.forward()
            loss.backward()
            return loss

        return torch_side(pass_over, model.parameters)

    def autograd_() -> Side:
        import autograd.numpy as anp

        half, one = np.float32(0.5), np.float32(1)

        def sigmoid(x: Any) -> Any:
            return half * (anp.tanh(half * x) + one)

        def forward(wx: Any, wh: Any, bias: Any) -> Any:
            h = c = network.data[-1]
            for x in network.data[:-1]:
                gates = anp.dot(x, wx) + anp.dot(h, wh) + bias
                i, f, o = (sigmoid(gates[:, hidden * j : hidden * (j + 1)]) for j in range(3))
                c = f * c + i * anp.tanh(gates[:, 3 * hidden :])
                h = o * anp.tanh(c)
            return anp.sum(h * h)

        return autograd_side(forward, network.parameters)

    name = f"LSTM unrolled {steps} steps, hidden 16, batch 4, elementary ops"
    return Workload(name, sides(settings, ours, torch=torch_, autograd=autograd_), 0.80, 0.50, rtol=1e-3)


# -------------------------------------------------------------------- making sides


def aiograd_side(pass_over: Any, leaves: Sequence[ag.Tensor]) -> Side:
    """A side whose step is `pass_over` and forgetting the gradients."""

    async def step() -> None:
        await pass_over()
        for leaf in leaves:
            leaf.grad = None

    async def result() -> list[Array]:
        value = await pass_over()
        found = [value.detach().numpy(), *(leaf.grad.numpy().copy() for leaf in leaves)]
        for leaf in leaves:
            leaf.grad = None
        return found

    return Side(step, result)


def torch_side(pass_over: Any, leaves: Sequence[Any]) -> Side:
    """The same for torch."""

    def step() -> None:
        pass_over()
        for leaf in leaves:
            leaf.grad = None

    def result() -> list[Array]:
        value = pass_over()
        found = [value.detach().numpy(), *(leaf.grad.numpy().copy() for leaf in leaves)]
        for leaf in leaves:
            leaf.grad = None
        return found

    return Side(step, result)


def autograd_side(forward: Any, values: Sequence[Array]) -> Side:
    """The same for HIPS autograd, which differentiates functions of arrays."""
    import autograd

    differentiate = autograd.value_and_grad(forward, tuple(range(len(values))))

    def result() -> list[Array]:
        value, grads = differentiate(*values)
        return [np.asarray(value), *grads]

    return Side(lambda: differentiate(*values), result)
