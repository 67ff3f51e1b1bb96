"""One backward pass in one process: what it runs, in which order, and the driver that runs it."""
