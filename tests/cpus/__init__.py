"""``python -m tests.cpus`` (``make cpus``): the numeric part of the suite under every code path that this CPU has, on every Python found."""
