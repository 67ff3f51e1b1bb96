"""Mixtures of experts over workers: a gate chooses experts for each sample, and combines their answers.

Source: hivemind ``moe/client/moe.py`` and ``switch_moe.py``; Shazeer et al., Outrageously large neural networks, 2017; Fedus et al., Switch
transformers, 2021.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from aiograd.array_functions import public as af
from aiograd.distributed.moe.gating import Grid, combine_experts, expert_scores, split_scores
from aiograd.distributed.moe.runtime.call_many import CallManyResult, call_many
from aiograd.distributed.moe.uid import check_prefix, parse_uid
from aiograd.errors import ArgumentError, ArgumentTypeError, ShapeError
from aiograd.running.modes import is_grad_enabled
from aiograd.tensors.core import host_array, make
from aiograd.tensors.creation import asarray
from aiograd.tensors.inplace import write
from aiograd.tensors.tensor import Tensor

#: options of `call_many` by name
_OPTIONS = frozenset(name for name, each in inspect.signature(call_many).parameters.items() if each.kind is each.KEYWORD_ONLY)


class RemoteMixtureOfExperts:
    """For each sample the `k_best` experts by the gate's scores, weighted by a softmax over the answers.

    ::

        moe = RemoteMixtureOfExperts(64, (4, 4), experts, prefix="ffn.", k_best=2, seed=0)
        y = await moe(x)

    Args:
        in_features: last dimension of the input; middle dimensions are averaged for the gate.
        grid_size: extent of the grid of experts.
        experts: async callables by uid; a uid that begins with `prefix` takes part.
        prefix: such as ``"ffn."``.
        k_best: experts per sample.
        beam: prefixes kept by the beam search; `k_best` by default.
        allow_zero_outputs: a sample without an answer gives zeros, instead of an error. If no sample has an answer, the zeros have the shape of
            earlier answers, or of the input if there have been none.
        seed: of the gate's initial weights.
        options: of `call_many`.

    Raises:
        ArgumentError, ArgumentTypeError: sizes, experts, uids or options that cannot be.

    >>> experts = await dist.moe.find_experts(driver, ["left"])
    >>> mixture = dist.moe.RemoteMixtureOfExperts(2, (2,), experts, prefix="ffn.", k_best=1)
    >>> (await mixture(ag.ones(1, 2))).detach()
    tensor([[2., 2.]])
    """

    #: statistics of the last forward: experts that answered, experts that were lost
    last: CallManyResult | None = None
    #: shape of an answer to one sample, once there has been one
    _answer_shape: tuple[int, ...] | None = None

    def __init__(
        self,
        in_features: int,
        grid_size: Sequence[int],
        experts: Mapping[str, Callable[..., Any]],
        *,
        prefix: str,
        k_best: int,
        beam: int | None = None,
        allow_zero_outputs: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        for name, number in {"in_features": in_features, "k_best": k_best, **({} if beam is None else {"beam": beam})}.items():
            if isinstance(number, bool) or not isinstance(number, (int, np.integer)):
                raise ArgumentTypeError(f"{type(self).__name__}({name}={number!r}): expected an int")
        if not isinstance(experts, Mapping) or not all(isinstance(uid, str) for uid in experts):
            raise ArgumentTypeError(f"{type(self).__name__}: expected experts by uid, as find_experts() gives them, found {type(experts).__name__}")
        if unknown := options.keys() - _OPTIONS:
            known = ", ".join(sorted(_OPTIONS))
            raise ArgumentError(f"{type(self).__name__}: unknown options {', '.join(sorted(unknown))}; expected some of {known}")
        if k_best < 1 or in_features < 1:
            raise ArgumentError(f"{type(self).__name__}(in_features={in_features}, k_best={k_best}): expected at least 1")
        check_prefix(prefix)
        own = {parse_uid(uid).coordinates: expert for uid, expert in experts.items() if uid.startswith(prefix)}
        self.experts: dict[tuple[int, ...], Callable[..., Any]] = own
        if not self.experts:
            raise ArgumentError(f"{type(self).__name__}: none of the {len(experts)} experts begins with {prefix!r}")
        self.grid: Grid = Grid(grid_size, [parse_uid(uid) for uid in experts if uid.startswith(prefix)])
        self.in_features = in_features
        self.k_best = k_best
        self.beam = beam
        self.allow_zero_outputs = allow_zero_outputs
        self.options = options
        self.random: np.random.Generator = np.random.default_rng(seed)
        bound = 1 / np.sqrt(in_features)
        outputs = sum(self.grid.shape)
        self.weight: Any = make(self.random.uniform(-bound, bound, (outputs, in_features)).astype(np.float32)).requires_grad_()
        self.bias: Any = make(self.random.uniform(-bound, bound, outputs).astype(np.float32)).requires_grad_()

    def parameters(self) -> list[Any]:
        """The gate's parameters; experts learn by themselves.

        Returns:
            The Parameters.
        """
        return [self.weight, self.bias]

    def named_parameters(self) -> list[tuple[str, Any]]:
        """The gate's parameters by name.

        Returns:
            Pairs of name and Parameter.
        """
        return [("weight", self.weight), ("bias", self.bias)]

    def state_dict(self) -> dict[str, Any]:
        """The gate's parameters.

        Returns:
            A dict for `load_state_dict`.
        """
        return {"weight": self.weight.detach(), "bias": self.bias.detach()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; both are checked before either is changed.

        Args:
            state: Tensors or arrays by name.

        Raises:
            ArgumentError: without one of the names, or no dict. ArgumentTypeError: no numbers. ShapeError: of another gate.
        """
        if not isinstance(state, Mapping) or not {"weight", "bias"} <= state.keys():
            raise ArgumentError(f"{type(self).__name__}.load_state_dict: expected a dict with 'weight' and 'bias', as state_dict() returns it")
        what = f"{type(self).__name__}.load_state_dict"
        values = {name: asarray(state[name]) for name in ("weight", "bias")}
        for name, parameter in self.named_parameters():
            found = values[name]
            if found.shape != parameter.shape:
                raise ShapeError(f"{what}: {name} has shape {list(found.shape)}, expected {list(parameter.shape)}")
            if found.dtype.kind not in "biuf":
                raise ArgumentTypeError(f"{what}: {name} has dtype {found.dtype}, expected {parameter.dtype}")
        for name, parameter in self.named_parameters():
            write(parameter, host_array(values[name]))

    def _gate_input(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            raise ArgumentTypeError(f"{type(self).__name__}: got a {type(x).__name__}; expected a Tensor of shape (batch, ..., {self.in_features})")
        if x.ndim < 2 or x.shape[-1] != self.in_features:
            raise ShapeError(f"{type(self).__name__}: got an input of shape {list(x.shape)}; expected (batch, ..., {self.in_features})")
        return af.mean(x, axis=tuple(range(1, x.ndim - 1))) if x.ndim > 2 else x

    def _scores(self, gate_input: Any) -> list[Any]:
        return split_scores(af.matmul(gate_input, self.weight.T) + self.bias, self.grid.shape)

    async def _ask(self, chosen: Sequence[Sequence[tuple[int, ...]]], x: Any, more: Sequence[Any]) -> tuple[CallManyResult, Any]:
        """The answers of the chosen experts, and their outputs as a Tensor ``(batch, k, ...)`` even if no expert answered."""
        self.last = result = await call_many([[self.experts[place] for place in places] for places in chosen], (x, *more), **self.options)
        if result.mask.any():
            self._answer_shape = result.outputs.shape[2:]
            return result, result.outputs
        shape = x.shape[1:] if self._answer_shape is None else self._answer_shape
        return result, make(np.zeros((*result.mask.shape, *shape), x.dtype if x.dtype.kind in "fc" else np.float32))

    async def __call__(self, x: Any, *more: Any) -> Any:
        """The mixture's output ``(batch, ...)``. Cancelling cancels all requests.

        Args:
            x: ``(batch, ..., in_features)``; `more` are further arguments of the experts, not seen by the gate.

        Raises:
            As `call_many` and `combine_experts`.
        """
        scores = self._scores(self._gate_input(x))
        chosen = self.grid.beam_search([part.detach().numpy() for part in scores], self.k_best, self.beam)
        logits = expert_scores(scores, chosen)
        result, outputs = await self._ask(chosen, x, more)
        return combine_experts(logits, outputs, result.mask, allow_zero_outputs=self.allow_zero_outputs)


class RemoteSwitchMixtureOfExperts(RemoteMixtureOfExperts):
    """One expert per sample, a residual around it, and a loss that keeps the experts equally busy.

    Args:
        jitter: only the gate sees the input multiplied by random numbers from ``1 - jitter`` to ``1 + jitter``.
        grid_dropout: probability that a coordinate is left out of a dimension's choice (never all of them).
        utilization_alpha: weight of the past in the running mean of how often each coordinate is used.
        training: True if jitter and dropout are on.
        in_features, grid_size, experts, prefix: as of `RemoteMixtureOfExperts`.
        **options: further arguments of `RemoteMixtureOfExperts`.

    Raises:
        ArgumentError, ArgumentTypeError: numbers that make no sense, or options that a switch does not have.

    >>> experts = await dist.moe.find_experts(driver, ["left"])
    >>> mixture = dist.moe.RemoteSwitchMixtureOfExperts(2, (2,), experts, prefix="ffn.")
    >>> output, loss = await mixture(ag.ones(1, 2))
    >>> output.shape, loss.shape
    ((1, 2), ())
    """

    def __init__(
        self,
        in_features: int,
        grid_size: Sequence[int],
        experts: Mapping[str, Callable[..., Any]],
        *,
        prefix: str,
        jitter: float = 0.01,
        grid_dropout: float = 0.0,
        utilization_alpha: float = 0.9,
        **options: Any,
    ) -> None:
        for name, value in {"jitter": jitter, "grid_dropout": grid_dropout, "utilization_alpha": utilization_alpha}.items():
            if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
                raise ArgumentTypeError(f"{type(self).__name__}({name}={value!r}): expected a number from 0 to below 1")
        if fixed := options.keys() & {"k_best", "allow_zero_outputs"}:
            raise ArgumentError(f"{type(self).__name__}({sorted(fixed)[0]}=...): a switch asks one expert per sample, and a silent one gives zeros")
        options.setdefault("k_min", 0)
        options.setdefault("on_expert_loss", "drop")
        super().__init__(in_features, grid_size, experts, prefix=prefix, k_best=1, allow_zero_outputs=True, **options)
        if not 0 <= jitter < 1 or not 0 <= grid_dropout < 1 or not 0 <= utilization_alpha < 1:
            raise ArgumentError(f"{type(self).__name__}: jitter, grid_dropout and utilization_alpha are from 0 to below 1")
        self.jitter = jitter
        self.grid_dropout = grid_dropout
        self.alpha = utilization_alpha
        self.training = True
        #: running share of samples per coordinate, one array per dimension
        self.utilization: list[np.ndarray[Any, Any]] = [np.full(size, 1 / size) for size in self.grid.shape]

    async def __call__(self, x: Any, *more: Any) -> tuple[Any, Any]:
        """The output, ``x`` plus the chosen expert's answer times its probability, and the balancing loss (1 per dimension at best)."""
        gate_input = self._gate_input(x)
        if self.training and self.jitter:
            noise = self.random.uniform(1 - self.jitter, 1 + self.jitter, gate_input.shape)
            dtype = gate_input.dtype if gate_input.dtype.kind in "fc" else noise.dtype  # as integers the factors would be 0 or 1
            gate_input = gate_input * make(noise.astype(dtype))
        logits = self._scores(gate_input)
        if self.training and self.grid_dropout:
            logits = [part + make(self._dropped(part.shape).astype(part.dtype)) for part in logits]
        probabilities = [_softmax(part) for part in logits]
        chosen = self.grid.beam_search([part.detach().numpy() for part in logits], 1, self.beam)
        _, outputs = await self._ask(chosen, x, more)
        rows = np.arange(x.shape[0])
        columns = [np.array([places[0][d] if places else 0 for places in chosen], np.intp) for d in range(len(logits))]
        weight = probabilities[0][rows, columns[0]]
        for part, column in zip(probabilities[1:], columns[1:], strict=True):
            weight = weight * part[rows, column]
        answer = outputs[:, 0] if outputs.shape[1] else af.reshape(outputs, (0, *outputs.shape[2:]))  # of a batch without rows
        if answer.shape != x.shape:
            raise ShapeError(f"{type(self).__name__}: experts answered with shape {list(answer.shape[1:])}; the residual needs {list(x.shape[1:])}")
        output = x + af.reshape(weight, (-1, *(1,) * (x.ndim - 1))) * answer
        return output, self._balancing_loss(probabilities, columns)

    def _dropped(self, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        drop = self.random.random(shape) < self.grid_dropout
        drop[drop.all(axis=1)] = False
        return np.where(drop, -1e9, 0.0)

    def _balancing_loss(self, probabilities: Sequence[Any], columns: Sequence[np.ndarray[Any, Any]]) -> Any:
        loss: Any = None
        for d, (part, column) in enumerate(zip(probabilities, columns, strict=True)):
            size = part.shape[1]
            share = np.bincount(column, minlength=size) / max(len(column), 1)
            if len(column) and self.training and is_grad_enabled():
                self.utilization[d] = self.alpha * self.utilization[d] + (1 - self.alpha) * share
            mean = af.mean(part, axis=0) if len(column) else af.sum(part, axis=0)  # which is zeros
            term = af.sum(mean * make(self.utilization[d].astype(part.dtype))) * float(size)
            loss = term if loss is None else loss + term
        return loss


def _softmax(x: Any) -> Any:
    shifted = x - make(x.detach().numpy().max(axis=1, keepdims=True))
    powers = af.exp(shifted)
    return powers / af.sum(powers, axis=1, keepdims=True)
