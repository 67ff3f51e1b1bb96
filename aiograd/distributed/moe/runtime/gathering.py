"""Gathering: requests under way at the same time, until every sample has the answers that it needs, or can no longer get them.

Note [Waiting for answers]
    All requests are awaited until the timeout. Once every sample that asks an expert has `k_min` answers, the others get `timeout_after_k_min` more.
    A request without an answer by then is a straggler: cancelled, and left out. A sample that can no longer get its `k_min` answers is an error at
    once. `k_min` counts for each sample; a request that is lost is lost for every sample in it. A request that does not stop within the engine's
    `cancel_grace` of being cancelled is reported and left running.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from aiograd.distributed.moe.runtime.requests import Place, Request
from aiograd.engine.run import current_engine
from aiograd.engine.run.ending import end
from aiograd.errors import ContextError, DeadlineError, ExpertLostError


class Loss(NamedTuple):
    """An expert that was left out of a sample.

    >>> dist.moe.Loss(sample=0, position=1, expert="ffn.1", reason="late", error=None).reason
    'late'
    """

    sample: int
    position: int
    expert: Any
    #: "failed" or "late"
    reason: str
    error: BaseException | None


class Rules(NamedTuple):
    """How long to wait, and what to do about losses.

    Attributes:
        k_min: answers that each sample needs, or all of its experts where it asks fewer.
        timeout, timeout_after_k_min: seconds; None for no limit.
        on_loss: ``"raise"`` or ``"drop"``.
        detect_anomalies: True if values that are not finite count as a failure.
        what: name of the operation, for messages.
    """

    k_min: int
    timeout: float | None
    timeout_after_k_min: float | None
    on_loss: str
    detect_anomalies: bool
    what: str


class ExpertAnswer(NamedTuple):
    """The outcome of a request.

    Attributes:
        request: the rows that the answer is for; other rows of the request are lost.
        value: the result of the call.
        complaint: the reason why the other rows are lost.
    """

    request: Request
    value: Any
    complaint: str = ""


class Gathering:
    """Runs one coroutine per request until the rules say that it is enough; see Note [Waiting for answers].

    Attributes:
        answers: by number of the request.
        lost: the requests that were left out, with their errors.
    """

    def __init__(self, rules: Rules, requests: Sequence[Request]) -> None:
        self.rules = rules
        self.requests = requests
        self.answers: dict[int, ExpertAnswer] = {}
        self.lost: dict[Place, Loss] = {}
        #: by sample: how many experts it asks, how many have answered, how many may still answer
        self._asked = Counter(sample for request in requests for sample in request.samples.tolist())
        self._answered: Counter[int] = Counter()
        self._open = self._asked.copy()

    async def run(
        self, call: Callable[[int], Coroutine[Any, Any, ExpertAnswer]], check: Callable[[ExpertAnswer], str | None] = lambda answer: None
    ) -> None:
        """Fill `answers` and `lost`. Cancelling cancels all calls and waits for them.

        Args:
            call: makes the call of a request, given its number.
            check: returns the fault of an answer, which makes it a failure.

        Raises:
            ExpertLostError, DeadlineError: as the rules say. ContextError: of a call.
        """
        rules = self.rules
        loop = asyncio.get_running_loop()
        tasks = {loop.create_task(call(number)): number for number in range(len(self.requests))}
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
                self._check_possible()
                if not done and limits and loop.time() >= min(limits):
                    break
                if enough_until is None and rules.timeout_after_k_min is not None and not self._lacking():
                    enough_until = loop.time() + rules.timeout_after_k_min
        finally:
            for task in tasks.keys() - pending:
                if not task.cancelled():
                    task.exception()  # so that no other failure is reported as never looked at
            grace = current_engine().cancel_grace
            experts = {task: repr(self.requests[number].expert) for task, number in tasks.items()}
            cancelled = await end(pending, grace, lambda running: f"{rules.what}: {', '.join(sorted(map(experts.__getitem__, running)))}")
            if cancelled is not None:
                raise cancelled
        for number in sorted(tasks[task] for task in pending):
            self._lose(self.requests[number], "late", None)
        lacking = self._lacking()
        if lacking:
            sample = min(lacking)
            raise DeadlineError(
                f"{rules.what}: {self._answered[sample]} of the experts of sample {sample} answered within {rules.timeout:g} s; expected at least "
                f"k_min={rules.k_min} ({len(lacking)} samples in all lack answers)"
            )

    def _take(self, number: int, task: asyncio.Task[ExpertAnswer], check: Callable[[ExpertAnswer], str | None]) -> None:
        request = self.requests[number]
        self._open.subtract(request.samples.tolist())
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            answer = task.result()
            complaint = check(answer)
            if complaint is None:
                self.answers[number] = answer
                self._answered.update(answer.request.samples.tolist())
                kept = set(answer.request.places)
                if len(kept) < len(request.samples):
                    lost = ArithmeticError(answer.complaint)
                    self._lose(request, "failed", lost, [place for place in request.places if place not in kept])
                return
            error = ArithmeticError(complaint)
        elif not isinstance(error, (Exception, asyncio.CancelledError)) or isinstance(error, ContextError):
            raise error  # which is no fault of the expert
        self._lose(request, "failed", error)

    def _lose(self, request: Request, reason: str, error: BaseException | None, places: Sequence[Place] | None = None) -> None:
        places = request.places if places is None else places
        self.lost.update((place, Loss(*place, request.expert, reason, error)) for place in places)
        if reason == "failed" and self.rules.on_loss == "raise":
            raise self._error(self.lost[places[0]], len(places) - 1)

    def _error(self, loss: Loss, others: int = 0) -> ExpertLostError:
        also = "" if not others else f" (and of {others} other{'s' if others > 1 else ''})"
        text = f"{self.rules.what}: expert {loss.expert!r} of sample {loss.sample}{also} failed: {type(loss.error).__name__}: {loss.error}"
        error = ExpertLostError(text, sample=loss.sample, position=loss.position)
        error.__cause__ = loss.error
        return error

    def _lacking(self) -> list[int]:
        """Samples with fewer answers than they need."""
        return [sample for sample, asked in self._asked.items() if self._answered[sample] < min(self.rules.k_min, asked)]

    def _check_possible(self) -> None:
        for sample in self._lacking():
            if self._answered[sample] + self._open[sample] < min(self.rules.k_min, self._asked[sample]):
                raise self._error([loss for loss in self.lost.values() if loss.sample == sample][-1])
