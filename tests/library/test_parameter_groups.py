"""Each kind of layer gets its rule."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from blockadapt import BlockAdam, BlockAdamW, param_groups
from blockadapt.optimizers import BlockOptimizer
from blockadapt.partition import partition
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


@pytest.mark.parametrize(("make", "kept"), [(weight_norm, ("original0", "original1")), (spectral_norm, ("original",))])
def test_what_a_parametrization_keeps_of_a_weight_gets_the_weights_rule(make: Any, kept: tuple[str, ...]) -> None:
    """And nobody looks at the weight itself: `spectral_norm` moves its buffers whenever somebody does."""
    layers = {
        "output": [nn.Embedding(5, 3), nn.ConvTranspose1d(2, 3, 1)],
        "auto": [nn.Linear(4, 3), nn.Conv1d(2, 3, 3)],
        "chunk": [nn.LayerNorm((4, 3))],
    }
    for expected, some in layers.items():
        for layer in map(make, some):
            before = [buffer.clone() for buffer in layer.buffers()]
            found = rules(nn.Sequential(layer))
            assert [found[f"0.parametrizations.weight.{name}"] for name in kept] == [expected] * len(kept)
            assert rules(layer) == {name.removeprefix("0."): rule for name, rule in found.items()}
            assert all(map(torch.equal, layer.buffers(), before))


def test_parameters_outside_known_layers_follow_their_shape() -> None:
    assert rules(Odd()) == {"scale": "chunk", "shift": "chunk", "table": "auto", "inner.weight": "auto"}


class Tied(nn.Module):
    """A head that shares its weight with an embedding, defined before or after it."""

    def __init__(self, head_first: bool) -> None:
        super().__init__()
        words, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        head.weight = words.weight
        if head_first:
            self.head, self.words = head, words
        else:
            self.words, self.head = words, head


both_choices = pytest.mark.parametrize("embeddings", ["output", "diagonal"])


@both_choices
@pytest.mark.parametrize(("head_first", "name"), [(False, "words.weight"), (True, "head.weight")])
def test_a_tied_head_follows_the_embedding_and_is_taken_once(head_first: bool, name: str, embeddings: str) -> None:
    assert rules(Tied(head_first), embeddings=embeddings) == {name: embeddings}


class LanguageModel(nn.Module):
    """An untied head over as many words as the embedding has, of other width, beside layers of other widths."""

    def __init__(self, words: int = 11, predicted: int = 11) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 4)
        self.places = nn.Embedding(6, 4)
        self.inner = nn.ModuleList([nn.Linear(4, 6) for _ in range(2)])
        self.head = nn.Linear(6, predicted)


@both_choices
def test_an_untied_head_follows_the_embedding_whose_words_it_predicts(embeddings: str) -> None:
    expected = {"words.weight": embeddings, "places.weight": embeddings, "head.weight": embeddings}
    expected |= {"head.bias": "diagonal"}
    expected |= {f"inner.{i}.{name}": rule for i in (0, 1) for name, rule in (("weight", "auto"), ("bias", "chunk"))}
    assert rules(LanguageModel(), embeddings=embeddings) == expected


def test_layers_that_are_as_wide_as_an_embedding_is_long_are_no_heads() -> None:
    """`places` has 6 rows and both inner layers 6 outputs; a head is the only one of its kind."""
    assert rules(LanguageModel())["inner.0.weight"] == "auto"
    assert rules(LanguageModel(predicted=12))["head.weight"] == "auto"


class Teller(LanguageModel):
    """Says where its head is, as Hugging Face's models do: here at a layer that nobody would guess."""

    def get_output_embeddings(self) -> nn.Module:
        return self.inner[1]


def test_a_model_that_tells_its_head_is_believed() -> None:
    told = rules(nn.Sequential(Teller()), embeddings="diagonal")
    assert told["0.inner.1.weight"] == told["0.inner.1.bias"] == "diagonal"
    assert told["0.head.weight"] == "auto"


def test_a_model_that_says_it_has_no_head_is_believed() -> None:
    class Headless(LanguageModel):
        def get_output_embeddings(self) -> None:
            return None

    assert rules(Headless())["head.weight"] == "auto"


def test_a_tied_heads_own_bias_is_one_number_for_each_word_and_spared_like_other_biases() -> None:
    tied = Tied(head_first=False)
    tied.head.bias = nn.Parameter(torch.zeros(5))
    groups = param_groups(tied, embeddings="diagonal", decay_norms_and_biases=False, weight_decay=0.1)
    assert [([name for name, _ in group["params"]], group["grouping"], group["weight_decay"]) for group in groups] == [
        (["words.weight"], "diagonal", 0.1),
        (["head.bias"], "diagonal", 0.0),
    ]


@pytest.mark.parametrize("head_bias", [False, True], ids=["GPT-2", "BERT"])
def test_hugging_faces_models_tell_their_heads(head_bias: bool) -> None:
    pytest.importorskip("transformers")
    if head_bias:
        from transformers.models.bert import BertConfig, BertForMaskedLM

        sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 1}
        found = rules(BertForMaskedLM(BertConfig(vocab_size=30, **sizes)), embeddings="diagonal")
        assert found["cls.predictions.bias"] == "diagonal"
        assert found["bert.embeddings.word_embeddings.weight"] == "diagonal"
        assert found["bert.encoder.layer.0.output.dense.weight"] == "auto"
    else:
        from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

        ends = {"bos_token_id": 0, "eos_token_id": 0}
        config = GPT2Config(vocab_size=30, n_embd=8, n_head=2, n_layer=1, tie_word_embeddings=False, **ends)
        found = rules(GPT2LMHeadModel(config), embeddings="diagonal")
        assert found["lm_head.weight"] == found["transformer.wte.weight"] == "diagonal"
        assert found["transformer.h.0.mlp.c_fc.weight"] == "output"
        assert found["transformer.h.0.mlp.c_fc.bias"] == "chunk"


@pytest.mark.filterwarnings("default")  # what other packages warn of is theirs
def test_what_peft_puts_beside_a_head_or_trains_in_its_place_follows_the_embedding() -> None:
    peft = pytest.importorskip("peft", reason='needs pip install "blockadapt[trainers]"')
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=30, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    for options, kept in (
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "modules_to_save.default.weight"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lora_B.default.weight"),
    ):
        adapted = peft.get_peft_model(LlamaForCausalLM(config), peft.LoraConfig(r=4, **options))
        found = rules(adapted, embeddings="diagonal")
        assert found[f"base_model.model.lm_head.{kept}"] == "diagonal"
        assert found.get("base_model.model.lm_head.lora_A.default.weight", "auto") == "auto"
        assert found["base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"] == "auto"


@pytest.mark.parametrize("cls", CLASSES)
def test_conv1d_moves_as_the_same_layer_written_as_linear(cls: type[BlockOptimizer]) -> None:
    """13 outputs in blocks of 4: there is a short last run."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    linear, transposed = nn.Linear(9, 13), conv1d(13, 9)
    with torch.no_grad():
        transposed.weight.copy_(linear.weight.t())
        transposed.bias.copy_(linear.bias)
    start = linear.weight.detach().clone()
    optimizers = [cls(param_groups(layer, block_size=4), lr=0.01) for layer in (linear, transposed)]
    for _ in range(20):
        weight, bias = torch.randn(13, 9), torch.randn(13)
        linear.weight.grad, transposed.weight.grad = weight, weight.t().contiguous()
        linear.bias.grad, transposed.bias.grad = bias, bias.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(transposed.weight.t(), linear.weight)
    assert torch.equal(transposed.bias, linear.bias)
    assert (linear.weight - start).abs().max() > 0.01


def test_a_subclass_of_conv1d_is_cut_like_it() -> None:
    class Quiet(pytest.importorskip("transformers.pytorch_utils").Conv1D):  # type: ignore[misc]
        pass

    assert rules(Quiet(4, 3)) == {"weight": "output", "bias": "chunk"}


def test_only_hugging_faces_conv1d_is_known_as_such() -> None:
    class Conv1D(nn.Linear):
        pass

    assert rules(Conv1D(3, 4)) == {"weight": "auto", "bias": "chunk"}


class Attention(nn.Module):
    """q, k and v in one projection of this name."""

    def __init__(self, name: str, head_size: int, heads: int, *, tells: bool = True) -> None:
        super().__init__()
        if tells:
            self.head_dim = head_size
        self.add_module(name, nn.Linear(5, 3 * heads * head_size))
        self.out = nn.Linear(heads * head_size, 7)


def sizes(model: nn.Module, **options: Any) -> dict[str, int | None]:
    """The block size that each parameter's group asks for, by its name."""
    groups = param_groups(model, **options)
    return {name: group.get("block_size") for group in groups for name, _ in group["params"]}


@pytest.mark.parametrize(
    "name", ["c_attn", "qkv", "qkv_proj", "to_qkv", "query_key_value", "Wqkv", "in_proj_qkv", "in_proj_qkvz"]
)
def test_no_block_of_a_fused_projection_straddles_heads(name: str) -> None:
    found = sizes(Attention(name, head_size=16, heads=3))
    assert found == {f"{name}.weight": 8, f"{name}.bias": 8, "out.weight": None, "out.bias": None}


def test_no_block_of_what_lies_below_a_fused_projection_straddles_heads() -> None:
    """As what a parametrization keeps of it, and PEFT's adapters beside it."""
    attention = Attention("qkv", head_size=16, heads=3)
    attention.qkv = nn.ModuleDict({"base_layer": weight_norm(attention.qkv), "lora_B": nn.Linear(2, 144, bias=False)})
    kept = ["base_layer.bias", *(f"base_layer.parametrizations.weight.original{i}" for i in (0, 1)), "lora_B.weight"]
    found = sizes(attention)
    assert [found[f"qkv.{name}"] for name in kept] == [8] * 4


def test_no_block_of_torchs_own_attention_straddles_heads() -> None:
    layer = nn.TransformerEncoderLayer(d_model=24, nhead=2, dim_feedforward=5)
    found = sizes(layer, block_size=8)
    assert found.pop("self_attn.in_proj_weight") == found.pop("self_attn.in_proj_bias") == 6
    assert set(found.values()) == {8}


@pytest.mark.parametrize(
    ("head_size", "heads", "tells", "asked", "expected", "why"),
    [
        (64, 2, True, None, 8, "8 divides 64 and is the largest up to the default of 10"),
        (64, 2, True, 32, 32, "32 divides 64"),
        (6, 4, True, 10, 6, "a head is smaller than a block"),
        (25, 2, True, 10, 5, "5 is just half of 10"),
        (11, 10, True, 10, 10, "heads do not allow it, a third of the outputs, 110, does"),
        (4, 4, True, 16, 16, "heads are too small, a third of the outputs, 16, is not"),
        (13, 3, True, 10, 10, "neither 13 nor 39 has a divisor from 5 to 10"),
        (16, 3, False, 10, 8, "the head size is unknown; a third of the outputs is 48"),
    ],
)
def test_the_block_size_of_a_fused_projection_is_the_largest_that_fits(
    head_size: int, heads: int, tells: bool, asked: int | None, expected: int, why: str
) -> None:
    options = {} if asked is None else {"block_size": asked}
    found = sizes(Attention("qkv", head_size, heads, tells=tells), **options)
    assert found["qkv.weight"] == found["qkv.bias"] == expected, why


@pytest.mark.parametrize("name", ["head_dim", "head_size", "attention_head_size", "head_k_dim"])
def test_attention_tells_the_size_of_its_heads(name: str) -> None:
    """Of 320 outputs: no third of them is a whole number, and 10 divides them."""
    attention = nn.Module()
    attention.qkv = nn.Linear(5, 320)
    assert sizes(attention)["qkv.weight"] is None
    setattr(attention, name, 64)
    assert sizes(attention)["qkv.weight"] == 8


@pytest.mark.parametrize("name", ["num_heads", "n_head", "n_heads", "heads", "num_attention_heads"])
def test_the_number_of_heads_tells_their_size(name: str) -> None:
    """20 heads of 64, as in nanoGPT's large model: a third of the outputs is 1,280, which 10 divides and 64 not."""
    attention = Attention("c_attn", head_size=64, heads=20, tells=False)
    assert sizes(attention)["c_attn.weight"] is None
    setattr(attention, name, 20)
    assert sizes(attention)["c_attn.weight"] == 8
    setattr(attention, name, 7)  # no number of heads that the outputs could have
    assert sizes(attention)["c_attn.weight"] is None


def test_a_head_size_that_does_not_divide_the_outputs_is_no_head_size() -> None:
    attention = Attention("qkv", head_size=16, heads=3)
    attention.head_dim = 10
    assert sizes(attention)["qkv.weight"] == 8


def straddles(owner: Tensor, grouping: str, block_size: int) -> bool:
    """Whether any block holds coordinates of more than one owner."""
    views = partition(tuple(owner.shape), grouping, block_size).views(owner)
    assert views is not None
    return any(bool((view != view[..., :1]).any()) for view in views)


def test_no_block_of_stacked_experts_holds_coordinates_of_two_rows() -> None:
    experts = nn.Module()
    experts.up = nn.Parameter(torch.zeros(2, 3, 96))  # [experts, outputs, inputs]; 96 leaves a short last run
    experts.small = nn.Parameter(torch.zeros(2, 3, 12))
    (group,) = param_groups(experts)
    for _, param in group["params"]:
        row = torch.arange(6).view(2, 3, 1).expand(param.shape).contiguous()
        assert not straddles(row, group["grouping"], 10)
        assert straddles(row, "output", 10)


@pytest.mark.parametrize("transposed", [False, True], ids=["Linear", "Conv1D"])
def test_the_blocks_of_a_fused_projection_hold_coordinates_of_one_head_of_q_k_or_v(transposed: bool) -> None:
    attention = Attention("c_attn", head_size=12, heads=2)
    if transposed:
        attention.c_attn = pytest.importorskip("transformers.pytorch_utils").Conv1D(72, 5)
    head_of_output = torch.arange(72) // 12
    for group in param_groups(attention):
        for name, param in group["params"]:
            if name.startswith("c_attn"):
                owner = head_of_output.expand(param.shape) if transposed or param.ndim == 1 else head_of_output[:, None]
                owner = owner.expand(param.shape).contiguous()
                assert not straddles(owner, group["grouping"], group["block_size"])
                assert straddles(owner, group["grouping"], 10)


def test_the_block_size_that_is_taken_for_granted_is_the_optimizers_default() -> None:
    """Heads of 10 keep the default, and of 20 too: anything else taken for granted would be asked for."""
    assert inspect.signature(BlockAdam).parameters["block_size"].default == 10
    assert sizes(Attention("qkv", 20, 2))["qkv.weight"] is None
    assert sizes(Attention("qkv", 11, 2))["qkv.weight"] is None


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
        ("output", 0.3),
        ("auto", 0.3),
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embeddings": "input"}, "param_groups: `embeddings` must be one of 'output', 'diagonal', got 'input'."),
        ({"embeddings": None}, "param_groups: `embeddings` must be one of 'output', 'diagonal', got None."),
        ({"block_size": 0}, "param_groups: `block_size` must be an integer in [1, 4096], got 0."),
        ({"block_size": 2.5}, "param_groups: `block_size` must be an integer in [1, 4096], got 2.5."),
    ],
)
def test_bad_options_are_refused_in_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        param_groups(nn.Linear(2, 2), **options)
