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
    kind = prop.get("type")
    if kind in ("integer", "number"):
        return _number(prop)
    if kind == "array" and "prefixItems" in prop:
        return f"a list of {len(prop['prefixItems'])}, each {expectation(prop['prefixItems'][0])}"
    if kind == "array":
        return _list_of(prop["items"])
    if kind == "object":
        return f"names, each with {expectation(prop['additionalProperties'])}"
    if kind == "string" and "examples" in prop:
        return f"text like {_either(prop['examples'])}"
    return {"string": "text", "boolean": "true or false", "null": "null", "None": "a value"}[str(kind)]


def _number(prop: Mapping[str, Any]) -> str:
    if prop.get("format") == SIZE_FORMAT:
        return f"a number of bytes{_bounds(prop)}, as 500MB, 2GiB or 500000000"
    return ("a whole number" if prop["type"] == "integer" else "a number") + _bounds(prop)


def _list_of(item: Mapping[str, Any]) -> str:
    if "discriminator" in item:
        return f"a list, each with a kind: {_either([*item['discriminator']['mapping']])}"
    items = expectation(item)
    return "a list of text" if items == "text" else f"a list, each {items}"


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _bounds(prop: Mapping[str, Any]) -> str:
    if "exclusiveMinimum" in prop and "maximum" in prop:
        return f" above {prop['exclusiveMinimum']:g}, at most {prop['maximum']:g}"
    if "maximum" in prop:
        return f" from {prop['minimum']:g} to {prop['maximum']:g}"
    if "exclusiveMinimum" in prop:
        return f" above {prop['exclusiveMinimum']:g}"
    return f" of at least {prop['minimum']:g}" if "minimum" in prop else ""


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
