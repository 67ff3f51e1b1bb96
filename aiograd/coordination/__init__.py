"""Coordination: the asyncio side of transactions, and steps that members on several workers take together or not at all.

A machine of `aiograd.transaction` decides, its drive carries out the commands, and a client knows the work and the messages. Backward passes,
agreements of groups and steps of optimizers are such clients; so are the steps of pipelines and of replicas, which are here. A *member* takes part
in steps on one worker. It is an adapter (see `aiograd.distributed.register_adapter`), and the coordinating process calls it.

====================  =====================================================================================
`client`              `TransactionClient`: the methods that a user of a drive overrides
`drive`               `ParticipantDrive`: timer and questions; `CoordinatorDrive`: telling until acknowledged
`asking`              `ask_outcome`: one question about the outcome of a transaction, as an event
`session`             `StepSession`: one step on a member; `StepWork`: the work of one process for a step
`member`              `StepMember`: the steps of a member, one after the other, and its answers about them
`decisions`           `StepDecisions`: the decisions of the coordinating process, told until acknowledged
`coordinator`         `StepCoordinator`: asks members if they are prepared, decides, and tells them
`message_form`        messages between workers as frozen dataclasses: `encode` and `parse`; pure
`message_code`        the functions that make, parse and encode the messages of a class, compiled from its fields; pure
`message_json`        the same as JSON, where they go in arrays of bytes; pure
`malformed`           the error that names message, field and bound; pure
`buckets`             groups of parameters for sums of gradients over equal members; pure
`reduced_pass`        the gradients on their way, while others are still computed
`outline`             parameters and buffers of modules that are to be alike; pure
`module_calls`        calls of modules on the executor, and a snapshot of their buffers
====================  =====================================================================================
"""
