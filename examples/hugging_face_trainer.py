"""Block-AdamW in Hugging Face's Trainer: the three ways in, and how each keeps groupings and weight decay."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

from blockadapt import BlockAdamW, param_groups


def model() -> GPT2LMHeadModel:
    """Build a GPT-2 that fits a test."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=40, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def counting() -> list[dict[str, torch.Tensor]]:
    """Sequences that count upwards, each from another number."""
    rows = (torch.arange(start, start + 16) % 40 for start in range(64))
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder: Path, steps: int) -> TrainingArguments:
    """Give the arguments as you would write them for any optimizer."""
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        weight_decay=0.1,
        save_steps=5,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )


def with_an_optimizer(folder: Path, steps: int = 10) -> Trainer:
    """Hand the optimizer to `optimizers=`; the Trainer adds its schedule. Its `weight_decay` is not used."""
    net, args = model(), arguments(folder, steps)
    groups = param_groups(net, decay_norms_and_biases=False)
    optimizer = BlockAdamW(groups, lr=args.learning_rate, weight_decay=args.weight_decay)
    return Trainer(net, args, train_dataset=counting(), optimizers=(optimizer, None))


def with_a_class(folder: Path, steps: int = 10) -> Trainer:
    """Let the Trainer make the optimizer, with `optimizer_cls_and_kwargs=`.

    Left alone it makes two groups, one decayed and one not, and every parameter gets the grouping `"auto"`, which cuts
    GPT-2's Conv1D along the wrong axis. `params` among the arguments takes the place of those groups. The Trainer takes
    it out of the dict when it makes an optimizer, so make a new dict for each Trainer.
    """
    net, args = model(), arguments(folder, steps)
    groups = param_groups(net, weight_decay=args.weight_decay, decay_norms_and_biases=False)
    made = (BlockAdamW, {"params": groups, "lr": args.learning_rate})
    return Trainer(net, args, train_dataset=counting(), optimizer_cls_and_kwargs=made)


class BlockTrainer(Trainer):
    """A Trainer that makes Block-AdamW for the model and the arguments that it has by then."""

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the optimizer where there is none; under `model_init` the Trainer drops it at every `train()`."""
        if self.optimizer is None:
            groups = param_groups(self.model if model is None else model, decay_norms_and_biases=False)
            self.optimizer = BlockAdamW(groups, lr=self.args.learning_rate, weight_decay=self.args.weight_decay)
        return self.optimizer


def with_a_model_init(folder: Path, steps: int = 10) -> Trainer:
    """Let the Trainer make the model too, anew at every `train()`, as a search over hyperparameters does.

    Groups made beforehand would hold the parameters of another model: the first `train()` would train nothing, and
    every later one would fall back to the Trainer's own two groups, all without a word.
    """
    return BlockTrainer(model_init=model, args=arguments(folder, steps), train_dataset=counting())


def main() -> None:
    """Train in each way."""
    for way in (with_an_optimizer, with_a_class, with_a_model_init):
        with tempfile.TemporaryDirectory() as folder:
            result = way(Path(folder)).train()
        print(f"{way.__name__}: mean loss {result.training_loss:.3f}")


if __name__ == "__main__":
    main()
