"""Defines Muon as it is used: torch's Muon for the matrices inside a model, torch's AdamW for all else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Muon(Optimizer):
    """Runs torch's Muon and torch's AdamW as one optimizer.

    A hidden matrix X[out, in], where a convolution's filters are read as [out, in · height · width], follows

        B ← μ B + (1 − μ) G;  U = NS((1 − μ) G + μ B);  X ← (1 − α λ) X − 0.2 α √max(out, in) U,

    where NS takes five Newton-Schulz steps in bfloat16 towards the nearest orthogonal matrix. The factor 0.2 √max gives
    U the size of a step of AdamW, so that one α serves both. Embeddings, the last matrix (the head), vectors and
    scalars are AdamW's.

    Args:
        model: Its parameters are optimized.
        lr: α.
        betas: Decays of AdamW. Muon's μ is 0.95.
        weight_decay: λ of both.
    """

    def __init__(self, model: nn.Module, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        hidden = hidden_matrices(model)
        rest = [parameter for parameter in model.parameters() if parameter not in {*hidden}]
        groups = [{"params": params} for params in (hidden, rest) if params]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        # Views share memory with the parameters, so a step of theirs is a step of the parameters.
        self._views = {parameter: nn.Parameter(parameter.detach().flatten(1)) for parameter in hidden}
        options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        self._parts: list[Optimizer] = []
        if hidden:
            matrices = [*self._views.values()]
            self._parts.append(torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options))
        if rest:
            self._parts.append(torch.optim.AdamW(rest, betas=betas, **options))

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter, view in self._views.items():
            view.grad = None if parameter.grad is None else parameter.grad.flatten(1)
        for group, part in zip(self.param_groups, self._parts, strict=True):
            for name in ("lr", "weight_decay"):
                part.param_groups[0][name] = group[name]
            # The state is kept here, under the parameters themselves: a checkpoint may have replaced it.
            for parameter in group["params"]:
                part.state[self._views.get(parameter, parameter)] = self.state[parameter]
            part.step()
        return loss


def embeddings_of(model: nn.Module) -> set[Tensor]:
    """Return the weights of the model's embeddings."""
    return {module.weight for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))}


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of two axes or more, but for embeddings and the last of them."""
    embeddings = embeddings_of(model)
    return [parameter for parameter in model.parameters() if parameter.ndim >= 2 and parameter not in embeddings][:-1]
