"""Parts of your own: from a file, an installed package or a notebook, as strict and as safe as those built in."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import blockadapt_experiments
from blockadapt_experiments import parts
from blockadapt_experiments.contenders.catalogue import CONTENDERS
from blockadapt_experiments.contenders.own import register_optimizer
from blockadapt_experiments.data import images
from blockadapt_experiments.data.examples import Examples
from blockadapt_experiments.experiments.registry import get_experiment, register_experiment
from blockadapt_experiments.files.atomic import read_json
from blockadapt_experiments.results.recorded_runs import read_tuned
from support.laboratory import COMMAND, ENVIRONMENT, finished, outcome, wait_until
from support.parts import nothing_registered

EXAMPLES = Path(__file__).parents[2] / "examples" / "laboratory"
SPIRALS, VALLEY, SIGN = (EXAMPLES / f"{name}.py" for name in ("spirals", "valley", "sign_momentum"))


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    with nothing_registered():
        yield


def test_everything_that_the_package_offers_is_there() -> None:
    for name in blockadapt_experiments.__all__:
        assert getattr(blockadapt_experiments, name).__name__ == ("dict" if name == "Row" else name)
    with pytest.raises(AttributeError, match="has no attribute 'rnu'"):
        _ = blockadapt_experiments.rnu


def test_an_experiment_of_your_own_leaves_records_and_a_report(tmp_path: Path) -> None:
    blockadapt_experiments.load_file(VALLEY)
    summary = blockadapt_experiments.run("valley", "smoke", out=tmp_path, seeds=[0, 1], tune=True, quiet=True)
    assert (summary.arms, summary.seeds, summary.complete) == (["adam", "block-adam"], [0, 1], True)
    assert blockadapt_experiments.read(str(tmp_path)).out == tmp_path
    assert {*read_tuned(tmp_path, "test")} == {"adam", "block-adam"}
    text = blockadapt_experiments.make_report(tmp_path).read_text(encoding="utf-8")
    assert "Block-Adam comes further down than Adam" in text
    assert "Rosenbrock" in text


@pytest.mark.parametrize(
    ("argument", "value", "rule"),
    [
        ("jobs", 0, "an integer >= 1"),  # which waited for ever
        ("optimizers", "adam", "a list"),
        ("seeds", 3, "a list"),
        ("arms", ["b25"], "a table"),
        ("settings", ["epochs=3"], "a table"),
    ],
)
def test_a_call_that_cannot_be_gets_one_sentence_and_writes_nothing(
    tmp_path: Path, argument: str, value: Any, rule: str
) -> None:
    with pytest.raises(ValueError, match=f"^run: `{argument}` must be {rule}, got {re.escape(repr(value))}\\.$"):
        blockadapt_experiments.run("toy-adagrad", "smoke", out=tmp_path / "out", **{argument: value})
    assert not (tmp_path / "out").exists()


def test_a_data_set_a_model_and_an_optimizer_of_your_own_meet(tmp_path: Path) -> None:
    for file in (SPIRALS, SIGN):
        blockadapt_experiments.load_file(file)
    arms = {"slow": {"optimizer": "sign-momentum", "inertia": 0.99, "lr": 1e-3}}
    chosen = {"optimizers": ["sign-momentum", "adam"], "settings": {"epochs": 1, "batch.size": 100}}
    summary = blockadapt_experiments.run("spirals", "smoke", out=tmp_path, arms=arms, quiet=True, **chosen)
    assert [summary.label(arm) for arm in summary.arms] == [
        "Sign of momentum", "Adam", "slow (Sign of momentum, inertia 0.99)",
    ]  # fmt: skip
    command = read_json(tmp_path / "experiment.json")["command"]
    assert command == (
        f"blockadapt_experiments.run('spirals', 'smoke', out={str(tmp_path)!r}, optimizers=['sign-momentum', 'adam'], "
        f"arms={arms!r}, settings={chosen['settings']!r})"
    )
    run = read_json(tmp_path / "runs" / "slow" / "-" / "seed-0" / "run.json")
    assert {*run["code"]} == {"spirals", "two-spirals", "sign-momentum"}
    assert {*run["data_sha256"]} == {"two-spirals"}
    assert {*read_json(tmp_path / "runs" / "adam" / "-" / "seed-0" / "run.json")["code"]} == {"spirals", "two-spirals"}


def test_an_optimizer_of_your_own_takes_shared_settings_and_its_own(tmp_path: Path) -> None:
    blockadapt_experiments.load_file(SIGN)
    contender = CONTENDERS["sign-momentum"]
    assert contender.shared == ("decoupled_weight_decay",)
    assert (contender.own, contender.types["inertia"]) == ({"inertia": 0.9}, float)
    with pytest.raises(ValueError, match=r"^arms\.x: sign-momentum has no setting `beta1`; the nearest is `\w+`\.$"):
        blockadapt_experiments.run(
            "toy-adagrad", "smoke", out=tmp_path, arms={"x": {"optimizer": "sign-momentum", "beta1": 0.5}}
        )
    assert not any(tmp_path.iterdir())


def test_a_killed_run_of_your_own_ends_with_the_same_bytes(tmp_path: Path) -> None:
    steps = ["--set", "steps=400", "--set", "every=2", "--set", "optimizers=['block-adam']"]
    command = [*COMMAND, "run", "valley", "--load", str(VALLEY), "--scale", "smoke", *steps, "--out"]
    assert finished([*command, str(tmp_path / "whole")]).returncode == 0
    broken = tmp_path / "broken"
    process = subprocess.Popen([*command, str(broken)], env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    wait_until(lambda: any(broken.glob("runs/*/*/*/checkpoint.pt")), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not any(broken.glob("runs/*/*/*/result.json"))
    assert finished([*command, str(broken)]).returncode == 0
    assert outcome(broken) == outcome(tmp_path / "whole")
    assert len(outcome(broken)) == 2


def test_other_processes_load_the_same_file_and_changed_code_is_refused(tmp_path: Path) -> None:
    file = Path(shutil.copy(VALLEY, tmp_path / "mine.py"))
    command = [*COMMAND, "run", "valley", "--load", str(file), "--scale", "smoke", "--out", str(tmp_path / "out")]
    done = finished([*command, "--jobs", "2"])
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 of 2 runs are finished" in done.stdout
    assert f"report {tmp_path / 'out'} --load {file}`" in done.stdout
    file.write_text(file.read_text(encoding="utf-8") + "\n# another line\n", encoding="utf-8")
    done = finished([*command, "--seed", "0,1"])
    assert done.returncode == 2
    assert done.stderr.startswith("run: `code.valley` must be '")
    assert not (tmp_path / "out" / "runs" / "adam" / "-" / "seed-1").exists()


def test_list_shows_the_scales_that_an_experiment_of_your_own_has() -> None:
    shown = finished([*COMMAND, "list", "--load", str(VALLEY)]).stdout.splitlines()
    (line,) = (line for line in shown if line.split()[:1] == ["valley"])
    assert "  smoke, laptop  " in line


def test_an_installed_package_brings_its_parts(tmp_path: Path) -> None:
    shutil.copy(SPIRALS, tmp_path / "spiral_parts.py")
    info = tmp_path / "spiral_parts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: spiral-parts\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[blockadapt.experiments]\nspirals = spiral_parts\n", encoding="utf-8")
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{tmp_path}:{ENVIRONMENT.get('PYTHONPATH', '')}"}
    assert "Two spirals: who winds fastest?" in finished([*COMMAND, "list"], env=environment).stdout
    run = [*COMMAND, "run", "spirals", "--scale", "smoke", "--optimizers", "sgd", "--out", str(tmp_path / "out")]
    assert finished(run, env=environment).returncode == 0
    (tmp_path / "spiral_parts.py").write_text("1 / 0", encoding="utf-8")
    done = finished(run, env=environment)
    sentence = "load: the entry point 'spirals' (spiral_parts) failed: ZeroDivisionError: division by zero\n"
    assert (done.returncode, done.stderr) == (2, sentence)


FAILING = {
    "import nothing_like_this": "load: {}, line 1: ModuleNotFoundError: No module named 'nothing_like_this'",
    "x = 1\n1 / 0": "load: {}, line 2: ZeroDivisionError: division by zero",
    "x = (": "load: {}, line 1: SyntaxError: '(' was never closed",
}


@pytest.mark.parametrize("source", FAILING)
def test_a_file_that_fails_gets_one_sentence_with_its_line(tmp_path: Path, source: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source, encoding="utf-8")
    with pytest.raises(ValueError, match=r"^load: ") as refusal:
        parts.load_file(file)
    assert str(refusal.value).startswith(FAILING[source].format(file))
    with pytest.raises(ValueError, match=r"^load: `load` must be a Python file that can be read, got '.*other\.py'\.$"):
        parts.load_file(tmp_path / "other.py")


def make(model: nn.Module, lr: float) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr)


def test_names_that_are_taken_or_no_names_are_refused() -> None:
    for name in ("adam", "a/b", "", "-x", "a b"):
        with pytest.raises(ValueError, match=r"^register: `name` must be "):
            register_optimizer(name, lr=0.1)(make)
    register_optimizer("mine", lr=0.1)(make)
    register_optimizer("mine", lr=0.2)(make)  # as a cell of a notebook that is run again
    assert CONTENDERS["mine"].lr == 0.2
    with pytest.raises(ValueError, match=r"^register: `name` must be one that nothing else has, got 'mine'\.$"):
        images.register_images("mine")(lambda data_dir: (Examples(torch.ones(1), torch.ones(1)),) * 2)


def test_an_optimizer_that_asks_for_what_there_is_not_is_refused() -> None:
    def typo(model: nn.Module, lr: float, *, weigth_decay: float) -> torch.optim.SGD:
        raise AssertionError

    def positional(model: nn.Module, lr: float, momentum: float = 0.9) -> torch.optim.SGD:
        raise AssertionError

    def listed(model: nn.Module, lr: float, *, betas: tuple[float, float] = (0.9, 0.99)) -> torch.optim.SGD:
        raise AssertionError

    for function, sentence in (
        (
            typo,
            "register_optimizer: there is no setting `optimizer.weigth_decay` for x; the nearest is `weight_decay`.",
        ),
        (positional, "register_optimizer: `x` must be a function of a model, a learning rate, and parameters by name"),
        (
            listed,
            "register_optimizer: `x.betas` must be a number, a string, true or false by default, got (0.9, 0.99).",
        ),
    ):
        with pytest.raises(ValueError, match=r"^register_optimizer: ") as refusal:
            register_optimizer("x", lr=0.1)(function)
        assert str(refusal.value).startswith(sentence)
    assert "x" not in CONTENDERS


@pytest.mark.parametrize("change", [{"objective": "hight"}, {"measure": "hight"}, {"target": ("hight", 1.0)}])
def test_an_experiment_of_your_own_names_metrics_that_it_has(change: dict[str, Any]) -> None:
    parts.load_file(VALLEY)
    valley = replace(get_experiment("valley"), name="other", **change)
    (name,) = change
    with pytest.raises(ValueError, match=rf"^other: `{name}` must be one of the metrics, \['height'\], got 'hight'\.$"):
        register_experiment(valley)


def test_images_of_your_own_are_checked_and_fit_built_in_experiments(tmp_path: Path) -> None:
    def noise(count: int, side: int) -> Examples:
        return Examples(torch.zeros(count, 1, side, side, dtype=torch.uint8), torch.arange(count) % 10)

    images.register_images("blank")(lambda data_dir: (noise(40, 14), noise(20, 14)))
    images.register_images("odd")(lambda data_dir: (noise(40, 9), noise(20, 9)))
    images.register_images("few")(lambda data_dir: (Examples(torch.ones(3, 1, 28, 28), torch.arange(2)), noise(2, 28)))
    chosen = {"train_examples": 40, "test_examples": 20, "epochs": 1}

    def go(data: str) -> blockadapt_experiments.Summary:
        settings = {**chosen, "data": data}
        return blockadapt_experiments.run(
            "mnist-lenet300", "smoke", out=tmp_path / data, optimizers=["sgd"], settings=settings, quiet=True
        )

    assert go("blank").complete
    with pytest.raises(ValueError, match=r"^settings: `data` must be grey squares that 28 pixels hold"):
        go("odd")
    with pytest.raises(
        ValueError, match=r"^few: `train` must be one or more images with as many labels, int64, got 3 "
    ):
        go("few")
    with pytest.raises(
        ValueError, match=r"^settings: `data` must be one of 'mnist', 'digits', 'blank', 'odd', 'few', got"
    ):
        go("blanc")
    assert not (tmp_path / "odd").exists()


def test_parts_of_this_process_alone_are_not_shared_out(tmp_path: Path) -> None:
    notebook = f"""
import linecache, blockadapt_experiments as lab
source = open({str(VALLEY)!r}).read()
try:
    exec(source)
except ValueError as error:
    print(error)
linecache.cache["<cell 1>"] = (len(source), None, source.splitlines(keepends=True), "<cell 1>")  # as notebooks do
exec(compile(source, "<cell 1>", "exec"))
lab.run("valley", "smoke", out={str(tmp_path / "one")!r}, quiet=True)
try:
    lab.run("valley", "smoke", out={str(tmp_path / "two")!r}, jobs=2)
except ValueError as error:
    print(error)
"""
    done = finished([sys.executable, "-c", notebook])
    assert done.stdout.splitlines() == [
        "register: 'valley' must come from a file or a notebook whose code can be read.",
        "run: `jobs` must be 1 for parts that only this process has; put them into a file.",
    ]
    assert {*read_json(tmp_path / "one" / "experiment.json")["code"]} == {"valley"}
