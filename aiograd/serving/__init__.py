"""``ag.serving``: a service that answers and learns at once, with versions of its weights.

=================  ==========================================================================
`server`           answers requests, each by one version
`answers`          the rows of a request, and its answer
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
    from aiograd.serving.answers import Answer as Answer
    from aiograd.serving.buffer import ReplayBuffer as ReplayBuffer
    from aiograd.serving.delta import apply_delta as apply_delta
    from aiograd.serving.delta import encode_delta as encode_delta
    from aiograd.serving.follower import Follower as Follower
    from aiograd.serving.follower import lead as lead
    from aiograd.serving.gate import Gate as Gate
    from aiograd.serving.log import VersionLog as VersionLog
    from aiograd.serving.metrics import ServingMetrics as ServingMetrics
    from aiograd.serving.server import Server as Server
    from aiograd.serving.statistics import Comparison as Comparison
    from aiograd.serving.statistics import ServingStatistics as ServingStatistics
    from aiograd.serving.trainer import Trainer as Trainer
    from aiograd.serving.versions import Version as Version
    from aiograd.serving.web import HTTPError as HTTPError
    from aiograd.serving.web import aiohttp_middleware as aiohttp_middleware
    from aiograd.serving.web import exception_handlers as exception_handlers
    from aiograd.serving.web import http_error as http_error
else:
    __getattr__, __dir__ = on_first_use(
        __name__,
        {
            "Answer": "aiograd.serving.answers",
            "Comparison": "aiograd.serving.statistics",
            "Follower": "aiograd.serving.follower",
            "Gate": "aiograd.serving.gate",
            "ReplayBuffer": "aiograd.serving.buffer",
            "Server": "aiograd.serving.server",
            "ServingMetrics": "aiograd.serving.metrics",
            "ServingStatistics": "aiograd.serving.statistics",
            "Trainer": "aiograd.serving.trainer",
            "Version": "aiograd.serving.versions",
            "VersionLog": "aiograd.serving.log",
            "HTTPError": "aiograd.serving.web",
            "aiohttp_middleware": "aiograd.serving.web",
            "exception_handlers": "aiograd.serving.web",
            "http_error": "aiograd.serving.web",
            "apply_delta": "aiograd.serving.delta",
            "encode_delta": "aiograd.serving.delta",
            "lead": "aiograd.serving.follower",
        },
    )

__all__ = [
    "Answer", "Comparison", "Follower", "Gate", "HTTPError", "ReplayBuffer", "Server", "ServingMetrics", "ServingStatistics", "Trainer",
    "Version", "VersionLog",
    "aiohttp_middleware", "apply_delta", "encode_delta", "exception_handlers", "http_error", "lead",
]  # fmt: skip
