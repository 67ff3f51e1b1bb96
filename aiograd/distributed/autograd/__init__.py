"""Backward passes across workers.

`context` and `nodes` are the graph; `discovery` finds the edges that take part, `exchange` moves gradients over them, `decision` ends the pass, each
on a `pass_record`; `participant` is one worker's part of a pass, and `backward` starts passes and serves other workers' passes.
"""
