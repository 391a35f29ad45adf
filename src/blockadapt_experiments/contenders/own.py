"""Registers optimizers of your own, as contenders in any experiment."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from blockadapt.validation import require, require_number
from blockadapt_experiments.contenders.catalogue import CONTENDERS, Contender, OptimizerSettings
from blockadapt_experiments.names import nearest
from blockadapt_experiments.parts import register

MakeT = TypeVar("MakeT", bound=Callable[..., Optimizer])


def register_optimizer(name: str, *, lr: float, label: str = "") -> Callable[[MakeT], MakeT]:
    """Make the decorated function's optimizer known by a name, to every experiment.

    The function takes a model and a learning rate, then by name what it needs. A parameter without a default is the
    experiment's `optimizer.*` of that name, such as `weight_decay`. One with a default is a setting of its own, which
    an arm may change. `steps` is the number of steps that the run will take.

    Args:
        name: As in settings and on the command line.
        lr: The learning rate to start from where none is tuned.
        label: Its name for people; "" for `name`.

    Raises:
        ValueError: The name is taken, or the function asks for something that there is not.
    """
    owner = "register_optimizer"
    require_number(owner, "lr", lr, above=0)

    def decorate(make: MakeT) -> MakeT:
        parameters = [*inspect.signature(make).parameters.values()]
        rest = parameters[2:]
        ok = len(parameters) >= 2 and all(each.kind is each.KEYWORD_ONLY for each in rest)
        require(ok, owner, name, "a function of a model, a learning rate, and parameters by name after *", make)
        options = {each.name: each.default for each in rest}
        for option in ("lr", "label", "optimizer"):
            require(option not in options, owner, name, "without a parameter that every arm has", option)
        own = {key: value for key, value in options.items() if value is not inspect.Parameter.empty and key != "steps"}
        shared = tuple(key for key in options if key not in own and key != "steps")
        for key in shared:
            if key not in OptimizerSettings.__dataclass_fields__:
                near = nearest(key, OptimizerSettings.__dataclass_fields__)
                raise ValueError(f"{owner}: there is no setting `optimizer.{key}` for {name}; the nearest is `{near}`.")
        for key, value in own.items():
            plain = isinstance(value, bool | int | float | str)
            require(plain, owner, f"{name}.{key}", "a number, a string, true or false by default", value)

        def build(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
            chosen = {**vars(settings), **({"steps": steps} if "steps" in options else {})}
            return make(model, lr, **chosen)

        register("optimizer", name, CONTENDERS, make)
        CONTENDERS[name] = Contender(name, label or name, "other", "own", False, float(lr), build, shared, own)
        return make

    return decorate
