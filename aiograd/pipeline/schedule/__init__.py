"""Schedules: the actions of each rank, as data, made, checked, timed and drawn without running anything.

=================================  =====================================================================================
`action`, `schedule`               a cell, and all rows of a schedule; read these first
`catalog`, `named`, `search`       schedules by name: the literature's, and the best one found for given costs
`layout`                           which rank a stage lives on
`dependencies`, `validation`       the facts that an action waits for, and the rules of a schedule that can run
`lowering`, `liveness`, `ticks`    transfers between ranks, the life of activations, the number of steps
`absorption`                       the rows of a pipeline in replicas after a loss
`costs`, `simulation`, `timeline`  start and end of each action, their cost, and pictures of it
`plan`, `grid`                     a schedule made ready to be carried out; a schedule as text
=================================  =====================================================================================
"""
