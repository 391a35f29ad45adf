"""Each kind of layer gets its rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from blockadapt import BlockAdam, BlockAdamW, param_groups
from blockadapt.optimizers import BlockOptimizer
from support.contract_cases import CLASSES, bits, run


def rules(model: nn.Module, **options: Any) -> dict[str, str]:
    """The grouping of each parameter by its name."""
    return {name: group["grouping"] for group in param_groups(model, **options) for name, _ in group["params"]}


LAYERS: dict[str, tuple[nn.Module, dict[str, str]]] = {
    "Linear": (nn.Linear(4, 3), {"weight": "auto", "bias": "chunk"}),
    "Bilinear": (nn.Bilinear(2, 3, 4), {"weight": "auto", "bias": "chunk"}),
    "Conv1d": (nn.Conv1d(2, 3, 3), {"weight": "auto", "bias": "chunk"}),
    "Conv2d": (nn.Conv2d(2, 3, 3), {"weight": "auto", "bias": "chunk"}),
    "Conv3d": (nn.Conv3d(2, 3, 3), {"weight": "auto", "bias": "chunk"}),
    "ConvTranspose2d": (nn.ConvTranspose2d(2, 3, 3), {"weight": "auto", "bias": "chunk"}),
    "pointwise ConvTranspose2d": (nn.ConvTranspose2d(2, 3, 1), {"weight": "output", "bias": "chunk"}),
    "Embedding": (nn.Embedding(5, 3), {"weight": "output"}),
    "EmbeddingBag": (nn.EmbeddingBag(5, 3), {"weight": "output"}),
    "LayerNorm": (nn.LayerNorm(4), {"weight": "chunk", "bias": "chunk"}),
    "LayerNorm over a matrix": (nn.LayerNorm((4, 3)), {"weight": "chunk", "bias": "chunk"}),
    "RMSNorm": (nn.RMSNorm(4), {"weight": "chunk"}),
    "GroupNorm": (nn.GroupNorm(2, 4), {"weight": "chunk", "bias": "chunk"}),
    "BatchNorm1d": (nn.BatchNorm1d(4), {"weight": "chunk", "bias": "chunk"}),
    "BatchNorm2d": (nn.BatchNorm2d(4), {"weight": "chunk", "bias": "chunk"}),
    "InstanceNorm2d": (nn.InstanceNorm2d(4, affine=True), {"weight": "chunk", "bias": "chunk"}),
    "PReLU": (nn.PReLU(4), {"weight": "chunk"}),
    "LSTM": (
        nn.LSTM(3, 2),
        {"weight_ih_l0": "auto", "weight_hh_l0": "auto", "bias_ih_l0": "chunk", "bias_hh_l0": "chunk"},
    ),
    "GRU": (
        nn.GRU(3, 2),
        {"weight_ih_l0": "auto", "weight_hh_l0": "auto", "bias_ih_l0": "chunk", "bias_hh_l0": "chunk"},
    ),
    "MultiheadAttention": (
        nn.MultiheadAttention(4, 2, add_bias_kv=True),
        {
            "in_proj_weight": "auto",
            "in_proj_bias": "chunk",
            "out_proj.weight": "auto",
            "out_proj.bias": "chunk",
            "bias_k": "chunk",
            "bias_v": "chunk",
        },
    ),
}


@pytest.mark.parametrize(("layer", "expected"), LAYERS.values(), ids=LAYERS.keys())
def test_a_layers_parameters_get_its_rule(layer: nn.Module, expected: dict[str, str]) -> None:
    assert rules(layer) == expected
    assert rules(nn.Sequential(nn.Identity(), layer)) == {f"1.{name}": rule for name, rule in expected.items()}


class Odd(nn.Module):
    """Parameters of its own, beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.zeros(3))
        self.table = nn.Parameter(torch.zeros(3, 3))
        self.inner = nn.Linear(3, 3, bias=False)


def test_parameters_outside_known_layers_follow_their_shape() -> None:
    assert rules(Odd()) == {"scale": "chunk", "shift": "chunk", "table": "auto", "inner.weight": "auto"}


class Tied(nn.Module):
    def __init__(self, head_first: bool) -> None:
        super().__init__()
        words, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        head.weight = words.weight
        if head_first:
            self.head, self.words = head, words
        else:
            self.words, self.head = words, head


@pytest.mark.parametrize(
    ("head_first", "expected"), [(False, {"words.weight": "output"}), (True, {"head.weight": "auto"})]
)
def test_a_tied_weight_is_taken_once_by_the_first_module(head_first: bool, expected: dict[str, str]) -> None:
    assert rules(Tied(head_first)) == expected


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3, bias=False))


def test_every_parameter_is_in_one_group_under_its_own_name() -> None:
    net = model()
    named = {name: param for group in param_groups(net) for name, param in group["params"]}
    assert named.keys() == dict(net.named_parameters()).keys()
    assert all(named[name] is param for name, param in net.named_parameters())


def test_groups_without_parameters_are_left_out() -> None:
    assert [group["grouping"] for group in param_groups(nn.Linear(2, 2, bias=False))] == ["auto"]
    assert param_groups(nn.ReLU()) == []


def test_norms_and_biases_are_decayed_unless_asked_otherwise() -> None:
    groups = param_groups(model(), weight_decay=0.3, lr=0.1)
    assert [(group["grouping"], group["weight_decay"]) for group in groups] == [
        ("auto", 0.3),
        ("output", 0.3),
        ("chunk", 0.3),
    ]
    spared = param_groups(model(), weight_decay=0.3, lr=0.1, decay_norms_and_biases=False)
    assert [group["weight_decay"] for group in spared] == [0.3, 0.3, 0.0]
    assert [group["lr"] for group in spared] == [0.1, 0.1, 0.1]


def test_norms_and_biases_are_spared_the_optimizers_own_decay_too() -> None:
    net = model()
    optimizer = BlockAdamW(param_groups(net, decay_norms_and_biases=False), lr=0.1, weight_decay=0.5)
    norm = net[2]
    assert isinstance(norm, nn.LayerNorm)
    before = bits(norm.weight), net[1].weight.detach().clone()
    for param in net.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert bits(norm.weight) == before[0]
    torch.testing.assert_close(net[1].weight, 0.95 * before[1])


@pytest.mark.parametrize("cls", CLASSES)
def test_the_groups_fit_every_optimizer_of_the_family(cls: type[BlockOptimizer]) -> None:
    net = model()
    optimizer = cls(param_groups(net, block_size=2))
    run(optimizer, [1, 2])
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in net.named_parameters())
    assert {group["block_size"] for group in optimizer.param_groups} == {2}


def test_an_embeddings_block_lies_within_one_words_vector() -> None:
    """Of a gradient on one word, only that word's vector moves."""
    words = nn.Embedding(6, 7)
    before = words.weight.detach().clone()
    optimizer = BlockAdam(param_groups(words, block_size=3), lr=0.1)
    words(torch.tensor([2])).square().sum().backward()
    optimizer.step()
    moved = (words.weight != before).any(dim=1)
    assert moved.tolist() == [False, False, True, False, False, False]


def test_options_that_no_optimizer_has_are_refused_when_it_is_made() -> None:
    with pytest.raises(
        TypeError, match="`wieght_decay` is not an option of a param group, did you mean `weight_decay`"
    ):
        BlockAdam(param_groups(nn.Linear(2, 2), wieght_decay=0.1))
