"""Settings of an experiment: typed, read from the TOML file that ships with it, changed by `--set key=value`.

A file has a table `[defaults]` and one for each scale, which overrides keys of it; nested tables merge. Keys are
written with dots: `optimizer.block_size`. Every key and every type is checked, wherever it came from.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any, Literal, TypeVar

from blockadapt.validation import (
    Described,
    is_number,
    refusal,
    require,
    require_choice,
)
from blockadapt_experiments.contenders.catalogue import CONTENDERS
from blockadapt_experiments.core.experiment import Experiment
from blockadapt_experiments.core.names import SCALES as SCALES
from blockadapt_experiments.core.names import nearest as nearest
from blockadapt_experiments.core.settings import Settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Table = dict[str, Any]


SettingsT = TypeVar("SettingsT", bound=Settings)


def load(experiment: Experiment[SettingsT], scale: str, changes: Sequence[str] = ()) -> SettingsT:
    """The settings of an experiment at this scale, with these changes (`key=value`) on top.

    Raises:
        ValueError: For an unknown scale, key or optimizer, or a value of the wrong type; the sentence names the key.
    """
    owner = experiment.name
    require_choice(owner, "scale", scale, SCALES)
    file = files("blockadapt_experiments") / "configs" / f"{owner}.toml"
    tables = tomllib.loads(file.read_text(encoding="utf-8"))
    table = _merged(tables["defaults"], tables[scale])
    known = {*CONTENDERS, *table.get("optimizers", ())}
    for change in changes:
        table = _merged(table, _parsed(owner, change))
    settings: SettingsT = build(owner, experiment.config, table, keys(experiment.config))
    for key, names in (("optimizers", settings.optimizers), ("lr", settings.lr)):
        for name in names:
            if name not in known:
                near = nearest(name, known)
                raise ValueError(f"{owner}: `{key}` has an unknown optimizer {name!r}; the nearest is {near!r}.")
    return settings


NOT_VARIED = ("optimizers", "seeds", "lr", "tune", "variants")
"""What is the same for all variants: it says which runs there are."""


def varied(settings: SettingsT, variant: str) -> SettingsT:
    """The settings with the changes of this variant (`key=value`, with commas between several).

    Raises:
        ValueError: For what `load` refuses, and for a key that says which runs there are.
    """
    table = plain(settings)
    for change in filter(None, variant.split(",")):
        parsed = _parsed("variant", change)
        for key in parsed:
            require(key not in NOT_VARIED, "variant", key, "the same for all variants", Described(change))
        table = _merged(table, parsed)
    varied: SettingsT = build("variant", type(settings), table, keys(type(settings)))
    return varied


def plain(settings: Any) -> dict[str, Any]:
    """The settings as JSON gives them back: dictionaries, lists, numbers, strings."""
    plain_settings: dict[str, Any] = _plain(dataclasses.asdict(settings))
    return plain_settings


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found.update(flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value})
    return found


class Difference(typing.NamedTuple):
    """A dotted key, and what two settings have there; `MISSING` where one has no such key."""

    key: str
    ours: Any
    theirs: Any


MISSING = Described("nothing")


def first_difference(ours: Any, theirs: Any, key: str = "") -> Difference | None:
    """The first value that differs between two plain settings; None if there is none."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in dict.fromkeys([*ours, *theirs]):
            below = f"{key}.{name}" if key else name
            different = first_difference(ours.get(name, MISSING), theirs.get(name, MISSING), below)
            if different:
                return different
        return None
    return None if ours == theirs else Difference(key, ours, theirs)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value


def _merged(below: Table, above: Table) -> Table:
    merged = {**below, **above}
    for name in below.keys() & above.keys():
        if isinstance(below[name], dict) and isinstance(above[name], dict):
            merged[name] = _merged(below[name], above[name])
    return merged


def _parsed(owner: str, change: str) -> Table:
    """`a.b=value` as nested tables; the value as TOML if it is that, else as it stands."""
    key, equals, text = change.partition("=")
    parts = key.strip().split(".")
    require(bool(equals) and all(parts), owner, "set", "key=value", change)
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        document = {}
    value = document["value"] if document.keys() == {"value"} else text.strip()
    for part in reversed(parts):
        value = {part: value}
    return typing.cast(Table, value)


def keys(config: Any, prefix: str = "") -> list[str]:
    """Every key that a settings class has, dotted."""
    found = []
    for name, hint in typing.get_type_hints(config).items():
        if name in config.__dataclass_fields__:
            below = keys(hint, f"{prefix}{name}.") if dataclasses.is_dataclass(hint) else []
            found += below or [prefix + name]
    return found


def build(owner: str, config: Any, table: Mapping[str, Any], known: Sequence[str], prefix: str = "") -> Any:
    """An instance of this settings class, from a table whose keys and types are checked on the way."""
    hints = {name: typing.get_type_hints(config)[name] for name in config.__dataclass_fields__}
    for name in table:
        if name not in hints:
            key = prefix + name
            raise ValueError(f"{owner}: there is no setting `{key}`; the nearest is `{nearest(key, known)}`.")
    values = {}
    for name, value in table.items():
        key = prefix + name
        if dataclasses.is_dataclass(hints[name]):
            require(isinstance(value, dict), owner, key, "a table", value)
            values[name] = build(owner, hints[name], value, known, f"{key}.")
        else:
            values[name] = _converted(owner, key, hints[name], value)
    missing = [
        f"{prefix}{entry.name}"
        for entry in dataclasses.fields(config)
        if entry.name not in values
        and entry.default is dataclasses.MISSING
        and entry.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(refusal(owner, missing[0], "given", MISSING))
    return config(**values)


_SCALARS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("an integer", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    float: ("a number", is_number),
    str: ("a string", lambda value: isinstance(value, str)),
}


def _converted(owner: str, key: str, hint: Any, value: Any) -> Any:
    """The value as this type has it; a list becomes a tuple, an integer a float where a float is asked for."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _converted_union(owner, key, arguments, value)
    if origin is Literal:
        require_choice(owner, key, value, arguments)
        return value
    if origin is tuple:
        require(isinstance(value, list), owner, key, "a list", value)
        entries = arguments[:1] * len(value) if arguments[-1] is ... else arguments
        require(len(value) == len(entries), owner, key, f"a list of {len(entries)}", value)
        return tuple(_converted(owner, key, entry, item) for entry, item in zip(entries, value, strict=True))
    if origin is dict:
        require(isinstance(value, dict), owner, key, "a table", value)
        return {name: _converted(owner, f"{key}.{name}", arguments[1], entry) for name, entry in value.items()}
    rule, fits = _SCALARS[hint]
    require(fits(value), owner, key, rule, value)
    if hint is int:
        require(-(2**63) <= value < 2**63, owner, key, "in [-2⁶³, 2⁶³)", value)
    return float(value) if hint is float else value


def _converted_union(owner: str, key: str, choices: Sequence[Any], value: Any) -> Any:
    """The first type of the union that takes the value. TOML has no null: "none" stands for None."""
    if type(None) in choices and value in (None, "none"):
        return None
    problem: ValueError | None = None
    for choice in choices:
        if choice is not type(None):
            try:
                return _converted(owner, key, choice, value)
            except ValueError as error:
                problem = problem or error
    assert problem is not None
    raise problem
