"""Units in several buckets are made ready as one step, and move as they do in one."""

from __future__ import annotations

import pytest

from blockadapt import BlockAdam, SpectrumClip
from blockadapt.kernels import Batch
from blockadapt.kernels.eigh import EighKernel
from support.changes import parameter
from support.contract_cases import everything, give_gradients_, run


class Silent(EighKernel):
    """Takes blocks of 3, and measures nothing."""

    name = "silent"
    measures = False

    def takes(self, batch: Batch) -> bool:
        return batch.n == 3


def test_what_a_later_bucket_cannot_do_is_refused_in_the_optimizers_name() -> None:
    params = [parameter(4), parameter(3)]
    optimizer = BlockAdam(params, clip=SpectrumClip("auto"), backend=Silent())
    give_gradients_(params, 1)
    before = everything(optimizer)
    with pytest.raises(ValueError, match=r"^BlockAdam: `clip` must be .* the kernel 'silent' measures none"):
        optimizer._preparation.updates([[unit] for unit in optimizer.units()])
    assert everything(optimizer) == before


def test_units_in_buckets_move_as_they_do_together() -> None:
    shapes = [(12, 7), (5,), (16, 16)]
    split, whole = (BlockAdam([parameter(*shape) for shape in shapes], block_size=5) for _ in range(2))
    for step in range(4):
        give_gradients_(split.param_groups[0]["params"], step)
        for update in split._preparation.updates([[unit] for unit in split.units()]):
            update.write_()
        run(whole, [step])
    assert everything(split) == everything(whole)
    assert [*split._preparation.standing] == [0, 1, 2]
