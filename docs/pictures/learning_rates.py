"""Train a tiny GPT with AdamW and with Block-AdamW at many learning rates, and draw where each ends.

python docs/pictures/learning_rates.py          takes some minutes; writes learning-rates.csv and learning-rates.svg
python docs/pictures/learning_rates.py --draw   draws the numbers that are there
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
from collections.abc import Iterator

import torch
from matplotlib.figure import Figure
from pictures import HERE, tidy, write_svg
from torch import Tensor
from torch.nn.functional import cross_entropy

from blockadapt import BlockAdamW, param_groups
from blockadapt_experiments.drawing.colours import STYLES
from blockadapt_experiments.models.gpt import Gpt

TEXT = HERE.parent.parent / "LICENSE"
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
SEEDS = (0, 1, 2)
STEPS, BATCH, CONTEXT, WIDTH, LAYERS, HEADS = 300, 8, 64, 64, 2, 2
LAST = 30
"""Steps at the end whose mean loss is taken."""


def windows(seed: int) -> Iterator[Tensor]:
    """Yield minibatches of CONTEXT + 1 characters of the licence, as numbers."""
    letters = sorted(set(TEXT.read_text(encoding="utf-8")))
    text = torch.tensor([letters.index(letter) for letter in TEXT.read_text(encoding="utf-8")])
    draw = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=draw)
        yield text[starts[:, None] + torch.arange(CONTEXT + 1)]


def final_loss(name: str, lr: float, seed: int) -> float:
    """Return the mean loss of the last steps; weight decay 0.1, ten steps of warm-up, then a cosine to zero."""
    torch.manual_seed(seed)
    model = Gpt(128, CONTEXT, WIDTH, LAYERS, HEADS)
    if name == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    else:
        optimizer = BlockAdamW(param_groups(model), lr=lr, weight_decay=0.1)
    losses = []
    for step, batch in enumerate(windows(seed)):
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / 10, 0.5 + 0.5 * math.cos(math.pi * step / STEPS))
        optimizer.zero_grad()
        logits = model(batch[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return statistics.mean(losses[-LAST:])


def measure() -> None:
    """Do all runs, and write a line of the CSV file for each."""
    with (HERE / "learning-rates.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("optimizer", "lr", "seed", "loss"))
        for lr in RATES:
            for name in ("adamw", "block-adamw"):
                for seed in SEEDS:
                    table.writerow((name, lr, seed, round(final_loss(name, lr, seed), 4)))
                    file.flush()


def draw() -> None:
    """Means over seeds as lines, single seeds as points."""
    with (HERE / "learning-rates.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    panel = figure.subplots()
    for name, label in (("adamw", "AdamW"), ("block-adamw", "Block-AdamW")):
        found = {
            lr: [float(r["loss"]) for r in rows if r["optimizer"] == name and float(r["lr"]) == lr] for lr in RATES
        }
        line = STYLES[name].line()
        panel.plot(RATES, [statistics.mean(found[lr]) for lr in RATES], label=label, linewidth=1.8, **line)
        for lr, losses in found.items():
            panel.plot([lr] * len(losses), losses, "o", markersize=3, color=line["color"], alpha=0.6)
    panel.set_xscale("log")
    panel.set_xlabel("learning rate")
    panel.set_ylabel(f"training loss, mean of the last {LAST} steps")
    tidy(panel)
    panel.legend(frameon=False)
    write_svg(figure, "learning-rates.svg")


if __name__ == "__main__":
    if "--draw" not in sys.argv:
        measure()
    draw()
