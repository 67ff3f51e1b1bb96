"""One step of a pipeline in one process, apart from the event loop it runs on.

==================  ============================================================================================
`stage`             one piece of a model, and how it is to be run
`stage_run`         a stage during one step, with its values of each microbatch between forward and backward
`microbatch_state`  the state of a microbatch in a stage, and its results
`links`             named values between stages, also past neighbours
`rank`              a row of the schedule, carried out over the stages of one rank
`message`           the values that one stage hands to the next
`accumulator`       the gradients of the step on their way into ``grad``
`step_random`       the random numbers of the step
==================  ============================================================================================
"""
