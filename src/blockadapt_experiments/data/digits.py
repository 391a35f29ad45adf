"""Reads the handwritten digits that come with scikit-learn: 1,797 grey images of 8 × 8. Nothing is downloaded.

scikit-learn is imported where it is used: that takes longer than many a run.
"""

from __future__ import annotations

import torch

from blockadapt_experiments.data.examples import Examples, Split

LARGEST_PIXEL = 16
TEST_FRACTION = 0.25
SPLIT_SEED = 0
"""The split is part of the data: it does not follow the seed of a run."""


def digits() -> Split:
    """Load all digits: 1,347 to train on, 450 to test on, each class in the same proportion in both.

    Images are [count, 1, 8, 8], float32 in [0, 1]; labels are 0 to 9.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    everything = Examples(
        torch.from_numpy(images).to(torch.float32).div(LARGEST_PIXEL).view(-1, 1, 8, 8),
        torch.from_numpy(labels).to(torch.int64),
    )
    return split(everything, TEST_FRACTION, SPLIT_SEED)


def split(examples: Examples, test_fraction: float, seed: int) -> Split:
    """Cut the examples into two parts, stratified by label; the same seed gives the same parts."""
    from sklearn.model_selection import train_test_split

    rows = range(len(examples))
    parts = train_test_split(rows, test_size=test_fraction, random_state=seed, stratify=examples.labels.numpy())
    train, test = (torch.tensor(part) for part in parts)
    return Split(
        Examples(examples.images[train], examples.labels[train]),
        Examples(examples.images[test], examples.labels[test]),
    )
