"""Search for a schedule that wastes little time with given costs, within given memory. Read `searching` first."""

from __future__ import annotations

from aiograd.pipeline.schedule.search.searching import search_schedule as search_schedule
