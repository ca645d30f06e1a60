"""The settings by dotted name: which there are, what each expects, and which one a misspelt name meant."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from stoker.config.models import Config
from stoker.config.section import SIZE_FORMAT
from stoker.schema import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting, as documented and as messages describe it."""

    name: str
    expects: str
    """What values it takes, in words."""
    default: Json
    text: str
    """What it means."""
    mapping: bool
    """Whether its value is a mapping with names of the user's choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A group of settings."""

    name: str
    text: str


@cache
def all_settings() -> Mapping[str, Setting]:
    """Every setting by dotted name, in the order of the models."""
    return {node.name: node for node in every_node() if isinstance(node, Setting)}


@cache
def all_sections() -> Mapping[str, Section]:
    """Every section by dotted name, in the order of the models."""
    return {node.name: node for node in every_node() if isinstance(node, Section)}


def as_name(key: object) -> str:
    """A key of a YAML file as the name that it is; `on` is a truth value to YAML 1.1."""
    return "on" if key is True else str(key)


@cache
def every_node() -> tuple[Setting | Section, ...]:
    """Sections and settings in the order of the models, each section before its settings."""
    schema = Config.model_json_schema()
    return tuple(_below("", schema, schema.get("$defs", {}), Config().to_dict()))


def _below(
    prefix: str, schema: Mapping[str, Any], defs: Mapping[str, Any], defaults: Mapping[str, Json]
) -> Iterable[Setting | Section]:
    for key, prop in schema["properties"].items():
        name, inside = prefix + key, _section_of(prop, defs)
        if inside is None:
            yield Setting(
                name=name,
                expects=expectation(prop),
                default=defaults[key],
                text=prop.get("description", ""),
                mapping=any(option.get("type") == "object" for option in prop.get("anyOf", [prop])),
            )
        else:
            yield Section(name=name, text=inside.get("description", ""))
            default = defaults[key]
            assert isinstance(default, dict)
            yield from _below(f"{name}.", inside, defs, default)


def _section_of(prop: Mapping[str, Any], defs: Mapping[str, Any]) -> Mapping[str, Any] | None:
    reference = prop.get("$ref")
    return None if reference is None else defs[reference.rsplit("/", 1)[-1]]


def expectation(prop: Mapping[str, Any]) -> str:
    """A JSON schema in words.

    >>> expectation({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]})
    'a whole number of at least 1, or null'
    """
    if "anyOf" in prop:
        return ", or ".join(dict.fromkeys(expectation(option) for option in prop["anyOf"]))
    if "enum" in prop or "const" in prop:  # a choice of one is a constant
        return _either([str(value) for value in prop.get("enum", [prop.get("const")])])
    if "discriminator" in prop:
        tag = prop["discriminator"]
        return f"an object with a {tag['propertyName']}: {_either([*tag['mapping']])}"
    kind = prop.get("type")
    if kind in ("integer", "number"):
        return _number(prop)
    if kind == "array":
        return _list_of(prop)
    if kind == "object":
        return _object(prop)
    if kind == "string":
        return _text(prop)
    return {"boolean": "true or false", "null": "null", "None": "a value"}[str(kind)]


def _number(prop: Mapping[str, Any]) -> str:
    if prop.get("format") == SIZE_FORMAT:
        return f"a number of bytes{_bounds(prop)}, as 500MB, 2GiB or 500000000"
    what = "a whole number" if prop["type"] == "integer" else "a number"
    if "multipleOf" in prop:
        what = f"a multiple of {_figure(prop['multipleOf'])}"
    return what + _bounds(prop)


def _object(prop: Mapping[str, Any]) -> str:
    if "properties" in prop:
        return f"an object with {', '.join(prop.get('required', prop['properties']))}"
    return f"names, each with {expectation(prop['additionalProperties'])}"


def _text(prop: Mapping[str, Any]) -> str:
    if "examples" in prop:
        return f"text like {_either(prop['examples'])}"
    if prop.get("format") == "uuid":
        return "a UUID, as 6f1c2a34-8c1e-4b7e-9f0a-2d1b7f0c9e55"
    least, most = prop.get("minLength", 0), prop.get("maxLength")
    of = (
        ""
        if most is None
        else f" of {least} to {most} characters"
        if least
        else f" of at most {most} characters"
    )
    return f"text{of} that matches {prop['pattern']}" if "pattern" in prop else f"text{of}"


def _list_of(prop: Mapping[str, Any]) -> str:
    if "prefixItems" in prop:
        return f"a list of {len(prop['prefixItems'])}, each {expectation(prop['prefixItems'][0])}"
    item = prop["items"]
    if "$ref" in item:
        return "a list of objects, each with a name"
    if "discriminator" in item:
        return f"a list, each with a kind: {_either([*item['discriminator']['mapping']])}"
    of = f" of {prop['minItems']} to {prop['maxItems']}" if {"minItems", "maxItems"} <= prop.keys() else ""
    items = expectation(item)
    return "a list of text" if items == "text" else f"a list{of}, each {items}"


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _bounds(prop: Mapping[str, Any]) -> str:
    lowest, above = prop.get("minimum"), prop.get("exclusiveMinimum")
    highest, below = prop.get("maximum"), prop.get("exclusiveMaximum")
    if below is not None and prop["type"] == "integer":
        highest, below = below - 1, None
    if lowest is not None and highest is not None:
        return f" from {_figure(lowest)} to {_figure(highest)}"
    parts = (("at least", lowest), ("above", above), ("at most", highest), ("below", below))
    said = ", ".join(f"{word} {_figure(value)}" for word, value in parts if value is not None)
    return f" of {said}" if lowest is not None else f" {said}".rstrip()


def _figure(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` probably meant; None where nothing is close.

    >>> nearest("training.latent_cache_dirr", ["training.lr", "training.latent_cache_dir"])
    'training.latent_cache_dir'
    >>> nearest("training.task", ["training.tier", "data.task"])
    'data.task'
    """
    known = list(known)
    leaf = name.rsplit(".", 1)[-1]
    elsewhere = [other for other in known if other.rsplit(".", 1)[-1] == leaf]
    if elsewhere:
        return elsewhere[0]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if close:
        return close[0]
    leaves = {other.rsplit(".", 1)[-1]: other for other in reversed(known)}
    close = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.6)
    return leaves[close[0]] if close else None


def shown(value: object) -> str:
    """A value as it would be written in the file.

    >>> shown("abc"), shown(None), shown(0.5), shown([1, 2])
    ('"abc"', 'null', '0.5', '[1, 2]')
    """
    return json.dumps(value, default=str, ensure_ascii=False)
