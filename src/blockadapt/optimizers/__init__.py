"""Stage 5 updates parameters: its thin classes name their options, and hold no linear algebra."""

from blockadapt.optimizers.base import BlockOptimizer
from blockadapt.optimizers.block_adagrad import BlockAdaFom, BlockAdagrad
from blockadapt.optimizers.block_adam import BlockAdam, BlockAdamW
from blockadapt.optimizers.block_rmsprop import BlockRMSprop

__all__ = ["BlockAdaFom", "BlockAdagrad", "BlockAdam", "BlockAdamW", "BlockOptimizer", "BlockRMSprop"]
