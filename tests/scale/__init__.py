"""Clusters of a thousand workers on the simulated network: what the driver, a worker and the network have to do."""
