"""Builds a language model: an LSTM regularised as Zaremba et al. (2014) do, and its perplexity."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

EVALUATION_STREAMS = 20
"""Pieces that a text is cut into to be measured; each starts with no memory of the one before it."""

IGNORED = -100
"""The target of a place that is no part of the text."""

Memory = tuple[Tensor, Tensor]
"""What the LSTM carries on: outputs and cells, [layers, streams, hidden] each."""


class LanguageModel(nn.Module):
    """Holds an embedding, LSTM layers of the same width, and a linear layer of its own to the next word.

    With 3 layers of 500 and 10,000 words it has 16,022,000 parameters; torch's LSTM has two biases a layer.

    Args:
        vocabulary: Words.
        hidden: Width of the embedding and of every layer.
        layers: Of the LSTM.
        dropout: Where nothing recurs: on the embedding, between layers and before the last.
        init: All parameters start from U(±init).
    """

    def __init__(self, vocabulary: int, hidden: int, layers: int, dropout: float, init: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        between = dropout if layers > 1 else 0.0  # torch warns of a dropout that has no place
        self.lstm = nn.LSTM(hidden, hidden, layers, dropout=between, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(hidden, vocabulary)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -init, init)

    def forward(self, words: Tensor, memory: Memory | None = None) -> tuple[Tensor, Memory]:
        """Compute scores [streams, length, vocabulary] of every next word, and the memory after the last.

        Args:
            words: Places in the vocabulary, [streams, length].
            memory: That after the words before; None for none.
        """
        outputs, memory = self.lstm(self.dropout(self.embedding(words)), memory)
        return self.output(self.dropout(outputs)), memory


@torch.no_grad()
def perplexity(model: LanguageModel, text: Tensor, end: int, unroll: int) -> float:
    """Compute exp of the mean negative log-likelihood of a token, <eos> among them, in nats.

    Every token counts once; the first is predicted from an <eos>. The text is read in `EVALUATION_STREAMS` pieces at
    once, through which the memory is carried.

    Args:
        model: The model.
        text: [tokens].
        end: The place of <eos>.
        unroll: Words read at a time, which changes nothing but the memory that it takes.
    """
    model.eval()
    device = model.output.weight.device
    before = torch.cat([torch.tensor([end]), text[:-1]])
    length = math.ceil(len(text) / EVALUATION_STREAMS)
    missing = EVALUATION_STREAMS * length - len(text)
    words, targets = (
        pad(part, (0, missing), value=value).view(EVALUATION_STREAMS, length).to(device)
        for part, value in ((before, end), (text, IGNORED))
    )
    total, memory = 0.0, None
    for inputs, wanted in _windows(words, targets, unroll):
        scores, memory = model(inputs, memory)
        total += cross_entropy(scores.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="sum").item()
    return torch.tensor(total / len(text), dtype=torch.float64).exp().item()  # inf where Python's would overflow


def _windows(words: Tensor, targets: Tensor, unroll: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(words.split(unroll, dim=1), targets.split(unroll, dim=1), strict=True)
