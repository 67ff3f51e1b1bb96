"""Timelines: when each rank did what, what follows from it, and pictures of it. Read `timeline` first."""
