"""Every contender against its published rule, written apart in NumPy; resumed runs; names, settings and refusals."""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from blockadapt import BlockAdam, plan
from blockadapt_experiments.contenders.builders import _theirs
from blockadapt_experiments.contenders.catalogue import CONTENDERS, OptimizerSettings, make_optimizer
from blockadapt_experiments.contenders.ggt import GGT
from support.contract_cases import Net, give_gradients_, grad_bits, param_bits, twins
from support.files import through_a_file
from support.oracle import DenseOracle, Kind, input_blocks, runs

Array = NDArray[np.float64]
State = dict[str, Any]
Rule = Callable[[State, Array, Array, int, float], Array]
"""The new x of one tensor, from its state, x, g, t and lr."""

NAMES = [
    "sgd", "adam", "adamw", "amsgrad", "paper-adam", "rmsprop", "adagrad", "adadelta", "nadam", "adabound", "amsbound",
    "yogi", "soap", "muon", "shampoo", "ggt", "block-adam", "block-adam-clip", "block-adam-auto-clip", "block-adamw",
    "block-amsgrad",
    "block-rmsprop", "block-rmsprop-clip", "block-adagrad", "block-adafom", "full-adagrad",
]  # fmt: skip

# None at its default, so that each must have been passed on.
BETA1, BETA2, RMS, MU, EPS, DECAY, FINAL, PROGRESS = 0.8, 0.95, 0.7, 0.6, 1e-3, 0.1, 0.02, 3.0
DECOUPLED = 0.2
LR, STEPS = 0.05, 5
GAMMA = PROGRESS / STEPS

SETTINGS: dict[str, Any] = {
    "beta1": BETA1,
    "beta2": BETA2,
    "rms_decay": RMS,
    "momentum": MU,
    "eps": EPS,
    "weight_decay": DECAY,
    "decoupled_weight_decay": DECOUPLED,
    "final_lr": FINAL,
    "clip_progress": PROGRESS,
    "auto_clip_progress": PROGRESS,
    "block_size": 4,
}


class Square(nn.Module):
    """Tensors of 0, 1, 2 and 4 axes whose unfoldings have full rank, so that eigenbases are unique."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.conv = nn.Conv2d(2, 2, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))


def square() -> Square:
    torch.manual_seed(3)
    return Square().double()


def lr_at(step: int) -> float:
    """It is halved after step 2, as a schedule would."""
    return LR if step <= 2 else LR / 2


def arrays(tensors: Iterable[Tensor]) -> list[Array]:
    return [tensor.detach().double().numpy().copy() for tensor in tensors]


def steps_of(optimizer: Optimizer, params: list[nn.Parameter]) -> Iterable[tuple[int, list[Array], list[Array]]]:
    """Take `STEPS` steps; after each: t, the gradients it had and the parameters it led to."""
    for step in range(1, STEPS + 1):
        give_gradients_(params, step)
        grads = arrays(param.grad for param in params if param.grad is not None)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step)
        optimizer.step()
        yield step, grads, arrays(params)


# Rules of one tensor -----------------------------------------------------------------------------------------------


def averaged(state: State, name: str, value: Array, beta: float, start: float = 0.0) -> Array:
    """Exponential moving average from `start`."""
    state[name] = beta * state.get(name, start) + (1 - beta) * value
    average: Array = state[name]
    return average


def sgd(nesterov: bool) -> Rule:
    def rule(state: State, x: Array, g: Array, t: int, lr: float) -> Array:
        g = g + DECAY * x
        state["b"] = MU * state.get("b", 0.0) + g
        return x - lr * (g + MU * state["b"] if nesterov else state["b"])

    return rule


def adam(correct: bool, ams: bool, eps: float) -> Rule:
    def rule(state: State, x: Array, g: Array, t: int, lr: float) -> Array:
        g = g + DECAY * x
        m, v = averaged(state, "m", g, BETA1), averaged(state, "v", g**2, BETA2)
        if ams:
            v = state["largest"] = np.maximum(state.get("largest", 0.0), v)
        if correct:
            m, v = m / (1 - BETA1**t), v / (1 - BETA2**t)
        return x - lr * m / (np.sqrt(v) + eps)

    return rule


def adamw(state: State, x: Array, g: Array, t: int, lr: float) -> Array:
    m, v = averaged(state, "m", g, BETA1), averaged(state, "v", g**2, BETA2)
    return (1 - lr * DECOUPLED) * x - lr * m / (1 - BETA1**t) / (np.sqrt(v / (1 - BETA2**t)) + 1e-8)


def rmsprop(state: State, x: Array, g: Array, t: int, lr: float) -> Array:
    g = g + DECAY * x
    return x - lr * g / (np.sqrt(averaged(state, "v", g**2, RMS)) + EPS)


def adagrad(state: State, x: Array, g: Array, t: int, lr: float) -> Array:
    g = g + DECAY * x
    state["v"] = state.get("v", 0.0) + g**2
    return x - lr * g / (np.sqrt(state["v"]) + EPS)


def adadelta(state: State, x: Array, g: Array, t: int, lr: float) -> Array:
    g = g + DECAY * x
    v = averaged(state, "v", g**2, 0.9)
    d = g * np.sqrt(state.get("u", 0.0) + 1e-6) / np.sqrt(v + 1e-6)
    averaged(state, "u", d**2, 0.9)
    return x - lr * d


def nadam(state: State, x: Array, g: Array, t: int, lr: float) -> Array:
    g = g + DECAY * x
    m, v = averaged(state, "m", g, BETA1), averaged(state, "v", g**2, BETA2)
    mu = [BETA1 * (1 - 0.5 * 0.96 ** (0.004 * step)) for step in range(1, t + 2)]
    ahead = mu[-1] * m / (1 - math.prod(mu)) + (1 - mu[-2]) * g / (1 - math.prod(mu[:-1]))
    return x - lr * ahead / (np.sqrt(v / (1 - BETA2**t)) + EPS)


def adabound(ams: bool) -> Rule:
    def rule(state: State, x: Array, g: Array, t: int, lr: float) -> Array:
        g = g + DECAY * x
        m, v = averaged(state, "m", g, BETA1), averaged(state, "v", g**2, BETA2)
        if ams:
            v = state["largest"] = np.maximum(state.get("largest", 0.0), v)
        final = FINAL * lr / LR
        eta = lr * math.sqrt(1 - BETA2**t) / (1 - BETA1**t) / (np.sqrt(v) + EPS)
        clipped = np.clip(eta, final * (1 - 1 / (GAMMA * t + 1)), final * (1 + 1 / (GAMMA * t)))
        state["touched"] = state.get("touched", False) | np.any(clipped != eta)
        return x - clipped * m

    return rule


def yogi(state: State, x: Array, g: Array, t: int, lr: float) -> Array:
    g = g + DECAY * x
    m = averaged(state, "m", g, BETA1, start=1e-6)
    v = state["v"] = state.get("v", 1e-6) + (1 - BETA2) * np.sign(g**2 - state.get("v", 1e-6)) * g**2
    return x - lr * m / (1 - BETA1**t) / (np.sqrt(v / (1 - BETA2**t)) + 1e-3)


def along(matrices: list[Array], x: Array) -> Array:
    """Multiply every axis of x by its matrix."""
    for axis, matrix in enumerate(matrices):
        x = np.moveaxis(np.tensordot(matrix, x, axes=(1, axis)), 0, axis)
    return x


def unfolded(x: Array, axis: int) -> Array:
    return np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)


def soap(state: State, x: Array, g: Array, t: int, lr: float) -> Array:
    """For the first ten steps, in which the basis is that of the first gradient."""
    if t == 1:
        products = [unfolded(g, axis) @ unfolded(g, axis).T for axis in range(g.ndim)] if g.ndim > 1 else []
        state["Q"] = [np.linalg.eigh(product)[1] for product in products]
        return x
    there, back = [Q.T for Q in state["Q"]], state["Q"]
    m, v = averaged(state, "m", g, 0.95), averaged(state, "v", along(there, g) ** 2, 0.95)
    step = along(back, along(there, m) / (np.sqrt(v) + 1e-8))
    x = x - lr * math.sqrt(1 - 0.95 ** (t - 1)) / (1 - 0.95 ** (t - 1)) * step
    return (1 - lr * DECOUPLED) * x


def shampoo(state: State, x: Array, g: Array, t: int, lr: float) -> Array:
    g = g + DECAY * x
    roots = []
    for axis in range(g.ndim):
        L = state.get(axis, 1e-6 * np.eye(g.shape[axis])) + unfolded(g, axis) @ unfolded(g, axis).T
        eigenvalues, U = np.linalg.eigh(L)
        roots.append(U @ np.diag(eigenvalues ** (-1 / (2 * g.ndim))) @ U.T)
        state[axis] = L
    return x - lr * along(roots, g)


RULES: list[Any] = [
    pytest.param("sgd", {}, sgd(nesterov=False), 1e-12, id="sgd"),
    pytest.param("sgd", {"nesterov": True}, sgd(nesterov=True), 1e-12, id="sgd-nesterov"),
    pytest.param("adam", {}, adam(correct=True, ams=False, eps=1e-8), 1e-12, id="adam"),
    pytest.param("amsgrad", {}, adam(correct=True, ams=True, eps=1e-8), 1e-12, id="amsgrad"),
    pytest.param("adamw", {}, adamw, 1e-12, id="adamw"),
    pytest.param("paper-adam", {}, adam(correct=False, ams=False, eps=EPS), 1e-12, id="paper-adam"),
    pytest.param(
        "paper-adam",
        {"bias_correction": True},  # of the block methods alone
        adam(correct=False, ams=False, eps=EPS),
        1e-12,
        id="paper-adam-beside-corrected",
    ),
    pytest.param("rmsprop", {}, rmsprop, 1e-12, id="rmsprop"),
    pytest.param("adagrad", {}, adagrad, 1e-12, id="adagrad"),
    pytest.param("adadelta", {}, adadelta, 1e-12, id="adadelta"),
    # torch keeps Π μ in float32 whatever the parameters are
    pytest.param("nadam", {}, nadam, 1e-7, id="nadam"),
    # √(v + 1e-15) for √v
    pytest.param("adabound", {}, adabound(ams=False), 1e-11, id="adabound"),
    pytest.param("amsbound", {}, adabound(ams=True), 1e-11, id="amsbound"),
    pytest.param("yogi", {}, yogi, 1e-12, id="yogi"),
    pytest.param("soap", {}, soap, 1e-10, id="soap"),
    # at first a factor's condition number is that of g gᵀ + 1e-6 I
    pytest.param("shampoo", {}, shampoo, 1e-9, id="shampoo"),
]


@pytest.mark.parametrize(("name", "changes", "rule", "tolerance"), RULES)
def test_a_baseline_follows_its_published_rule(name: str, changes: State, rule: Rule, tolerance: float) -> None:
    model = square()
    params = list(model.parameters())
    optimizer = make_optimizer(name, model, LR, OptimizerSettings(**{**SETTINGS, **changes}), STEPS)
    expected, states = arrays(params), [State() for _ in params]
    for t, grads, found in steps_of(optimizer, params):
        pieces = zip(states, expected, grads, strict=True)
        expected = [rule(state, x, g, t, lr_at(t)) for state, x, g in pieces]
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)
    if name in ("adabound", "amsbound"):
        assert all(state["touched"] for state in states), "the bounds never mattered"


# Rules of blocks ---------------------------------------------------------------------------------------------------

BLOCK_RULES: list[tuple[str, Kind, dict[str, Any]]] = [
    ("block-adam", "adam", {}),
    ("block-adam-clip", "adam", {"clip": (FINAL, GAMMA)}),
    ("block-adam-auto-clip", "adam", {"clip": ("auto", GAMMA)}),
    ("block-adamw", "adamw", {"weight_decay": DECOUPLED}),
    ("block-amsgrad", "adam", {"amsgrad": True}),
    ("block-rmsprop", "rmsprop", {"betas": (0.0, RMS)}),
    ("block-rmsprop-clip", "rmsprop", {"betas": (0.0, RMS), "clip": ((1 - BETA1) * FINAL, GAMMA)}),
    ("block-adagrad", "adagrad", {}),
    ("block-adafom", "adafom", {}),
    ("full-adagrad", "adagrad", {}),
]


@pytest.mark.parametrize(("name", "kind", "options"), BLOCK_RULES, ids=[name for name, *_ in BLOCK_RULES])
@pytest.mark.parametrize("correct", [False, True])
def test_a_block_method_follows_its_rule_in_the_blocks_of_each_layer(
    name: str, kind: Kind, options: dict[str, Any], correct: bool
) -> None:
    """W[6, 4] in runs of 4 and 2 down its columns, the bias in chunks of 4 and 2. Only Adam has a bias correction.

    Weight and bias are param groups of their own, and so have an oracle each, but where one block is over both.
    """
    torch.manual_seed(3)
    layer = nn.Linear(4, 6).double()
    params = list(layer.parameters())
    shared: dict[str, Any] = {"lr": LR, "betas": (BETA1, BETA2), "eps": EPS, "weight_decay": DECAY}
    correction = {"bias_correction": correct and kind in ("adam", "adamw")}
    start = np.concatenate([x.reshape(-1) for x in arrays(params)])
    parts = [(slice(0, 24), input_blocks((6, 4), 4)), (slice(24, 30), runs(range(6), 4))]
    if name == "full-adagrad":
        parts = [(slice(0, 30), [list(range(30))])]
    oracles = [DenseOracle(start[part], cut, kind, **{**shared, **correction, **options}) for part, cut in parts]
    settings = OptimizerSettings(**SETTINGS, bias_correction=correct)
    for t, grads, found in steps_of(make_optimizer(name, layer, LR, settings, STEPS), params):
        g, x = (np.concatenate([each.reshape(-1) for each in arrays_]) for arrays_ in (grads, found))
        for oracle, (part, _) in zip(oracles, parts, strict=True):
            oracle.lr = lr_at(t)
            oracle.step(g[part])
            np.testing.assert_allclose(x[part], oracle.x, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("embeddings", ["output", "diagonal"])
def test_each_kind_of_layer_has_its_own_grouping(embeddings: str) -> None:
    """A block of an embedding, and of the head over the same words, lies within one word's vector."""
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 8), nn.Linear(8, 5))
    optimizer = make_optimizer("block-adam", model, LR, OptimizerSettings(embeddings=embeddings), STEPS)
    groupings = {name: group["grouping"] for group in optimizer.param_groups for name in group["param_names"]}
    inner, head = {"1.weight": "auto", "1.bias": "chunk"}, {"2.weight": embeddings, "2.bias": "diagonal"}
    assert groupings == {"0.weight": embeddings, **inner, **head}


def test_a_named_grouping_and_a_kept_basis_reach_the_block_methods() -> None:
    settings = OptimizerSettings(**{**SETTINGS, "block_size": 3}, grouping="output", refresh_every=2)
    ours, theirs = square(), square()
    direct = BlockAdam(
        theirs.parameters(), lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, grouping="output", block_size=3,
        bias_correction=False, refresh_every=2,
    )  # fmt: skip
    made = make_optimizer("block-adam", ours, LR, settings, STEPS)
    for _ in zip(steps_of(made, list(ours.parameters())), steps_of(direct, list(theirs.parameters())), strict=True):
        assert param_bits(ours.parameters()) == param_bits(theirs.parameters())


def test_torchs_own_have_torchs_defaults() -> None:
    """Whatever the paper prints: the settings that are not given are those of torch's constructors."""
    for name, made_by in (("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)):
        model = Net()
        made = make_optimizer(name, model, 1e-3, OptimizerSettings(), STEPS)
        assert type(made) is made_by
        assert made.defaults == made_by(model.parameters()).defaults


def test_random_blocks_hold_coordinates_of_one_parameter_in_no_order() -> None:
    settings = OptimizerSettings(**{**SETTINGS, "block_size": 9}, grouping="random")
    model = nn.Sequential(nn.Conv2d(4, 5, 3), nn.Linear(5, 7))
    made = make_optimizer("block-adam", model, LR, settings, STEPS)
    rows = {row.name: row for row in plan(made).rows}
    assert {name: row.sizes for name, row in rows.items()} == {
        "0.weight": {9: 20}, "0.bias": {5: 1}, "1.weight": {8: 1, 9: 3}, "1.bias": {7: 1}
    }  # fmt: skip
    groups = [group["grouping"].groups for group in made.param_groups]
    assert sorted(place for block in groups[0] for place in block) == list(range(180))
    together = sum(a // 9 == b // 9 for block in groups[0] for a, b in itertools.pairwise(block))
    assert together < 40  # of 160 neighbours in a block; all of them if blocks were filters, 8 expected by chance
    again = make_optimizer("block-adam", model, LR, settings, STEPS)
    assert [group["grouping"].groups for group in again.param_groups] == groups


# Muon and SOAP: what is treated otherwise ----------------------------------------------------------------------------


class Words(nn.Module):
    """An embedding, a matrix, a convolution and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.tall = nn.Linear(4, 6)
        self.conv = nn.Conv2d(3, 2, 2)
        self.head = nn.Linear(6, 5)


def words() -> Words:
    torch.manual_seed(3)
    return Words()


def orthogonalised(matrix: Array) -> Array:
    """Five Newton-Schulz steps with the published coefficients."""
    a, b, c = 3.4445, -4.7750, 2.0315
    X = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    X = X / np.linalg.norm(X)
    for _ in range(5):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X if matrix.shape[0] <= matrix.shape[1] else X.T


def muon(state: State, x: Array, g: Array, t: int, lr: float) -> Array:
    G = g.reshape(len(g), -1)
    B = averaged(state, "B", G, 0.95)
    step = 0.2 * math.sqrt(max(G.shape)) * orthogonalised(0.05 * G + 0.95 * B)
    return (1 - lr * DECOUPLED) * x - lr * step.reshape(x.shape)


def test_muon_has_hidden_matrices_and_adamw_the_rest() -> None:
    """Newton-Schulz runs in bfloat16, so a step of size 1 is known to two digits."""
    model = words()
    names = [name for name, _ in model.named_parameters()]
    params = list(model.parameters())
    made = make_optimizer("muon", model, LR, OptimizerSettings(**SETTINGS), STEPS)
    expected, states = arrays(params), [State() for _ in params]
    for t, grads, found in steps_of(made, params):
        for place, (name, g) in enumerate(zip(names, grads, strict=True)):
            hidden = name in ("tall.weight", "conv.weight")
            rule, tolerance = (muon, 0.04 * LR) if hidden else (adamw, 1e-6)
            expected[place] = rule(states[place], expected[place], g, t, lr_at(t))
            np.testing.assert_allclose(found[place], expected[place], rtol=1e-6, atol=t * tolerance, err_msg=name)


def test_a_closure_is_called_with_gradients_on() -> None:
    model = words()
    made = make_optimizer("muon", model, LR, OptimizerSettings(), STEPS)

    def closure() -> float:
        assert torch.is_grad_enabled()
        give_gradients_(model.parameters(), 0)
        return 2.5

    assert made.step(closure) == 2.5  # type: ignore[arg-type]


def test_soap_leaves_embeddings_and_long_axes_diagonal() -> None:
    model = words()
    settings = OptimizerSettings(**SETTINGS, soap_largest_axis=5)
    made = make_optimizer("soap", model, LR, settings, STEPS)
    give_gradients_(model.parameters(), 0)
    made.step()
    bases = {
        name: [len(Q) for Q in made.state[param]["Q"]] for name, param in model.named_parameters() if param.ndim > 1
    }
    assert bases == {
        "embedding.weight": [0, 0], "tall.weight": [0, 4], "conv.weight": [2, 3, 2, 2], "head.weight": [5, 0]
    }  # fmt: skip


def test_soap_without_bases_is_adam_from_its_second_step_on() -> None:
    model = words()
    made = make_optimizer("soap", model, LR, OptimizerSettings(**SETTINGS), STEPS)
    x, state = arrays([model.embedding.weight])[0], State(Q=[])
    for t, grads, found in steps_of(made, list(model.parameters())):
        if t > 1:
            x = soap(state, x, grads[0], t, lr_at(t))
        np.testing.assert_allclose(found[0], x, rtol=1e-5, atol=1e-6)


def test_every_setting_reaches_ggt() -> None:
    changed: dict[str, Any] = {
        "window": 3,
        "beta2": 0.9,
        "complement": "scale",
        "scope": "tensor",
        "momentum": "sum",
        "columns": "momentum",
        "relative_cutoff": 1e-3,
        "absolute_cutoff": 1e-2,
    }
    settings = OptimizerSettings(**SETTINGS, **{f"ggt_{name}": value for name, value in changed.items()})
    made = make_optimizer("ggt", square(), LR, settings, STEPS)
    direct = GGT(square().parameters(), lr=LR, beta1=BETA1, eps=EPS, weight_decay=DECAY, **changed)
    not_options = ("params", "param_names")
    made_options, direct_options = (
        {name: value for name, value in optimizer.param_groups[0].items() if name not in not_options}
        for optimizer in (made, direct)
    )
    assert made_options == direct_options
    untouched = GGT(square().parameters())
    assert all(direct_options[name] != untouched.defaults[name] for name in changed)


# Resumption --------------------------------------------------------------------------------------------------------

RESUMED: dict[str, OptimizerSettings] = {
    "plain": OptimizerSettings(block_size=4),
    "changed": OptimizerSettings(
        **{**SETTINGS, "block_size": 2}, bias_correction=True, refresh_every=3, nesterov=True, ggt_window=4
    ),
    "closing": OptimizerSettings(clip_progress=400.0, auto_clip_progress=400.0),
}
END = 16


def take_steps(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    """Steps with fresh gradients; the learning rate falls as a schedule would have it."""
    for step in steps:
        give_gradients_(model.parameters(), step)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step // 5)
        optimizer.step()


def resumed_cases() -> Iterator[Any]:
    """Spectra close only where they are clipped; settings and dtypes are crossed among the slow tests."""
    for name, settings, dtype in itertools.product(NAMES, RESUMED, (torch.float32, torch.float64)):
        if settings != "closing" or CONTENDERS[name].clipped:
            marks = [pytest.mark.slow] if (settings, dtype) == ("changed", torch.float64) else []
            yield pytest.param(name, settings, dtype, marks=marks, id=f"{name}-{settings}-{dtype}")


@pytest.mark.parametrize(("name", "settings", "dtype"), [*resumed_cases()])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(name: str, settings: str, dtype: torch.dtype) -> None:
    """Saved before the first step, early, and when SOAP has found its second basis."""
    (whole,) = twins(dtype=dtype, count=1)
    optimizer = make_optimizer(name, whole, 1e-2, RESUMED[settings], END)
    states = {}
    for step in range(END):
        if step in (0, 3, 12):
            states[step] = through_a_file({"model": whole.state_dict(), "optimizer": optimizer.state_dict()})
        take_steps(whole, optimizer, [step])
    for saved_at, state in states.items():
        (resumed,) = twins(dtype=dtype, count=1)
        optimizer = make_optimizer(name, resumed, 1e-2, RESUMED[settings], END)
        resumed.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        take_steps(resumed, optimizer, range(saved_at, END))
        assert param_bits(resumed.parameters()) == param_bits(whole.parameters()), f"saved at {saved_at}"


# What all have in common -------------------------------------------------------------------------------------------


def test_the_table_has_every_contender_under_its_own_name() -> None:
    assert list(CONTENDERS) == NAMES
    assert [contender.name for contender in CONTENDERS.values()] == NAMES
    assert len({contender.label for contender in CONTENDERS.values()}) == len(NAMES)
    assert {name for name in NAMES if CONTENDERS[name].clipped} == {
        "adabound", "amsbound", "block-adam-clip", "block-adam-auto-clip", "block-rmsprop-clip"
    }  # fmt: skip
    for name in NAMES:
        assert (CONTENDERS[name].kind == "block") == name.startswith("block-")


@pytest.mark.parametrize("name", NAMES)
def test_a_contender_moves_every_parameter_and_leaves_gradients_alone(name: str) -> None:
    (model,) = twins(count=1)
    optimizer = make_optimizer(name, model, CONTENDERS[name].lr, OptimizerSettings(), steps=10)
    assert {p for group in optimizer.param_groups for p in group["params"]} == {*model.parameters()}
    start = param_bits(model.parameters())
    for step in range(2):  # SOAP moves from the second on
        give_gradients_(model.parameters(), step)
        grads = grad_bits(list(model.parameters()))
        optimizer.step()
        assert grad_bits(list(model.parameters())) == grads
    assert all(before != after for before, after in zip(start, param_bits(model.parameters()), strict=True))


def test_full_adagrad_refuses_a_model_that_it_cannot_hold() -> None:
    with pytest.raises(ValueError, match=r"^BlockAdagrad: `grouping` must be"):
        make_optimizer("full-adagrad", nn.Linear(100, 100), 0.1, OptimizerSettings(), steps=1)


@pytest.mark.parametrize("name", ["blok-adam", "Block-Adam", "amsgrat", "ada-bound", "gtt"])
def test_an_unknown_name_is_refused_with_the_nearest(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"^make_optimizer: there is no optimizer '.+'; the nearest is '(.+)'\.$"
    ) as caught:
        make_optimizer(name, Net(), 0.1, OptimizerSettings(), steps=1)
    nearest = str(caught.value).split("'")[-2]
    assert difflib.get_close_matches(name, NAMES, n=1, cutoff=0.0) == [nearest]


@pytest.mark.parametrize(("argument", "value"), [("lr", 0.0), ("lr", math.inf), ("steps", 0), ("steps", 2.5)])
def test_a_bad_lr_or_number_of_steps_is_refused(argument: str, value: Any) -> None:
    arguments: dict[str, Any] = {"lr": 0.1, "steps": 10, argument: value}
    with pytest.raises(ValueError, match=f"^make_optimizer: `{argument}` must be .+, got {re.escape(repr(value))}\\.$"):
        make_optimizer("adam", Net(), settings=OptimizerSettings(), **arguments)


def test_an_option_that_the_installed_version_does_not_name_is_refused() -> None:
    """Its constructors take any keyword and forget it."""
    with pytest.raises(TypeError, match=r"^Yogi: the installed pytorch_optimizer has no `wieght_decay`\.$"):
        _theirs("Yogi", Net().parameters(), wieght_decay=0.1)


BAD: list[tuple[str, Any, str]] = [
    ("eps", 0.0, "a finite number > 0"),
    ("beta1", 1.0, "in [0, 1)"),
    ("beta2", -0.1, "in [0, 1)"),
    ("rms_decay", math.nan, "in [0, 1)"),
    ("momentum", 1.0, "in [0, 1)"),
    ("bias_correction", 1, "True or False"),
    ("nesterov", "no", "True or False"),
    ("block_size", 0, "an integer >= 1"),
    ("refresh_every", 1.5, "an integer >= 1"),
    (
        "grouping",
        "columns",
        "one of 'auto', 'input', 'output', 'filter', 'chunk', 'tensor', 'joint', 'diagonal', 'random'",
    ),
    ("embeddings", "input", "one of 'output', 'diagonal'"),
    ("weight_decay", -1.0, "a finite number >= 0"),
    ("decoupled_weight_decay", -1.0, "a finite number >= 0"),
    ("soap_largest_axis", 0, "an integer >= 1"),
    ("final_lr", 0.0, "a finite number > 0"),
    ("clip_progress", math.inf, "a finite number > 0"),
    ("ggt_window", 0, "an integer >= 1"),
    ("ggt_beta2", 0.0, "in (0, 1]"),
    ("ggt_complement", "keep", "one of 'drop', 'scale'"),
    ("ggt_scope", "layer", "one of 'model', 'tensor'"),
    ("ggt_momentum", "ema", "one of 'average', 'sum'"),
    ("ggt_columns", "m", "one of 'gradient', 'momentum'"),
    ("ggt_relative_cutoff", 1.0, "in [0, 1)"),
    ("ggt_absolute_cutoff", -1.0, "a finite number >= 0"),
]


@pytest.mark.parametrize(("name", "value", "rule"), BAD)
def test_a_bad_setting_is_refused_in_one_sentence(name: str, value: Any, rule: str) -> None:
    sentence = f"optimizer: `{name}` must be {rule}, got {value!r}."
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        OptimizerSettings(**{name: value})


def test_nesterov_without_momentum_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^optimizer: `momentum` must be > 0 where `nesterov` is set, got 0\.0\.$"):
        OptimizerSettings(momentum=0.0, nesterov=True)
