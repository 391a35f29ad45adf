"""Images for the experiments that train on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from blockadapt_experiments.data import images
from support.images import write_images


@pytest.fixture(scope="session")
def cifar_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write noise into the files of CIFAR-10 and CIFAR-100."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name, label, classes in (("cifar10", "label", 10), ("cifar100", "fine_label", 100)):
        for split, count in (("train", 60), ("test", 24)):
            pixels = random.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
            labels = random.integers(0, classes, count)
            write_images(folder / name, split, pixels, image="img", label=label, labels=labels)
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep decoded images in a folder of the test's own."""
    monkeypatch.setattr(images, "cache_folder", lambda: tmp_path / "cache")
