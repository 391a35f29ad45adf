"""Give each kind of layer its rule."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from blockadapt.partition import MAX_BLOCK
from blockadapt.validation import require, require_bool, require_choice, require_integer

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)

_FUSED = {
    *("c_attn", "qkv", "qkv_proj", "to_qkv", "query_key_value", "Wqkv", "in_proj_qkv", "in_proj_qkvz"),
    *("in_proj_weight", "in_proj_bias"),
}
"""Names of projections, or of their parameters, that hold q, k and v one after another."""

_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "head_k_dim")
"""Names under which an attention module keeps the size of a head."""

_HEAD_COUNTS = ("num_heads", "n_head", "n_heads", "heads", "num_attention_heads")
"""Names under which it keeps how many heads there are."""

_BLOCK_SIZE = 10
"""What the optimizers take where nobody asks for a block size."""

_OWN_RULE = "left out, because each kind of layer has its own"


class _Rule(NamedTuple):
    """Says what the parameters of one param group have in common."""

    grouping: str
    block_size: int | None = None  # None: whatever the group gets anyway
    is_norm_or_bias: bool = False


def param_groups(
    model: nn.Module, *, embeddings: str = "output", decay_norms_and_biases: bool = True, **defaults: Any
) -> list[dict[str, Any]]:
    """Make named param groups of a model, and give each kind of layer its grouping.

    | parameter | grouping | so that a block lies within |
    |---|---|---|
    | weight of Linear, Conv, LSTM/GRU, MultiheadAttention, and all else | `"auto"` | one input neuron or kernel |
    | weight of Hugging Face's `Conv1D` and of a pointwise transposed convolution | `"output"` | one input neuron |
    | weight of an embedding, and of a head that is tied to it or that predicts its words | `embeddings` | one word |
    | bias of such a head | `"diagonal"` | one word |
    | norm layers, biases and other vectors | `"chunk"` | the parameter |
    | experts stacked as [experts, rows, columns] | `"auto"`, which takes a row for a kernel | one row of one expert |

    `Conv1D` and transposed convolutions store [in, out], so the outputs of one input neuron are a row. A model that
    tells its head (`get_output_embeddings`, as Hugging Face's do) is believed; in others the head is the only Linear
    with as many outputs as an embedding has words.

    Where q, k and v are one projection, its group gets the largest `block_size` that divides the size of a head, so
    that no block straddles heads; if that is less than half of the one asked for, then one that divides a third of
    the outputs; and if that is too small as well, the one asked for. A module that tells only how many heads it has
    is taken to have as many for k and v. Give `block_size` here rather than to the optimizer, or it is taken to be 10.

    What PEFT puts beside a head or a fused projection, or trains in its place, is cut as that is.

    A parameter that several modules share is taken once, under its first name. What a parametrization such as
    `weight_norm` keeps of a weight follows the weight's rule.

    Args:
        model: The model.
        embeddings: `"output"`, blocks within a word's vector; or `"diagonal"`, Adam's rule, which takes a fraction of
            the time and memory where the vocabulary is large. A small GPT on words lost with it two thirds of what
            blocks are ahead of AdamW (`docs/results/gpt-words.md`).
        decay_norms_and_biases: False sets `weight_decay` to 0 for norm layers and biases.
        **defaults: Options that every group gets, such as `lr` or `weight_decay`.

    Returns:
        A list for any optimizer of the family; groups without parameters are left out.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(100, 16), torch.nn.Linear(16, 32))
        >>> [(group["grouping"], len(group["params"])) for group in param_groups(model)]
        [('output', 1), ('auto', 1), ('chunk', 1)]
    """
    owner = "param_groups"
    require(isinstance(model, nn.Module), owner, "model", "a torch.nn.Module", type(model).__name__)
    require_choice(owner, "embeddings", embeddings, ("output", "diagonal"))
    require_bool(owner, "decay_norms_and_biases", decay_norms_and_biases)
    require("grouping" not in defaults, owner, "grouping", _OWN_RULE, defaults.get("grouping"))
    block_size = defaults.get("block_size", _BLOCK_SIZE)
    require_integer(owner, "block_size", block_size, least=1, most=MAX_BLOCK)

    tables = [module for module in model.modules() if isinstance(module, _EMBEDDINGS)]
    heads = _heads(model, tables)
    words = {param for layer in (*tables, *heads) for param in _weights(layer)}
    word_biases = {head.bias for head in heads if head.bias is not None}
    found: dict[_Rule, list[tuple[str, Tensor]]] = {}
    seen: set[Tensor] = set()
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if param in seen:
                continue
            seen.add(param)
            full = f"{prefix}.{name}" if prefix else name
            if param in words:
                rule = _Rule(embeddings)
            elif param in word_biases:
                rule = _Rule("diagonal", is_norm_or_bias=True)
            else:
                layer = layer_of(model, prefix, module)
                rule, attention = _rule(layer, name, param), _attention_of(model, full)
                if attention is not None:
                    rule = rule._replace(block_size=_block_size_within_heads(attention, layer, param, block_size))
            found.setdefault(rule, []).append((full, param))

    groups = []
    for rule, params in found.items():
        group = {"params": params, "grouping": rule.grouping, **defaults}
        if rule.block_size is not None:
            group["block_size"] = rule.block_size
        if rule.is_norm_or_bias and not decay_norms_and_biases:
            group["weight_decay"] = 0.0
        groups.append(group)
    return groups


def layer_of(model: nn.Module, prefix: str, module: nn.Module) -> nn.Module:
    """Find the layer that a module's parameters belong to: the one whose weight it parametrizes, or else itself."""
    if not isinstance(module, ParametrizationList):
        return module
    return model.get_submodule(prefix.rpartition("parametrizations.")[0].rstrip("."))


def _weights(layer: nn.Module) -> Sequence[Tensor]:
    """List the parameters that a layer's weight is made of: almost always itself.

    A parametrized one is not asked for, because `spectral_norm` moves its buffers at each look.
    """
    if is_parametrized(layer, "weight"):
        return [*layer.parametrizations["weight"].parameters(recurse=False)]  # type: ignore[index,union-attr]
    return [layer.weight]  # type: ignore[list-item]


def _rule(module: nn.Module, name: str, param: Tensor) -> _Rule:
    if isinstance(module, _NORMS) or "bias" in name or param.ndim <= 1:
        return _Rule("chunk", is_norm_or_bias=True)
    return _Rule("output" if _stores_inputs_first(module, param) else "auto")


def _stores_inputs_first(module: nn.Module, param: Tensor) -> bool:
    """Tell whether a weight is [in, out]: that of Hugging Face's `Conv1D`, or of a pointwise transposed convolution."""
    pointwise_transposed = isinstance(module, _ConvTransposeNd) and prod(param.shape[2:]) == 1
    return param.ndim > 1 and (pointwise_transposed or _is_conv1d(module))


def _is_conv1d(module: nn.Module) -> bool:
    """Tell whether this is Hugging Face's `Conv1D`, a Linear that stores [in, out]; known without importing it."""
    return any(cls.__name__ == "Conv1D" and cls.__module__.startswith("transformers.") for cls in type(module).__mro__)


def _heads(model: nn.Module, tables: Sequence[nn.Embedding | nn.EmbeddingBag]) -> list[nn.Linear]:
    """Return the Linear layers whose outputs are the words of an embedding."""
    asked = [getattr(module, "get_output_embeddings", None) for module in model.modules()]
    answers = [ask() for ask in asked if ask is not None]
    if answers:
        return [layer for head in answers if isinstance(head, nn.Module) for layer in _widest(head)]
    by_outputs: dict[int, list[nn.Linear]] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            by_outputs.setdefault(module.out_features, []).append(module)
    candidates = (by_outputs.get(words, []) for words in {table.num_embeddings for table in tables})
    return [linears[0] for linears in candidates if len(linears) == 1]


def _widest(head: nn.Module) -> list[nn.Linear]:
    """Return the Linear layers of a head that predict its words: itself, or what PEFT has put around or beside it."""
    linears = [module for module in head.modules() if isinstance(module, nn.Linear)]
    words = max((linear.out_features for linear in linears), default=0)
    return [linear for linear in linears if linear.out_features == words]


def _attention_of(model: nn.Module, name: str) -> nn.Module | None:
    """Return the module whose fused projection a parameter belongs to, itself or as an adapter of PEFT's below it."""
    path = [part for part in name.split(".") if part != "parametrizations"]
    above = [path[:position] for position, part in enumerate(path) if part in _FUSED]
    return model.get_submodule(".".join(above[0])) if above else None


def _block_size_within_heads(attention: nn.Module, layer: nn.Module, param: Tensor, block_size: int) -> int | None:
    """Return the block size, at most the one asked for, with which no block straddles heads, or else q, k and v.

    None where that is the one asked for, or where it would be less than half of it.
    """
    outputs = param.shape[-1] if _is_conv1d(layer) else param.shape[0]
    sizes = [size for size in _integers(attention, _HEAD_SIZES) if outputs % size == 0]
    parts = [3 * heads for heads in _integers(attention, _HEAD_COUNTS)] + [3]
    for extent in sizes + [outputs // part for part in parts if outputs % part == 0]:
        best = max(n for n in range(1, block_size + 1) if extent % n == 0)
        if 2 * best >= block_size:
            return best if best != block_size else None
    return None


def _integers(module: nn.Module, names: Sequence[str]) -> list[int]:
    """Return what a module keeps under these names, where it is a positive integer."""
    values = (getattr(module, name, None) for name in names)
    return [value for value in values if isinstance(value, int) and value > 0]
