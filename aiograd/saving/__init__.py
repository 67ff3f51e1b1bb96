"""Files of tensors and of training states.

`serialization`    `save` and `load`, as safetensors
`training_state`   `TrainingState`: model, optimizer, schedule and step number in one file
"""
