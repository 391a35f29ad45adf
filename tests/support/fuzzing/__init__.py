"""Training as a user may mistreat it: random models, options and actions between steps, against the dense oracle.

A `Training` is a Hypothesis state machine. Its rules come in three kinds, each in a file:

    comparing   one step of both; parameters, first moments and kinds of state are compared
    actions     what may be done between steps; the oracle follows
    offences    something impossible, one step that must be refused with nothing changed, and the repair

They draw from `choices`, the oracle's side of training is in `followed`, and `refusing` sees a step refused.

x and m of the oracle are set to the library's before each step, so that each step is compared on its own and half
precision only rounds once; V, Σ̂ and U the oracle keeps for itself. All tensors lie in guarded memory.

Run as a module it is the child process that guard pages need: `python -m support.fuzzing numba 3 1000 log`.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from support.fuzzing.actions import Actions
from support.fuzzing.offences import Offences
from support.guards import Canaries, Pages


class Training(Actions, Offences):
    """See the module's docstring."""


def fuzz(backend: str, sequences: int, guard: Callable[[], Canaries | Pages], start: int | None = None) -> None:
    """Run so many sequences; raises with the shortest one that fails."""

    class Run(Training):
        pass

    Run.backend, Run.make_guard = backend, staticmethod(guard)
    if start is not None:
        seed(start)(Run)
    run_state_machine_as_test(
        Run,
        settings=settings(
            max_examples=sequences,
            stateful_step_count=15,
            derandomize=start is None,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
