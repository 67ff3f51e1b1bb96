"""``ag.serving``: a service that answers and learns at once, with versions of its weights.

==============  ==========================================================================
`batching`      the queue of requests: which rows run together, and when; pure
`batcher`       requests that meet run as one batch
==============  ==========================================================================
"""

from __future__ import annotations

__all__: list[str] = []
