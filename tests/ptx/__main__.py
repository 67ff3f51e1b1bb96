"""See `tests.ptx.compiling`."""

from __future__ import annotations

import sys

from tests.ptx.compiling import main

if __name__ == "__main__":
    sys.exit(main())
