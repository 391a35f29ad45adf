"""An optimizer of your own, in every experiment of the laboratory.

blockadapt run mnist-lenet300 --load examples/laboratory/sign_momentum.py --optimizers adam,sign-momentum \
        --arm 'slow=sign-momentum,inertia=0.99'
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from blockadapt_experiments import register_optimizer


class SignMomentum(Optimizer):
    """Keeps m ← μ m + (1 − μ) g, and takes the step x ← (1 − α λ) x − α sign(m)."""

    def __init__(self, params, lr: float, inertia: float, weight_decay: float) -> None:
        if not 0 <= inertia < 1:
            raise ValueError(f"SignMomentum: `inertia` must be in [0, 1), got {inertia}.")
        super().__init__(params, {"lr": lr, "inertia": inertia, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        """Take a step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    m = state.setdefault("m", torch.zeros_like(parameter))
                    m.lerp_(parameter.grad, 1 - group["inertia"])
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(m.sign(), alpha=group["lr"])


# `decoupled_weight_decay` has no default: it is the experiment's `optimizer.decoupled_weight_decay`.
# `inertia` has one: it is this optimizer's own, and an arm may change it.
@register_optimizer("sign-momentum", lr=1e-4, label="Sign of momentum")
def sign_momentum(model: nn.Module, lr: float, *, decoupled_weight_decay: float, inertia: float = 0.9) -> Optimizer:
    """Make it for a model."""
    return SignMomentum(model.parameters(), lr, inertia, decoupled_weight_decay)
