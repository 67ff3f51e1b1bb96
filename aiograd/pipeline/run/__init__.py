"""Running pipelines: everything of `aiograd.pipeline` that waits on an event loop.

`pipeline` is the public face; `local` runs the ranks of one process; `mailbox` and `together` are what they are made of.
"""

from __future__ import annotations

from aiograd.pipeline.run.local import Event as Event
from aiograd.pipeline.run.pipeline import Pipeline as Pipeline
