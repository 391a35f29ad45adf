"""Builds DenseNet-BC for images of 32 × 32 (Huang et al., 2017), as its authors' Torch code builds and initialises it.

conv3×3, then three dense blocks with a transition between each two, then BN-ReLU, the mean over positions, and a
linear layer. A layer of a block is BN-ReLU-conv1×1(4k)-BN-ReLU-conv3×3(k) of all feature maps before it, k the growth;
its output joins them. A transition is BN-ReLU-conv1×1 to half the maps, then average pooling by 2. No convolution has a
bias and there is no dropout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blockadapt.validation import require, require_integer

BLOCKS = 3
REDUCTION = 0.5
"""The share of its feature maps that a transition keeps."""

WIDENING = 4
"""A 1×1 convolution hands on as many maps as this times the growth."""


class DenseLayer(nn.Module):
    """Computes BN-ReLU-conv1×1-BN-ReLU-conv3×3 of all feature maps so far; returns the new ones."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        inner = WIDENING * growth
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, inner, kernel_size=1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, growth, kernel_size=3, padding=1, bias=False)

    def forward(self, *maps: Tensor) -> Tensor:
        """Compute new maps from `maps`: the block's input and the outputs of its earlier layers."""
        inner = self.conv1(torch.relu(self.norm1(torch.cat(maps, dim=1))))
        output: Tensor = self.conv2(torch.relu(self.norm2(inner)))
        return output


class DenseBlock(nn.Module):
    """Holds layers that each see the maps of all before them.

    With `checkpointing` only the maps themselves are kept for the backward pass. What a layer makes of them grows with
    the square of the depth, and is computed again there.
    """

    def __init__(self, channels: int, growth: int, layers: int, checkpointing: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(channels + i * growth, growth) for i in range(layers))
        self.checkpointing = checkpointing

    def forward(self, images: Tensor) -> Tensor:
        """Return all maps, those of the input first."""
        maps = [images]
        for layer in self.layers:
            if self.checkpointing and self.training and torch.is_grad_enabled():
                contexts = partial(_contexts, layer)
                new = checkpoint(layer, *maps, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
            else:
                new = layer(*maps)
            maps.append(new)
        return torch.cat(maps, dim=1)


class Transition(nn.Sequential):
    """Computes BN-ReLU-conv1×1 to fewer maps, at half the resolution."""

    def __init__(self, channels: int, kept: int) -> None:
        super().__init__(
            nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, kept, kernel_size=1, bias=False), nn.AvgPool2d(2)
        )


class DenseNet(nn.Module):
    """Is DenseNet-BC-`depth`-`growth`.

    Args:
        depth: Layers with weights, 6n + 4 for n layers in each block.
        growth: Feature maps that a layer adds.
        classes: Outputs.
        checkpointing: Whether to keep less for the backward pass and compute it again: less memory for the time of
            another forward pass, and the same gradients.
    """

    def __init__(self, depth: int, growth: int, classes: int, *, checkpointing: bool = False) -> None:
        super().__init__()
        require_depth("DenseNet", depth)
        require_integer("DenseNet", "growth", growth, least=1)
        require_integer("DenseNet", "classes", classes, least=1)
        layers = (depth - 4) // 6
        channels = 2 * growth
        self.stem = nn.Conv2d(3, channels, kernel_size=3, padding=1, bias=False)
        self.blocks = nn.Sequential()
        for block in range(BLOCKS):
            self.blocks.append(DenseBlock(channels, growth, layers, checkpointing))
            channels += layers * growth
            if block < BLOCKS - 1:
                kept = math.floor(REDUCTION * channels)
                self.blocks.append(Transition(channels, kept))
                channels = kept
        self.norm = nn.BatchNorm2d(channels)
        self.output = nn.Linear(channels, classes)
        self._initialise()

    def forward(self, images: Tensor) -> Tensor:
        """Compute scores [count, classes] of images [count, 3, height, width]."""
        images = images.contiguous(memory_format=torch.channels_last)  # a training step in two thirds of the time
        maps = torch.relu(self.norm(self.blocks(self.stem(images))))
        scores: Tensor = self.output(maps.mean(dim=(2, 3)))
        return scores

    def _initialise(self) -> None:
        """Give convolutions the variance 2/(k² · out) and the last bias 0; norms and the last weights stay torch's."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels
                nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
        nn.init.zeros_(self.output.bias)


def require_depth(owner: str, depth: int) -> None:
    """Raise unless a DenseNet-BC can be so deep."""
    require(isinstance(depth, int) and depth >= 10 and depth % 6 == 4, owner, "depth", "6n + 4 with n >= 1", depth)


def _contexts(layer: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return what the forward pass and its repetition run in."""
    return nullcontext(), _without_statistics(layer)


@contextmanager
def _without_statistics(layer: nn.Module) -> Iterator[None]:
    """Keep a second look at the same batch out of the running statistics: it goes to copies of them."""
    norms = [module for module in layer.modules() if isinstance(module, nn.BatchNorm2d)]
    kept = [(norm, name, buffer) for norm in norms for name, buffer in norm.named_buffers()]
    for norm, name, buffer in kept:
        setattr(norm, name, buffer.clone())
    try:
        yield
    finally:
        for norm, name, buffer in kept:
            setattr(norm, name, buffer)
