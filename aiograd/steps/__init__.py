"""Steps that hosts on several workers take together or not at all: what drives `aiograd.transaction` for steps of pipelines and of replicas.

A *host* is what takes part in the steps of something on one worker. It is an adapter (see `aiograd.distributed.register_adapter`), asked by the
process that decides, which has a host of its own for the others to ask.

====================  =====================================================================================
`host`                `StepHost`: the steps of a host, one after the other, and its answers about them
`session`             `StepSession`: one step there, and what a host does while it hears nothing of who decides
`coordinator`         `StepCoordinator`: asks all hosts whether they are prepared, decides, and tells them
`pending_decisions`   what was decided about steps, told to hosts until they acknowledge it
`buckets`             parameters whose gradients are summed over equal hosts together; pure
`reduced_pass`        those gradients on their way, while others are still computed
`outline`             parameters and buffers of modules that are to be alike; pure
====================  =====================================================================================
"""
