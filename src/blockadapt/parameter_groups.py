"""Give each kind of layer its rule."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvTransposeNd

from blockadapt.validation import require, require_bool

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def param_groups(model: nn.Module, *, decay_norms_and_biases: bool = True, **defaults: Any) -> list[dict[str, Any]]:
    """Param groups of a model, named, each kind of layer with its grouping.

    Embeddings get `"output"`, so a block lies within one word's vector, and so do pointwise transposed convolutions,
    whose inputs come first; norm layers, biases and other vectors get `"chunk"`; all else (Linear, Conv, LSTM/GRU,
    MultiheadAttention) `"auto"`. A parameter shared by several modules is taken once, by the first.

    Args:
        model: The model.
        decay_norms_and_biases: False sets `weight_decay` to 0 for norm layers and biases.
        **defaults: Options that every group gets, such as `lr` or `weight_decay`.

    Returns:
        A list for any optimizer of the family; groups without parameters are left out.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(100, 16), torch.nn.Linear(16, 100))
        >>> [(group["grouping"], len(group["params"])) for group in param_groups(model)]
        [('auto', 1), ('output', 1), ('chunk', 1)]
    """
    owner = "param_groups"
    require(isinstance(model, nn.Module), owner, "model", "a torch.nn.Module", type(model).__name__)
    require_bool(owner, "decay_norms_and_biases", decay_norms_and_biases)
    rule = "left out, because each kind of layer has its own"
    require("grouping" not in defaults, owner, "grouping", rule, defaults.get("grouping"))
    found: dict[str, list[tuple[str, Tensor]]] = {"auto": [], "output": [], "chunk": []}
    seen: set[Tensor] = set()
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if param not in seen:
                seen.add(param)
                found[_rule(module, name, param)].append((f"{prefix}.{name}" if prefix else name, param))
    groups = [{"params": params, "grouping": rule, **defaults} for rule, params in found.items() if params]
    if not decay_norms_and_biases:
        for group in groups:
            if group["grouping"] == "chunk":
                group["weight_decay"] = 0.0
    return groups


def _rule(module: nn.Module, name: str, param: Tensor) -> str:
    if isinstance(module, _EMBEDDINGS):
        return "output"
    if isinstance(module, _NORMS) or "bias" in name or param.ndim <= 1:
        return "chunk"
    if isinstance(module, _ConvTransposeNd) and prod(param.shape[2:]) == 1:
        return "output"
    return "auto"
