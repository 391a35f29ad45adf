"""Texts for tests of the language model."""

from __future__ import annotations

from pathlib import Path

from blockadapt_experiments.data.text import TextFiles


def write_text(folder: Path, name: str, train: str = "a b\n", valid: str = "a\n", test: str = "b\n") -> TextFiles:
    """Its three files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for part, text in (("train", train), ("valid", valid), ("test", test)):
        paths.append(folder / f"{name}.{part}.txt")
        paths[-1].write_text(text, encoding="utf-8")
    return TextFiles(name, *paths)
