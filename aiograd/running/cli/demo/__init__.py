"""``aiograd demo``: a network cut across worker processes learns to read handwritten digits, loses a worker on the way, and checks its claims.

============  ======================================================================
`command`     the options of the subcommand
`story`       the order of events, and the checks
`training`    the driver's side: forward, backward, step, checkpoint, restore
`clusters`    where it runs: this machine, Ray, workers that join
`service`     the functions that worker processes offer
`model`       the network, and how it is cut
`data`        the digits
`alone`       the same training in one process, to compare with
`display`     headings, checks and the progress bar
============  ======================================================================
"""

from __future__ import annotations

from aiograd.running.cli.demo.story import Options, show

__all__ = ["Options", "show"]
