"""Collectives: operations that all workers of a group carry out together, with the same bits on every one of them.

==================  =============================================================================================================
`operation`         an operation as all ranks must agree on it, and the checks of its arguments
`layout`            arrays as flat buffers, cut into a part for each rank and each part into pieces; pure
`exchange`          one operation on one rank: the pieces it sends, adds up and waits for; pure
`ring`              the same in a group of many members, with few connections; pure
`group`             `Group`, what users hold: carries out exchanges over requests between workers
`agreement`         decisions of a group: all members apply something, or none does
`group_server`      the groups of one worker: how they are formed, and the requests of other members
==================  =============================================================================================================
"""
