"""Objects that live on one worker and are used from others: references, modules, optimizers, adapters, and the transfer of their states."""
