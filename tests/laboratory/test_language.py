"""Text and language model: found, cut and counted as documented; the model is Zaremba's, its perplexity exact."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from blockadapt_experiments import language
from blockadapt_experiments.data import MissingData
from blockadapt_experiments.language import (
    Corpus,
    LanguageModel,
    find_text,
    perplexity,
    read_corpus,
    streams,
    unigram_perplexity,
)
from support.texts import write_text

# Text -----------------------------------------------------------------------------------------------------------------


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


# Model ----------------------------------------------------------------------------------------------------------------


def test_the_model_of_the_paper_has_as_many_parameters_as_published() -> None:
    model = LanguageModel(10_000, 500, 3, dropout=0.5, init=0.05)
    assert sum(parameter.numel() for parameter in model.parameters()) == 16_022_000
    for name, parameter in model.named_parameters():
        largest, mean = float(parameter.detach().abs().max()), float(parameter.detach().mean())
        # The largest of n is below the bound by more than 20/n of it once in e²⁰ times.
        assert 0.05 * (1 - 20 / parameter.numel()) < largest <= 0.05, name
        assert abs(mean) < 6 * 0.05 / math.sqrt(3 * parameter.numel()), name
    assert model.output.weight is not model.embedding.weight


def layers_of(model: LanguageModel) -> list[nn.LSTM]:
    """Each layer as an LSTM of its own, with the same weights."""
    width = model.lstm.hidden_size
    layers = []
    for number in range(model.lstm.num_layers):
        layer = nn.LSTM(width, width)
        layer.load_state_dict(
            {f"{name[:-1]}0": getattr(model.lstm, f"{name[:-1]}{number}") for name in layer.state_dict()}
        )
        layers.append(layer)
    return layers


def test_dropout_is_where_nothing_recurs() -> None:
    model = LanguageModel(50, 8, 3, dropout=0.5, init=0.5).train()
    layers = layers_of(model)
    words = torch.randint(0, 50, (4, 6))
    torch.manual_seed(1)
    scores, _ = model(words)
    torch.manual_seed(1)
    maps = dropout(model.embedding(words), 0.5).transpose(0, 1)  # [length, streams, width], as the LSTM has them
    for number, layer in enumerate(layers):
        maps, _ = layer(maps)
        if number < len(layers) - 1:
            maps = dropout(maps, 0.5)
    expected = model.output(dropout(maps.transpose(0, 1), 0.5))
    torch.testing.assert_close(scores, expected, rtol=1e-6, atol=1e-6)
    kept = model.eval()(words)[0]
    torch.testing.assert_close(kept, model(words)[0], rtol=0, atol=0)


def test_one_layer_has_no_dropout_between_layers() -> None:
    LanguageModel(5, 4, 1, dropout=0.5, init=0.1)  # torch would warn


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def log_likelihood(model: LanguageModel, before: list[int], text: list[int]) -> float:
    """Σ log p of the words of one piece, token by token in float64, from the LSTM's equations."""
    weights = {name: value.double().numpy() for name, value in model.state_dict().items()}
    layers, width = model.lstm.num_layers, model.lstm.hidden_size
    h, c = np.zeros((layers, width)), np.zeros((layers, width))
    total = 0.0
    for word, following in zip(before, text, strict=True):
        x = weights["embedding.weight"][word]
        for layer in range(layers):
            gates = sum(
                weights[f"lstm.weight_{kind}_l{layer}"] @ value + weights[f"lstm.bias_{kind}_l{layer}"]
                for kind, value in (("ih", x), ("hh", h[layer]))
            )
            i, f, g, o = np.split(gates, 4)
            c[layer] = sigmoid(f) * c[layer] + sigmoid(i) * np.tanh(g)
            x = h[layer] = sigmoid(o) * np.tanh(c[layer])
        scores = weights["output.weight"] @ x + weights["output.bias"]
        total += scores[following] - np.log(np.exp(scores).sum())
    return total


@pytest.mark.parametrize(("pieces", "tokens"), [(1, 23), (4, 23), (4, 24), (20, 9)])
@pytest.mark.parametrize("unroll", [5, 100])
def test_perplexity_is_that_of_the_equations(
    monkeypatch: pytest.MonkeyPatch, pieces: int, tokens: int, unroll: int
) -> None:
    monkeypatch.setattr(language, "EVALUATION_STREAMS", pieces)
    model = LanguageModel(12, 7, 2, dropout=0.5, init=0.8)
    text = torch.randint(0, 12, (tokens,))
    words, end = text.tolist(), 3
    length = math.ceil(tokens / pieces)
    total = 0.0
    for start in range(0, tokens, length):  # each piece starts afresh, from the word before it
        piece = words[start : start + length]
        total += log_likelihood(model, [words[start - 1] if start else end, *piece[:-1]], piece)
    assert perplexity(model, text, end, unroll) == pytest.approx(math.exp(-total / tokens), rel=1e-5)


def test_perplexity_beyond_all_numbers_is_infinite() -> None:
    model = LanguageModel(3, 2, 1, dropout=0.0, init=0.1)
    with torch.no_grad():
        model.output.bias.copy_(torch.tensor([1e6, 0.0, 0.0]))
    assert perplexity(model, torch.tensor([1, 2, 1]), 0, 5) == math.inf


def test_a_corpus_without_a_test_text_measures_on_the_other() -> None:
    text: Tensor = torch.arange(2)
    assert Corpus("t", ("<eos>", "<unk>"), text, text, None).held_out.keys() == {"valid"}
