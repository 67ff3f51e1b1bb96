"""Coordination: the asyncio side of transactions, and steps that members on several workers take together or not at all.

A *member* takes part in the steps of a pipeline or of replicas on one worker. It is an adapter (see `aiograd.distributed.register_adapter`), and
the coordinating process asks it.

====================  =====================================================================================
`asking`              `ask_outcome`: one question about the outcome of a transaction, as an event
`host`                `StepHost`: the steps of a host, one after the other, and its answers about them
`session`             `StepSession`: one step there, and what a host does while it hears nothing of who decides
`coordinator`         `StepCoordinator`: asks all hosts whether they are prepared, decides, and tells them
`pending_decisions`   what was decided about steps, told to hosts until they acknowledge it
`buckets`             parameters whose gradients are summed over equal hosts together; pure
`reduced_pass`        those gradients on their way, while others are still computed
`outline`             parameters and buffers of modules that are to be alike; pure
`module_calls`        calls of modules, and their buffers put back
====================  =====================================================================================
"""
