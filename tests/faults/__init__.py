"""How training goes on under faults, here and elsewhere: ``python -m tests.faults``."""
