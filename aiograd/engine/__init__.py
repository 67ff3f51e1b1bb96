"""One backward pass in one process: its nodes, their order, and the runner."""
