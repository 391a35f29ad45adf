"""Block-AdamW in a loop of Accelerate's, with accumulated gradients and a saved state."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from blockadapt import BlockAdamW, param_groups


def model() -> nn.Module:
    """Letters in, letters out."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(30, 16), nn.Flatten(), nn.Linear(4 * 16, 32), nn.GELU(), nn.Linear(32, 30))


def batches(batch_size: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Four numbers in a row and the next one."""
    rows = torch.arange(64)[:, None] + torch.arange(5)
    return DataLoader(TensorDataset(rows[:, :4] % 30, rows[:, 4] % 30), batch_size=batch_size)


class Run:
    """All that Accelerate takes care of, so that it can save and load it."""

    def __init__(self, accumulate: int = 2) -> None:
        net = model()
        groups = param_groups(net, weight_decay=0.1, decay_norms_and_biases=False)
        optimizer = BlockAdamW(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        self.model, self.optimizer, self.batches, self.schedule = self.accelerator.prepare(
            net, optimizer, batches(16 // accumulate), schedule
        )

    def epoch(self) -> float:
        """Pass over the data once; `accumulate` makes `step` and `zero_grad` wait for their turn."""
        for x, y in self.batches:
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.cross_entropy(self.model(x), y)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
        return loss.item()


def main() -> None:
    """Train, save, load into a new run, train on."""
    with tempfile.TemporaryDirectory() as folder:
        first = Run()
        print(f"loss {first.epoch():.3f}")
        first.accelerator.save_state(str(Path(folder) / "state"))
        second = Run()
        second.accelerator.load_state(str(Path(folder) / "state"))
        print(f"loss {second.epoch():.3f}, resumed")


if __name__ == "__main__":
    main()
