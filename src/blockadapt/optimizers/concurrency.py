"""Guards a step from what comes in between: threads are kept out, Ctrl-C waits, other processes hear of what fails."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal without its enums, which would take 8 µs of every step
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, current_thread, main_thread
from typing import Any

from blockadapt.errors import NonFiniteGradientError
from blockadapt.optimizers.ranks import Ranks, Verdict
from blockadapt.validation import Described, refusal


class Alone:
    """Keeps other threads out of a step: kernels work without Python's lock, in memory that is the optimizer's.

    Args:
        owner: Who takes the step, for messages.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._lock = Lock()

    def __enter__(self) -> None:
        """Begin a step, without waiting.

        Raises:
            RuntimeError: A step is being taken already, by another thread or further up in this one.
        """
        if not self._lock.acquire(blocking=False):
            rule, found = "called again only when the last call has returned", Described("a call in the midst of one")
            raise RuntimeError(refusal(self._owner, "step", rule, found))

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Uninterrupted:
    """Makes Ctrl-C wait until a step is written: it would leave numbers of two steps. Only the main thread hears it."""

    def __enter__(self) -> None:
        self._came: tuple[Any, ...] | None = None
        self._handler: Callable[..., object] | None = None
        handler = _signal.getsignal(_signal.SIGINT)
        if callable(handler) and current_thread() is main_thread():
            with suppress(ValueError):  # an interpreter within another hears nothing
                _signal.signal(_signal.SIGINT, self._note)
                self._handler = handler

    def _note(self, *came: Any) -> None:
        self._came = came

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            _signal.signal(_signal.SIGINT, self._handler)
            if self._came is not None:
                self._handler(*self._came)


class ToldToOthers:
    """Tells the other processes of what is raised here, before anything is written: they wait for a verdict.

    Args:
        ranks: They.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __enter__(self) -> None:
        self._ranks.require_whole()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        verdict = Verdict.NOT_FINITE if isinstance(error, NonFiniteGradientError) else Verdict.FAILED
        with suppress(RuntimeError):  # the others do not answer: there is a reason to raise as it is
            self._ranks.agree(verdict)
