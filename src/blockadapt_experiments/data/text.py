"""Reads text as numbers, by words or by characters.

A text is a folder with one `*.train.txt`, one `*.valid.txt` and one `*.test.txt`, words between spaces, as Penn
Treebank's files are (`ptb.train.txt` and so on). Read by words, the end of a line is one, <eos>.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from blockadapt.validation import Described, refusal, require, require_integer
from blockadapt_experiments.data.fingerprints import fingerprint, note
from blockadapt_experiments.data.missing import MissingData

END, UNKNOWN = "<eos>", "<unk>"
PARTS = ("train", "valid", "test")


class TextFiles(NamedTuple):
    """Says where the parts of a text are; `name` is what its files have in common."""

    name: str
    train: Path
    valid: Path
    test: Path


def find_text(data_dir: Path | None) -> TextFiles:
    """Find the text in this folder, or in the only one of its folders that has one.

    Raises:
        MissingData: There is none.
        ValueError: There are several.
    """
    where = "without --data-dir" if data_dir is None else f"in {data_dir}"
    candidates = () if data_dir is None else (data_dir, *sorted(path for path in data_dir.glob("*") if path.is_dir()))
    found = {folder: parts for folder in candidates if all(parts := _parts(folder))}
    if not found:
        raise MissingData(
            f"data: no text was found {where}; give --data-dir DIR, a folder with one *.train.txt, one *.valid.txt and "
            "one *.test.txt (such as Penn Treebank's ptb.train.txt), or a folder that holds one such folder."
        )
    folder = data_dir if data_dir in found else next(iter(found))
    assert folder is not None
    if folder != data_dir and len(found) > 1:
        several = Described(", ".join(path.name for path in found))
        rule = "a folder with one text, or with one folder that has one"
        raise ValueError(refusal("data", "data-dir", rule, several))
    for part, paths in zip(PARTS, found[folder], strict=True):
        names = Described(", ".join(path.name for path in paths))
        require(len(paths) == 1, "data", "data-dir", f"a folder with exactly one *.{part}.txt", names)
    (train,), (valid,), (test,) = found[folder]
    return TextFiles(train.name.removesuffix(".train.txt") or folder.name, train, valid, test)


def _parts(folder: Path) -> list[list[Path]]:
    return [sorted(folder.glob(f"*.{part}.txt")) for part in PARTS]


@dataclass(frozen=True)
class Corpus:
    """Is a text as places in a vocabulary.

    Attributes:
        name: Of the text.
        vocabulary: Its words or characters, the most frequent of the training text first.
        train: Training text, int64 [tokens].
        valid: Text for validation.
        test: Text to test on; None if it is not to be touched.
    """

    name: str
    vocabulary: tuple[str, ...]
    train: Tensor
    valid: Tensor
    test: Tensor | None

    @property
    def end(self) -> int:
        """Return the place of <eos>."""
        return self.vocabulary.index(END)

    @property
    def held_out(self) -> dict[str, Tensor]:
        """Return what is measured on, by name."""
        return {"valid": self.valid} if self.test is None else {"valid": self.valid, "test": self.test}

    @cached_property
    def digest(self) -> str:
        """Compute a digest that changes with any word of it."""
        parts = [" ".join(self.vocabulary).encode(), *(part.numpy().tobytes() for part in (self.train, self.valid))]
        return hashlib.sha256(b"\n".join(parts)).hexdigest()


def read_corpus(
    files: TextFiles, vocabulary: int, train_tokens: int | None, evaluation_tokens: int | None, *, test: bool
) -> Corpus:
    """Read a text.

    Args:
        files: Where it is.
        vocabulary: The most words to tell apart, <eos> and <unk> among them. The most frequent of the training text are
            kept, in the order of the alphabet where they are equally frequent; all others become <unk>.
        train_tokens: How much of the training text to take, from its beginning; None for all.
        evaluation_tokens: The same of the other parts.
        test: Whether to read the test text.

    Raises:
        ValueError: A part is empty or is no text.
    """
    require_integer("data", "vocabulary", vocabulary, least=2)
    corpus = _read(files, vocabulary, train_tokens, evaluation_tokens, test)
    parts = [] if corpus.test is None else [corpus.test.numpy()]
    note(corpus.name, fingerprint([np.frombuffer(corpus.digest.encode(), np.uint8), *parts]))
    return corpus


@lru_cache(maxsize=2)
def _read(
    files: TextFiles, vocabulary: int, train_tokens: int | None, evaluation_tokens: int | None, test: bool
) -> Corpus:
    train = _words(files.train)[:train_tokens]
    kept = _vocabulary(train, vocabulary)
    places = {word: place for place, word in enumerate(kept)}
    unknown = places[UNKNOWN]

    def encoded(words: Sequence[str]) -> Tensor:
        return torch.tensor([places.get(word, unknown) for word in words])

    valid, tested = (
        encoded(_words(path)[:evaluation_tokens]) if wanted else None
        for path, wanted in ((files.valid, True), (files.test, test))
    )
    assert valid is not None
    return Corpus(files.name, kept, encoded(train), valid, tested)


@lru_cache(maxsize=2)
def read_characters(
    files: TextFiles, train_characters: int | None, evaluation_characters: int | None, *, test: bool
) -> Corpus:
    """Read a text by characters: all of the training text, and <unk> for those that only other parts have.

    Args:
        files: Where it is.
        train_characters: How much of the training text to take, from its beginning; None for all.
        evaluation_characters: The same of the other parts.
        test: Whether to read the test text.

    Raises:
        ValueError: A part is empty or is no text.
    """
    train = _characters(files.train)[:train_characters]
    kept = _vocabulary(train, len({*train}) + 2)
    kept = tuple(character for character in kept if character != END)
    places = {character: place for place, character in enumerate(kept)}
    unknown = places[UNKNOWN]

    def encoded(characters: str) -> Tensor:
        return torch.tensor([places.get(character, unknown) for character in characters])

    valid = encoded(_characters(files.valid)[:evaluation_characters])
    tested = encoded(_characters(files.test)[:evaluation_characters]) if test else None
    return Corpus(files.name, kept, encoded(train), valid, tested)


def _characters(path: Path) -> str:
    text = _text(path)
    require(bool(text), "data", path.name, "a text of at least one character", Described("an empty one"))
    return text


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"data: {path} cannot be read as text: {error}.") from error


def _words(path: Path) -> list[str]:
    words = _text(path).replace("\n", f" {END} ").split()
    require(bool(words), "data", path.name, "a text of at least one word", Described("an empty one"))
    return words


def _vocabulary(words: Sequence[str], size: int) -> tuple[str, ...]:
    counts = Counter(words)
    special = {END, UNKNOWN}
    ordinary = sorted(counts.keys() - special, key=lambda word: (-counts[word], word))[: size - len(special)]
    return tuple(sorted({*ordinary, *special}, key=lambda word: (-counts[word], word)))


def streams(tokens: Tensor, count: int) -> Tensor:
    """Cut the text into `count` contiguous stretches of one length, [count, length]; what is left over is dropped."""
    length = len(tokens) // count
    return tokens[: count * length].view(count, length)


def unigram_perplexity(train: Tensor, text: Tensor, vocabulary: int) -> float:
    """Compute what a model reaches that knows only the training text's word counts, each counted once more."""
    counts = torch.bincount(train, minlength=vocabulary).double() + 1
    return float((-(counts / counts.sum()).log()[text].mean()).exp())
