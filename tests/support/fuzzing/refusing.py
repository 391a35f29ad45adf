"""Something impossible is done, one step is refused with nothing changed, and it is undone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from support.contract_cases import bits_of_all
from support.fuzzing.comparing import Compared


class Refusing(Compared):
    """Has what actions and offences need to see a step refused."""

    def _unskip(self) -> None:
        for group in self.optimizer.param_groups:
            group["skipped_steps"] -= 1

    def _refused(self, given: bool = False) -> None:
        """One step is refused in one sentence, with nothing changed."""
        if not given:
            self._give_all_gradients()
        before = bits_of_all(self.optimizer)
        try:
            self.optimizer.step()
        except (ValueError, TypeError, RuntimeError) as error:
            text = str(error)
            owner = type(self.optimizer).__name__
            assert text.startswith(f"{owner}:"), f"not the owner's sentence: {text}"
        else:
            raise AssertionError("the step was not refused")
        assert bits_of_all(self.optimizer) == before, "the refused step changed something"

    def _give_all_gradients(self) -> None:
        frozen, self.frozen = self.frozen, set()
        wanted = {p: p.requires_grad for p in self._params()}
        self._give_gradients(0)
        self.frozen = frozen
        for param, want in wanted.items():
            param.requires_grad_(want)

    @contextmanager
    def _offence(self, what: str) -> Iterator[None]:
        """What is done inside is undone inside; training goes on as if nothing had been."""
        self._tell("offence", what)
        yield
        self._give_gradients(0)
        self._step()

    @contextmanager
    def _option(self, position: int, name: str, value: Any) -> Iterator[None]:
        group = self.optimizer.param_groups[position]
        kept, group[name] = group[name], value
        yield
        group[name] = kept

    @contextmanager
    def _data(self, param: Parameter, data: Tensor, keep_grad: bool = False) -> Iterator[None]:
        kept, grad = param.data, param.grad
        if not keep_grad:
            param.grad = None
        param.data = self.guard.moved(data.to(param.dtype))
        yield
        param.grad = None
        param.data = kept
        param.grad = grad
