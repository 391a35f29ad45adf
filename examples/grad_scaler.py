"""Block-AdamW with float16 and a GradScaler, which skips the steps whose gradients overflow."""

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


def step_(net: nn.Module, optimizer: BlockAdamW, scaler: torch.amp.GradScaler, step: int) -> float:
    """Scale the loss, bring the gradients back, clip their norm, and step unless they overflowed.

    The scaler looks for overflow before the optimizer does, so `on_nonfinite="raise"` stays a guard against the rest.
    """
    x, y = data(step)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


def main() -> None:
    """Start with a scale that is too large: the first steps are skipped until it fits."""
    net = model()
    optimizer = BlockAdamW(param_groups(net), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    for step in range(20):
        loss = step_(net, optimizer, scaler, step)
    print(f"loss {loss:.3f} at scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
