"""One backward pass in one process: what it runs, in which order, and the runner that runs it."""
