"""call_many: every sample asks its own experts, all at the same time; a few may fail or be late.

Note [Who is waited for]
    Everybody, until `forward_timeout`. Once every sample that asks anybody has `k_min` answers, the others get `timeout_after_k_min` more.
    Whoever has not answered then is a straggler: cancelled, and left out. A sample that can no longer get its `k_min` answers is an error at
    once. In backward the same rule holds for those who answered in forward, with `backward_timeout` and `backward_k_min`.

Note [Who is lost]
    An expert that raises, or answers with what makes no sense, is lost. With ``on_expert_loss="raise"`` that is an error; with ``"drop"`` it
    is left out like a straggler and listed in the result. An expert that is left out of a sample in backward (only there) gives no gradient;
    the gradients of the others for this sample's input are scaled up by ``asked / answered``, so that their sum keeps its size.

Source: hivemind ``_RemoteCallMany``; unlike there `k_min` is counted per sample, and the caller's input is never written to.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from aiograd.errors import ArgumentError, DeadlineError, ExpertLostError
from aiograd.function import Function, once_differentiable
from aiograd.graph.current import CURRENT
from aiograd.isolation import IsolatedContext, run_isolated_forward
from aiograd.tensors.core import TensorCore, make

#: a sample, and the position of an expert in its list
Place = tuple[int, int]
LOSSES = ("raise", "drop")


class Loss(NamedTuple):
    """An expert that was left out of a sample."""

    sample: int
    position: int
    expert: Any
    #: "failed" or "late"
    reason: str
    error: BaseException | None


@dataclass(slots=True)
class CallManyResult:
    """What the experts answered.

    Attributes:
        mask: booleans ``(batch, k)``: who answered; False too where a sample asked fewer than `k`.
        outputs: a Tensor ``(batch, k, ...)``, zeros where `mask` is False; differentiable once.
        lost: who was left out, and why.
        lost_in_backward: the same of backward passes through `outputs`.
    """

    mask: np.ndarray[Any, np.dtype[np.bool_]]
    outputs: Any
    lost: tuple[Loss, ...] = ()
    lost_in_backward: list[Loss] = field(default_factory=list)


class _Rules(NamedTuple):
    """How long to wait, and what to do about losses."""

    k_min: int
    timeout: float | None
    timeout_after_k_min: float | None
    on_loss: str
    what: str


class _Gathered:
    """Runs one coroutine per place until the rules say that it is enough."""

    def __init__(self, rules: _Rules, experts: dict[Place, Any]) -> None:
        self.rules = rules
        self.experts = experts
        self.values: dict[Place, Any] = {}
        self.lost: dict[Place, Loss] = {}

    async def run(self, make_call: Callable[[Place], Coroutine[Any, Any, Any]], check: Callable[[Place, Any], str | None]) -> None:
        """Fill `values` and `lost`.

        Raises:
            ExpertLostError, DeadlineError: as the rules say.
        """
        rules = self.rules
        loop = asyncio.get_running_loop()
        tasks = {loop.create_task(make_call(place)): place for place in self.experts}
        pending = set(tasks)
        deadline = None if rules.timeout is None else loop.time() + rules.timeout
        enough_until: float | None = None
        try:
            while pending:
                limits = [limit for limit in (deadline, enough_until) if limit is not None]
                left = None if not limits else max(min(limits) - loop.time(), 0)
                done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=tasks.__getitem__):
                    self._take(tasks[task], task, check)
                self._check_possible({tasks[task] for task in pending})
                if not done and limits and loop.time() >= min(limits):
                    break
                if enough_until is None and rules.timeout_after_k_min is not None and not self._lacking():
                    enough_until = loop.time() + rules.timeout_after_k_min
        finally:
            for task in pending:
                task.cancel()
            if pending:
                await asyncio.wait(pending)
            for task in tasks:
                if not task.cancelled():
                    task.exception()
        for task in pending:
            place = tasks[task]
            self.lost[place] = Loss(*place, self.experts[place], "late", None)
        lacking = self._lacking()
        if lacking:
            sample, found = next(iter(lacking.items()))
            raise DeadlineError(
                f"{rules.what}: {found} of the experts of sample {sample} answered within {rules.timeout:g} s; expected at least k_min={rules.k_min} "
                f"({len(lacking)} samples in all lack answers)"
            )

    def _take(self, place: Place, task: asyncio.Task[Any], check: Callable[[Place, Any], str | None]) -> None:
        error = None if not task.cancelled() and task.exception() is None else (asyncio.CancelledError() if task.cancelled() else task.exception())
        if error is None:
            complaint = check(place, task.result())
            if complaint is None:
                self.values[place] = task.result()
                return
            error = ArithmeticError(complaint)
        elif not isinstance(error, (Exception, asyncio.CancelledError)):
            raise error
        loss = self.lost[place] = Loss(*place, self.experts[place], "failed", error)
        if self.rules.on_loss == "raise":
            raise self._error(loss)

    def _error(self, loss: Loss) -> ExpertLostError:
        text = f"{self.rules.what}: expert {loss.expert!r} of sample {loss.sample} failed: {type(loss.error).__name__}: {loss.error}"
        error = ExpertLostError(text, sample=loss.sample, position=loss.position)
        error.__cause__ = loss.error
        return error

    def _lacking(self) -> dict[int, int]:
        """Samples with fewer answers than they need, with how many they have."""
        asked = Counter(sample for sample, _ in self.experts)
        found = Counter(sample for sample, _ in self.values)
        return {sample: found[sample] for sample in asked if found[sample] < min(self.rules.k_min, asked[sample])}

    def _check_possible(self, pending: set[Place]) -> None:
        under_way = Counter(sample for sample, _ in pending)
        for sample, found in self._lacking().items():
            if found + under_way[sample] < min(self.rules.k_min, sum(place[0] == sample for place in self.experts)):
                losses = [loss for loss in self.lost.values() if loss.sample == sample]
                raise self._error(losses[-1])


class _CallMany(Function):
    """The one node of a `call_many`."""

    @staticmethod
    def forward(ctx: Any, runs: dict[Place, IsolatedContext], rules: _Rules, result: CallManyResult, output: Any, count: int, *inputs: Any) -> Any:
        """Hand out the outputs that were computed."""
        ctx.runs, ctx.rules, ctx.result, ctx.shapes = runs, rules, result, [(x.shape, x.dtype) for x in inputs[:count]]
        return output

    @staticmethod
    @once_differentiable
    async def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        """Backward of all who answered, at the same time."""
        current = CURRENT.get()
        keep = current is not None and current.task.keep_graph
        runs: dict[Place, IsolatedContext] = ctx.runs
        experts = {place: ctx.result.experts[place] for place in runs}
        gathered = _Gathered(ctx.rules, experts)
        values = grad._data
        await gathered.run(lambda place: runs[place].run([make(values[place][None])], keep), lambda place, found: None)
        ctx.result.losses.extend(gathered.lost.values())
        asked, answered = Counter(sample for sample, _ in runs), Counter(sample for sample, _ in gathered.values)
        grads = [np.zeros(shape, dtype) for shape, dtype in ctx.shapes]
        for place in sorted(gathered.values):
            scale = asked[place[0]] / answered[place[0]]
            for total, part in zip(grads, runs[place].of_arguments(gathered.values[place]), strict=True):
                if part is not None:
                    total[place[0]] += part._data[0] if scale == 1 else part._data[0] * total.dtype.type(scale)
        closure: list[Any] = []
        for place, run in runs.items():
            found = gathered.values.get(place)
            closure += [None if found is None else found[number] for number, _ in run.closure]
        return None, None, None, None, None, *(make(total) for total in grads), *closure


class _Record(NamedTuple):
    """What backward needs of the result, without the outputs (which would be a cycle)."""

    experts: dict[Place, Any]
    losses: list[Loss]


async def call_many(
    experts: Sequence[Sequence[Any]],
    x: Any,
    *,
    k_min: int = 1,
    timeout_after_k_min: float | None = None,
    forward_timeout: float | None = None,
    backward_timeout: float | None = None,
    backward_k_min: int = 1,
    on_expert_loss: str = "raise",
    detect_anomalies: bool = False,
) -> CallManyResult:
    """Let each sample ask its own experts, all at the same time. See Note [Who is waited for] and Note [Who is lost].

    The answers are one node of the graph; in backward the experts that answered run at the same time again. Cancelling cancels all calls.

    Args:
        experts: for each sample the experts to ask, async callables that take a batch of one; lists may differ in length and be empty.
        x: a Tensor ``(batch, ...)``, or a tuple of such Tensors, one per argument of the experts.
        k_min, backward_k_min: answers that each sample needs (or all of its experts, where it asks fewer).
        timeout_after_k_min, forward_timeout, backward_timeout: seconds.
        on_expert_loss: ``"raise"`` or ``"drop"``.
        detect_anomalies: an answer that is not finite counts as a failure; so do inputs, before anything is sent.

    Raises:
        ExpertLostError: an expert failed, with ``"raise"``, or too many did. DeadlineError: too few answers in time. ArgumentError.
    """
    inputs = tuple(x) if isinstance(x, (tuple, list)) else (x,)
    _check(experts, inputs, k_min, backward_k_min, on_expert_loss)
    if detect_anomalies:
        for i, tensor in enumerate(inputs):
            if tensor.dtype.kind in "fc" and not np.isfinite(tensor.detach().numpy()).all():
                raise ArgumentError(f"call_many: input {i} has values that are not finite; nothing was sent")
    places = {(i, j): expert for i, asked in enumerate(experts) for j, expert in enumerate(asked)}
    forward = _Gathered(_Rules(k_min, forward_timeout, timeout_after_k_min, on_expert_loss, "call_many"), places)
    shapes: list[tuple[Any, ...]] = []  # of the first answer; the others have to be alike

    def check(place: Place, answer: tuple[IsolatedContext, tuple[Any, ...]]) -> str | None:
        outputs = answer[1]
        if len(outputs) != 1 or not isinstance(outputs[0], TensorCore) or outputs[0].ndim < 1 or outputs[0].shape[0] != 1:
            return "an expert answers a batch of one with one Tensor whose first dimension is one"
        found = (outputs[0].shape[1:], outputs[0].dtype)
        if shapes and found != shapes[0]:
            return f"its answer is {found[1]} {list(found[0])} for a sample, another expert's was {shapes[0][1]} {list(shapes[0][0])}"
        if detect_anomalies and not np.isfinite(outputs[0]._data).all():
            return "its answer has values that are not finite"
        shapes.append(found)
        return None

    def call(place: Place) -> Coroutine[Any, Any, Any]:
        return run_isolated_forward(places[place], *(tensor[place[0] : place[0] + 1] for tensor in inputs))

    await forward.run(call, check)
    most = max(map(len, experts), default=0)
    mask = np.zeros((len(experts), most), bool)
    tail, dtype = next(iter(shapes), ((), np.dtype(np.float32)))
    values = np.zeros((len(experts), most, *tail), dtype)
    runs: dict[Place, IsolatedContext] = {}
    for place in sorted(forward.values):
        context, (output,) = forward.values[place]
        mask[place] = True
        values[place] = output._data[0]
        runs[place] = context
    result = CallManyResult(mask, make(values), tuple(forward.lost[place] for place in sorted(forward.lost)))
    backward = _Rules(backward_k_min, backward_timeout, timeout_after_k_min, on_expert_loss, "backward of call_many")
    closure = [run.stand_in(number) for run in runs.values() for number, _ in run.closure]
    record = _Record(places, result.lost_in_backward)
    result.outputs = _CallMany.apply(runs, backward, record, result.outputs, len(inputs), *inputs, *closure)
    return result


def _check(experts: Sequence[Sequence[Any]], inputs: tuple[Any, ...], k_min: int, backward_k_min: int, on_loss: str) -> None:
    if on_loss not in LOSSES:
        raise ArgumentError(f"call_many(on_expert_loss={on_loss!r}): expected 'raise' or 'drop'")
    if k_min < 0 or backward_k_min < 0:
        raise ArgumentError(f"call_many(k_min={k_min}, backward_k_min={backward_k_min}): expected at least 0")
    for i, tensor in enumerate(inputs):
        if not isinstance(tensor, TensorCore) or tensor.ndim < 1 or tensor.shape[0] != len(experts):
            found = f"shape {list(tensor.shape)}" if isinstance(tensor, TensorCore) else type(tensor).__name__
            raise ArgumentError(f"call_many: input {i} has {found}; expected a Tensor with one row for each of the {len(experts)} lists of experts")
