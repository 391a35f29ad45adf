"""A small convolutional network for images of 32 × 32."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

SIDE = 32
"""Pixels of an image's side."""


def small_cnn(width: int, classes: int) -> nn.Sequential:
    """Build three 3×3 convolutions with ReLU, each halved by a maximum, and one linear layer, without normalisation.

    Args:
        width: Channels of the first convolution; the others have twice as many. 32 gives 66,570 parameters for ten
            classes.
        classes: Outputs.
    """
    wide = 2 * width
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, width, 3, padding=1),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(width, wide, 3, padding=1),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            conv3=nn.Conv2d(wide, wide, 3, padding=1),
            relu3=nn.ReLU(),
            pool3=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            output=nn.Linear(wide * (SIDE // 8) ** 2, classes),
        )
    )
