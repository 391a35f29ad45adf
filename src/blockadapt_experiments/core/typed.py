"""Turn plain tables into instances of typed classes, and refuse whatever does not fit in one sentence.

A settings class is a frozen dataclass. Pydantic checks its keys and types, strictly: no text is taken for a number.
The class checks its values itself, in `__post_init__`. Pydantic rather than msgspec, because its errors have a kind, a
place and a value from which our sentences can be made, where msgspec has text, and because it refuses keys that a
dataclass does not have, which msgspec drops.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from blockadapt.validation import Described, refusal, require
from blockadapt_experiments.names import nearest

MISSING = Described("nothing")

_RULES = {
    "bool_type": "true or false",
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "tuple_type": "a list",
    "dict_type": "a table",
    "dataclass_type": "a table",
}
"""What a value must be, by pydantic's kind of error."""


def keys(config: Any, prefix: str = "") -> list[str]:
    """List every key that a settings class has, dotted."""
    found = []
    for name, hint in _hints(config).items():
        below = keys(hint, f"{prefix}{name}.") if dataclasses.is_dataclass(hint) else []
        found += below or [prefix + name]
    return found


def build(owner: str, config: Any, table: Mapping[str, Any], known: Sequence[str]) -> Any:
    """Make an instance of this settings class from a table.

    Raises:
        ValueError: A key or a type is wrong, or the class refuses a value; one sentence says which. Of a key that does
            not exist it names the nearest of those known.
    """
    _require_range(owner, table)
    table = _with_none(config, table)
    try:
        return _checked(config, table)
    except ValidationError as error:
        raise ValueError(_sentence(owner, error, table, known)) from None


def converted(owner: str, key: str, hint: Any, value: Any) -> Any:
    """Give one value as this type has it: an integer as a float where a float is asked for.

    Raises:
        ValueError: It is of another type.
    """
    _require_range(owner, value, key)
    try:
        return _checked(hint, value)
    except ValidationError as error:
        raise ValueError(_sentence(owner, error, value, (), key)) from None


def _checked(hint: Any, value: Any) -> Any:
    # As JSON, where a list may become a tuple: in Python itself strictness would ask for a tuple.
    return _adapter(hint).validate_json(json.dumps(value, default=str), strict=True, extra="forbid")


@lru_cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


def _hints(config: Any) -> dict[str, Any]:
    """Give the type of every field."""
    hints = typing.get_type_hints(config)
    return {name: hints[name] for name in config.__dataclass_fields__}


def _with_none(hint: Any, value: Any) -> Any:
    """Put None for "none" wherever the class allows it: TOML has no null."""
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        hints = _hints(hint)
        return {name: _with_none(hints.get(name), entry) for name, entry in value.items()}
    optional = typing.get_origin(hint) in (typing.Union, types.UnionType) and type(None) in typing.get_args(hint)
    return None if optional and value == "none" else value


def _require_range(owner: str, value: Any, key: str = "") -> None:
    """Refuse integers that 64 bits do not hold, wherever they are: a loop over them would not end."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            _require_range(owner, entry, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for entry in value:
            _require_range(owner, entry, key)
    elif isinstance(value, int):
        require(-(2**63) <= value < 2**63, owner, key, "in [-2⁶³, 2⁶³)", value)


def _sentence(owner: str, error: ValidationError, given: Any, known: Sequence[str], prefix: str = "") -> str:
    """Put the first problem into our words; a key that does not exist before all others."""
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "unexpected_keyword_argument")
    problem = problems[0]
    kind, value, context = problem["type"], problem["input"], problem.get("ctx", {})
    key, asked = _key(problem["loc"], given, prefix)
    if kind == "unexpected_keyword_argument":
        return f"{owner}: there is no setting `{key}`; the nearest is `{nearest(key, known)}`."
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return refusal(owner, key, f"one of {context['expected'].replace(' or ', ', ')}", value)
    if kind == "missing" and not isinstance(asked, list):
        return refusal(owner, key, "given", MISSING)
    if kind in ("missing", "too_long"):  # every entry that a list lacks is a problem of its own
        length = context.get("max_length", len(asked) + len([each for each in problems if each["type"] == "missing"]))
        return refusal(owner, key, f"a list of {length}", asked)
    return refusal(owner, key, _RULES.get(kind, problem["msg"]), value)


def _key(place: Sequence[int | str], given: Any, prefix: str) -> tuple[str, Any]:
    """Give the dotted key of a place, and what was given there.

    Pydantic's places go on with numbers in lists and with the names of the types of a union, which are no keys.
    """
    parts = [prefix] if prefix else []
    for part in place:
        if not isinstance(part, str) or not isinstance(given, Mapping):
            break
        parts.append(part)
        given = given.get(part)
    return ".".join(parts), given
