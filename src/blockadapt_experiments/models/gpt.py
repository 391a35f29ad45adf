"""Builds a small GPT: a language model of causal attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

INIT = 0.02
"""Deviation of the initial weights, GPT-2's."""

EVALUATION_WINDOWS = 32
"""Windows measured at once."""


class Layer(nn.Module):
    """Computes x ← x + attention(norm(x)); x ← x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.mixed = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [windows, length, width] to the same shape."""
        windows, length, width = x.shape
        parts = self.attention(self.norm1(x)).view(windows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(seen.transpose(1, 2).reshape(windows, length, width))
        moved: Tensor = self.narrow(gelu(self.wide(self.norm2(x))))
        return x + moved


class Gpt(nn.Module):
    """Holds embeddings of tokens and places, layers, a norm, and a linear layer of its own to the next token.

    With 5 layers of 128 and a context of 128 it has 1,008,000 parameters besides 257 for each token.

    Args:
        vocabulary: Tokens.
        context: The most tokens that it sees at once.
        width: Of the embeddings and the layers.
        layers: How many.
        heads: Of the attention; they share the width.
    """

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                # GPT-2 starts what adds to the residual smaller, so that the sum over layers does not grow.
                adds = name.endswith(("mixed.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=INIT / math.sqrt(2 * layers) if adds else INIT)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute scores of every next token [windows, length, vocabulary] from tokens [windows, length]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        scores: Tensor = self.output(self.norm(self.layers(self.tokens(tokens) + self.places(places))))
        return scores


@torch.no_grad()
def mean_loss(model: Gpt, text: Tensor, context: int) -> float:
    """Measure the mean negative log-likelihood of a token in nats, over windows of this length.

    Args:
        model: The model.
        text: [tokens]; at least one window and the token after it. What is left over is not measured.
        context: Tokens in a window.
    """
    model.eval()
    device = model.output.weight.device
    count = (len(text) - 1) // context
    inputs, targets = (text[move : move + count * context].view(count, context) for move in (0, 1))
    total = 0.0
    for start in range(0, count, EVALUATION_WINDOWS):
        rows = slice(start, start + EVALUATION_WINDOWS)
        scores = model(inputs[rows].to(device))
        total += cross_entropy(scores.flatten(0, 1), targets[rows].flatten().to(device), reduction="sum").item()
    return total / (count * context)
