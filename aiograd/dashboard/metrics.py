"""Metrics: a worker's counts in the text format of Prometheus, by ``prometheus_client`` (extra ``metrics``).

Every name has the label ``worker``.

======================================  =========  =============================================================================================
`aiograd_contexts`                      gauge      contexts that are open
`aiograd_passes_running`                gauge      distributed backward passes with a part here that run
`aiograd_passes_total`                  counter    passes that have ended, by ``outcome``: committed or aborted
`aiograd_exchange_seconds`              histogram  durations by ``exchange``, as in `aiograd.distributed.meter`
`aiograd_exchange_failures_total`       counter    exchanges that ended with an exception, by ``exchange``
`aiograd_loop_lag_seconds`              histogram  how late timers of the event loop fire, 20 samples a second while metrics are asked for
`aiograd_references`                    gauge      objects held for references of peers
`aiograd_message_bytes_held`            gauge      bytes of messages that are being received or served
`aiograd_stuck_functions`               gauge      functions that still run although their calls were given up
`aiograd_peer_connected`                gauge      1 if there is a connection to ``peer``
`aiograd_peer_bytes_total`              counter    bytes of frames, by ``peer`` and ``direction``: in or out
`aiograd_peer_round_trip_seconds`       gauge      from request to answer, on average of the quickest of the latest 32, by ``peer``
`aiograd_resident_memory_bytes`         gauge      memory of the process
`aiograd_device_memory_bytes`           gauge      memory that the process has allocated on its CUDA device
`aiograd_implicit_solves_total`         counter    linear systems that backward passes of implicit functions have solved, in this process
`aiograd_implicit_iterations_total`     counter    products with Jacobians in them
`aiograd_implicit_failures_total`       counter    implicit functions and systems that ended with a `ConvergenceError`
`aiograd_waiting_seconds`               gauge      the longest wait here, by ``kind``: pass, step, call, collective, commit or other; 0 without one
`aiograd_loop_held_seconds`             gauge      since when the loop of ``peer`` is held up, of the peers with a loop that is
`aiograd_scalar`                        gauge      the last value of each scalar that was logged with ``ag.log``, by ``name``
======================================  =========  =============================================================================================

The servers of the process add the metrics of `aiograd.serving.ServingMetrics`; their label ``server`` is the model's class and a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from aiograd import serving
from aiograd.dashboard.reporter import device_bytes, links_of, resident_bytes, waits_here
from aiograd.distributed.meter import BOUNDS, DurationHistogram
from aiograd.distributed.rpc.http.pages import Page
from aiograd.distributed.worker_core import WorkerCore
from aiograd.implicit.solvers import IMPLICIT_COUNTS
from aiograd.running.scalars import LOG
from aiograd.serving.registry import REGISTRY

#: seconds for which the loop's lag is sampled after each scrape: Prometheus takes a metric that it has not seen for five minutes for gone
BETWEEN_SCRAPES = 300.0
#: kinds of waits by the first word of their task, or else of the task that they wait for, and the kind of all others
WAIT_KINDS, OTHER = {"pass": "pass", "step": "step", "call": "call", "operation": "collective", "commit": "commit"}, "other"


def metrics_page(core: WorkerCore) -> Page:
    """The metrics of a worker; status 501 where prometheus_client is not installed."""
    try:
        from prometheus_client import CollectorRegistry, exposition
    except ImportError:
        return Page(501, b"metrics need the extra `metrics`: pip install 'aiograd[metrics]'\n")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(WorkerMetrics(core))
    return Page(200, exposition.generate_latest(registry), exposition.CONTENT_TYPE_LATEST)


class WorkerMetrics:
    """A collector of prometheus_client for one worker; register it in a registry of your own to serve it elsewhere.

    Args:
        core: the worker.
    """

    def __init__(self, core: WorkerCore) -> None:
        self._core = core

    def describe(self) -> list[Any]:
        """Nothing: names are told with the values."""
        return []

    def collect(self) -> Iterator[Any]:
        """The metrics at this moment."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        core, name = self._core, self._core.name
        core.loop_lag.sample(core.loop, BETWEEN_SCRAPES)
        figures = core.worker.statistics()
        for metric, text, value in (
            ("contexts", "Contexts that are open", figures.contexts),
            ("passes_running", "Distributed backward passes that run", figures.passes),
            ("references", "Objects held for references of peers", figures.references),
            ("message_bytes_held", "Bytes of messages that are being received or served", figures.bytes_held),
            ("stuck_functions", "Functions that run although their calls were given up", figures.stuck),
            ("resident_memory_bytes", "Memory of the process", resident_bytes()),
            ("device_memory_bytes", "Memory that the process has allocated on its CUDA device", device_bytes()),
        ):
            gauge = GaugeMetricFamily(f"aiograd_{metric}", text, labels=["worker"])
            gauge.add_metric([name], value)
            yield gauge
        passes = CounterMetricFamily("aiograd_passes", "Distributed backward passes that have ended", labels=["worker", "outcome"])
        passes.add_metric([name, "committed"], figures.passes_committed)
        passes.add_metric([name, "aborted"], figures.passes_aborted)
        yield passes
        for figure, text in (
            ("solves", "Linear systems that implicit functions have solved"),
            ("iterations", "Products with Jacobians of implicit functions"),
            ("failures", "Implicit functions that ended with a ConvergenceError"),
        ):
            counter = CounterMetricFamily(f"aiograd_implicit_{figure}", text, labels=["worker"])
            counter.add_metric([name], getattr(IMPLICIT_COUNTS, figure))
            yield counter
        seconds = HistogramMetricFamily("aiograd_exchange_seconds", "Durations of exchanges with other workers", labels=["worker", "exchange"])
        failures = CounterMetricFamily("aiograd_exchange_failures", "Exchanges that ended with an exception", labels=["worker", "exchange"])
        for exchange, histogram in core.meter.histograms.items():
            seconds.add_metric([name, exchange], _buckets(histogram), histogram.total)
            failures.add_metric([name, exchange], histogram.failed)
        yield seconds
        yield failures
        lag = HistogramMetricFamily("aiograd_loop_lag_seconds", "How late timers of the event loop fire", labels=["worker"])
        lag.add_metric([name], _buckets(core.loop_lag.histogram), core.loop_lag.histogram.total)
        yield lag
        connected = GaugeMetricFamily("aiograd_peer_connected", "1 if there is a connection to the peer", labels=["worker", "peer"])
        moved = CounterMetricFamily("aiograd_peer_bytes", "Bytes of frames", labels=["worker", "peer", "direction"])
        trips = GaugeMetricFamily("aiograd_peer_round_trip_seconds", "From request to answer, the quickest of late", labels=["worker", "peer"])
        for peer, link in links_of(core).items():
            connected.add_metric([name, peer], link.is_connected)
            moved.add_metric([name, peer, "in"], link.bytes_in)
            moved.add_metric([name, peer, "out"], link.bytes_out)
            if link.round_trip is not None:
                trips.add_metric([name, peer], link.round_trip)
        yield connected
        yield moved
        yield trips
        report = waits_here(core)
        longest = dict.fromkeys((*WAIT_KINDS.values(), OTHER), 0.0)
        for wait in report.waits:
            words = wait.task.partition(" ")[0], wait.on_task.partition(" ")[0]
            kind = next((WAIT_KINDS[word] for word in words if word in WAIT_KINDS), OTHER)
            longest[kind] = max(longest[kind], wait.seconds)
        waiting = GaugeMetricFamily("aiograd_waiting_seconds", "The longest wait", labels=["worker", "kind"])
        for kind, length in longest.items():
            waiting.add_metric([name, kind], length)
        yield waiting
        held = GaugeMetricFamily("aiograd_loop_held_seconds", "Since when the loop of a peer is held up", labels=["worker", "peer"])
        for loop in report.held:
            held.add_metric([name, loop.worker], loop.seconds)
        yield held
        logged = GaugeMetricFamily("aiograd_scalar", "The last value of a logged scalar", labels=["worker", "name"])
        for (owner, scalar), entry in list(LOG.latest.items()):
            if owner in (None, name):
                logged.add_metric([name, scalar], entry.value)
        yield logged
        families: dict[str, Any] = {}
        for label, server in REGISTRY.servers_of(name, with_others=True):
            for family in serving.ServingMetrics(server, server._trainer, name=label).collect():
                if (first := families.get(family.name)) is None:
                    families[family.name] = family
                else:
                    first.samples += family.samples
        yield from families.values()


def _buckets(histogram: DurationHistogram) -> list[tuple[str, int]]:
    """The bounds of a histogram, each with the count of values up to it."""
    return list(zip([*map(str, BOUNDS), "+Inf"], accumulate(histogram.counts), strict=True))
