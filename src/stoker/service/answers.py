"""What goes wrong, as answers: `{"error": "one line", "fields": [...]}` and a status that fits."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from stoker.config.names import Schema, schema_of, without_null, wrong_fields
from stoker.errors import (
    ConfigError,
    Conflict,
    Degraded,
    NotFound,
    PathRefusedError,
    ReadOnlyError,
    ResourceError,
    SourceError,
    StalledError,
    StokerError,
)

STATUS: tuple[tuple[type[StokerError], int], ...] = (
    (PathRefusedError, 403),
    (NotFound, 404),
    (Conflict, 409),
    (Degraded, 503),
    (StalledError, 504),
    (ResourceError, 507),
    (ReadOnlyError, 507),
    (ConfigError, 422),
    (SourceError, 422),
)
"""Status by class, the first that fits; 422 for every other error raised on purpose."""
EVERYWHERE = (400, 401, 403, 408, 413, 422, 431, 503, 504)
"""What every route may answer: the guard's refusals, a wrong request, a database that does not answer."""
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class FieldFault(BaseModel):
    """What is wrong with one field of a request."""

    path: str
    problem: str


class Fault(BaseModel):
    """Why a request was not done."""

    error: str
    fields: list[FieldFault] = []


def faults(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For the OpenAPI: these statuses and those that every route may answer."""
    return {status: {"model": Fault} for status in sorted({*EVERYWHERE, *statuses})}


def as_json(body: BaseModel) -> Response:
    """An answer to a read that comes often: written where it was made, and not checked once more."""
    return Response(body.model_dump_json(), media_type="application/json")


def install(app: FastAPI) -> None:
    """Let `app` answer in this form whatever happens."""
    app.add_exception_handler(StokerError, _of_ours)
    app.add_exception_handler(RequestValidationError, _of_fields)
    app.add_exception_handler(HTTPException, _of_routing)


def status_of(error: Exception) -> int:
    """The status that fits an error raised on purpose."""
    return next((status for kind, status in STATUS if isinstance(error, kind)), 422)


def _of_ours(_request: Request, error: Exception) -> Response:
    status = status_of(error)
    wait = {"Retry-After": "2"} if status in (503, 504) else None
    return JSONResponse({"error": str(error), "fields": []}, status, headers=wait)


def _of_fields(request: Request, error: Exception) -> Response:
    errors = error.errors() if isinstance(error, RequestValidationError) else []
    found = [
        FieldFault(path=path.removeprefix("body").removeprefix("."), problem=problem)
        for path, problem in wrong_fields(errors, _schema_of(request))
    ]
    said = "; ".join(f"{fault.path or 'the body'}: {fault.problem}" for fault in found[:3])
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    body = Fault(error=f"the request is refused: {said}{more}", fields=found[:100])
    return JSONResponse(body.model_dump(), 422)


def _schema_of(request: Request) -> Schema:
    """The schema of all that the route of a request takes: body, query, path and headers."""
    route: APIRoute = request.scope["route"]
    taken = route.dependant
    parts = {"path": taken.path_params, "query": taken.query_params, "header": taken.header_params}
    places: dict[str, Schema] = {
        place: {"properties": {one.alias: without_null(_schema_of_field(one)) for one in fields}}
        for place, fields in parts.items()
    }
    if route.body_field is not None:
        places["body"] = _schema_of_field(route.body_field)
    return {"properties": places}


def _schema_of_field(field: Any) -> Schema:
    return schema_of(Annotated[field.field_info.annotation, field.field_info])


def _of_routing(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(getattr(error, "headers", None) or {})
    if "Allow" in headers:  # each method is a route of its own, and the first one named its own alone
        headers["Allow"] = ", ".join(_allowed(request))
    said = {404: "there is nothing at this address", 405: "this address does not take that method"}
    detail = said.get(status) or str(getattr(error, "detail", error))
    return JSONResponse({"error": detail, "fields": []}, status, headers=headers)


def _allowed(request: Request) -> list[str]:
    """The methods that the address of a request takes."""
    routes, scope = request.app.routes, request.scope
    return [
        method
        for method in METHODS
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in routes)
    ]
