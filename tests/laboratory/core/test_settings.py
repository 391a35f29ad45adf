"""Arms: what they are made with, what they share with the others, and what is refused."""

from __future__ import annotations

import json
import re

import pytest
import torch
from torch import nn

from blockadapt import BlockAdam
from blockadapt_experiments.contenders.catalogue import CONTENDERS, OptimizerSettings, make_optimizer
from blockadapt_experiments.core.config import arm_changes, flat, load, plain, run_settings
from blockadapt_experiments.experiments.mnist import MnistSettings
from blockadapt_experiments.experiments.registry import get_experiment


def lenet(*changes: str, arms: tuple[str, ...] = ()) -> MnistSettings:
    return load(get_experiment("mnist-lenet300"), "smoke", (*changes, *arm_changes(arms)))


B25 = "b25=block-adam,block_size=25,weight_decay=0.5"


def test_an_arm_has_its_own_settings_and_shares_the_rest() -> None:
    settings = lenet("optimizer.beta1=0.8", "optimizer.weight_decay=0.25", "optimizers=['block-adam']", arms=(B25,))
    assert settings.optimizers == ("block-adam", "b25")
    own, shared = (
        settings.make_optimizer(name, nn.Linear(4, 4), 1e-3, steps=1).param_groups[0] for name in ("b25", "block-adam")
    )
    chosen = ("block_size", "weight_decay", "betas")
    assert [own[key] for key in chosen] == [25, 0.5, (0.8, 0.999)]
    assert [shared[key] for key in chosen] == [10, 0.25, (0.8, 0.999)]


def test_an_arm_changes_what_an_optimizer_has_of_its_own() -> None:
    settings = lenet(arms=("loose=adam,eps=1e-3", "short=soap,beta2=0.9"))
    assert settings.make_optimizer("adam", nn.Linear(2, 2), 1e-3, 1).defaults["eps"] == 1e-8
    assert settings.make_optimizer("loose", nn.Linear(2, 2), 1e-3, 1).defaults["eps"] == 1e-3
    assert settings.make_optimizer("short", nn.Linear(2, 2), 1e-3, 1).defaults["betas"] == (0.95, 0.9)


def test_the_learning_rate_of_an_arm_is_the_one_set_then_its_own_then_its_optimizers() -> None:
    settings = lenet("lr.c=0.3", arms=("a=sgd", "b=sgd,lr=0.2", "c=sgd,lr=0.2"))
    assert [settings.first_lr(name) for name in ("a", "b", "c")] == [CONTENDERS["sgd"].lr, 0.2, 0.3]


def test_optimizers_may_choose_among_arms_and_set_their_order() -> None:
    assert lenet("optimizers=['b25', 'sgd']", arms=(B25, "x=adam")).optimizers == ("b25", "sgd", "x")


def test_arms_load_back_from_plain_settings() -> None:
    settings = lenet(arms=(B25, "loose=adam,eps=1,label=Adam, ε = 1"))
    values = {key: "none" if value is None else json.dumps(value) for key, value in flat(plain(settings)).items()}
    assert lenet(*(f"{key}={value}" for key, value in values.items())) == settings


def test_a_run_depends_on_its_own_arm_and_on_no_other() -> None:
    one, two = (
        plain(lenet(*changes, arms=arms)) for changes, arms in (((), (B25,)), (("seeds=[7]",), (B25, "x=adam")))
    )
    assert run_settings(one, "b25") == run_settings(two, "b25")
    assert run_settings(one, "sgd") == run_settings(two, "sgd") == run_settings(plain(lenet()), "sgd")
    other = plain(lenet(arms=("b25=block-adam,block_size=24",)))
    assert run_settings(one, "b25") != run_settings(other, "b25")


NAME = "run: `arm` must be name=optimizer,key=value,… with a name of letters, digits, - and _, got"
REFUSED = {
    ("b=blok-adam",): "arms.b: there is no optimizer 'blok-adam'; the nearest is 'block-adam'.",
    ("b=block-adam,blocksize=3",): "arms.b: block-adam has no setting `blocksize`; the nearest is `block_size`.",
    ("b=sgd,eps=1e-3",): "arms.b: sgd has no setting `eps`; the nearest is `nesterov`.",
    ("b=block-adam,block_size=0",): "optimizer: `block_size` must be an integer >= 1, got 0.",
    ("b=block-adam,block_size=many",): "settings: `arms.b.block_size` must be an integer, got 'many'.",
    ("b=adam,lr=0",): "settings: `arms.b.lr` must be a finite number > 0, got 0.0.",
    ("adam=sgd,momentum=0.5",): "settings: `arms.adam` must be another name than that of another optimizer, got adam.",
    ("b=sgd", "b=adam"): "run: `arm` must be given once for each name, got 'b=adam'.",
    ("b",): f"{NAME} 'b'.",
    ("../b=adam",): f"{NAME} '../b=adam'.",
    ("b=adam,lr",): f"{NAME} 'b=adam,lr'.",
    ("b=",): f"{NAME} 'b='.",
}


@pytest.mark.parametrize("arms", REFUSED)
def test_an_arm_that_cannot_be_gets_one_sentence(arms: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(REFUSED[arms])}$"):
        lenet(arms=arms)


def test_an_arm_in_a_table_is_held_to_the_same() -> None:
    with pytest.raises(ValueError, match=r"^settings: `arms\.b\.optimizer` must be given, got nothing\.$"):
        lenet("arms.b.block_size=3")
    with pytest.raises(
        ValueError, match=r"^settings: `arms\.a b` must be a name of letters, digits, - and _, got a b\.$"
    ):
        lenet("arms={'a b' = {optimizer = 'adam'}}")


def test_every_contender_reads_every_setting_that_it_names_and_no_other() -> None:
    class Watched(dict[str, object]):
        """Settings that remember which of them were read."""

        def __getattr__(self, name: str) -> object:
            read.add(name)
            return self[name]

    for name, contender in CONTENDERS.items():
        read: set[str] = set()
        settings = {**vars(OptimizerSettings()), **contender.own}
        contender.builder(nn.Sequential(nn.Linear(2, 2), nn.Conv2d(1, 1, 2)), 1e-3, Watched(settings), 1)
        assert read == contender.types.keys(), name


def test_an_arm_makes_what_the_shared_settings_would() -> None:
    torch.manual_seed(0)
    made = make_optimizer("block-adam", nn.Linear(4, 4), 1e-3, OptimizerSettings(), 1, {"block_size": 2})
    assert isinstance(made, BlockAdam)
    assert made.defaults["block_size"] == 2
