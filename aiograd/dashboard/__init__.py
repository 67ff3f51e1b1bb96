"""The dashboard: one page, served by a worker, that shows what its cluster does: ``Worker(dashboard=True)``, ``LocalCluster(dashboard=True)``.

==============  ====================================================================================================
`monitor`       the dashboard's part of a worker
`reporter`      a worker's reports; `sampling` decides which work is recorded for it, `pass_graph` notes passes
`collector`     asks the workers for it; `board` keeps it for the page
`servers`       the servers of `aiograd.serving`
`pages`         the page, its data, and the right to them; ``static`` has its files
`metrics`       counts for Prometheus
==============  ====================================================================================================
"""

from __future__ import annotations

from aiograd.dashboard.monitor import DashboardMonitor

__all__ = ["DashboardMonitor"]
