"""Tensors: their data, how operations on them are recorded, and how passes over them begin."""
