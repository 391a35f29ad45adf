"""Says who holds which rows of which parameters: the seam between one process and many.

    contract      what a step asks of the processes that train together, and how they vote on it
    messages      what each of them has to say reaches all others
    rows          rows [first, last) of a parameter, its gradient and its state; the same as parts of DTensors
    own_shards    every process moves what lies in it: all of a plain parameter, its own rows of a DTensor (FSDP2)
    shared_out    every process has all parameters, moves its rows of them, and sends these to the others (ZeRO-1)

Both ways hand a step plain tensors: some rows of a parameter, of its gradient and of its first moment, and the blocks
in these rows. Nothing is written before all processes have agreed that all of them can write.
"""

from blockadapt.optimizers.ranks.contract import Ranks, Verdict
from blockadapt.optimizers.ranks.messages import Sum
from blockadapt.optimizers.ranks.own_shards import OwnShards
from blockadapt.optimizers.ranks.rows import are_sharded, is_flattened, is_sharded, local, require_placements
from blockadapt.optimizers.ranks.shared_out import SharedOut, shares

__all__ = [
    "OwnShards",
    "Ranks",
    "SharedOut",
    "Sum",
    "Verdict",
    "are_sharded",
    "is_flattened",
    "is_sharded",
    "local",
    "require_placements",
    "shares",
]
