"""The language model is Zaremba's, its perplexity exact."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import dropout

from blockadapt_experiments.models import lstm
from blockadapt_experiments.models.lstm import LanguageModel, perplexity


def test_the_model_of_the_paper_has_as_many_parameters_as_published() -> None:
    model = LanguageModel(10_000, 500, 3, dropout=0.5, init=0.05)
    assert sum(parameter.numel() for parameter in model.parameters()) == 16_022_000
    for name, parameter in model.named_parameters():
        largest, mean = float(parameter.detach().abs().max()), float(parameter.detach().mean())
        # The largest of n is below the bound by more than 20/n of it once in e²⁰ times.
        assert 0.05 * (1 - 20 / parameter.numel()) < largest <= 0.05, name
        assert abs(mean) < 6 * 0.05 / math.sqrt(3 * parameter.numel()), name
    assert model.output.weight is not model.embedding.weight


def layers_of(model: LanguageModel) -> list[nn.LSTM]:
    """Each layer as an LSTM of its own, with the same weights."""
    width = model.lstm.hidden_size
    layers = []
    for number in range(model.lstm.num_layers):
        layer = nn.LSTM(width, width)
        layer.load_state_dict(
            {f"{name[:-1]}0": getattr(model.lstm, f"{name[:-1]}{number}") for name in layer.state_dict()}
        )
        layers.append(layer)
    return layers


def test_dropout_is_where_nothing_recurs() -> None:
    model = LanguageModel(50, 8, 3, dropout=0.5, init=0.5).train()
    layers = layers_of(model)
    words = torch.randint(0, 50, (4, 6))
    torch.manual_seed(1)
    scores, _ = model(words)
    torch.manual_seed(1)
    maps = dropout(model.embedding(words), 0.5).transpose(0, 1)  # [length, streams, width], as the LSTM has them
    for number, layer in enumerate(layers):
        maps, _ = layer(maps)
        if number < len(layers) - 1:
            maps = dropout(maps, 0.5)
    expected = model.output(dropout(maps.transpose(0, 1), 0.5))
    torch.testing.assert_close(scores, expected, rtol=1e-6, atol=1e-6)
    kept = model.eval()(words)[0]
    torch.testing.assert_close(kept, model(words)[0], rtol=0, atol=0)


def test_one_layer_has_no_dropout_between_layers() -> None:
    LanguageModel(5, 4, 1, dropout=0.5, init=0.1)  # torch would warn


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def log_likelihood(model: LanguageModel, before: list[int], text: list[int]) -> float:
    """Σ log p of the words of one piece, token by token in float64, from the LSTM's equations."""
    weights = {name: value.double().numpy() for name, value in model.state_dict().items()}
    layers, width = model.lstm.num_layers, model.lstm.hidden_size
    h, c = np.zeros((layers, width)), np.zeros((layers, width))
    total = 0.0
    for word, following in zip(before, text, strict=True):
        x = weights["embedding.weight"][word]
        for layer in range(layers):
            gates = sum(
                weights[f"lstm.weight_{kind}_l{layer}"] @ value + weights[f"lstm.bias_{kind}_l{layer}"]
                for kind, value in (("ih", x), ("hh", h[layer]))
            )
            i, f, g, o = np.split(gates, 4)
            c[layer] = sigmoid(f) * c[layer] + sigmoid(i) * np.tanh(g)
            x = h[layer] = sigmoid(o) * np.tanh(c[layer])
        scores = weights["output.weight"] @ x + weights["output.bias"]
        total += scores[following] - np.log(np.exp(scores).sum())
    return total


@pytest.mark.parametrize(("pieces", "tokens"), [(1, 23), (4, 23), (4, 24), (20, 9)])
@pytest.mark.parametrize("unroll", [5, 100])
def test_perplexity_is_that_of_the_equations(
    monkeypatch: pytest.MonkeyPatch, pieces: int, tokens: int, unroll: int
) -> None:
    monkeypatch.setattr(lstm, "EVALUATION_STREAMS", pieces)
    model = LanguageModel(12, 7, 2, dropout=0.5, init=0.8)
    text = torch.randint(0, 12, (tokens,))
    words, end = text.tolist(), 3
    length = math.ceil(tokens / pieces)
    total = 0.0
    for start in range(0, tokens, length):  # each piece starts afresh, from the word before it
        piece = words[start : start + length]
        total += log_likelihood(model, [words[start - 1] if start else end, *piece[:-1]], piece)
    assert perplexity(model, text, end, unroll) == pytest.approx(math.exp(-total / tokens), rel=1e-5)


def test_perplexity_beyond_all_numbers_is_infinite() -> None:
    model = LanguageModel(3, 2, 1, dropout=0.0, init=0.1)
    with torch.no_grad():
        model.output.bias.copy_(torch.tensor([1e6, 0.0, 0.0]))
    assert perplexity(model, torch.tensor([1, 2, 1]), 0, 5) == math.inf
