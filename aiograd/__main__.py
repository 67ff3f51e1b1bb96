"""``python -m aiograd``."""

from __future__ import annotations

import sys

from aiograd.running.cli import main

sys.exit(main())
