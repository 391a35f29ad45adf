"""The public names, their signatures and their documentation; and who may import whom."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import blockadapt
from blockadapt import (
    BlockAdaFom,
    BlockAdagrad,
    BlockAdam,
    BlockAdamW,
    BlockRMSprop,
    IndexGroups,
    Plan,
    SpectrumClip,
    param_groups,
    plan,
)
from blockadapt.diagnostics import SpectrumRecorder, theory
from support.imports import imported_names, modules

PACKAGE = Path(blockadapt.__file__).parent
PUBLIC = [
    "BlockAdaFom",
    "BlockAdagrad",
    "BlockAdam",
    "BlockAdamW",
    "BlockRMSprop",
    "IndexGroups",
    "Kernel",
    "NonFiniteGradientError",
    "Plan",
    "PlanRow",
    "SpectralFunction",
    "SpectrumClip",
    "param_groups",
    "plan",
]

# Names -------------------------------------------------------------------------------------------------------------


def test_the_public_names_are_these() -> None:
    assert sorted(blockadapt.__all__) == sorted(PUBLIC)
    assert len(set(blockadapt.__all__)) == len(blockadapt.__all__)
    assert all(hasattr(blockadapt, name) for name in PUBLIC)


def test_the_version_is_three_numbers() -> None:
    assert [part.isdigit() for part in blockadapt.__version__.split(".")] == [True, True, True]


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.parametrize("cls", [BlockAdam, BlockAdamW, BlockRMSprop, BlockAdagrad, BlockAdaFom])
def test_every_optimizer_is_a_torch_optimizer(cls: type) -> None:
    assert issubclass(cls, torch.optim.Optimizer)


# Signatures --------------------------------------------------------------------------------------------------------

NO_DEFAULT = inspect.Parameter.empty
KEYWORDS = {"grouping": "auto", "block_size": 10, "clip": None}
LAST_KEYWORDS = {
    "refresh_every": 1,
    "maximize": False,
    "on_nonfinite": "raise",
    "capturable": False,
    "backend": "auto",
    "process_group": None,
}
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-4}
SLOW = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.0}

SIGNATURES: dict[Any, tuple[dict[str, Any], dict[str, Any]]] = {
    BlockAdam: (
        {"params": NO_DEFAULT, **ADAM, "weight_decay": 0.0, "amsgrad": False},
        {**KEYWORDS, "bias_correction": True, "beta1_decay": 1.0, **LAST_KEYWORDS},
    ),
    BlockAdamW: (
        {"params": NO_DEFAULT, **ADAM, "weight_decay": 1e-2, "amsgrad": False},
        {**KEYWORDS, "bias_correction": True, "beta1_decay": 1.0, **LAST_KEYWORDS},
    ),
    BlockRMSprop: (
        {"params": NO_DEFAULT, "lr": 1e-2, "alpha": 0.99, "eps": 1e-4, "weight_decay": 0.0},
        {**KEYWORDS, "bias_correction": False, **LAST_KEYWORDS},
    ),
    BlockAdagrad: ({"params": NO_DEFAULT, **SLOW}, {**KEYWORDS, "bias_correction": False, **LAST_KEYWORDS}),
    BlockAdaFom: (
        {"params": NO_DEFAULT, "lr": 1e-2, "beta1": 0.9, "eps": 1e-4, "weight_decay": 0.0},
        {**KEYWORDS, "bias_correction": False, "beta1_decay": 1.0, **LAST_KEYWORDS},
    ),
    SpectrumClip: ({"final_lr": 0.1, "gamma": 1e-3}, {}),
    IndexGroups: ({"groups": NO_DEFAULT}, {}),
    SpectrumRecorder: ({"optimizer": NO_DEFAULT, "every": 10, "writer": None}, {}),
}


@pytest.mark.parametrize("cls", SIGNATURES, ids=lambda cls: cls.__name__)
def test_the_constructor_takes_these_arguments_in_this_order(cls: type) -> None:
    kinds: dict[Any, list[tuple[str, Any]]] = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        kinds.setdefault(parameter.kind, []).append((name, parameter.default))
    positional, keyword = SIGNATURES[cls]
    expected = {
        inspect.Parameter.POSITIONAL_OR_KEYWORD: list(positional.items()),
        inspect.Parameter.KEYWORD_ONLY: list(keyword.items()),
    }
    assert kinds == {kind: names for kind, names in expected.items() if names}


# Documentation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented_with_an_example(name: str) -> None:
    doc = vars(getattr(blockadapt, name)).get("__doc__") or getattr(blockadapt, name).__doc__ or ""
    assert doc.strip(), f"{name} has no docstring"
    assert "Example:" in doc, f"{name} has no Example"
    assert ">>> " in doc, f"{name} has no example that can be run"


def test_the_recorder_is_documented_with_an_example() -> None:
    doc = inspect.getdoc(SpectrumRecorder) or ""
    assert ">>> " in doc
    assert [name for name in inspect.signature(SpectrumRecorder).parameters if f"    {name}: " not in doc] == []


@pytest.mark.parametrize("name", theory.__all__)
def test_every_function_of_the_theory_is_documented(name: str) -> None:
    doc = inspect.getdoc(getattr(theory, name)) or ""
    assert doc.strip()
    if "Args:" in doc:
        arguments = inspect.signature(getattr(theory, name)).parameters
        assert [argument for argument in arguments if f"    {argument}: " not in doc] == []


def public_members() -> Iterator[Any]:
    for name, cls in [*((name, getattr(blockadapt, name)) for name in PUBLIC), ("SpectrumRecorder", SpectrumRecorder)]:
        if not inspect.isclass(cls):
            continue
        for owner in cls.__mro__:
            if not owner.__module__.startswith("blockadapt"):
                continue
            for member, value in vars(owner).items():
                if not member.startswith("_") and (callable(value) or hasattr(value, "__get__")):
                    yield pytest.param(value, id=f"{name}.{member}")


@pytest.mark.parametrize("member", list(public_members()))
def test_every_public_method_is_documented(member: Any) -> None:
    assert (inspect.getdoc(member) or "").strip()


@pytest.mark.parametrize("cls", [BlockAdam, BlockRMSprop, BlockAdagrad, BlockAdaFom], ids=lambda cls: cls.__name__)
def test_every_argument_of_an_optimizer_is_explained(cls: type) -> None:
    """By the class itself, or by BlockAdam where the class says so."""
    doc = inspect.getdoc(cls) or ""
    if "Arguments not listed are BlockAdam's" in doc:
        doc += inspect.getdoc(BlockAdam) or ""
    missing = [name for name in inspect.signature(cls).parameters if f"    {name}: " not in doc]
    assert missing == []


@pytest.mark.parametrize("function", [param_groups, plan], ids=lambda function: function.__name__)
def test_every_argument_of_a_function_is_explained(function: Any) -> None:
    doc = inspect.getdoc(function) or ""
    named = [name for name, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD]
    assert [name for name in named if f"    {name}: " not in doc] == []


def test_a_plan_prints_as_a_table() -> None:
    table = str(plan(torch.nn.Linear(2, 2)))
    assert isinstance(plan(torch.nn.Linear(2, 2)), Plan)
    assert table.splitlines()[0].split() == ["parameter", "shape", "grouping", "blocks", "state", "flops", "a", "step"]


# Imports -----------------------------------------------------------------------------------------------------------


def importers_of(target: str, among: str = "blockadapt") -> set[str]:
    """The modules below `among` that import `target` or anything in it."""
    return {
        module
        for module, path in modules(PACKAGE).items()
        if f"{module}.".startswith(f"{among}.")
        for name in imported_names(PACKAGE, path)
        if f"{name}.".startswith(f"{target}.")
    }


def test_the_import_reader_sees_imports() -> None:
    assert "blockadapt.spectrum" in importers_of("torch")
    assert "blockadapt.planning" in importers_of("blockadapt.optimizers")
    assert "blockadapt.optimizers.base" in importers_of("blockadapt.optimizers.checkpoint")
    assert {*modules(PACKAGE)} >= {"blockadapt", "blockadapt.kernels", "blockadapt.kernels.contract"}


def test_the_library_never_imports_the_experiments() -> None:
    assert importers_of("blockadapt_experiments") == set()


@pytest.mark.parametrize("stage", ["partition", "moments", "spectrum"])
def test_the_first_stages_know_neither_kernels_nor_optimizers(stage: str) -> None:
    for later in ("kernels", "optimizers", "planning", "parameter_groups"):
        assert importers_of(f"blockadapt.{later}", among=f"blockadapt.{stage}") == set()


def test_kernels_know_no_optimizers() -> None:
    for later in ("optimizers", "planning", "parameter_groups"):
        assert importers_of(f"blockadapt.{later}", among="blockadapt.kernels") == set()
    assert importers_of("torch.optim", among="blockadapt.kernels") == set()


def test_nothing_imports_the_diagnostics() -> None:
    importers = importers_of("blockadapt.diagnostics")
    assert importers
    assert all(f"{name}.".startswith("blockadapt.diagnostics.") for name in importers)


def test_plumbing_knows_no_stage() -> None:
    for plumbing in ("validation", "errors"):
        for stage in ("partition", "moments", "spectrum", "kernels", "optimizers", "planning", "parameter_groups"):
            assert importers_of(f"blockadapt.{stage}", among=f"blockadapt.{plumbing}") == set()


def test_there_is_no_linear_algebra_in_the_optimizers() -> None:
    texts = {module: path.read_text(encoding="utf-8") for module, path in modules(PACKAGE).items()}
    users = {name for name, text in texts.items() if "linalg" in text}
    assert {name for name in users if name.startswith("blockadapt.optimizers")} == set()
    assert users, "someone must do it"


def test_numba_is_imported_in_its_own_kernel_modules_only() -> None:
    users = importers_of("numba") | importers_of("llvmlite")
    assert all(name.startswith("blockadapt.kernels.") for name in users)
    assert users.isdisjoint({"blockadapt.kernels.contract", "blockadapt.kernels.eigh"})


def test_triton_is_imported_below_its_own_kernel_only() -> None:
    users = importers_of("triton")
    assert users == {f"blockadapt.kernels.gpu.{name}" for name in ("eigensolver", "jacobi", "step", "work")}


def test_importing_the_library_is_light() -> None:
    """No plotting, no command line, no compiler: they are imported when used."""
    heavy = ("matplotlib", "sklearn", "typer", "rich", "numba", "llvmlite", "pandas", "pyarrow", "tensorboard")
    heavy += ("triton", "blockadapt_experiments", "blockadapt.diagnostics")
    code = f"import sys, blockadapt; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


def test_a_plan_an_optimizer_and_a_first_iteration_through_eigh_import_no_compiler() -> None:
    heavy = ("numba", "llvmlite", "triton", "torch._dynamo")  # the last is imported by torch's own constructors
    made = "layer = torch.nn.Linear(3, 3); blockadapt.plan(layer); blockadapt.BlockAdamW(layer.parameters())"
    made += "; o = blockadapt.BlockAdamW(layer.parameters(), backend='eigh')"
    used = "o.zero_grad(); layer(torch.ones(2, 3)).sum().backward(); o.step(); assert o.state"
    code = f"import sys, torch, blockadapt; {made}; {used}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
