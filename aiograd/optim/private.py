"""Private: DP-SGD, steps that promise differential privacy for the examples.

Note [A private step is a transaction]
    Losses and passes of a step write nothing. After them there is no await: the optimizer steps, epsilon is logged; where one of these fails,
    parameters and the optimizer's state are put back. The count goes on last. So a step that raises or is cancelled has spent nothing.

Note [Noise on threads]
    The noise of a step comes from a fork of the generator, made when the step begins: two steps that run at the same time have different noise. It
    is added to the sums in place, block by block, each from a generator of its own, so that threads of the executor share the work and the numbers
    depend on neither their count nor on whether there are any. Gradients are clipped and added up on a thread, too. A step that fails puts the
    generator back, unless something else has used it meanwhile.

Source: Abadi et al., Deep learning with differential privacy (2016).
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from aiograd.engine.run import current_engine
from aiograd.engine.run.together import together
from aiograd.errors import ArgumentError, ArgumentTypeError, ModifiedError, NaNGradientError
from aiograd.functional.batching.per_sample import checked, gradients_of_examples, norms_of
from aiograd.optim.accountant import check_mechanism, check_number, rdp_epsilon
from aiograd.optim.optimizer import Optimizer
from aiograd.running.modes import tell_compiler
from aiograd.running.random import Generator
from aiograd.running.scalars import log
from aiograd.tensors.core import counter_of, make
from aiograd.tensors.creation import asarray
from aiograd.tensors.inplace import write
from aiograd.tensors.tensor import Tensor

T = TypeVar("T")
#: numbers of noise that are drawn at a time, and of parameters from which on they step apart from the next ones, and noise comes from a thread
_BLOCK, _BUNCH = 1 << 15, 1 << 16
#: calls of the executor that draw noise at the same time
_THREADS = 4
_SETTINGS = ("noise_multiplier", "max_grad_norm", "sample_rate", "dataset_size")


class Private:
    """Steps of an optimizer with the clipped gradients of a batch and noise: ``(sum(clip(g_i)) + noise) / (sample_rate * dataset_size)``.

    The gradient of each example over all parameters is scaled down to `max_grad_norm`; the noise has the standard deviation
    ``noise_multiplier * max_grad_norm``. Epsilon holds for batches in which each example is with probability `sample_rate`, independently of
    others: `aiograd.data.PoissonSampler` draws such batches. After every step ``ag.log`` gets "epsilon", at `delta`.

    Args:
        optimizer: trains its parameters that require grad; any with a step that is not awaited.
        noise_multiplier: at least 0; with 0 nothing is private.
        max_grad_norm: above 0.
        sample_rate: probability of an example to be in a batch, above 0 and at most 1.
        dataset_size: examples of the data set, at least 1.
        generator: draws the noise; None: one seeded from the system. It is no cryptographic source of random numbers.

    Attributes:
        steps: how many were taken. delta: a tenth of 1 / dataset_size, for the logged epsilon.

    Raises:
        ArgumentError: a setting out of its range. ArgumentTypeError: no such optimizer or generator.

    Source: Abadi et al., Deep learning with differential privacy (2016).

    >>> model = ag.nn.Linear(2, 1)
    >>> optimizer = ag.optim.SGD(model.parameters(), lr=0.1)
    >>> private = ag.optim.Private(optimizer, noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.01, dataset_size=400)
    >>> losses = await private.step(lambda x, y: ((model(x) - y) ** 2).sum(), (ag.ones(4, 2), ag.zeros(4, 1)))
    >>> losses.shape, private.steps, round(private.epsilon(1e-5), 2)
    ((4,), 1, 0.96)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        sample_rate: float,
        dataset_size: int,
        generator: Generator | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer) or inspect.iscoroutinefunction(type(optimizer).step):
            raise ArgumentTypeError(f"Private: expected an optimizer with a step that is not awaited, found {type(optimizer).__name__}")
        if generator is not None and not isinstance(generator, Generator):
            raise ArgumentTypeError(f"Private: expected a Generator or None, found {type(generator).__name__}")
        check_mechanism("Private", noise_multiplier, sample_rate)
        check_number("Private", "max_grad_norm", max_grad_norm, lambda x: 0 < x < math.inf, "a finite number above 0")
        check_number("Private", "dataset_size", dataset_size, lambda x: x >= 1 and not isinstance(x, (float, np.floating)), "a whole number above 0")
        self.optimizer = optimizer
        self.noise_multiplier: float = float(noise_multiplier)
        self.max_grad_norm: float = float(max_grad_norm)
        self.sample_rate: float = float(sample_rate)
        self.dataset_size: int = int(dataset_size)
        self.generator: Generator = Generator() if generator is None else generator
        self.steps: int = 0
        self.delta: float = 0.1 / self.dataset_size
        self._expected = self.sample_rate * self.dataset_size

    async def step(self, loss: Callable[..., Any], batch: Any, *, chunk_size: int | None = None) -> Tensor:
        """Take a step; an empty batch is one, with noise alone.

        It is a transaction: where it raises, or is cancelled, no parameter, no state, no generator and no count has changed. No ``grad`` is used and
        no hook of a parameter is called. See Note [A private step is a transaction].

        Args:
            loss: of one example, ``loss(*example)``, as for `aiograd.grad_per_sample`.
            batch: arrays or Tensors, (B, ...) each.
            chunk_size: how many examples are computed together; None: all.

        Returns:
            The losses before the step, (B,). They are not private.

        Raises:
            NaNGradientError: the gradient of an example is not finite. ModifiedError: a parameter was modified meanwhile, as by another step.
            ArgumentError: as `aiograd.grad_per_sample`, or parameters of a `DistributedDataParallel`.

        >>> w = ag.zeros(2, requires_grad=True)
        >>> optimizer = ag.optim.SGD([w], lr=1.0)
        >>> private = ag.optim.Private(optimizer, noise_multiplier=0.0, max_grad_norm=1.0, sample_rate=0.5, dataset_size=2)
        >>> await private.step(lambda x: (x * w).sum(), np.array([[3.0, 4.0]], np.float32))
        tensor([0.])
        >>> w.detach()
        tensor([-0.6, -0.8])
        """
        tell_compiler("takes a private step")
        params, chunks = checked("Private.step", loss, self._params(), batch, chunk_size)
        if any((extra := p._node._extra) is not None and extra.reducer is not None for p in params):
            raise ArgumentError(
                "Private.step: parameters belong to a DistributedDataParallel, and a private step combines no gradients, so members would differ. "
                "Train in one process, or call detach() of the DistributedDataParallel"
            )
        versions = [counter_of(p)[0] for p in params]
        unused = self.generator.state_dict()
        generator = self.generator.fork()
        used = self.generator.state_dict()
        try:
            totals, losses = await self._sums(loss, params, chunks, generator)
            if versions != [counter_of(p)[0] for p in params]:
                raise ModifiedError("Private.step: a parameter was modified while the step computed its gradients; take one step at a time")
            self._take(totals)
        except BaseException:
            if self.generator.state_dict() == used:
                self.generator.load_state_dict(unused)
            raise
        return asarray(np.concatenate(losses) if losses else np.zeros(0, params[0].dtype))

    async def _sums(
        self, loss: Callable[..., Any], params: list[Any], chunks: list[list[Any]], generator: Generator
    ) -> tuple[dict[Any, Any], list[Any]]:
        """The sums of noise and clipped gradients by parameter, and the losses of each chunk."""
        totals: dict[Any, Any] = dict.fromkeys(params)
        size = sum(p.size for p in params)
        losses: list[Any] = []
        for chunk in chunks:
            chunk_losses, gradients = await gradients_of_examples("Private.step", loss, params, chunk)
            await _worked(size, self._add_clipped, totals, gradients, len(chunk_losses), sum(map(len, losses)))
            losses.append(chunk_losses)
        blocks = _blocks(totals)
        pairs = list(zip(blocks, generator.spawn(len(blocks)), strict=True))
        await together(_worked(size, self._add_noise, pairs[first::_THREADS]) for first in range(min(_THREADS, len(pairs))))
        return totals, losses

    def _add_clipped(self, totals: dict[Any, Any], gradients: list[Any], examples: int, before: int) -> None:
        """Add the clipped gradients of some examples, `before` which others came."""
        norms = norms_of(gradients, examples)
        if not np.isfinite(norms).all():
            wrong = np.flatnonzero(~np.isfinite(norms)) + before
            raise NaNGradientError(
                f"Private.step: the gradients of examples {wrong[:5].tolist()} of the batch are not finite ({len(wrong)} in all); nothing has "
                "changed. Leave them out of the data set, or mend the loss."
            )
        weights = self.max_grad_norm / np.maximum(norms, self.max_grad_norm) / self._expected
        for p in totals:
            each = gradients.pop(0)  # so that it goes as the sum comes
            if each is not None:
                total = each.weighted(weights)
                totals[p] = total if totals[p] is None else totals[p] + total

    def _add_noise(self, pairs: list[tuple[list[Any], Generator]]) -> None:
        """Add noise to blocks of sums, to each from its generator."""
        std = self.noise_multiplier * self.max_grad_norm / self._expected
        for block, generator in pairs:
            for part in block:
                part += generator.normal(part.shape, std=std, dtype=part.dtype)._data

    def _params(self) -> list[Any]:
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]

    def _take(self, totals: dict[Any, Any]) -> None:
        undo: list[Callable[[], None]] = []
        try:
            for bunch in self._bunches(list(totals)):
                gradients = {p: make(totals.pop(p)).to(p.device) for p in bunch}
                undo.append(_undo(self.optimizer, bunch))
                self.optimizer.step(gradients)
            log("epsilon", self._epsilon(self.delta, self.steps + 1), self.steps + 1)
        except BaseException:
            for put_back in reversed(undo):
                put_back()
            raise
        self.steps += 1

    def _bunches(self, params: list[Any]) -> list[list[Any]]:
        """Parameters that step together: gradients go as copies of parameters come, which keeps memory low. All, where a step looks at all."""
        bunches: list[list[Any]] = [[]]
        splits = self.optimizer.is_elementwise and type(self.optimizer).step is Optimizer.step
        for p in params:
            if splits and sum(q.size for q in bunches[-1]) >= _BUNCH:
                bunches.append([])
            bunches[-1].append(p)
        return bunches

    def epsilon(self, delta: float) -> float:
        """The epsilon of (epsilon, delta)-differential privacy of all steps taken; see `rdp_epsilon`.

        Args:
            delta: probability that the promise does not hold, between 0 and 1; below 1 / dataset_size to mean anything.

        Returns:
            Epsilon; infinity without noise.

        Raises:
            ArgumentError: another `delta`.
        """
        return self._epsilon(delta, self.steps)

    def _epsilon(self, delta: float, steps: int) -> float:
        return rdp_epsilon(noise_multiplier=self.noise_multiplier, sample_rate=self.sample_rate, steps=steps, delta=delta)

    def state_dict(self) -> dict[str, Any]:
        """The states of optimizer and generator, the count, and the settings that epsilon depends on.

        Returns:
            A dict for `load_state_dict`.
        """
        settings = {name: getattr(self, name) for name in _SETTINGS}
        return {"optimizer": self.optimizer.state_dict(), "generator": self.generator.state_dict(), "steps": self.steps, **settings}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of steps with the same settings.

        Args:
            state_dict: the state.

        Raises:
            ArgumentError: it does not fit, or the settings differ, so that epsilon would be wrong; nothing has changed.
        """
        what, expected = "Private.load_state_dict", {"optimizer", "generator", "steps", *_SETTINGS}
        if not isinstance(state_dict, Mapping) or set(state_dict) != expected:
            raise ArgumentError(f"{what}: expected a dict with {sorted(expected)}, as state_dict() returns it")
        for name in _SETTINGS:
            if state_dict[name] != getattr(self, name):
                raise ArgumentError(f"{what}: the state is of steps with {name}={state_dict[name]!r}, expected {getattr(self, name)!r}")
        check_number(what, "steps", state_dict["steps"], lambda x: x >= 0 and x == int(x), "a whole number of at least 0")
        generator = Generator(0).load_state_dict(state_dict["generator"])
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.generator.load_state_dict(generator.state_dict())
        self.steps = int(state_dict["steps"])


def _blocks(totals: dict[Any, Any]) -> list[list[Any]]:
    """The numbers of sums by parameter, in blocks of about `_BLOCK`, as arrays that share their memory; a parameter without a sum gets zeros."""
    blocks: list[list[Any]] = []
    room = 0
    for p, total in totals.items():
        totals[p] = np.zeros(p.shape, p.dtype) if total is None else np.ascontiguousarray(total).reshape(p.shape)  # else (1,) for ()
        flat = totals[p].reshape(-1)
        for start in range(0, flat.size, _BLOCK):
            part = flat[start : start + _BLOCK]
            if room < part.size:
                blocks.append([])
                room = _BLOCK
            blocks[-1].append(part)
            room -= part.size
    return blocks


async def _worked(size: int, function: Callable[..., T], *args: Any) -> T:
    """The result of a function that works on arrays of `size` numbers together: of a thread of the executor where they are many."""
    if size < _BUNCH:
        return function(*args)
    return await current_engine().offload(functools.partial(function, *args))  # type: ignore[no-any-return]


def _undo(optimizer: Optimizer, params: list[Any]) -> Callable[[], None]:
    """A function that restores parameters, their state and the optimizer's options as they are now."""
    groups = [dict(group) for group in optimizer.param_groups]
    values = [(p, p.detach().clone()) for p in params]
    known = {p: {name: copy.deepcopy(value) for name, value in optimizer.state[p].items()} for p in params if p in optimizer.state}

    def put_back() -> None:
        for p, value in values:
            write(p, value._data)
            optimizer.state.pop(p, None)
        optimizer.state.update(known)
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(options)

    return put_back
