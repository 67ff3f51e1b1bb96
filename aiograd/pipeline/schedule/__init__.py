"""Schedules: who does what when, as data, made, checked, timed and drawn without running anything.

=================================  =====================================================================================
`action`, `schedule`               a cell, and all rows of a schedule; read these first
`catalog`, `named`, `search`       schedules by name: those of the literature, and the best one found for given costs
`layout`                           which rank a stage lives on
`dependencies`, `validation`       what an action waits for, and what makes a schedule possible
`lowering`, `liveness`, `ticks`    what moves between ranks, what is kept how long, how many steps it takes
`costs`, `simulation`, `timeline`  when each action would start and end, what that costs, and pictures of it
`plan`, `grid`                     a schedule made ready to be carried out; a schedule as text
=================================  =====================================================================================
"""
