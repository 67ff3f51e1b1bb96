"""Support for running code, on several levels: modes and defaults of a task, random numbers, devices, tracing, progress, late imports.

`modes`, `foreign_modes`   grad mode, anomaly mode and default dtype of a task; the modes of other libraries
`random`, `random_streams` generators and seeds; streams of random numbers and the replay of draws
`random_parameters`        checks of what random numbers are asked for
`devices`                  the protocol of devices other than the CPU; `accelerator` is PyTorch's name for them
`offloading`               synchronous functions on the engine's executor
`scalars`                  logged values, for CSV, TensorBoard and the dashboard
`svg`, `chrome_trace`      the writers of pictures and of Chrome traces
`tracing`, `log_fields`    spans of OpenTelemetry and fields of log records
`caller`, `progress`, `notebook`, `top_level`    the user's line, a progress bar, display in notebooks, code outside of tasks
`digest`                   the digest of a state, one for serving, local steps and replicas
`exceptions`               texts of exceptions that are passed on, and what a future carries of them
`assembly`, `late`, `lazy`, `trees`, `types`, `version`    how the package is put together, and what it is built from
"""
