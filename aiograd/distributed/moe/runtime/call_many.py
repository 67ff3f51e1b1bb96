"""call_many: every sample asks its own experts, all at the same time; a few may fail or be late.

Note [Requests for many rows]
    Rows of a batch that go to the same expert travel in one request, and so do their gradients in one more: an expert that learns takes one
    step for them. Their results are given back to each sample. Waiting, losses and results are decided for each sample, as if it had been asked for
    by itself; but a request that fails or is late is lost for all of its samples.

    An expert's output for a row may depend in its last bits on the number of rows it gets, since BLAS takes other kernels for other shapes: an
    expert that computes each row alone gives the bits it would give for that row by itself, others agree to rounding. Which rows are together
    depends on the arguments alone, never on timing, so the same call gives the same bits each time while no expert is lost and no worker batches it
    with rows of other callers. ``max_rows=1`` asks for every row by itself.

Note [Lost experts]
    An expert that raises, or gives a malformed answer, is lost. With ``on_expert_loss="raise"`` that is an error; with ``"drop"`` it
    is left out like a straggler and listed in the result. An expert that is left out of a sample in backward (only there) gives no gradient;
    the gradients of the others for this sample's input are scaled up by ``asked / answered``, so that their sum keeps its size.

    With `detect_anomalies` an expert is lost only for samples with an answer that is not finite. It is asked again without them, so that they have no
    part in the graph of the other samples' gradients: zero times infinity would be NaN in its parameters.

Source: hivemind ``_RemoteCallMany``; unlike there `k_min` is counted per sample, and the caller's input is never written to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from aiograd.distributed.moe.runtime.gathering import ExpertAnswer, Gathering, Loss, Rules
from aiograd.distributed.moe.runtime.requests import Request, requests_for
from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.functional.function import Function, once_differentiable
from aiograd.functional.isolation import IsolatedContext, run_isolated_forward
from aiograd.graph.current import CURRENT
from aiograd.tensors.core import TensorCore, make

LOSSES: Final = ("raise", "drop")
_NOT_FINITE: Final = "its answer has values that are not finite"


@dataclass(slots=True)
class CallManyResult:
    """The answers of the experts.

    Attributes:
        mask: booleans ``(batch, k)``: True if the expert answered; False too where a sample asked fewer than `k`.
        outputs: a Tensor ``(batch, k, ...)``, zeros where `mask` is False; differentiable once. ``(batch, k)`` if no expert answered.
        lost: the experts that did not answer, with the reasons.
        lost_in_backward: the same for backward passes through `outputs`.
        requests: how many were sent; backward sends one for each that was answered.

    >>> expert = ag.nn.ReLU()
    >>> result = await dist.moe.call_many([[expert], []], ag.ones(2, 1))
    >>> result.mask.tolist(), result.outputs.shape
    ([[True], [False]], (2, 1, 1))
    """

    mask: np.ndarray[Any, np.dtype[np.bool_]]
    outputs: Any
    lost: tuple[Loss, ...] = ()
    lost_in_backward: list[Loss] = field(default_factory=list)
    requests: int = 0


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
    max_rows: int = 1024,
) -> CallManyResult:
    """Let each sample ask its own experts, all at the same time. See Note [Requests for many rows] and Note [Lost experts].

    The answers are one node of the graph; in backward the experts that answered run at the same time again. Cancelling cancels all calls.

    Args:
        experts: for each sample the experts to ask; lists may differ in length and be empty. An expert is an async callable that takes rows and
            returns a Tensor with as many, each the answer to one row.
        x: a Tensor ``(batch, ...)``, or a tuple of such Tensors, one per argument of the experts.
        k_min, backward_k_min: answers that each sample needs (or all of its experts, where it asks fewer).
        timeout_after_k_min, forward_timeout, backward_timeout: seconds.
        on_expert_loss: ``"raise"`` or ``"drop"``.
        detect_anomalies: an answer or gradient that is not finite counts as a failure; inputs and gradients of outputs that are not finite are an
            error, before anything is sent.
        max_rows: most rows of a request; there are fewer where rows are large, so that requests fit into messages.

    Returns:
        The answers, and which experts gave them.

    Raises:
        ExpertLostError: an expert failed, with ``"raise"``, or too many did. DeadlineError: too few answers in time. ContextError: an expert has
        called another worker with what requires grad (`RemoteExpert` may). ArgumentError.

    >>> result = await dist.moe.call_many([[ag.nn.ReLU(), ag.nn.Tanh()]], ag.zeros(1, 1))
    >>> result.mask
    array([[ True,  True]])
    """
    inputs = tuple(x) if isinstance(x, (tuple, list)) else (x,)
    _check_arguments(experts, inputs, k_min, backward_k_min, on_expert_loss, max_rows)
    seconds = {"timeout_after_k_min": timeout_after_k_min, "forward_timeout": forward_timeout, "backward_timeout": backward_timeout}
    for name, value in seconds.items():
        _check_seconds(name, value)
    if detect_anomalies:
        for i, tensor in enumerate(inputs):
            if not _is_finite(tensor.detach().numpy()):
                raise ArgumentError(f"call_many: input {i} has values that are not finite; nothing was sent")
    rules = Rules(k_min, forward_timeout, timeout_after_k_min, on_expert_loss, detect_anomalies, "call_many")
    requests = requests_for(experts, inputs, max_rows)
    forward = Gathering(rules, requests)
    answers = _Answers(rules, inputs)
    await forward.run(lambda number: answers.ask(requests[number]), answers.complaint)

    most = max(map(len, experts), default=0)
    mask = np.zeros((len(experts), most), bool)
    tail, dtype = answers.row or ((), np.dtype(np.float32))
    values = np.zeros((len(experts), most, *tail), dtype)
    runs: list[IsolatedContext] = []
    answered: list[Request] = []
    for number in sorted(forward.answers):
        request, (run, (output,)), _ = forward.answers[number]
        mask[request.samples, request.positions] = True
        values[request.samples, request.positions] = output._data
        runs.append(run)
        answered.append(request)
    result = CallManyResult(mask, make(values), tuple(forward.lost[place] for place in sorted(forward.lost)), requests=len(requests))
    backward = rules._replace(k_min=backward_k_min, timeout=backward_timeout, what="backward of call_many")
    closure = [run.stand_in(number) for run in runs for number, _ in run.closure]
    record = _Record(backward, answered, runs, result.lost_in_backward)
    result.outputs = _CallMany.apply(record, result.outputs, len(inputs), *inputs, *closure)
    return result


class _Answers:
    """Asks experts, and compares their answers."""

    def __init__(self, rules: Rules, inputs: tuple[Any, ...]) -> None:
        self.rules = rules
        self.inputs = inputs
        #: shape of a row of the first answer, and its dtype; the others have to be alike
        self.row: tuple[tuple[int, ...], np.dtype[Any]] | None = None

    async def ask(self, request: Request) -> ExpertAnswer:
        """Send a request, and a second one without the rows with answers that are not finite, if these are lost and others are not."""
        run, outputs = await self._forward(request)
        if self.rules.detect_anomalies and self.rules.on_loss == "drop" and self._misshapen(request, outputs) is None:
            finite = _finite_rows(outputs[0]._data)
            if finite.any() and not finite.all():
                request = request.only(finite)
                run, outputs = await self._forward(request)
        return ExpertAnswer(request, (run, outputs), _NOT_FINITE)

    async def _forward(self, request: Request) -> tuple[IsolatedContext, tuple[Any, ...]]:
        return await run_isolated_forward(request.expert, *(tensor[request.samples] for tensor in self.inputs))

    @staticmethod
    def _misshapen(request: Request, outputs: tuple[Any, ...]) -> str | None:
        rows = len(request.samples)
        if len(outputs) == 1 and isinstance(outputs[0], TensorCore) and outputs[0].ndim >= 1 and outputs[0].shape[0] == rows:
            return None
        found = ", ".join(str(list(output.shape)) if isinstance(output, TensorCore) else type(output).__name__ for output in outputs)
        return f"it answered {rows} rows with {found or 'nothing'}; expected one Tensor with as many rows"

    def complaint(self, answer: ExpertAnswer) -> str | None:
        """The fault of an answer, None if there is none. The first answer without a fault sets the shape and dtype of the others."""
        _, outputs = answer.value
        complaint = self._misshapen(answer.request, outputs)
        if complaint is not None:
            return complaint
        found = outputs[0].shape[1:], outputs[0].dtype
        if self.row is not None and found != self.row:
            return f"its answer is {found[1]} {list(found[0])} for a sample, another expert's was {self.row[1]} {list(self.row[0])}"
        if self.rules.detect_anomalies and not _is_finite(outputs[0]._data):
            return _NOT_FINITE
        self.row = found
        return None


@dataclass(slots=True, frozen=True)
class _Record:
    """The state that backward needs. It does not refer to the result, since the outputs would form a reference cycle."""

    rules: Rules
    requests: list[Request]
    runs: list[IsolatedContext]
    losses: list[Loss]


class _CallMany(Function):
    """The one node of a `call_many`."""

    @staticmethod
    def forward(ctx: Any, record: _Record, output: Any, count: int, *inputs: Any) -> Any:
        """Hand out the outputs that were computed."""
        ctx.record, ctx.shapes = record, [(x.shape, x.dtype) for x in inputs[:count]]
        return output

    @staticmethod
    @once_differentiable
    async def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        """Backward of all experts that answered, at the same time."""
        record: _Record = ctx.record
        current = CURRENT.get()
        keep = current is not None and current.task.keep_graph
        seeds = [grad._data[request.samples, request.positions] for request in record.requests]
        if record.rules.detect_anomalies and not all(map(_is_finite, seeds)):
            raise ArgumentError("backward of call_many: the gradient of its outputs has values that are not finite; nothing was sent")

        async def ask(number: int) -> ExpertAnswer:
            request, run = record.requests[number], record.runs[number]
            captured = await run.run([make(seeds[number])], keep)
            finite = _finite_gradients(run, captured, len(request.samples)) if record.rules.detect_anomalies else np.ones(len(request.samples), bool)
            return ExpertAnswer(request.only(finite), (finite, captured), "its gradients have values that are not finite")

        gathering = Gathering(record.rules, record.requests)
        await gathering.run(ask, lambda answer: None if len(answer.request.samples) else answer.complaint)
        record.losses.extend(gathering.lost[place] for place in sorted(gathering.lost))
        closure: list[Any] = []
        for number, run in enumerate(record.runs):
            answer = gathering.answers.get(number)
            closure += [None if answer is None else answer.value[1][nr] for nr, _ in run.closure]
        return None, None, None, *_gradients(record, gathering.answers, ctx.shapes), *closure


def _gradients(record: _Record, answers: dict[int, ExpertAnswer], shapes: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[Any]:
    """The inputs' gradients. A sample's gradients are summed in the order in which it asks its experts, for any grouping into requests."""
    batch = shapes[0][0][0]
    asked, answered = np.zeros(batch, np.int64), np.zeros(batch, np.int64)
    for request in record.requests:
        np.add.at(asked, request.samples, 1)
    for answer in answers.values():
        np.add.at(answered, answer.request.samples, 1)
    scale = asked / np.maximum(answered, 1)
    grads = [np.zeros(shape, dtype) for shape, dtype in shapes]
    last = max((int(answer.request.positions.max()) for answer in answers.values()), default=-1)
    for position in range(last + 1):
        for number, (request, (rows, captured), _) in answers.items():
            here = request.positions == position
            samples = request.samples[here]  # each at most once, since a sample has one expert at a position
            factors = scale[samples]
            for total, part in zip(grads, record.runs[number].of_arguments(captured), strict=True):
                if part is not None and samples.size:
                    values = part._data[rows][here]
                    if (factors != 1).any():
                        values = values * factors.astype(total.dtype).reshape(-1, *(1,) * (values.ndim - 1))
                    total[samples] += values
    return [make(total) for total in grads]


def _is_finite(values: np.ndarray[Any, Any]) -> bool:
    return values.dtype.kind not in "fc" or bool(np.isfinite(values).all())


def _finite_rows(values: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    rows = values.shape[0]
    if values.dtype.kind not in "fc":
        return np.ones(rows, bool)
    finite: np.ndarray[Any, np.dtype[np.bool_]] = np.isfinite(values).reshape(rows, -1).all(axis=1)
    return finite


def _finite_gradients(run: IsolatedContext, captured: Sequence[Any], rows: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """True for rows with finite gradients; False for all if a gradient that they share is not finite."""
    shared = (captured[number] for number, _ in run.closure)
    finite = np.full(rows, all(part is None or _is_finite(part._data) for part in shared))
    for part in run.of_arguments(captured):
        if part is not None:
            finite &= _finite_rows(part._data)
    return finite


def _check_seconds(name: str, seconds: Any) -> None:
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float, np.integer, np.floating)):
        raise ArgumentTypeError(f"call_many({name}={seconds!r}): expected a number of seconds, or None for no limit")
    if not seconds >= 0:  # NaN as well
        raise ArgumentError(f"call_many({name}={seconds!r}): expected at least 0 seconds, or None for no limit")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _check_arguments(
    experts: Sequence[Sequence[Any]], inputs: tuple[Any, ...], k_min: int, backward_k_min: int, on_loss: str, max_rows: int
) -> None:
    if not _is_list(experts) or not all(map(_is_list, experts)):
        wrong = next((each for each in experts if not _is_list(each)), None) if _is_list(experts) else experts
        raise ArgumentTypeError(f"call_many: expected for each sample a list of experts, found {type(wrong).__name__}")
    if on_loss not in LOSSES:
        raise ArgumentError(f"call_many(on_expert_loss={on_loss!r}): expected 'raise' or 'drop'")
    for name, number in {"k_min": k_min, "backward_k_min": backward_k_min, "max_rows": max_rows}.items():
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)):
            raise ArgumentTypeError(f"call_many({name}={number!r}): expected an int")
    if k_min < 0 or backward_k_min < 0:
        raise ArgumentError(f"call_many(k_min={k_min}, backward_k_min={backward_k_min}): expected at least 0")
    if max_rows < 1:
        raise ArgumentError(f"call_many(max_rows={max_rows}): expected at least 1")
    if not inputs:
        raise ArgumentError("call_many: got an empty tuple; expected at least one Tensor")
    for i, tensor in enumerate(inputs):
        if not isinstance(tensor, TensorCore) or tensor.ndim < 1 or tensor.shape[0] != len(experts):
            found = f"shape {list(tensor.shape)}" if isinstance(tensor, TensorCore) else type(tensor).__name__
            raise ArgumentError(f"call_many: input {i} has {found}; expected a Tensor with one row for each of the {len(experts)} lists of experts")
