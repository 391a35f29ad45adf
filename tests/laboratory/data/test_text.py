"""Texts are found, cut and counted as documented."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blockadapt_experiments.data.missing import MissingData
from blockadapt_experiments.data.text import (
    Corpus,
    find_text,
    read_characters,
    read_corpus,
    streams,
    unigram_perplexity,
)
from support.texts import write_text


def test_a_text_is_found_in_its_folder_and_in_the_one_above(tmp_path: Path) -> None:
    expected = write_text(tmp_path / "penn", "ptb")
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "notes.txt").write_text("nothing", encoding="utf-8")
    assert find_text(tmp_path / "penn") == find_text(tmp_path) == expected


def test_a_text_in_the_folder_itself_goes_before_those_below(tmp_path: Path) -> None:
    expected = write_text(tmp_path, "here")
    write_text(tmp_path / "below", "there")
    assert find_text(tmp_path) == expected


@pytest.mark.parametrize("missing", ["train", "valid", "test"])
def test_a_part_that_is_missing_makes_it_no_text(tmp_path: Path, missing: str) -> None:
    write_text(tmp_path, "ptb")
    (tmp_path / f"ptb.{missing}.txt").unlink()
    with pytest.raises(
        MissingData, match=r"^data: no text was found in .*; give --data-dir DIR, a folder with one \*\.t"
    ):
        find_text(tmp_path)


def test_no_folder_and_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="no text was found without --data-dir"):
        find_text(None)
    with pytest.raises(MissingData, match="no text was found in"):
        find_text(tmp_path / "nowhere")


def test_several_texts_are_refused_by_name(tmp_path: Path) -> None:
    write_text(tmp_path / "novels", "novels")
    write_text(tmp_path / "penn", "ptb")
    with pytest.raises(ValueError, match=r"^data: `data-dir` must be a folder with one text.*, got novels, penn\.$"):
        find_text(tmp_path)
    write_text(tmp_path / "novels", "more")
    with pytest.raises(ValueError, match=r"exactly one \*\.train\.txt, got more\.train\.txt, novels\.train\.txt\.$"):
        find_text(tmp_path / "novels")


def test_lines_end_in_eos_and_words_have_places_by_frequency(tmp_path: Path) -> None:
    files = write_text(tmp_path, "t", " the cat <unk> the\n the cat sat \n", " the dog\n", " sat the")
    corpus = read_corpus(files, 100, None, None, test=True)
    assert corpus.vocabulary == ("the", "<eos>", "cat", "<unk>", "sat")
    assert corpus.train.tolist() == [0, 2, 3, 0, 1, 0, 2, 4, 1]
    assert corpus.valid.tolist() == [0, 3, 1]  # a word that the training text has not
    assert corpus.test is not None
    assert corpus.test.tolist() == [4, 0]  # no line ends here
    assert (corpus.name, corpus.end) == ("t", 1)
    assert corpus.train.dtype == torch.int64


def test_a_smaller_vocabulary_keeps_the_most_frequent_words(tmp_path: Path) -> None:
    files = write_text(tmp_path, "t", "e e e d d b b a a c\n")
    corpus = read_corpus(files, 5, None, None, test=True)
    # <eos>, <unk> and three words; a goes before b and d by the alphabet. <unk> stands for b and c.
    assert corpus.vocabulary == ("e", "a", "b", "<eos>", "<unk>")
    assert [corpus.vocabulary[place] for place in corpus.train.tolist()] == [
        "e", "e", "e", "<unk>", "<unk>", "b", "b", "a", "a", "<unk>", "<eos>",
    ]  # fmt: skip


def test_a_part_of_the_text_is_its_beginning(tmp_path: Path) -> None:
    files = write_text(tmp_path, "t", "a b c d\n" * 3, "b c d\n", "d c b a\n")
    corpus = read_corpus(files, 100, 7, 2, test=True)
    words = {name: [corpus.vocabulary[place] for place in part] for name, part in corpus.held_out.items()}
    assert [corpus.vocabulary[place] for place in corpus.train] == ["a", "b", "c", "d", "<eos>", "a", "b"]
    assert words == {"valid": ["b", "c"], "test": ["d", "c"]}


def test_the_test_text_is_read_only_if_asked_for(tmp_path: Path) -> None:
    files = write_text(tmp_path, "t")
    files.test.write_bytes(b"\xff\xfe\xff")
    assert read_corpus(files, 10, None, None, test=False).held_out.keys() == {"valid"}
    with pytest.raises(ValueError, match=r"^data: .*t\.test\.txt cannot be read as text"):
        read_corpus(files, 10, None, None, test=True)


def test_an_empty_part_is_refused(tmp_path: Path) -> None:
    files = write_text(tmp_path, "t", valid="")
    with pytest.raises(
        ValueError, match=r"^data: `t\.valid\.txt` must be a text of at least one word, got an empty one"
    ):
        read_corpus(files, 10, None, None, test=True)


def test_the_digest_changes_with_any_word(tmp_path: Path) -> None:
    first = read_corpus(write_text(tmp_path / "1", "t", "a b\n", "a\n"), 10, None, None, test=True)
    same = read_corpus(write_text(tmp_path / "2", "u", "a b\n", "a\n", "a a\n"), 10, None, None, test=False)
    others = [
        read_corpus(write_text(tmp_path / "3", "t", "b b\n", "a\n"), 10, None, None, test=True),
        read_corpus(write_text(tmp_path / "4", "t", "a b\n", "b\n"), 10, None, None, test=True),
        read_corpus(write_text(tmp_path / "5", "t", "a c\n", "a\n"), 10, None, None, test=True),
    ]
    assert first.digest == same.digest
    assert len({first.digest, *(other.digest for other in others)}) == 4


def test_streams_are_contiguous() -> None:
    assert streams(torch.arange(11), 3).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_the_unigram_perplexity_by_hand() -> None:
    train, text = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1, 2])
    # Counted once more: 4, 2 and 1 of 7.
    expected = math.exp(-(math.log(4 / 7) + math.log(2 / 7) + math.log(1 / 7)) / 3)
    assert unigram_perplexity(train, text, 3) == pytest.approx(expected, rel=1e-12)


def test_a_corpus_without_a_test_text_measures_on_the_other() -> None:
    text: Tensor = torch.arange(2)
    assert Corpus("t", ("<eos>", "<unk>"), text, text, None).held_out.keys() == {"valid"}


def test_characters_are_those_of_the_training_text_the_most_frequent_first(tmp_path: Path) -> None:
    corpus = read_characters(write_text(tmp_path, "t", "aab\n", "ba?\n", "b"), None, None, test=True)
    assert corpus.vocabulary == ("a", "\n", "b", "<unk>")
    assert corpus.train.tolist() == [0, 0, 2, 1]
    assert corpus.valid.tolist() == [2, 0, 3, 1]
    assert corpus.test is not None
    assert corpus.test.tolist() == [2]


def test_characters_are_taken_from_the_beginning_and_the_test_text_only_if_asked(tmp_path: Path) -> None:
    corpus = read_characters(write_text(tmp_path, "t", "abcd", "dcba", "d"), 3, 2, test=False)
    assert corpus.vocabulary == ("a", "b", "c", "<unk>")
    assert (corpus.train.tolist(), corpus.valid.tolist(), corpus.test) == ([0, 1, 2], [3, 2], None)


def test_a_text_without_characters_is_refused(tmp_path: Path) -> None:
    files = write_text(tmp_path, "t", valid="")
    with pytest.raises(
        ValueError, match=r"^data: `t\.valid\.txt` must be a text of at least one character, got an empty one\.$"
    ):
        read_characters(files, None, None, test=False)
