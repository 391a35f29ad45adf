"""Holds the networks of the experiments."""

from __future__ import annotations

import math
from collections import OrderedDict

from torch import nn


def lenet_300_100() -> nn.Sequential:
    """Build LeNet-300-100: 784-300-100-10 with ReLU; 266,610 parameters."""
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(784, 300),
            relu1=nn.ReLU(),
            fc2=nn.Linear(300, 100),
            relu2=nn.ReLU(),
            fc3=nn.Linear(100, 10),
        )
    )


def lenet_5_caffe() -> nn.Sequential:
    """Build LeNet-5 as Caffe ships it: no nonlinearity after the convolutions; 431,080 parameters.

    Weights are U(±√(3/fan_in)), Caffe's "xavier", and biases zero.
    """
    model = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 20, 5),
            pool1=nn.MaxPool2d(2, 2),
            conv2=nn.Conv2d(20, 50, 5),
            pool2=nn.MaxPool2d(2, 2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(800, 500),
            relu1=nn.ReLU(),
            fc2=nn.Linear(500, 10),
        )
    )
    for layer in model:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            bound = math.sqrt(3 / layer.weight[0].numel())
            nn.init.uniform_(layer.weight, -bound, bound)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
    return model
