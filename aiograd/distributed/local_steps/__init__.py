"""Local steps: members that take many optimizer steps each on their own batches, and then change one base together, in rounds.

=======================  ==========================================================================================================
`controller`             the training as its program sees it (`LocalSteps`)
`round_record`           a round that was committed; pure
`round_statistics`       seconds and bytes of a training; pure
`coordinator`            the rounds: dealing batches, gathering results, the exchange and its decision
`base_coordinator`       the members: how they are made, get the base, catch up and are lost
`checkpoints`            the state of all as a dict that is saved
`remote_local_member`    a member, as the coordinating process sees it
`member`                 a member on its worker
`local_training`         the module, the inner optimizer and the local steps of a member
`base_state`             the base: parameters, buffers and the outer optimizer, with the next ones beside them
`payload_form`           pseudo-gradients as bytes, and their mean; pure
`batch_order`            the examples of each batch of each epoch; pure
`round_messages`         the wire form of arguments and results; pure
=======================  ==========================================================================================================
"""

from __future__ import annotations

from aiograd.distributed.local_steps.controller import LocalSteps as LocalSteps
from aiograd.distributed.local_steps.member import LocalStepsMember as LocalStepsMember
from aiograd.distributed.local_steps.round_record import RoundRecord as RoundRecord
from aiograd.distributed.local_steps.round_statistics import LocalStepsStatistics as LocalStepsStatistics
