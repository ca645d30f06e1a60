"""What is wrong with fields that pydantic refused, in the words of `names`: the value, what is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic import TypeAdapter

from stoker.config.names import expectation, nearest, shown

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


def wrong_fields(errors: Sequence[Any], schema: Schema) -> list[tuple[str, str]]:
    """Return of each wrong field its path and one sentence or two about it.

    Values of unknown fields, URLs, and long texts are not repeated: they may be secret, or huge.

    Args:
        errors: Of a `ValidationError`, see its `errors()`.
        schema: Of what was validated, see `schema_of`.
    """
    found: dict[str, str] = {}
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


def _problem(error: Mapping[str, Any], path: Sequence[str], parent: Schema, schema: Schema) -> str:
    kind = error["type"]
    if kind == "value_error":  # raised by a validator of ours
        return str(error["ctx"]["error"])
    if kind == "extra_forbidden":
        return f"no field has this name{_meant(path[-1], [*parent.get('properties', {})])}"
    expected = f"Expected {expectation(schema)}"
    if kind in ("missing", "union_tag_not_found"):
        return f"it is missing. {expected}"
    value = error["input"][path[-1]] if kind == "union_tag_invalid" else error["input"]
    choices = _choices(schema)
    near = nearest(value, choices) if isinstance(value, str) else None
    return f"{_shown(value)} is given. {expected}{f' (did you mean {near}?)' if near else ''}"


def _find(schema: Schema, loc: Sequence[int | str]) -> tuple[list[str], Schema, Schema]:
    """The path of a field as its sender knows it, the schema of what it is in, and its own."""
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
