"""Spans, with the real SDK of OpenTelemetry and an exporter in memory: per pass, call and step, with parents across workers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import aiograd as ag
from aiograd import distributed as dist
from aiograd import serving
from aiograd.coordination.message_form import parse
from aiograd.distributed.messages.fields import NO_TRACE, TraceContext
from aiograd.distributed.observing import trace_context
from aiograd.errors import ProtocolError, QueueFullError, RemoteError
from aiograd.running import tracing
from tests.distributed.workers import workers
from tests.support import assert_awaiting_raises, assert_raises

service = dist.Service()
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@service.function
def square(x: ag.Tensor) -> ag.Tensor:
    return (x * x).sum()


@service.function
async def outer(x: ag.Tensor) -> ag.Tensor:
    result: ag.Tensor = await dist.current_worker().call("right", "square", x)
    return result


@service.function
def fail() -> None:
    raise ValueError("on purpose")


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """A provider for one test: the real one can be set once per process only, so it is put where the API's own function finds it."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


def by_name(exporter: InMemorySpanExporter) -> dict[str, list[ReadableSpan]]:
    found: dict[str, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


def parent_of(span: ReadableSpan, exporter: InMemorySpanExporter) -> str | None:
    return next((each.name for each in exporter.get_finished_spans() if span.parent and each.context.span_id == span.parent.span_id), None)


async def test_a_step_over_three_workers_is_one_trace(spans: InMemorySpanExporter) -> None:
    async with workers("driver", "left", "right", service=service) as (driver, *_):
        with trace.get_tracer_provider().get_tracer("test").start_as_current_span("step"):
            async with driver.context() as ctx:
                x = ag.tensor([1.0, 2.0], requires_grad=True)
                await ctx.backward(await driver.call("left", "outer", x))
        await driver.call_apart("left", "aiograd.dashboard.report", 0, False, 0, "", 1)
        for worker in (driver, *_):
            await worker._monitor.aclose()
    found = by_name(spans)
    assert len({span.context.trace_id for span in spans.get_finished_spans()}) == 1, "everything belongs to the user's span"
    assert {name: len(each) for name, each in found.items()} == {
        "step": 1, "call outer": 1, "serve outer": 1, "call square": 1, "serve square": 1, "distributed backward": 1, "backward pass": 3,
    }  # fmt: skip
    parents = {span.name: parent_of(span, spans) for span in spans.get_finished_spans() if span.name != "backward pass"}
    assert parents == {
        "step": None, "call outer": "step", "serve outer": "call outer", "call square": "serve outer", "serve square": "call square",
        "distributed backward": "step",
    }  # fmt: skip
    assert sorted(str(parent_of(span, spans)) for span in found["backward pass"]) == ["backward pass", "backward pass", "distributed backward"]
    (serve,) = found["serve square"]
    assert serve.kind is trace.SpanKind.SERVER and found["call outer"][0].kind is trace.SpanKind.CLIENT
    attributes: Any = serve.attributes
    assert attributes["rpc.system"] == "aiograd" and attributes["rpc.method"] == "square" and attributes["client.address"] == "left"
    assert attributes["aiograd.context"].startswith("driver")


async def test_a_failure_is_in_the_spans_of_both_sides(spans: InMemorySpanExporter) -> None:
    async with workers("driver", "left", service=service) as (driver, _):
        await assert_awaiting_raises(RemoteError, None, driver.call("left", "fail"))
    for name in ("call fail", "serve fail"):
        (span,) = by_name(spans)[name]
        assert span.status.status_code is StatusCode.ERROR and span.events[0].name == "exception"


async def test_local_passes_and_steps_have_spans(spans: InMemorySpanExporter) -> None:
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    optimizer = ag.optim.SGD([x], lr=0.1)
    await (x * x).sum().backward()
    optimizer.step()
    stages = [ag.nn.Linear(2, 2), ag.nn.Linear(2, 2)]
    async with ag.pipeline.Pipeline(stages, ag.pipeline.make_schedule("GPipe", ranks=2, microbatches=2), loss_fn=ag.nn.functional.mse_loss) as pipe:
        await pipe.step(ag.tensor([[1.0, 2.0]] * 2), ag.tensor([[1.0, 2.0]] * 2))
    found = by_name(spans)
    assert found.keys() >= {"backward pass", "optimizer step", "pipeline step"}
    assert dict(found["pipeline step"][0].attributes or {}) == {"aiograd.microbatches": 2}


async def test_without_a_provider_nothing_happens_and_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    assert not tracing.is_traced() and tracing.traceparent() == "" and trace_context(None) is None
    assert tracing.span("x") is tracing.span("y")
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    assert not tracing.is_traced() and tracing.traceparent() == ""


def test_the_traceparent_is_that_of_w3c(spans: InMemorySpanExporter) -> None:
    with tracing.span("mine", parent=PARENT):
        mine = tracing.traceparent()
    (span,) = spans.get_finished_spans()
    assert mine == f"00-0af7651916cd43dd8448eb211c80319c-{span.context.span_id:016x}-01"
    assert span.parent is not None and span.parent.span_id == 0xB7AD6B7169203331 and span.parent.is_remote


def test_the_trace_context_of_a_message_is_checked() -> None:
    assert parse(TraceContext, (PARENT, True)) == TraceContext(PARENT, True) and parse(TraceContext, ("", False)) == NO_TRACE
    wrong: list[Any] = [None, (), (PARENT,), (1, True), (PARENT, 1), (PARENT + "0", True), ("x" * 55, True), (PARENT.upper(), True), [PARENT, True]]
    wrong += [(PARENT.replace("00-", "ff-", 1), True), (f"00-{'0' * 32}-b7ad6b7169203331-01", True), (f"00-{'a' * 32}-{'0' * 16}-01", True)]
    for value in wrong:
        assert_raises(ProtocolError, "malformed TraceContext", parse, TraceContext, value)


async def test_a_server_has_spans_of_predictions_steps_and_publications(spans: InMemorySpanExporter) -> None:
    model, rows = ag.nn.Linear(2, 1), np.ones((3, 2), np.float32)
    async with serving.Server(model, max_queue=4) as server:
        optimizer = ag.optim.SGD(model.parameters(), 0.1)
        trainer = serving.Trainer(server, optimizer, lambda module, x: (module(x) ** 2).mean(), buffer=serving.ReplayBuffer(10))
        await trainer.learn(rows)
        await trainer.step()
        await server.predict(rows)
        await assert_awaiting_raises(QueueFullError, None, asyncio.gather(server.predict(rows), server.predict(rows)))
    found = by_name(spans)
    assert {name: len(each) for name, each in found.items()} == {"publish": 2, "train": 1, "backward pass": 1, "optimizer step": 1, "predict": 3}
    assert {parent_of(found[name][0], spans) for name in ("backward pass", "optimizer step")} == {"train"}
    assert dict(found["predict"][0].attributes or {}) == {"aiograd.rows": 3, "aiograd.version": 2}
    assert [span.status.status_code for span in found["predict"]].count(StatusCode.ERROR) == 1
