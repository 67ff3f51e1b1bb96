"""``ag.serving``: a service that answers and learns at once, with versions of its weights.

==============  ==========================================================================
`batching`      the queue of requests: which rows run together, and when; pure
`batcher`       requests that meet run as one batch
`versions`      snapshots of a model, and the store that numbers and retains them; pure
`shares`        which version answers a request; pure
`delta`         the difference of two versions as bytes; pure
`gate`          whether a candidate is promoted, and kept afterwards; pure
`buffer`        rows to learn from; pure
==============  ==========================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiograd.running.lazy import on_first_use

if TYPE_CHECKING:
    from aiograd.serving.buffer import ReplayBuffer as ReplayBuffer
    from aiograd.serving.delta import apply_delta as apply_delta
    from aiograd.serving.delta import encode_delta as encode_delta
    from aiograd.serving.gate import Gate as Gate
    from aiograd.serving.versions import Version as Version
else:
    __getattr__, __dir__ = on_first_use(
        __name__,
        {
            "Gate": "aiograd.serving.gate",
            "ReplayBuffer": "aiograd.serving.buffer",
            "Version": "aiograd.serving.versions",
            "apply_delta": "aiograd.serving.delta",
            "encode_delta": "aiograd.serving.delta",
        },
    )

__all__ = ["Gate", "ReplayBuffer", "Version", "apply_delta", "encode_delta"]
