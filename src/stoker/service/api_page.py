"""The page that documents the API, made from the OpenAPI document of the service itself."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from stoker.service.pages import PageRoute, page
from stoker.service.services import ServicesDep

api_page_router = APIRouter(include_in_schema=False, route_class=PageRoute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of an operation."""

    name: str
    place: str
    """`path`, `query` or `header`."""
    type: str
    """With its limits, as text."""
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation, as the page shows it."""

    id: str
    method: str
    path: str
    description: tuple[str, ...]
    """Paragraphs."""
    parameters: tuple[Parameter, ...]
    bodies: tuple[str, ...]
    """Examples of a request."""
    status: str
    """Of success."""
    answers: tuple[str, ...]
    """Examples of that answer."""
    errors: tuple[str, ...]
    """Other statuses."""
    curl: str


@api_page_router.get("/docs")
def show_api(request: Request, services: ServicesDep) -> Response:
    """Return all operations of the API, by tag."""
    document = request.app.openapi()
    scheme = "https" if services.secure else request.url.scheme
    return page(
        request, "api.html", title="API", groups=operations_by_tag(document), openapi=request.app.openapi_url,
        address=f"{scheme}://{request.headers['host']}", token_file=str(services.folder.token),
    )  # fmt: skip


def operations_by_tag(document: Mapping[str, Any]) -> dict[str, list[Operation]]:
    """Return the operations of an OpenAPI document by their first tag, in the document's order."""
    found: dict[str, list[Operation]] = {}
    schemas = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for method, spec in methods.items():
            found.setdefault(spec["tags"][0], []).append(_operation(method.upper(), path, spec, schemas))
    return found


def _operation(method: str, path: str, spec: Mapping[str, Any], schemas: Mapping[str, Any]) -> Operation:
    bodies = _examples(spec.get("requestBody", {}), schemas)
    status = min(spec["responses"])
    return Operation(
        id=spec["operationId"],
        method=method,
        path=path,
        description=tuple(" ".join(part.split()) for part in spec["description"].split("\n\n")),
        parameters=tuple(
            Parameter(
                name=one["name"],
                place=one["in"],
                type=type_in_words(one["schema"], schemas),
                description=one.get("description", ""),
            )
            for one in spec.get("parameters", ())
        ),
        bodies=bodies,
        status=status,
        answers=_examples(spec["responses"][status], schemas),
        errors=tuple(one for one in sorted(spec["responses"]) if one != status),
        curl=_curl(method, path, bodies),
    )


def _examples(content: Mapping[str, Any], schemas: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the examples of a body or an answer as text."""
    found: list[Any] = []
    for media in content.get("content", {}).values():
        found += [one["value"] for one in media.get("examples", {}).values()]
        found += [media["example"]] if "example" in media else []
        found += _resolved(media.get("schema", {}), schemas).get("examples", ())
    return tuple(one if isinstance(one, str) else json.dumps(one, indent=1) for one in found)


def _resolved(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    return schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def type_in_words(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """Return the type of a parameter with its limits and default.

    >>> type_in_words({"type": "integer", "minimum": 1, "maximum": 500, "default": 50}, {})
    'integer, 1 to 500, default 50'
    """
    kinds = [_resolved(one, schemas) for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    one = kinds[0]
    low, high, default = one.get("minimum"), one.get("maximum"), schema.get("default")
    words = [" or ".join(one.get("enum", ())) or str(one.get("type", "any"))]
    if low is not None:
        words.append(f"{low:,} or more" if high is None else f"{low:,} to {high:,}")
    if default is not None:
        words.append(f"default {json.dumps(default)}")
    return ", ".join(words)


def _curl(method: str, path: str, bodies: tuple[str, ...]) -> str:
    """Return a command line with names in capitals in place of the parameters of the path."""
    parts = path.split("/")
    address = "/".join(part.strip("{}").upper() if part.startswith("{") else part for part in parts)
    words = ["curl", '-H "Authorization: Bearer $TOKEN"', "" if method == "GET" else f"-X {method}"]
    if bodies:
        body = json.dumps(json.loads(bodies[0]))
        words += ["-H 'Content-Type: application/json'", f"-d {shlex.quote(body)}"]
    return " ".join(word for word in [*words, f'"$STOKER_SERVER{address}"'] if word)
