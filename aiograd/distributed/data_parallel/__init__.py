"""Data parallelism: replicas of one module on several workers, whose gradients are combined while backward runs.

=============================  ====================================================================================================
`buckets`                      parameters in buckets that are reduced together; pure
`reducer`                      gradients of a pass on their way through a group of workers
`distributed_data_parallel`    the same program on every worker (`DistributedDataParallel`)
=============================  ====================================================================================================
"""
