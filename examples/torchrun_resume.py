"""Train on some processes, lose one, and go on with another number of them.

    torchrun --nproc-per-node 2 examples/torchrun_resume.py --folder run --steps 12 --die-at 8
    torchrun --nproc-per-node 3 examples/torchrun_resume.py --folder run --steps 12

The second command goes on from the last checkpoint, and prints the loss that an uninterrupted run prints, whatever the
number of processes. `--how fsdp` shards the model with `fully_shard`; `--how shared` keeps the whole model in every
process and shares only the optimizer's blocks out.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from blockadapt import BlockAdamW

BATCH = 48
SAVE_EVERY = 5


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Draw the minibatch of a step: it is the same on any number of processes, each of which takes its part."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 16, generator=generator)
    y = (x[:, :1] * x[:, 1:2]).tanh()
    part = slice(dist.get_rank(), None, dist.get_world_size())
    return x[part], y[part]


def build(how: str) -> tuple[nn.Module, BlockAdamW]:
    """Build the model and its optimizer. 48 rows on 1, 2 or 3 processes begin where blocks of 8 begin."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))
    if how == "fsdp":
        fully_shard(model)
        return model, BlockAdamW(model.parameters(), lr=0.01, block_size=8)
    model = DistributedDataParallel(model)
    return model, BlockAdamW(model.parameters(), lr=0.01, block_size=8, process_group=dist.group.WORLD)


def save(model: nn.Module, optimizer: BlockAdamW, step: int, folder: Path) -> None:
    """Write a checkpoint, and only then its name: a process may be lost at any moment."""
    model_state, state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=folder / f"step-{step}")
    if dist.get_rank() == 0:
        (folder / "latest.part").write_text(str(step))
        (folder / "latest.part").replace(folder / "latest")
    dist.barrier()


def load(model: nn.Module, optimizer: BlockAdamW, folder: Path) -> int:
    """Read the last checkpoint, if there is one; returns the steps taken."""
    if not (folder / "latest").exists():
        return 0
    step = int((folder / "latest").read_text())
    model_state, state = get_state_dict(model, optimizer)
    states = {"model": model_state, "optimizer": state}
    dcp.load(states, checkpoint_id=folder / f"step-{step}")
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    return step


def main() -> None:
    """Train from where the folder stands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--how", choices=("fsdp", "shared"), default="fsdp")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--die-at", type=int, help="the step at which the last process is killed")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    model, optimizer = build(arguments.how)
    first = load(model, optimizer, arguments.folder)
    loss = torch.zeros(())
    for step in range(first, arguments.steps):
        if step == arguments.die_at and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if (step + 1) % SAVE_EVERY == 0:
            save(model, optimizer, step + 1, arguments.folder)
    loss = loss.detach()
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        mean = loss.item() / dist.get_world_size()
        print(f"{dist.get_world_size()} processes, steps {first} to {arguments.steps}: loss {mean:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
