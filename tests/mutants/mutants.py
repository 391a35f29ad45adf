"""Break the library in one place after another, and see whether the tests notice: `make mutants`.

A mutant is a module with one change: a comparison turned, a number moved, a condition negated, a statement left out. It
is killed if one of its tests fails, and survives if they pass. The score is the share that is killed.

    python tests/mutants/mutants.py                              every module, a sample of each
    python tests/mutants/mutants.py --module partition --all     every mutant of one
    python tests/mutants/mutants.py --module partition --only 17 show one, and what its tests say

Torch, Numba and pytest are imported once; each mutant is a fork, in which an import hook puts the changed module in the
place of the original. The source is never written to, so that a mutant cannot outlive its run.

All tests run once without any change, and it is noted which functions each of them calls. A mutant meets those of its
module's tests that call the function it is in, the quickest case of each first, up to `--seconds`. So a survivor may be
one that a longer run kills: `--only` runs all of the module's tests.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.util
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "blockadapt"
LIBRARY = "tests/library"
OPTIMIZERS = f"{LIBRARY}/optimizers"

FORMULAS = [f"{OPTIMIZERS}/test_oracle.py", f"{OPTIMIZERS}/test_step_bound.py"]
KERNELS = [f"{LIBRARY}/kernels/test_kernels.py", f"{LIBRARY}/kernels/test_safety.py", *FORMULAS]
CHANGED = ("many_tensors", "changed_parameters", "changed_state", "changed_options", "changed_lists", "freed_memory")
CHANGES = [f"{OPTIMIZERS}/test_{name}.py" for name in CHANGED]
ONE_AT_A_TIME = [f"{OPTIMIZERS}/test_one_step_at_a_time.py"]
ON_DEVICES = [f"{OPTIMIZERS}/test_capturable.py"]
ESTIMATES = [f"{OPTIMIZERS}/test_estimates.py"]
RANKS = [f"{OPTIMIZERS}/test_ranks.py", *ESTIMATES]

LEAST_SCORE = 0.9
"""With a lower one the run fails."""

MODULES: dict[str, list[str]] = {
    "partition": [f"{LIBRARY}/test_partition.py", f"{LIBRARY}/test_validation.py", f"{OPTIMIZERS}/test_storage.py"],
    "moments": [f"{LIBRARY}/test_moments.py", f"{OPTIMIZERS}/test_equivalences.py", *FORMULAS],
    "spectrum": [f"{LIBRARY}/test_spectrum.py", f"{LIBRARY}/test_validation.py", *FORMULAS, *ESTIMATES],
    "validation": [f"{LIBRARY}/test_validation.py", *CHANGES],
    "kernels.contract": [f"{LIBRARY}/kernels/test_dispatch.py", *KERNELS, *ESTIMATES],
    "kernels.eigh": [*KERNELS, *ESTIMATES],
    "kernels.layout": [f"{OPTIMIZERS}/test_storage.py", *KERNELS],
    "kernels.reflections": [f"{OPTIMIZERS}/test_storage.py", *KERNELS],
    "kernels.safety": [f"{LIBRARY}/kernels/test_safety.py", *CHANGES],
    "kernels.dispatch": [f"{LIBRARY}/kernels/test_dispatch.py", f"{LIBRARY}/test_validation.py", *ESTIMATES],
    "kernels.host": [f"{LIBRARY}/kernels/test_host.py"],
    "kernels.segments": KERNELS,
    "kernels.work_lists": KERNELS,
    "kernels.transfer": [f"{OPTIMIZERS}/test_capturable.py"],
    "kernels.cpu.compilation": [f"{LIBRARY}/kernels/cpu/test_compilation.py", f"{LIBRARY}/test_compile.py"],
    "kernels.cpu.kernel": [f"{LIBRARY}/kernels/test_dispatch.py", *KERNELS],
    "kernels.cpu.private_folder": [f"{LIBRARY}/kernels/cpu/test_private_folder.py"],
    "kernels.cpu.threads": [f"{LIBRARY}/kernels/cpu/test_threads.py"],
    "kernels.cpu.work": [f"{LIBRARY}/kernels/cpu/test_step.py", *ONE_AT_A_TIME, *KERNELS, *ESTIMATES],
    "optimizers.update": [*FORMULAS, *CHANGES, *ON_DEVICES, f"{OPTIMIZERS}/test_equivalences.py"],
    "optimizers.unit": [f"{OPTIMIZERS}/test_contract.py", *CHANGES],
    "optimizers.gradients": [f"{OPTIMIZERS}/test_nonfinite.py", *CHANGES],
    "optimizers.options": [f"{LIBRARY}/test_validation.py", f"{OPTIMIZERS}/test_contract.py", *CHANGES],
    "optimizers.standing": CHANGES,
    "optimizers.whereabouts": CHANGES,
    "optimizers.overlap": [f"{OPTIMIZERS}/test_overlap.py", *CHANGES],
    "optimizers.peak": ESTIMATES,
    "optimizers.estimates": ESTIMATES,
    "optimizers.traced": [f"{OPTIMIZERS}/test_traced.py"],
    "optimizers.base": [
        f"{LIBRARY}/test_validation.py",
        f"{OPTIMIZERS}/test_contract.py",
        f"{OPTIMIZERS}/test_traced.py",
        *ON_DEVICES,
        *ONE_AT_A_TIME,
        *FORMULAS,
        *CHANGES,
    ],
    "optimizers.concurrency": [*ONE_AT_A_TIME, *RANKS],
    "optimizers.preparation": [f"{OPTIMIZERS}/test_preparation.py", *FORMULAS, *CHANGES, *ESTIMATES],
    "optimizers.step_state": [f"{OPTIMIZERS}/test_contract.py", *CHANGES],
    "optimizers.checkpoint": [f"{OPTIMIZERS}/test_checkpoint.py", f"{OPTIMIZERS}/test_faults.py"],
    "optimizers.storage": [
        f"{OPTIMIZERS}/test_storage.py",
        f"{OPTIMIZERS}/test_checkpoint.py",
        *ON_DEVICES,
        *CHANGES,
    ],
    "optimizers.ranks.contract": RANKS,
    "optimizers.ranks.messages": RANKS,
    "optimizers.ranks.own_shards": RANKS,
    "optimizers.ranks.rows": RANKS,
    "optimizers.ranks.shared_out": RANKS,
}
"""The tests that know a module best."""

PACKAGES = (
    "hypothesis.stateful",
    "numba",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "xdist.plugin",
)
"""Imported once, before any fork. The library is not among them: each mutant imports it anew."""


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


Spot = tuple[ast.AST, str, "int | None", int]


def spots(tree: ast.AST, function: int = 0) -> Iterator[Spot]:
    """Where a node hangs: its parent, the field, the position in it if that is a list; and the line of its function."""
    if isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef)):
        function = min(line.lineno for line in (tree, *tree.decorator_list))
    for name, value in ast.iter_fields(tree):
        if name in _UNTOUCHED or _is_for_types_only(tree) or isinstance(tree, (ast.Raise, ast.Assert, ast.JoinedStr)):
            continue  # words of a refusal are compared by tests of their own
        if isinstance(tree, ast.keyword) and tree.arg == "strict":
            continue  # of zip: an assertion too
        for position, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST):
                yield tree, name, position if isinstance(value, list) else None, function
                yield from spots(child, function)


def _is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@dataclass(frozen=True)
class Mutant:
    """One change of one module."""

    module: str
    number: int
    line: int
    function: int
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
    for parent, name, position, function in list(spots(tree)):
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
            found.append(Mutant(module, len(found), line, function, _short(node), _short(new), code))
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


@dataclass
class Test:
    """What a test does when nothing is changed."""

    seconds: float = 0.0
    """Of the processor, its children's included."""
    calls: set[tuple[str, int]] = field(default_factory=set)
    """Functions of the library, by file and first line."""


class Recorder:
    """Notes what each test calls, in children that it forks too: a line in a file that they share."""

    def __init__(self, file: int) -> None:
        self._file, self._seen, self._others = file, dict[int, Any](), dict[int, Any]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Around one test."""
        self._seen.clear()
        self._item, begin = item.nodeid, sum(os.times()[:4])
        sys.settrace(self._enter)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            self._write(sum(os.times()[:4]) - begin)

    def _enter(self, frame: Any, event: str, argument: Any) -> None:
        code, key = frame.f_code, id(frame.f_code)  # a code's own hash is that of all it holds
        if key in self._others or key in self._seen:
            return
        if code.co_filename.startswith(str(SOURCE)):
            self._seen[key] = code  # held, as the others are, so that its id stays its own
            self._write((code.co_filename, code.co_firstlineno))
        else:
            self._others[key] = code

    def _write(self, what: Any) -> None:
        os.write(self._file, (json.dumps([self._item, what]) + "\n").encode())


class Chosen:
    """Leaves only these tests, in this order."""

    def __init__(self, names: Sequence[str]) -> None:
        self._order = {name: position for position, name in enumerate(names)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Before any of them runs."""
        items[:] = sorted((i for i in items if i.nodeid in self._order), key=lambda item: self._order[item.nodeid])


def live(mutant: Mutant | None, files: Sequence[str], plugin: object, limit: float, loud: bool = False) -> bool | None:
    """Run tests in a fork; whether all passed, or None if they did not end in time."""
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
            processes = importlib.import_module("support.processes")
            processes._SERVER = multiprocessing.get_context("fork")  # ranks have the change too
            options = ["-x", "-q", "-p", "no:cacheprovider", "-n", "0", "-m", "not slow", "--no-header"]
            options += ["--assert=plain", "-p", "no:anyio"]  # a fork begins in a third of the time
            code = int(pytest.main([*options, *files], plugins=[plugin]))
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
    return None


def watched(modules: Sequence[str]) -> dict[str, Test]:
    """All tests of these modules by name, run once with nothing changed."""
    files = list(dict.fromkeys(file for module in modules for file in MODULES[module]))
    with tempfile.TemporaryFile("a+") as record:
        if not live(None, files, Recorder(record.fileno()), limit=7200.0):
            live(None, files, Chosen(()), limit=7200.0, loud=True)
            sys.exit("tests fail without any change")
        record.seek(0)
        tests: dict[str, Test] = defaultdict(Test)
        for name, what in map(json.loads, record):
            if isinstance(what, float):
                tests[name].seconds = what
            else:
                tests[name].calls.add(tuple(what))
    return tests


def chosen_for(mutant: Mutant, tests: Mapping[str, Test], seconds: float) -> list[str]:
    """Tests of its module that call its function, up to so many seconds: the quickest case of each, then the next.

    Many quick cases of one test, which may notice little, so leave time for the others.

    What is called by none, as what is only traced or only imported, meets all tests that call anything of the module.
    """
    file = str(file_of(mutant.module))
    known = {name: test for name, test in tests.items() if name.split("::")[0] in MODULES[mutant.module]}
    calling = [name for name, test in known.items() if (file, mutant.function) in test.calls]
    calling = calling or [name for name, test in known.items() if any(file == other for other, _ in test.calls)]
    cases: dict[str, int] = defaultdict(int)
    ordered = []
    for name in sorted(calling, key=lambda name: known[name].seconds):
        test = name.split("[")[0]
        cases[test] += 1
        ordered.append((cases[test], name))
    chosen, left = [], seconds
    for _, name in sorted(ordered, key=itemgetter(0)):
        if known[name].seconds <= left:
            left -= known[name].seconds
            chosen.append(name)
    return chosen


def judge(module: str, chosen: Sequence[Mutant], tests: Mapping[str, Test], seconds: float, jobs: int) -> list[Mutant]:
    """The survivors."""

    def lives(mutant: Mutant) -> bool | None:
        names = chosen_for(mutant, tests, seconds)
        files = list(dict.fromkeys(name.split("::")[0] for name in names))
        limit = 120 + 20 * jobs * sum(tests[name].seconds for name in names)
        return live(mutant, files, Chosen(names), limit) if names else True

    survivors = []
    with ThreadPoolExecutor(jobs) as pool:
        for mutant, alive in zip(chosen, pool.map(lives, chosen), strict=True):
            if alive or alive is None:
                print(f"  {'lives' if alive else 'does not end'}: {mutant}", flush=True)
            if alive:
                survivors.append(mutant)
    killed, total = len(chosen) - len(survivors), len(chosen)
    print(f"{module}: {killed} of {total} killed ({killed / max(1, total):.0%})", flush=True)
    return survivors


def main() -> None:
    """Print the score and the survivors."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--module", choices=MODULES, action="append", help="only these")
    parser.add_argument("--sample", type=int, default=40, help="mutants of each module")
    parser.add_argument("--seconds", type=float, default=20.0, help="tests that a mutant meets, by what they take")
    parser.add_argument("--all", action="store_true", help="every mutant")
    parser.add_argument("--only", type=int, help="one mutant of one module, with its tests' output")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    for package in PACKAGES:
        importlib.import_module(package)
    modules = options.module or [*MODULES]
    every = {module: mutants(module) for module in modules}
    if options.only is not None:
        mutant = every[modules[0]][options.only]
        print(mutant)
        print("lives" if live(mutant, MODULES[mutant.module], object(), 3600.0, loud=True) else "killed")
        return
    tests = watched(modules)
    print(f"{len(tests)} tests take {sum(test.seconds for test in tests.values()):.0f} s", flush=True)
    tried = lived = 0
    for module, found in every.items():
        chosen = found
        if not options.all and len(found) > options.sample:
            chosen = sorted(random.Random(options.seed).sample(found, options.sample), key=lambda mutant: mutant.number)
        tried += len(chosen)
        lived += len(judge(module, chosen, tests, options.seconds, options.jobs))
    score = (tried - lived) / tried
    print(f"all: {tried - lived} of {tried} killed ({score:.1%})")
    if score < LEAST_SCORE:
        sys.exit(f"fewer than {LEAST_SCORE:.0%} are killed")


if __name__ == "__main__":
    main()
