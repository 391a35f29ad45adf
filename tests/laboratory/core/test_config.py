"""Settings: what ships is valid, changes land where they should, and nothing wrong gets through."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass, field, replace
from typing import Literal

import pytest

from blockadapt_experiments.contenders.catalogue import CONTENDERS, OptimizerSettings
from blockadapt_experiments.core.config import SCALES, build, first_difference, keys, load, nearest, plain, varied
from blockadapt_experiments.core.settings import Settings, TuneSettings
from blockadapt_experiments.experiments.cnn import CnnSettings
from blockadapt_experiments.experiments.registry import EXPERIMENTS, get_experiment
from blockadapt_experiments.running.grids import lr_span

LENET = "mnist-lenet300"


def lenet(*changes: str, scale: str = "smoke") -> Settings:
    return load(get_experiment(LENET), scale, changes)


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("scale", SCALES)
def test_every_experiment_has_settings_at_every_scale(name: str, scale: str) -> None:
    experiment = get_experiment(name)
    settings = load(experiment, scale)
    assert isinstance(settings, experiment.config)
    assert list(experiment.variants(settings))
    assert json.loads(json.dumps(plain(settings))) == plain(settings)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_scales_grow(name: str) -> None:
    seeds = [len(load(get_experiment(name), scale).seeds) for scale in SCALES]
    assert seeds == sorted(seeds)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_seeds_to_tune_with_are_no_seeds_of_the_experiment(name: str) -> None:
    for scale in SCALES:
        settings = load(get_experiment(name), scale)
        assert not {*settings.seeds} & {*settings.tune.seeds}


def test_a_scale_overrides_defaults_and_nested_tables_merge() -> None:
    laptop, paper = lenet(scale="laptop"), lenet(scale="paper")
    assert laptop.epochs == 20
    assert paper.epochs == 100
    assert laptop.optimizer == OptimizerSettings(final_lr=1.0, clip_progress=1.0, bias_correction=True)
    assert paper.optimizer == OptimizerSettings(final_lr=1.0, ggt_window=200)


def test_changes_are_typed_and_the_last_one_wins() -> None:
    settings = lenet(
        "epochs=7",
        "epochs=9",
        "optimizer.grouping=input",
        "optimizer.block_size=25",
        "optimizer.eps=1",
        "lr.block-adam=3e-3",
        "seeds=[4, 5]",
        "schedule.kind=step",
        "schedule.at=[0.25]",
        'optimizers=["adam", "block-adam"]',
        "optimizer.nesterov=true",
    )
    assert settings.epochs == 9
    assert settings.optimizer.grouping == "input"
    assert settings.optimizer.block_size == 25
    assert settings.optimizer.eps == 1.0
    assert isinstance(settings.optimizer.eps, float)
    assert settings.lr["block-adam"] == 3e-3
    assert settings.seeds == (4, 5)
    assert (settings.schedule.kind, settings.schedule.at) == ("step", (0.25,))
    assert settings.optimizers == ("adam", "block-adam")
    assert settings.optimizer.nesterov is True


def test_none_is_written_as_a_word() -> None:
    assert lenet("schedule.factor=0.5").schedule.factor == 0.5
    assert lenet("schedule.factor=0.5", "schedule.factor=none").schedule.factor is None


REFUSED = {
    "epohcs=3": "mnist-lenet300: there is no setting `epohcs`; the nearest is `epochs`.",
    "optimizer.blocksize=3": "mnist-lenet300: there is no setting `optimizer.blocksize`; the nearest is "
    "`optimizer.block_size`.",
    "block_size=3": "mnist-lenet300: there is no setting `block_size`; the nearest is `optimizer.block_size`.",
    "epochs=many": "mnist-lenet300: `epochs` must be an integer, got 'many'.",
    "epochs=2.0": "mnist-lenet300: `epochs` must be an integer, got 2.0.",
    "epochs=true": "mnist-lenet300: `epochs` must be an integer, got True.",
    "epochs=0": "training: `epochs` must be an integer in [1, 1000000], got 0.",
    "epochs=1000001": "training: `epochs` must be an integer in [1, 1000000], got 1000001.",
    "epochs=99999999999999999999999": "mnist-lenet300: `epochs` must be in [-2⁶³, 2⁶³), got 99999999999999999999999.",
    "epochs=1\nseeds=[9]": "mnist-lenet300: `epochs` must be an integer, got '1\\nseeds=[9]'.",
    "optimizer.eps=true": "mnist-lenet300: `optimizer.eps` must be a number, got True.",
    "optimizer.eps=-1": "optimizer: `eps` must be a finite number > 0, got -1.0.",
    "optimizer=3": "mnist-lenet300: `optimizer` must be a table, got 3.",
    "optimizer.nesterov=yes": "mnist-lenet300: `optimizer.nesterov` must be true or false, got 'yes'.",
    "lr=0.1": "mnist-lenet300: `lr` must be a table, got 0.1.",
    "lr.adam=fast": "mnist-lenet300: `lr.adam` must be a number, got 'fast'.",
    "lr.adam=0": "settings: `lr.adam` must be a finite number > 0, got 0.0.",
    "lr.adm=0.1": "mnist-lenet300: `lr` has an unknown optimizer 'adm'; the nearest is 'adam'.",
    "seeds=3": "mnist-lenet300: `seeds` must be a list, got 3.",
    "seeds=[]": "settings: `seeds` must be one or more different integers in [0, 2⁶³), got [].",
    "seeds=[1, 1]": "settings: `seeds` must be one or more different integers in [0, 2⁶³), got [1, 1].",
    "seeds=[-1]": "settings: `seeds` must be one or more different integers in [0, 2⁶³), got [-1].",
    "seeds=['a']": "mnist-lenet300: `seeds` must be an integer, got 'a'.",
    "optimizers=[]": "settings: `optimizers` must be one or more different names, got [].",
    "optimizers=['blok-adam']": "mnist-lenet300: `optimizers` has an unknown optimizer 'blok-adam'; the nearest is "
    "'block-adam'.",
    "schedule.kind=exponential": (
        "mnist-lenet300: `schedule.kind` must be one of 'constant', 'step', 'dev', 'sqrt', 'cosine', got 'exponential'."
    ),
    "data=cifar": "settings: `data` must be one of 'mnist', 'digits', got 'cifar'.",
    "tune.low=0": "tune: `low` must be a finite number > 0, got 0.0.",
    "tune.high=1e-9": "tune: `high` must be a finite number in (0.001, inf), got 1e-09.",
    "tune.trials=1": "tune: `trials` must be an integer >= 2, got 1.",
    "epochs": "mnist-lenet300: `set` must be key=value, got 'epochs'.",
    "=3": "mnist-lenet300: `set` must be key=value, got '=3'.",
    "optimizer..eps=3": "mnist-lenet300: `set` must be key=value, got 'optimizer..eps=3'.",
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_is_wrong_gets_one_sentence(change: str) -> None:
    with pytest.raises(ValueError, match=r"^") as refusal:
        lenet(change)
    assert str(refusal.value) == REFUSED[change]


def test_an_unknown_scale_gets_one_sentence() -> None:
    sentence = "mnist-lenet300: `scale` must be one of 'smoke', 'laptop', 'paper', got 'huge'."
    with pytest.raises(ValueError, match=r"^") as refusal:
        lenet(scale="huge")
    assert str(refusal.value) == sentence


def test_an_unknown_experiment_gets_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"^") as refusal:
        get_experiment("mnist-lenet3000")
    assert str(refusal.value) == (
        "blockadapt: there is no experiment 'mnist-lenet3000'; the nearest is 'mnist-lenet300'."
    )


def test_the_nearest_name_may_be_meant_by_its_last_part() -> None:
    assert nearest("kind", ["schedule.kind", "king"]) == "schedule.kind"
    assert nearest("optimizer.beta", ["optimizer.beta1", "tune.low"]) == "optimizer.beta1"


@dataclass(frozen=True, kw_only=True)
class Inner:
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True, kw_only=True)
class Outer(Settings):
    pair: tuple[float, int]
    many: tuple[tuple[int, int], ...] = ()
    maybe: int | str | None = None
    inner: Inner = field(default_factory=Inner)


def outer(**table: object) -> Outer:
    return build("x", Outer, {"optimizers": ["adam"], "seeds": [0], **table}, known=keys(Outer))


def test_every_type_that_settings_may_have_is_converted() -> None:
    assert [key for key in keys(Outer) if "." not in key] == [
        "optimizers", "seeds", "arms", "lr", "pair", "many", "maybe",
    ]  # fmt: skip
    assert {"inner.kind", "tune.low", "optimizer.eps"} <= {*keys(Outer)}
    made = outer(pair=[1, 2], many=[[1, 2], [3, 4]], maybe="word", inner={"kind": "b"})
    assert (made.pair, made.many, made.maybe, made.inner) == ((1.0, 2), ((1, 2), (3, 4)), "word", Inner(kind="b"))
    assert isinstance(made.pair[0], float)
    assert outer(pair=[1, 2], maybe="none").maybe is None
    with pytest.raises(ValueError, match=r"^x: `pair` must be a list of 2, got \[1\]\.$"):
        outer(pair=[1])
    with pytest.raises(ValueError, match=r"^x: `maybe` must be an integer, got 1\.5\.$"):
        outer(pair=[1, 2], maybe=1.5)


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(ValueError, match=r"^x: `pair` must be given, got nothing\.$"):
        outer()


def test_the_first_difference_is_found_at_any_depth() -> None:
    ours = {"a": 1, "b": {"c": [1, 2], "d": 3}}
    assert first_difference(ours, ours) is None
    assert first_difference(ours, {**ours, "b": {"c": [1, 2], "d": 4}}) == ("b.d", 3, 4)
    assert first_difference(ours, {"a": 1, "b": {"c": [1]}}) == ("b.c", [1, 2], [1])
    key, here, there = first_difference(ours, {"a": 1}) or ("", 0, 0)
    assert (key, repr(here), repr(there)) == ("b", repr(ours["b"]), "nothing")


def test_plain_settings_load_back_to_the_same() -> None:
    settings = lenet("schedule.kind=dev", "lr.adam=0.1", scale="paper")
    flat = {}

    def walk(table: dict[str, object], prefix: str) -> None:
        for name, value in table.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{name}.")
            else:
                flat[prefix + name] = "none" if value is None else json.dumps(value)

    walk(plain(settings), "")
    assert lenet(*(f"{key}={value}" for key, value in flat.items()), scale="smoke") == settings


def test_learning_rates_are_those_of_the_contenders_unless_set() -> None:
    assert {*lenet().lr} <= {*CONTENDERS}
    assert TuneSettings().low == 1e-4
    assert TuneSettings().high == 1e2


def cnn(*changes: str) -> CnnSettings:
    return load(get_experiment("cifar10-cnn"), "laptop", changes)


def test_a_variant_changes_what_it_names_and_nothing_else() -> None:
    settings = cnn("schedule.factor=none")
    assert varied(settings, "") == settings
    found = varied(settings, "optimizer.block_size=4,optimizer.grouping=output,epochs=3")
    assert (found.optimizer.block_size, found.optimizer.grouping, found.epochs) == (4, "output", 3)
    optimizer = replace(found.optimizer, block_size=settings.optimizer.block_size, grouping="auto")
    assert replace(found, optimizer=optimizer, epochs=settings.epochs) == settings


@pytest.mark.parametrize(
    ("variant", "sentence"),
    [
        ("seeds=[1]", "variant: `seeds` must be the same for all variants, got seeds=[1]."),
        ("lr.adam=1", "variant: `lr` must be the same for all variants, got lr.adam=1."),
        ("optimizer.blok=1", "variant: there is no setting `optimizer.blok`; the nearest is `optimizer.block_size`."),
        ("epochs", "variant: `set` must be key=value, got 'epochs'."),
        ("epochs=0", "training: `epochs` must be an integer in [1, 1000000], got 0."),
    ],
)  # fmt: skip
def test_a_variant_that_cannot_be_gets_one_sentence(variant: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        varied(cnn(), variant)


@pytest.mark.parametrize("variants", ["[]", '["", ""]', '["a/b=1"]'])
def test_variants_are_different_and_can_be_folders(variants: str) -> None:
    with pytest.raises(
        ValueError, match=r"^settings: `variants` must be one or more different changes without slashes"
    ):
        cnn(f"variants={variants}")


# What a reviewer accepts ---------------------------------------------------------------------------------------------


def spacing(tune: TuneSettings) -> float:
    """The largest factor between two learning rates of the grid."""
    span = lr_span(tune)
    rates = [span.value(number) or 0.0 for number in range(span.points)]
    return max(above / below for below, above in itertools.pairwise(rates))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_at_laptop_scale_seeds_are_many_and_grids_fine(name: str) -> None:
    experiment = get_experiment(name)
    settings = load(experiment, "laptop")
    assert len(settings.seeds) >= 5
    if experiment.objective is not None:
        assert spacing(settings.tune) <= 3
        assert not {*settings.seeds} & {*settings.tune.seeds}


@pytest.mark.parametrize("name", ["cifar10-cnn", "gpt-char", "gpt-words"])
def test_beyond_the_paper_that_is_so_at_full_scale_too(name: str) -> None:
    settings = load(get_experiment(name), "paper")
    assert spacing(settings.tune) <= 3
    assert len(settings.seeds) >= 5


CLIPPED = ("mnist-lenet300", "mnist-lenet5", "cifar10-densenet", "cifar100-densenet", "lm-lstm")
PLAIN = {
    "sgd", "paper-adam", "adam", "adamw", "adabound", "soap", "block-adam", "block-adam-clip", "block-adam-auto-clip",
}  # fmt: skip


@pytest.mark.parametrize("name", [*CLIPPED, "cifar10-cnn"])
def test_at_laptop_scale_blocks_are_the_librarys_and_clips_follow_sgd(name: str) -> None:
    settings = load(get_experiment(name), "laptop")
    optimizer = settings.optimizer
    assert optimizer.bias_correction
    assert optimizer.final_lr == pytest.approx(settings.first_lr("sgd") / (1 - optimizer.momentum))
    assert (optimizer.clip_progress, optimizer.auto_clip_progress) == (1, 1)
    assert getattr(settings, "test_examples", 10_000) == 10_000


@pytest.mark.parametrize("name", CLIPPED)
def test_at_laptop_scale_the_paper_meets_what_people_use(name: str) -> None:
    laptop, paper = (load(get_experiment(name), scale) for scale in ("laptop", "paper"))
    assert {*laptop.optimizers} >= PLAIN
    assert not paper.optimizer.bias_correction
    if "paper-clip" in laptop.optimizers:
        arm = laptop.arm("paper-clip")
        assert arm.optimizer == "block-adam-clip"
        assert arm.changes == {key: getattr(paper.optimizer, key) for key in ("final_lr", "clip_progress")}
    assert ("paper-clip" in laptop.optimizers) == (not name.startswith("mnist"))  # where the paper does not clip
