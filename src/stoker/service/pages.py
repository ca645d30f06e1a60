"""The pages: logging in and out, and the templates that every page is made of.

A template knows `version`. What it shows is escaped; scripts and styles come from `static/`, since the policy
sent with each answer allows no others.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any, Literal, TypedDict
from urllib.parse import parse_qs

from fastapi import APIRouter, Request
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

import stoker
from stoker.service.auth import SESSION_S
from stoker.service.guard import Scope
from stoker.service.services import Here, Services, services_of
from stoker.service.views import FILTERS

FOLDER = Path(__file__).parent
router = APIRouter(include_in_schema=False)
_TEMPLATES = Environment(
    loader=FileSystemLoader(FOLDER / "templates"), autoescape=True, undefined=StrictUndefined
)
_TEMPLATES.filters |= FILTERS
_OURS = re.compile(r"/(?![/\\])[^\s\\]*")
"""A path of this service: what a browser would read as another site does not match."""


class _Flags(TypedDict):
    path: str
    httponly: bool
    samesite: Literal["strict"]
    secure: bool


def static_files() -> StaticFiles:
    """What templates refer to under `/static`."""
    return StaticFiles(directory=FOLDER / "static")


def page(request: Request, name: str, status: int = 200, **context: Any) -> HTMLResponse:
    """A page made of a template."""
    text = _TEMPLATES.get_template(name).render(
        version=stoker.__version__,
        path=request.url.path,
        degraded=services_of(request).degraded,
        **context,
    )
    return HTMLResponse(text, status)


def policy() -> str:
    """The Content-Security-Policy of every answer; the log-in page has the one style that is not a file.

    It is the only page that is shown without a session, and files need one.
    """
    style = re.search(r"<style>(.*?)</style>", (FOLDER / "templates/login.html").read_text(), re.DOTALL)
    text = "" if style is None else style[1]
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return (
        f"default-src 'self'; style-src 'self' 'sha256-{digest}'; img-src 'self' data:; object-src 'none'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )


def log_in_first(_scope: Scope, path: str) -> Response:
    """What a browser without a session gets for any page: the form, and from there the page it wanted."""
    return _form(path, status=401)


@router.get("/login")
def get_login(request: Request, here: Here, code: str = "", next: str = "/") -> Response:
    """The form; with a code in the address, the session at once and an address without it."""
    if not code:
        return _form(next)
    return _log_in(request, here, code, next)


@router.post("/login")
async def post_login(request: Request, here: Here) -> Response:
    """Trade a code, or the token, for a session."""
    try:
        fields = parse_qs((await request.body()).decode("utf-8", "replace"), max_num_fields=10)
    except ValueError:  # more fields than the form has: not sent by the form, so it holds no secret
        fields = {}
    secret, wanted = (fields.get(name, [""])[0] for name in ("secret", "next"))
    return _log_in(request, here, secret.strip(), wanted)


@router.post("/logout")
def post_logout(request: Request, here: Here) -> Response:
    """End the session."""
    if request.state.session is not None:
        here.auth.end(request.state.session)
    response = RedirectResponse("/login", 303)
    response.delete_cookie(here.auth.cookie, **_flags(request, here))
    return response


def _log_in(request: Request, here: Services, secret: str, wanted: str) -> Response:
    cookie = here.auth.log_in(secret)
    if cookie is None:
        return _form(wanted, "That is no code of this service, or not any more.", status=401)
    response = RedirectResponse(wanted if _OURS.fullmatch(wanted) else "/", 303)
    response.set_cookie(here.auth.cookie, cookie, max_age=int(SESSION_S), **_flags(request, here))
    return response


def _flags(request: Request, here: Services) -> _Flags:
    """Of the session's cookie: not for scripts nor other sites and, where there is TLS, for that alone."""
    secure = here.secure or request.url.scheme == "https"
    return {"path": "/", "httponly": True, "samesite": "strict", "secure": secure}


def _form(wanted: str, problem: str = "", status: int = 200) -> HTMLResponse:
    text = _TEMPLATES.get_template("login.html").render(wanted=wanted, problem=problem)
    return HTMLResponse(text, status)
