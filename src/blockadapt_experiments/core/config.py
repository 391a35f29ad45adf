"""Read the settings of an experiment from the TOML file that ships with it, and change them by `--set key=value`.

A file has a table `[defaults]` and one for each scale, which overrides keys of it; nested tables merge. Keys are
written with dots: `optimizer.block_size`. Every key and every type is checked, wherever it came from.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from blockadapt.validation import Described, refusal, require, require_choice
from blockadapt_experiments.contenders.catalogue import CONTENDERS
from blockadapt_experiments.core.experiment import Experiment
from blockadapt_experiments.core.settings import Settings
from blockadapt_experiments.core.shipped import shipped_tables
from blockadapt_experiments.core.typed import MISSING, build, keys
from blockadapt_experiments.names import SCALES as SCALES
from blockadapt_experiments.names import nearest as nearest
from blockadapt_experiments.names import require_optimizers
from blockadapt_experiments.parts import NAME

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Table = dict[str, Any]


SettingsT = TypeVar("SettingsT", bound=Settings)


def load(experiment: Experiment[SettingsT], scale: str, changes: Sequence[str | Mapping[str, Any]] = ()) -> SettingsT:
    """Read the settings of an experiment at this scale, and put these changes (`key=value`, or tables) on top.

    An arm that the changes define is run too, after the optimizers, unless `optimizers` names it.

    Raises:
        ValueError: For an unknown scale, key or optimizer, or a value of the wrong type; the sentence names the key.
    """
    owner = experiment.name
    tables = _tables(experiment)
    require_choice(owner, "scale", scale, [name for name in SCALES if name in tables])
    table = _merged(dict(tables.get("defaults", {})), dict(tables[scale]))
    own, shipped = {*table.get("optimizers", ())}, {*table.get("arms", ())}
    for change in changes:
        table = _merged(table, _parsed(owner, change) if isinstance(change, str) else nested(change))
    settings: SettingsT = build(owner, experiment.config, table, keys(experiment.config))
    new = [arm for arm in settings.arms if arm not in shipped and arm not in settings.optimizers]
    if new:
        settings = dataclasses.replace(settings, optimizers=(*settings.optimizers, *new))
    known = {*CONTENDERS, *own, *settings.arms}
    for key, names in (("optimizers", settings.optimizers), ("lr", settings.lr)):
        require_optimizers(owner, key, names, known)
    return settings


def _tables(experiment: Experiment[Any]) -> Mapping[str, Mapping[str, Any]]:
    """Read the settings at all scales."""
    return shipped_tables(experiment.name) if experiment.scales is None else experiment.scales


def scales_of(experiment: Experiment[Any]) -> list[str]:
    """List the scales that an experiment has."""
    return [scale for scale in SCALES if scale in _tables(experiment)]


def nested(table: Mapping[str, Any]) -> Table:
    """Turn dotted keys into nested tables.

    >>> nested({"optimizer.block_size": 25, "epochs": 3})
    {'optimizer': {'block_size': 25}, 'epochs': 3}
    """
    found: Table = {}
    for key, entry in table.items():
        value = nested(entry) if isinstance(entry, Mapping) else entry
        for part in reversed(key.split(".")):
            value = {part: value}
        found = _merged(found, value)
    return found


def arm_changes(arms: Iterable[str]) -> Iterator[str]:
    """Turn arms as they are typed, `name=optimizer,key=value,…`, into changes of settings.

    >>> list(arm_changes(["b25=block-adam,block_size=25,label=Blocks, n = 25"]))
    ['arms.b25.optimizer="block-adam"', 'arms.b25.block_size=25', 'arms.b25.label=Blocks, n = 25']

    Yields:
        A change, `key=value`.

    Raises:
        ValueError: An arm is not of this form, or two have one name.
    """
    seen: set[str] = set()
    for arm in arms:
        name, equals, rest = arm.partition("=")
        optimizer, *settings = re.split(r",(?=\s*\w+=)", rest)
        ok = bool(equals) and re.fullmatch(NAME, name) and bool(optimizer) and "," not in optimizer
        require(bool(ok), "run", "arm", "name=optimizer,key=value,… with a name of letters, digits, - and _", arm)
        require(name not in seen, "run", "arm", "given once for each name", arm)
        seen.add(name)
        yield f"arms.{name}.optimizer={json.dumps(optimizer.strip())}"
        yield from (f"arms.{name}.{setting.strip()}" for setting in settings)


LISTS = ("optimizers", "seeds", "variants")
"""What a folder may get more of."""

NOT_VARIED = ("optimizers", "arms", "seeds", "lr", "tune", "variants")
"""What is the same for all variants: it says which runs there are."""


def varied(settings: SettingsT, variant: str) -> SettingsT:
    """Make these changes of a variant (`key=value`, with commas between several) to the settings.

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


PLAN = ("optimizers", "seeds", "lr", "tune", "variants", "arms")
"""What says which runs there are, and nothing about any one of them, but for the run's own arm."""


def run_settings(settings: Mapping[str, Any], arm: str) -> dict[str, Any]:
    """Pick what a run of this arm depends on from plain settings. The learning rate, which may be tuned, is apart."""
    shared = {key: value for key, value in settings.items() if key not in PLAN}
    own = settings.get("arms", {}).get(arm)
    return {**shared, "arms": {arm: own}} if own else shared


def grown(before: Mapping[str, Any], ours: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Join the plain settings of two commands for one folder: the optimizers, arms, seeds and variants of both.

    Raises:
        ValueError: Anything else differs, or what both have; the sentence names the key, and where it is otherwise.
    """
    both = {*before.get("optimizers", ())} & {*ours.get("optimizers", ())}

    def rest(settings: Mapping[str, Any]) -> dict[str, Any]:
        """Pick all that must be the same."""
        arms = {name: table for name, table in settings.get("arms", {}).items() if name in both}
        lr = {name: rate for name, rate in settings.get("lr", {}).items() if name in both}
        kept = {key: value for key, value in settings.items() if key not in PLAN or key == "tune"}
        return {**kept, "arms": arms, "lr": lr}

    different = first_difference(rest(ours), rest(before))
    if different:
        raise ValueError(refusal("run", different.key, f"{different.theirs!r} as in {where}", different.ours))
    lists = {key: [*dict.fromkeys([*before[key], *ours.get(key, ())])] for key in LISTS if key in before}
    tables = {key: {**before.get(key, {}), **ours[key]} for key in ("arms", "lr") if ours.get(key)}
    return {**before, **lists, **tables}


def completed(experiment: Experiment[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Give plain settings that an older version has written what they lack: its default, which does what was done then.

    Raises:
        ValueError: They have a key that there is no more, or a value that is refused now.
    """
    return plain(build(experiment.name, experiment.config, settings, keys(experiment.config)))


def plain(settings: Any) -> dict[str, Any]:
    """Turn settings into what JSON gives back: dictionaries, lists, numbers, strings."""
    plain_settings: dict[str, Any] = _plain(dataclasses.asdict(settings))
    return plain_settings


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested tables into one, with dotted keys."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found.update(flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value})
    return found


class Difference(typing.NamedTuple):
    """Says what two settings have under a dotted key; `MISSING` where one has no such key."""

    key: str
    ours: Any
    theirs: Any


def first_difference(ours: Any, theirs: Any, key: str = "") -> Difference | None:
    """Find the first value that differs between two plain settings; None if there is none."""
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
    """Turn `a.b=value` into nested tables. The value is read as TOML if it is that, else it is kept as it stands."""
    key, equals, text = change.partition("=")
    require(bool(equals) and all(key.strip().split(".")), owner, "set", "key=value", change)
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        document = {}
    value = document["value"] if document.keys() == {"value"} else text.strip()
    return nested({key.strip(): value})
