"""``python -m aiograd``."""

from __future__ import annotations

import sys

from aiograd.cli import main

sys.exit(main())
