"""The settings by dotted name: which there are, what each expects, and which one a misspelt name meant."""

from __future__ import annotations

import ast
import difflib
import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import yaml
from pydantic import TypeAdapter

from stoker.config.models import Config
from stoker.config.sections import SIZE_FORMAT
from stoker.errors import Argument, Problem, StokerError
from stoker.schema import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting, as documented and as messages describe it."""

    name: str
    expects: str
    """The values it takes, in words."""
    default: Json
    text: str
    """Its meaning."""
    mapping: bool
    """True if its value is a mapping with names of the user's choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingGroup:
    """A group of settings."""

    name: str
    text: str


@cache
def all_settings() -> Mapping[str, Setting]:
    """Return every setting by dotted name, in the order of the models."""
    return {node.name: node for node in every_node() if isinstance(node, Setting)}


@cache
def all_sections() -> Mapping[str, SettingGroup]:
    """Return every section by dotted name, in the order of the models."""
    return {node.name: node for node in every_node() if isinstance(node, SettingGroup)}


def as_name(key: object) -> str:
    """Return a key of a YAML file as the name that it is; `on` is a truth value to YAML 1.1."""
    return "on" if key is True else str(key)


@cache
def every_node() -> tuple[Setting | SettingGroup, ...]:
    """Return sections and settings in the order of the models, each section before its settings."""
    schema = Config.model_json_schema()
    return tuple(_below("", schema, schema.get("$defs", {}), Config().to_dict()))


def _below(
    prefix: str, schema: Mapping[str, Any], defs: Mapping[str, Any], defaults: Mapping[str, Json]
) -> Iterable[Setting | SettingGroup]:
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
            yield SettingGroup(name=name, text=inside.get("description", ""))
            default = defaults[key]
            assert isinstance(default, dict)
            yield from _below(f"{name}.", inside, defs, default)


def _section_of(prop: Mapping[str, Any], defs: Mapping[str, Any]) -> Mapping[str, Any] | None:
    reference = prop.get("$ref")
    return None if reference is None else defs[reference.rsplit("/", 1)[-1]]


def expectation(prop: Mapping[str, Any]) -> str:
    """Return a JSON schema in words.

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


RENAMED_SECTIONS = {"precompute.deadlines": "precompute.timeouts"}
"""Sections that had another name, which spelling alone does not find."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` probably meant; None where nothing is close.

    >>> nearest("training.latent_cache_dirr", ["training.lr", "training.latent_cache_dir"])
    'training.latent_cache_dir'
    >>> nearest("training.task", ["training.tier", "data.task"])
    'data.task'
    """
    known = list(known)
    for old, new in RENAMED_SECTIONS.items():
        name = name.replace(old, new)
    if name in known:
        return name
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
    """Return a value as it would be written in the file.

    >>> shown("abc"), shown(None), shown(0.5), shown([1, 2])
    ('"abc"', 'null', '0.5', '[1, 2]')
    """
    return json.dumps(value, default=str, ensure_ascii=False)


# ----------------------------------------------------------------------------------------------------------
# What is wrong with fields that pydantic refused, in the words of `names`: the value, what is allowed.


Schema = Mapping[str, Any]
LONGEST_SHOWN = 60
"""Characters of a value that a message repeats; a longer one is told by its size."""
MOST_NAMES = 12
"""Names that a message lists where none is near."""


def schema_of(annotation: Any) -> Schema:
    """Return the JSON schema of a type, each reference replaced by what it stands for."""
    schema = TypeAdapter[Any](annotation).json_schema()
    return _resolved(schema, schema.get("$defs", {}))


def without_null(schema: Schema) -> Schema:
    """Return the schema of a value that may also be null, for where null cannot be written."""
    options = [one for one in schema.get("anyOf", ()) if one.get("type") != "null"]
    return options[0] if len(options) == 1 else schema


def wrong_fields(errors: Sequence[Any], schema: Schema) -> list[tuple[str, Problem]]:
    """Return of each wrong field its path and what is wrong with it.

    Values of unknown fields, URLs, and long texts are not repeated: they may be secret, or huge.

    Args:
        errors: Of a `ValidationError`, see its `errors()`.
        schema: Of what was validated, see `schema_of`.
    """
    found: dict[str, Problem] = {}
    places = [error["loc"] for error in errors]
    for error in errors:
        loc = error["loc"]
        if error["type"] == "too_short" and any(len(p) > len(loc) and p[: len(loc)] == loc for p in places):
            continue  # wrong items are not counted, and have lines of their own
        path, parent, inside = _find(schema, loc)
        if error["type"].startswith("union_tag"):
            parent, name = inside, inside["discriminator"]["propertyName"]
            path.append(name)
            inside = {"enum": [*inside["discriminator"]["mapping"]]}
        found.setdefault(".".join(path), _problem(error, path, parent, inside))
    return list(found.items())


def _problem(error: Mapping[str, Any], path: Sequence[str], parent: Schema, schema: Schema) -> Problem:
    kind = error["type"]
    if kind == "value_error":  # raised by a validator of ours
        cause = error["ctx"]["error"]
        return Problem(cause.fact, cause.hint) if isinstance(cause, StokerError) else Problem(str(cause))
    if kind == "extra_forbidden":
        return Problem(f"no field has this name{_meant(path[-1], [*parent.get('properties', {})])}")
    expected = f"Expected {expectation(schema)}"
    if kind in ("missing", "union_tag_not_found"):
        return Problem("it is missing", expected)
    value = error["input"][path[-1]] if kind == "union_tag_invalid" else error["input"]
    choices = _choices(schema)
    near = nearest(value, choices) if isinstance(value, str) else None
    return Problem(f"{_shown(value)} is given", f"{expected}{f' (did you mean {near}?)' if near else ''}")


def _find(schema: Schema, loc: Sequence[int | str]) -> tuple[list[str], Schema, Schema]:
    """Return the path of a field as its sender knows it, the schema of what it is in, and its own."""
    path: list[str] = []
    parent: Schema = {}
    for part in loc:
        schema = without_null(schema)
        if part in schema.get("discriminator", {}).get("mapping", {}):
            schema = schema["discriminator"]["mapping"][part]  # which kind it is, not a part of the path
            continue
        if isinstance(part, str) and _is_union_of_values(schema):
            continue  # which member refused it; the value may be any of them
        path.append(str(part))
        parent, schema = schema, _inside(schema, part)
    return path, parent, schema


def _inside(schema: Schema, part: int | str) -> Schema:
    if isinstance(part, int):
        return next((one["items"] for one in (schema, *schema.get("anyOf", ())) if "items" in one), {})
    more = schema.get("additionalProperties")
    return schema.get("properties", {}).get(part, more if isinstance(more, Mapping) else {})


def _is_union_of_values(schema: Schema) -> bool:
    options: Sequence[Schema] = schema.get("anyOf", ())
    return bool(options) and not any("properties" in one for one in options)


def _choices(schema: Schema) -> list[str]:
    return [str(value) for value in without_null(schema).get("enum", ())]


def _meant(name: str, known: Sequence[str]) -> str:
    near = nearest(name, known)
    if near:
        return f" (did you mean {near}?)"
    return f" (there are: {', '.join(known)})" if len(known) <= MOST_NAMES else ""


def _shown(value: object) -> str:
    if isinstance(value, bytes):
        return "something that is not JSON (is Content-Type application/json?)"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return f"a list of {len(cast('Sequence[object]', value))}" if value else "an empty list"
    if isinstance(value, str) and "://" in value:
        return "a URL"
    text = shown(value)
    return text if len(text) <= LONGEST_SHOWN else f"a value of {len(text):,} characters"


def _resolved(node: Any, defs: Schema) -> Any:
    if isinstance(node, list):
        return [_resolved(one, defs) for one in cast("list[Any]", node)]
    if not isinstance(node, dict):
        return node
    known = cast("dict[str, Any]", node)
    if "$ref" in known:
        return {**_resolved(defs[known["$ref"].rsplit("/", 1)[-1]], defs), **_own(known)}
    if "discriminator" in known:
        mapping = known["discriminator"]["mapping"]
        kinds = {kind: _resolved({"$ref": reference}, defs) for kind, reference in mapping.items()}
        return {**_own(known), "discriminator": {**known["discriminator"], "mapping": kinds}}
    return {key: _resolved(value, defs) for key, value in known.items() if key != "$defs"}


def _own(node: Schema) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key not in ("$ref", "$defs", "oneOf")}


# ----------------------------------------------------------------------------------------------------------
# Show the arguments that an error names as settings.
#
# Errors of the library name an argument of a call, `preset='well'`. On the command line that argument is
# the setting `data.preset=well`. An error knows the arguments that it names (`StokerError.arguments`), and
# nothing else of its text is changed. An argument is the setting whose last word it is, if there is only one.


OTHER_NAMES: Mapping[str, str] = {
    "patch": "encoder.patch_size",
    "stride": "training.time_stride",
    "horizon": "training.rollout_horizon",
    "dtype": "training.latent_cache_dtype",
    "cache_dir": "training.latent_cache_dir",
    "wait": "precompute.wait",
}
"""Arguments whose setting has another last word, or one that several settings have."""


def in_settings(error: StokerError) -> str:
    """Return the message of `error`, the arguments in it written as settings; other text is kept.

    >>> from stoker.errors import ConfigError, arg
    >>> in_settings(ConfigError(f"preset=x.h5 has no layout. Use {arg('preset', 'well')}"))
    'preset=x.h5 has no layout. Use data.preset=well'
    >>> in_settings(ConfigError(f"choose a smaller {arg('horizon')}, or {arg('patch', (1, 4))}"))
    "choose a smaller training.rollout_horizon, or 'encoder.patch_size=[1, 4]'"
    """
    return "".join(part if isinstance(part, str) else _as_setting(part) for part in error.parts)


def _as_setting(named: Argument) -> str:
    name, given = named.name, named.value
    setting = name if name.startswith("--") or "." in name else setting_of().get(name)
    if setting is None:
        return named.python
    if given is None or given == "...":
        return setting if given is None else f"{setting}={given}"
    try:
        value: Any = ast.literal_eval(given)
    except (ValueError, SyntaxError):
        value = given
    return shlex.quote(f"{setting}={_as_yaml(value)}")


def _as_yaml(value: object) -> str:
    if isinstance(value, str):
        return value
    plain = list(value) if isinstance(value, tuple) else value  # pyright: ignore[reportUnknownArgumentType]
    text = yaml.dump(plain, Dumper=_DoubleQuotes, default_flow_style=True, width=1_000_000)
    return text.removesuffix("...\n").strip()


class _DoubleQuotes(yaml.SafeDumper):
    """Quotes with `"` alone: the shell is given the setting in `'`, and every `'` in it would end that."""

    def choose_scalar_style(self) -> str:
        style: str = cast(Any, super()).choose_scalar_style()
        return '"' if style == "'" else style


@cache
def setting_of() -> Mapping[str, str]:
    """Return the setting of each argument that has one."""
    leaves = {name: name.rpartition(".")[2] for name in all_settings()}
    count = Counter(leaves.values())
    return {leaf: name for name, leaf in leaves.items() if count[leaf] == 1} | dict(OTHER_NAMES)
