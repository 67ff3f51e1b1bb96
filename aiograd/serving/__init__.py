"""``ag.serving``: a service that answers and learns at once, with versions of its weights.

=================  ==========================================================================
`server`           answers requests, each by one version
`answers`          the rows of a request, and its answer
`arguments`        numbers that they take, checked
`batching`         the queue of requests: which rows run together, and when; pure
`batcher`          requests that meet run as one batch
`forward`          a model's forward with the arrays of any version
`publisher`        the part of a server that publishes and takes back
`copying`          copies of a model's state while it trains
`versions`         snapshots of a model, the store that numbers and retains them, and which answers a request; pure
`shadow`           a version that computes beside the one that serves
`statistics`       figures of a server
`registry`         the servers and trainers of this process
`log`              versions in a folder, over restarts and crashes
`trainer`          learning inside of the service
`gate`             whether a candidate is promoted, and kept afterwards; pure
`buffer`           rows to learn from; pure
`follower`         servers in other processes that serve what this one serves
`delta`            the difference of two versions as bytes; pure
`web`              errors as HTTP responses
`metrics`          figures of a server for Prometheus
=================  ==========================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiograd.running.lazy import on_first_use

if TYPE_CHECKING:
    from aiograd.serving.answers import Answer
    from aiograd.serving.buffer import ReplayBuffer
    from aiograd.serving.delta import apply_delta, encode_delta
    from aiograd.serving.follower import Follower, lead
    from aiograd.serving.gate import Gate
    from aiograd.serving.log import VersionLog
    from aiograd.serving.metrics import ServingMetrics
    from aiograd.serving.server import Server
    from aiograd.serving.statistics import Comparison, ServingStatistics
    from aiograd.serving.trainer import Trainer
    from aiograd.serving.versions import Version
    from aiograd.serving.web import HTTPError, aiohttp_middleware, exception_handlers, http_error
else:
    _NAMES = {
        "answers": "Answer", "buffer": "ReplayBuffer", "delta": "apply_delta encode_delta", "follower": "Follower lead", "gate": "Gate",
        "log": "VersionLog", "metrics": "ServingMetrics", "server": "Server", "statistics": "Comparison ServingStatistics", "trainer": "Trainer",
        "versions": "Version", "web": "HTTPError aiohttp_middleware exception_handlers http_error",
    }  # fmt: skip
    _homes = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}
    __getattr__, __dir__ = on_first_use(__name__, _homes)

__all__ = [
    "Answer", "Comparison", "Follower", "Gate", "HTTPError", "ReplayBuffer", "Server", "ServingMetrics", "ServingStatistics", "Trainer",
    "Version", "VersionLog",
    "aiohttp_middleware", "apply_delta", "encode_delta", "exception_handlers", "http_error", "lead",
]  # fmt: skip
