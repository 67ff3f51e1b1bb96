"""The asyncio side of transactions, shared by backward passes, steps of pipelines and replicas, and agreements of groups.

`asking`    `ask_outcome`: one question about the outcome of a transaction, as an event
"""
