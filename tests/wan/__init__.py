"""Training with local steps in processes on shaped links: ``make wan``."""
