"""DenseNet-BC: its size, its function, its start, and gradients that do not depend on what is kept for them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, batch_norm, conv2d, cross_entropy, linear

from blockadapt_experiments.models.densenet import DenseBlock, DenseLayer, DenseNet, Transition


def sizes_by_hand(depth: int, growth: int, classes: int) -> dict[str, int]:
    """Parameters of each kind, counted layer by layer."""
    layers, channels = (depth - 4) // 6, 2 * growth
    found = {"1×1": 0, "3×3": 27 * channels, "norm": 0}
    for block in range(3):
        for _ in range(layers):
            found["1×1"] += channels * 4 * growth
            found["3×3"] += 9 * 4 * growth * growth
            found["norm"] += 2 * (channels + 4 * growth)
            channels += growth
        if block < 2:
            found["1×1"] += channels * (channels // 2)
            found["norm"] += 2 * channels
            channels //= 2
    found["norm"] += 2 * channels
    found["linear"] = (channels + 1) * classes
    return found


def sizes(model: nn.Module) -> dict[str, int]:
    found = {"1×1": 0, "3×3": 0, "norm": 0, "linear": 0}
    for module in model.modules():
        kind = {nn.BatchNorm2d: "norm", nn.Linear: "linear"}.get(type(module), "")
        if isinstance(module, nn.Conv2d):
            kind = f"{module.kernel_size[0]}×{module.kernel_size[1]}"
        if kind:
            found[kind] += sum(parameter.numel() for parameter in module.parameters(recurse=False))
    return found


@pytest.mark.parametrize(("classes", "total"), [(10, 769_162), (100, 800_032)])
def test_the_net_of_the_paper_has_as_many_parameters_as_published(classes: int, total: int) -> None:
    model = DenseNet(100, 12, classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == total
    assert sizes(model) == {"1×1": 492_264, "3×3": 249_480, "norm": 23_988, "linear": 343 * classes}


@pytest.mark.parametrize(("depth", "growth", "classes"), [(10, 5, 3), (22, 12, 10), (40, 12, 100), (100, 12, 10)])
def test_other_sizes_have_what_their_layers_add_up_to(depth: int, growth: int, classes: int) -> None:
    model = DenseNet(depth, growth, classes)
    assert sizes(model) == sizes_by_hand(depth, growth, classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == sum(sizes(model).values())


def test_channels_of_the_net_of_the_paper() -> None:
    model = DenseNet(100, 12, 10)
    first = [next(m for m in module.modules() if isinstance(m, nn.BatchNorm2d)).num_features for module in model.blocks]
    assert [*first, model.norm.num_features] == [24, 216, 108, 300, 150, 342]
    assert [type(module) for module in model.blocks] == [DenseBlock, Transition, DenseBlock, Transition, DenseBlock]
    assert all(module.bias is None for module in model.modules() if isinstance(module, nn.Conv2d))


def by_definition(model: DenseNet, images: Tensor) -> Tensor:
    """The scores in training, from the weights alone, all maps concatenated after every layer."""
    weights = iter(model.parameters())

    def norm_relu(maps: Tensor) -> Tensor:
        return batch_norm(maps, None, None, next(weights), next(weights), training=True, eps=1e-5).clamp(min=0)

    maps = conv2d(images, next(weights), padding=1)
    for block in range(3):
        for _ in range(len(model.blocks[0].layers)):
            inner = conv2d(norm_relu(maps), next(weights))
            maps = torch.cat([maps, conv2d(norm_relu(inner), next(weights), padding=1)], dim=1)
        if block < 2:
            maps = avg_pool2d(conv2d(norm_relu(maps), next(weights)), 2)
    maps = avg_pool2d(norm_relu(maps), maps.shape[-1]).flatten(1)
    scores = linear(maps, next(weights), next(weights))
    assert next(weights, None) is None
    return scores


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_function_is_that_of_the_definition(checkpointing: bool) -> None:
    model = DenseNet(16, 3, 7, checkpointing=checkpointing).double()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(model(images), by_definition(model, images), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_initial_weights() -> None:
    model = DenseNet(100, 12, 10)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            count = module.weight.numel()
            expected = 2 / (module.kernel_size[0] ** 2 * module.out_channels)
            # The mean square of a normal sample has a relative deviation of √(2/count); the mean one of σ/√count.
            assert abs(float(module.weight.square().mean()) / expected - 1) < 6 * math.sqrt(2 / count)
            assert abs(float(module.weight.mean())) < 6 * math.sqrt(expected / count)
        elif isinstance(module, nn.BatchNorm2d):
            assert bool((module.weight == 1).all())
            assert bool((module.bias == 0).all())
    assert bool((model.output.bias == 0).all())
    assert 0.9 < float(model.output.weight.abs().max()) * math.sqrt(342) <= 1


# Checkpointing --------------------------------------------------------------------------------------------------------


def pair() -> tuple[DenseNet, DenseNet]:
    kept, again = DenseNet(22, 6, 5), DenseNet(22, 6, 5, checkpointing=True)
    again.load_state_dict(kept.state_dict())
    return kept, again


def test_checkpointing_changes_no_bit() -> None:
    kept, again = pair()
    for _ in range(3):
        images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
        losses = []
        for model in (kept, again):
            model.zero_grad()
            losses.append(cross_entropy(model(images), labels))
            losses[-1].backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.1 * parameter.grad)  # type: ignore[arg-type]
        assert torch.equal(*losses)
        for ours, theirs in zip(kept.parameters(), again.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            assert torch.equal(ours.grad, theirs.grad)
    # Running statistics have seen each batch once.
    state = again.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in kept.state_dict().items())
    assert {int(value) for name, value in state.items() if name.endswith("num_batches_tracked")} == {3}
    assert torch.equal(kept.eval()(images), again.eval()(images))


def test_checkpointing_keeps_little_more_than_the_maps() -> None:
    kept, again = pair()
    images = torch.randn(2, 3, 32, 32)
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def saved(model: DenseNet) -> int:
        storages.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            scores = model(images)  # alive, so that no storage is used twice
        assert scores.requires_grad
        return sum(storages.values())

    maps = []
    for module in again.modules():
        if isinstance(module, DenseLayer):
            module.register_forward_hook(lambda module, inputs, output: maps.append(output.numel() * 4))
    without, with_it = saved(kept), saved(again)
    assert with_it + sum(maps) < 0.4 * without


def test_checkpointing_does_not_hinder_measuring() -> None:
    _, again = pair()
    with torch.no_grad():
        again(torch.randn(2, 3, 32, 32))
    assert {int(module.num_batches_tracked) for module in again.modules() if isinstance(module, nn.BatchNorm2d)} == {1}  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [0, 4, 20, 23, 101])
def test_a_depth_that_cannot_be_is_refused(depth: int) -> None:
    with pytest.raises(ValueError, match=rf"^DenseNet: `depth` must be 6n \+ 4 with n >= 1, got {depth}\.$"):
        DenseNet(depth, 12, 10)
