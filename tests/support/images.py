"""Image files as the Hugging Face hub has them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from PIL import Image


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def write_images(
    folder: Path,
    split: str,
    images: np.ndarray,
    *,
    image: str = "image",
    label: str = "label",
    parts: int = 1,
    first_label: int = 0,
    labels: np.ndarray | None = None,
) -> None:
    """Parquet files as the hub has them: a struct of bytes and path, and a label."""
    folder.mkdir(parents=True, exist_ok=True)
    labels = first_label + np.arange(len(images)) % 7 if labels is None else labels
    for part, rows in enumerate(np.array_split(np.arange(len(images)), parts)):
        table = pa.table(
            {
                image: pa.array([{"bytes": png(images[row]), "path": f"{row}.png"} for row in rows]),
                label: pa.array(labels[rows]),
            }
        )
        pyarrow.parquet.write_table(table, folder / f"{split}-{part:05}-of-{parts:05}.parquet")
