"""One optimizer for each parameter that steps within `backward`, so that no two gradients need to be held at once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from blockadapt import BlockAdamW, param_groups


def model() -> nn.Module:
    """Layers of three kinds."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv1d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14, 12), nn.ReLU())
    return nn.Sequential(body, nn.LayerNorm(12), nn.Linear(12, 3))


def data(step: int) -> tuple[Tensor, Tensor]:
    """Draw a minibatch of waves of three frequencies."""
    generator = torch.Generator().manual_seed(step)
    y = torch.randint(3, (32,), generator=generator)
    phase = 6 * torch.rand(32, 1, 1, generator=generator)
    return torch.sin(torch.arange(16) * (y[:, None, None] + 1) / 3 + phase), y


def step_in_backward_(net: nn.Module) -> list[BlockAdamW]:
    """Hook an optimizer to every parameter; each keeps the options of the group that the parameter is in."""
    optimizers = []
    for group in param_groups(net, weight_decay=0.1, decay_norms_and_biases=False):
        options = {name: value for name, value in group.items() if name != "params"}
        for named in group["params"]:
            optimizer = BlockAdamW([{"params": [named], **options}], lr=1e-2)

            def step(param: Tensor, optimizer: BlockAdamW = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            named[1].register_post_accumulate_grad_hook(step)
            optimizers.append(optimizer)
    return optimizers


def train(net: nn.Module, steps: int = 40) -> float:
    """Train in a loop that has neither `step` nor `zero_grad`."""
    for step in range(steps):
        x, y = data(step)
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
    return loss.item()


def main() -> None:
    """Train."""
    net = model()
    step_in_backward_(net)
    print(f"loss {train(net):.3f}")


if __name__ == "__main__":
    main()
