"""Block-AdamW with a model that `torch.compile` has compiled; the optimizer itself stays as it is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from blockadapt import BlockAdamW, param_groups


def model() -> nn.Module:
    """Build a small network."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))


def data(step: int) -> tuple[Tensor, Tensor]:
    """Noise around five centres."""
    generator = torch.Generator().manual_seed(step)
    y = torch.arange(40) % 5
    return torch.eye(5, 20)[y] + 0.1 * torch.randn(40, 20, generator=generator), y


def train(net: nn.Module, optimizer: BlockAdamW, steps: int = 10) -> float:
    """Ordinary training; `net` may be compiled or not."""
    for step in range(steps):
        x, y = data(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    """Train, with groups made from the model itself, so that the names in its checkpoints are its own."""
    net = model()
    optimizer = BlockAdamW(param_groups(net), lr=1e-2)
    print(f"loss {train(torch.compile(net), optimizer):.3f}")


if __name__ == "__main__":
    main()
