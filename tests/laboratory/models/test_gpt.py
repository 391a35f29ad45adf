"""The small GPT: its size, that it sees no later token, and the loss of a text."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import log_softmax

from blockadapt_experiments.models.gpt import EVALUATION_WINDOWS, Gpt, mean_loss


def tiny() -> Gpt:
    torch.manual_seed(0)
    return Gpt(vocabulary=7, context=5, width=8, layers=2, heads=2)


def test_it_has_as_many_parameters_as_it_says() -> None:
    for vocabulary in (10, 30):
        model = Gpt(vocabulary, context=128, width=128, layers=5, heads=4)
        assert sum(parameter.numel() for parameter in model.parameters()) == 1_008_000 + 257 * vocabulary


def test_a_score_depends_on_no_later_token() -> None:
    model, tokens = tiny(), torch.tensor([[1, 2, 3, 4, 5]])
    before = model(tokens)
    for place in range(5):
        changed = tokens.clone()
        changed[0, place] = 0
        differs = (model(changed) != before).any(dim=2)[0].tolist()
        assert differs[:place] == [False] * place
        assert differs[place]


def test_what_adds_to_the_residual_starts_smaller() -> None:
    model = Gpt(vocabulary=50, context=20, width=128, layers=8, heads=4)
    layer = model.layers[3]
    assert layer.wide.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert layer.narrow.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert not layer.wide.bias.any()
    assert (layer.norm1.weight == 1).all()


def test_the_loss_of_a_text_counts_every_token_of_its_windows_once() -> None:
    """Windows of five, more of them than are measured at once; the last two tokens fill none."""
    model, count = tiny().double(), EVALUATION_WINDOWS + 3
    text = torch.randint(7, (5 * count + 3,), generator=torch.Generator().manual_seed(1))
    total = 0.0
    for start in range(0, 5 * count, 5):
        scores = log_softmax(model(text[None, start : start + 5])[0], dim=1).detach()
        total -= sum(float(scores[place, text[start + place + 1]]) for place in range(5))
    assert mean_loss(model, text, 5) == pytest.approx(total / (5 * count), rel=1e-12)
    assert mean_loss(model, text, 5) == pytest.approx(math.log(7), rel=0.05)  # it has learnt nothing yet
