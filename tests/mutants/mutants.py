"""Break the library in one place after another, and see whether the tests notice: `make mutants`.

A mutant is a module with one change: a comparison turned, a number moved, a condition negated, a statement left out. It
is killed if the tests chosen for its module fail, and survives if they pass. The score is the share that is killed.

    python tests/mutants/mutants.py                              every module, a sample of each
    python tests/mutants/mutants.py --module partition --all     every mutant of one
    python tests/mutants/mutants.py --module partition --only 17 show one, and what its tests say

Torch, Numba and pytest are imported once; each mutant is a fork, in which an import hook puts the changed module in the
place of the original. No file is written, so that a mutant cannot outlive its run.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.util
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "blockadapt"
LIBRARY = "tests/library"
OPTIMIZERS = f"{LIBRARY}/optimizers"

SAFETY = [f"{OPTIMIZERS}/test_safety.py", f"{OPTIMIZERS}/test_fuzz.py"]
FORMULAS = [f"{OPTIMIZERS}/test_oracle.py::test_every_option_follows_the_formulas", f"{OPTIMIZERS}/test_step_bound.py"]
KERNELS = [f"{LIBRARY}/kernels", *FORMULAS]

MODULES: dict[str, list[str]] = {
    "partition": [f"{LIBRARY}/test_partition.py", f"{LIBRARY}/test_validation.py", f"{OPTIMIZERS}/test_storage.py"],
    "moments": [f"{OPTIMIZERS}/test_equivalences.py", *FORMULAS],
    "spectrum": [f"{LIBRARY}/test_validation.py", *FORMULAS],
    "kernels.eigh": KERNELS,
    "kernels.layout": [f"{OPTIMIZERS}/test_storage.py", *KERNELS],
    "kernels.cpu.kernel": KERNELS,
    "kernels.cpu.work": KERNELS,
    "optimizers.update": FORMULAS,
    "optimizers.unit": [f"{OPTIMIZERS}/test_contract.py"],
    "optimizers.gradients": [f"{OPTIMIZERS}/test_nonfinite.py"],
    "optimizers.base": [f"{LIBRARY}/test_validation.py", f"{OPTIMIZERS}/test_contract.py"],
    "optimizers.checkpoint": [f"{OPTIMIZERS}/test_checkpoint.py", f"{OPTIMIZERS}/test_faults.py"],
    "optimizers.storage": [f"{OPTIMIZERS}/test_storage.py", f"{OPTIMIZERS}/test_checkpoint.py"],
}
"""The tests that know a module best; `SAFETY` follows for all."""


# What can be changed -------------------------------------------------------------------------------------------------

_COMPARED: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
}


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """The changes of one node, each a new node."""
    if isinstance(node, ast.Compare):
        for position, operator in enumerate(node.ops):
            new = copy.deepcopy(node)
            new.ops[position] = _COMPARED[type(operator)]()
            yield new
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in _COMPUTED:
        new = copy.deepcopy(node)
        new.op = _COMPUTED[type(node.op)]()
        yield new
    elif isinstance(node, ast.BoolOp):
        new = copy.deepcopy(node)
        new.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        yield new
        for position in range(len(node.values)):  # one condition left out
            rest = [value for i, value in enumerate(node.values) if i != position]
            yield copy.deepcopy(rest[0]) if len(rest) == 1 else ast.BoolOp(node.op, copy.deepcopy(rest))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield copy.deepcopy(node.operand)
    elif isinstance(node, ast.IfExp):
        yield copy.deepcopy(node.body)
        yield copy.deepcopy(node.orelse)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Constant) and type(node.value) is float:
        yield ast.Constant(node.value * 2 if node.value else 1.0)
    elif isinstance(node, ast.If):
        for always in (True, False):
            new = copy.deepcopy(node)
            new.test = ast.Constant(always)
            yield new
    elif (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)) or isinstance(
        node, (ast.AugAssign, ast.Delete)
    ):
        yield ast.Pass()
    elif isinstance(node, ast.Continue):
        yield ast.Break()
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield ast.Return(ast.Constant(None))


_UNTOUCHED = {"annotation", "returns", "decorator_list", "bases"}
"""Fields that say what a thing is rather than what it does."""


def places(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Where a node hangs: its parent, the field, and the position in it if that is a list."""
    for name, value in ast.iter_fields(tree):
        if name in _UNTOUCHED or _is_for_types_only(tree) or isinstance(tree, (ast.Raise, ast.Assert, ast.JoinedStr)):
            continue  # words of a refusal are compared by tests of their own
        for position, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST):
                yield tree, name, position if isinstance(value, list) else None
                yield from places(child)


def _is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@dataclass(frozen=True)
class Mutant:
    """One change of one module."""

    module: str
    number: int
    line: int
    before: str
    after: str
    code: Any

    def __str__(self) -> str:
        return f"{self.module} {self.number} (line {self.line}): {self.before}  →  {self.after}"


def file_of(module: str) -> Path:
    """The module's source."""
    return SOURCE.joinpath(*module.split(".")).with_suffix(".py")


def mutants(module: str) -> list[Mutant]:
    """All of them, in the order of the source."""
    path = file_of(module)
    tree = ast.parse(path.read_text())
    found = []
    for parent, name, position in list(places(tree)):
        whole = getattr(parent, name)
        node = whole if position is None else whole[position]
        for new in replacements(node):
            ast.copy_location(new, node)
            if position is None:
                setattr(parent, name, new)
            else:
                whole[position] = new
            changed = ast.fix_missing_locations(copy.deepcopy(tree))
            if position is None:
                setattr(parent, name, node)
            else:
                whole[position] = node
            line = getattr(node, "lineno", 0)
            code = compile(changed, str(path), "exec")
            found.append(Mutant(module, len(found), line, _short(node), _short(new), code))
    return found


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 90 else text[:87] + "…"


# One life ------------------------------------------------------------------------------------------------------------


class Hook(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from changed code."""

    def __init__(self, name: str, code: Any, path: Path) -> None:
        self.name, self.code, self.path = name, code, path

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """For this module only."""
        return (
            importlib.util.spec_from_file_location(fullname, self.path, loader=self) if fullname == self.name else None
        )

    def exec_module(self, module: ModuleType) -> None:
        """Run the changed code."""
        exec(self.code, module.__dict__)


def tests_of(module: str) -> list[str]:
    """The best first, each once."""
    return list(dict.fromkeys([*MODULES[module], *SAFETY]))


def live(mutant: Mutant | None, module: str, limit: float, loud: bool = False) -> bool:
    """Run the module's tests in a fork; whether all passed. One that does not end in time has been noticed."""
    child = os.fork()
    if child == 0:
        os.setsid()
        if not loud:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
        code = 1
        try:
            if mutant is not None:
                name = f"blockadapt.{mutant.module}"
                sys.meta_path.insert(0, Hook(name, mutant.code, file_of(mutant.module)))
            import pytest

            options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", "--no-header"]
            code = int(pytest.main([*options, *tests_of(module)]))
        except BaseException:  # a mutant may raise anything
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def judge(module: str, chosen: Sequence[Mutant], jobs: int) -> list[Mutant]:
    """The survivors."""
    begin = time.monotonic()
    if not live(None, module, limit=3600.0):
        live(None, module, limit=3600.0, loud=True)
        sys.exit(f"{module}: its tests fail without any change")
    usual = time.monotonic() - begin
    survivors = []
    with ThreadPoolExecutor(jobs) as pool:
        lives = pool.map(lambda mutant: live(mutant, module, limit=30 + 4 * jobs * usual), chosen)
        for mutant, alive in zip(chosen, lives, strict=True):
            if alive:
                survivors.append(mutant)
                print(f"  lives: {mutant}", flush=True)
    killed, total = len(chosen) - len(survivors), len(chosen)
    print(f"{module}: {killed} of {total} killed ({killed / max(1, total):.0%}), tests take {usual:.0f} s", flush=True)
    return survivors


def main() -> None:
    """Print the score and the survivors."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--module", choices=MODULES, action="append", help="only these")
    parser.add_argument("--sample", type=int, default=40, help="mutants of each module")
    parser.add_argument("--all", action="store_true", help="every mutant")
    parser.add_argument("--only", type=int, help="one mutant of one module, with its tests' output")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    for package in ("torch", "numba", "pytest"):  # not hypothesis: pytest wants to see it imported
        importlib.import_module(package)
    tried = lived = 0
    for module in options.module or MODULES:
        every = mutants(module)
        if options.only is not None:
            print(every[options.only])
            print("lives" if live(every[options.only], module, 3600.0, loud=True) else "killed")
            return
        chosen = every
        if not options.all and len(every) > options.sample:
            chosen = sorted(random.Random(options.seed).sample(every, options.sample), key=lambda mutant: mutant.number)
        tried += len(chosen)
        lived += len(judge(module, chosen, options.jobs))
    print(f"all: {tried - lived} of {tried} killed ({(tried - lived) / tried:.1%})")


if __name__ == "__main__":
    main()
