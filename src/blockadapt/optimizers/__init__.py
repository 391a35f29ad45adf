"""Stage 5: the update. Thin classes that name their options; no linear algebra."""

from blockadapt.optimizers.base import BlockOptimizer
from blockadapt.optimizers.block_adagrad import BlockAdaFom, BlockAdagrad
from blockadapt.optimizers.block_adam import BlockAdam, BlockAdamW
from blockadapt.optimizers.block_rmsprop import BlockRMSprop

__all__ = ["BlockAdaFom", "BlockAdagrad", "BlockAdam", "BlockAdamW", "BlockOptimizer", "BlockRMSprop"]
