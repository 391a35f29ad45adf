"""Record directories written by hand, in the format of `blockadapt run`, and experiments to go with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blockadapt_experiments.claims.claim import Claim, Verdict
from blockadapt_experiments.core.config import load, plain
from blockadapt_experiments.core.experiment import Experiment
from blockadapt_experiments.experiments.registry import get_experiment
from blockadapt_experiments.files.checked import sealed, write_sealed
from blockadapt_experiments.results.intervals import interval
from blockadapt_experiments.results.measurements import Metric
from blockadapt_experiments.results.summary import Summary

ENVIRONMENT = {
    "machine": {"system": "Linux-6.1-x86_64", "processor": "A processor", "cores": 2},
    "versions": {"python": "3.11.2", "torch": "2.13.0", "blockadapt": "0.1.0"},
    "threads": 1,
    "commit": "0123456789abcdef0123456789abcdef01234567",
}


@dataclass(frozen=True)
class NoSettings:
    pass


def experiment(**changes: Any) -> Experiment[NoSettings]:
    """An experiment that is nowhere registered."""
    fields: dict[str, Any] = {
        "name": "pretend",
        "title": "A pretended experiment",
        "section": "section 9",
        "config": NoSettings,
        "axis": "epoch",
        "metrics": (Metric("loss", "training loss", log=True), Metric("accuracy", "test accuracy (%)", better="high")),
        "task": None,
        "target": ("accuracy", 97.0),
    }
    return Experiment(**{**fields, **changes})


def write_experiment(
    out: Path, name: str = "pretend", scale: str = "laptop", settings: Mapping[str, Any] | None = None, **changes: Any
) -> None:
    """`experiment.json`, with these settings, or with some that are made up but for the changes."""
    made_up = {"optimizers": ["adam", "block-adam"], "seeds": [0, 1, 2], "lr": {}, "epochs": 20, **changes}
    record = {
        "experiment": name,
        "scale": scale,
        "settings": made_up if settings is None else settings,
        "command": f"blockadapt run {name} --scale {scale} --out {out.name}",
        "environment": ENVIRONMENT,
    }
    out.mkdir(parents=True, exist_ok=True)
    write_sealed(out / "experiment.json", record)


def write_run(
    out: Path,
    arm: str,
    variant: str,
    seed: int,
    rows: Sequence[Mapping[str, float]],
    *,
    lr: float = 1e-3,
    leg: float | None = 0.5,
    numbers: Mapping[str, float] | None = None,
    finished: bool = True,
    arrays: Mapping[str, np.ndarray] | None = None,
    environment: Mapping[str, Any] = ENVIRONMENT,
) -> Path:
    """One run, with one row a leg of that many seconds (None: no times)."""
    directory = out / "runs" / arm / (variant.replace("/", "-") or "-") / f"seed-{seed}"
    directory.mkdir(parents=True)
    about = {"experiment": "pretend", "scale": "laptop", "arm": arm, "variant": variant, "seed": seed, "lr": lr}
    write_json(directory / "run.json", {**about, "settings": {}, "environment": environment})
    write_lines(directory / "metrics.jsonl", rows)
    timing = [{"leg": i, "seconds": leg, "last_row": i + 1} for i in range(len(rows))]
    write_lines(directory / "timing.jsonl", [] if leg is None else timing)
    if arrays is not None:
        np.savez(directory / "arrays.npz", **arrays)
    if finished:
        counts = {"rows": len(rows), "arrays": list(arrays or {}), "seconds": len(rows) * (leg or 0.0)}
        write_result(directory, numbers=numbers or {}, **counts)
    else:
        (directory / "checkpoint.pt").write_bytes(b"not read here")
    return directory


def write_result(directory: Path, **result: Any) -> None:
    """`result.json`, which counts all files that are in the directory now."""
    written = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in directory.iterdir()
        if path.name != "result.json"
    }
    times = {"peak_memory_bytes": 10**8, "finished": "2025-01-01T00:00:00+00:00"}
    write_json(directory / "result.json", sealed({**result, "written": written, **times}))


def write_tuned(out: Path, arms: Mapping[str, Any]) -> None:
    """`tuned.json`, in which tuning found this for these arms."""
    write_sealed(out / "tuned.json", {"arms": arms})


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def rows_of(**columns: Sequence[float]) -> list[dict[str, float]]:
    """Rows with an epoch from 1, and these columns."""
    return [
        {"epoch": epoch, **dict(zip(columns, values, strict=True))}
        for epoch, values in enumerate(zip(*columns.values(), strict=True), start=1)
    ]


def write_ends(
    out: Path, name: str, ends: Mapping[str, Sequence[float]], diverged: Sequence[tuple[str, int]] = (), **settings: Any
) -> Path:
    """Records at laptop scale of runs whose measure ends with these values, one a seed."""
    design = get_experiment(name)
    seeds = list(range(max(map(len, ends.values()))))
    told = {**plain(load(design, "laptop")), "optimizers": [*ends], "seeds": seeds, **settings}
    write_experiment(out, name, settings=told)
    assert design.measure is not None
    for arm, values in ends.items():
        for seed, end in enumerate(values):
            rows = rows_of(**{design.measure: [2 * end, end]})
            rows = [{**row, design.axis: row["epoch"]} for row in rows]
            numbers = {"diverged": 1.0} if (arm, seed) in diverged else {}
            write_run(out, arm, "", seed, rows, numbers=numbers)
    return out


def steadier(summary: Summary) -> Verdict:
    """Whether block Adam oscillates less than Adam in test accuracy."""
    block, diagonal = (interval(summary.oscillation(arm, "accuracy"))[0] for arm in ("block-adam", "adam"))
    return Verdict(block < diagonal, f"The standard deviation is {block:.3f} with blocks and {diagonal:.3f} without.")


def realistic(out: Path) -> Experiment[NoSettings]:
    """Five optimizers, four seeds, tuned; one run was killed, one diverged. Drawn from noise, learned from nothing."""
    optimizers = ["adam", "block-adam", "ggt", "rmsprop", "block-rmsprop"]
    write_experiment(out, "mnist-lenet300", optimizers=optimizers, seeds=[0, 1, 2, 3], batch_size=128, train=12000)
    floors, noise = [0.004, 0.002, 0.006, 0.005, 0.003], [0.5, 0.12, 0.25, 0.6, 0.2]
    state = [2.1e6, 7.0e6, 5.4e7, 1.1e6, 6.9e6]
    for number, arm in enumerate(optimizers):
        for seed in range(4):
            random = np.random.default_rng([number, seed])
            epoch = np.arange(1, 21)
            jitter = np.exp(noise[number] * random.standard_normal(20) * np.minimum(epoch / 10, 1))
            loss = (0.32 * np.exp(-epoch / (3.0 + 0.5 * number)) + floors[number]) * jitter
            accuracy = 98.3 - 0.1 * number - 5 * np.exp(-epoch / 3) + 0.35 * noise[number] * random.standard_normal(20)
            if (arm, seed) == ("ggt", 3):
                loss[12:], accuracy[12:] = np.nan, 9.8
            rows = rows_of(loss=loss.tolist(), accuracy=accuracy.tolist())
            numbers = {"state_bytes": state[number], "final_state_bytes": state[number], "steps": 1880.0}
            killed = (arm, seed) == ("block-rmsprop", 2)
            lr, leg = [1e-3, 3.2e-3, 1e-2, 1e-3, 1e-4][number], 1.1 + [0, 0.5, 2.2, 0.1, 0.5][number]
            write_run(
                out, arm, "", seed, rows[:9] if killed else rows, lr=lr, leg=leg, numbers=numbers, finished=not killed
            )
    tried = [[10.0**k, abs(k + 3) / 10 + 0.05] for k in range(-4, 1)]
    tuned = {"grid": {"lr": [1e-4, 1.0, 5]}, "objective": "validation_loss", "value": 0.05, "tried": tried}
    lrs = dict(zip(optimizers, [1e-3, 3.2e-3, 1e-2, 1e-3, 1e-4], strict=True))
    write_tuned(out, {arm: {"": {**tuned, "lr": lrs[arm]}} for arm in optimizers})
    claims = (
        Claim("With blocks the test accuracy does not oscillate late in training (section 5.1).", steadier),
        Claim(
            "Block methods reach a higher test accuracy.", lambda s: Verdict(False, "Adam was higher by 0.2 points.")
        ),
        Claim("GGT costs more than blocks.", lambda s: Verdict(None, "One seed of GGT diverged; three do not tell.")),
    )
    return experiment(
        name="mnist-lenet300", title="LeNet-300-100 on MNIST", section="section 5.1", claims=claims, draw=draw
    )


def draw(summary: Summary, directory: Path) -> list[Path]:
    """A picture of nothing much."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), dpi=100, layout="constrained")
    figure.subplots().plot([0, 1, 2], [1, 0, 1])
    path = directory / f"{summary.experiment.name}-drawing.png"
    FigureCanvasAgg(figure).print_png(path)
    return [path]


def swept(out: Path, steps: int = 3000, seeds: int = 8) -> Experiment[NoSettings]:
    """Two optimizers over three variants, a row a step."""
    write_experiment(out, "toy-adagrad", optimizers=["adagrad", "full-adagrad"], seeds=list(range(seeds)), steps=steps)
    for number, arm in enumerate(("adagrad", "full-adagrad")):
        for variant in ("M=1", "M=5", "M=10"):
            for seed in range(seeds):
                random = np.random.default_rng([number, int(variant[2:]), seed])
                step = np.arange(1, steps + 1)
                start, end = random.uniform(0.6, 0.9), random.uniform(0.2, 0.4)
                loss = (
                    end
                    + (start - end) * step ** (-0.2 - 0.15 * number)
                    + 0.03 * random.standard_normal(steps) / int(variant[2:])
                )
                rows = [{"step": int(s), "loss": float(l)} for s, l in zip(step, loss, strict=True)]
                write_run(out, arm, variant, seed, rows, lr=0.1, leg=1e-4)
    metrics = (Metric("loss", "training loss"),)
    return experiment(
        name="toy-adagrad",
        title="Toy network: full against diagonal AdaGrad",
        section="figure 1",
        axis="step",
        metrics=metrics,
        target=("loss", 0.35),
    )
