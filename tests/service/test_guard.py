"""Nothing is answered that the guard does not allow, whatever the route and the method."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Mount

from stoker.errors import ResourceError
from stoker.extras.compat.addresses import JOBS as JOBS_EARLIER
from stoker.extras.compat.addresses import current_path
from stoker.service import pages, security
from stoker.service.security import PUBLIC, RequestLimits
from stoker.service.server import create_app
from stoker.service.services import Services
from tests.service.running import HOST, Answer, ask

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND")
JOBS = "/api/v1/training/jobs"


def paths_of(routes: Any, prefix: str = "") -> Iterator[str]:
    """Every address of an application, with something in place of its parameters."""
    for route in routes:
        if isinstance(route, Mount):
            yield f"{prefix}{route.path}/stoker.css"
        elif (inner := getattr(route, "original_router", None)) is not None:
            yield from paths_of(inner.routes, prefix + route.include_context.prefix)
        else:
            path = "/".join("x" if part.startswith("{") else part for part in route.path.split("/"))
            assert "WebSocket" not in type(route).__name__, "the guard serves none"
            yield prefix + path


def test_every_route_is_listed(app: Any) -> None:
    """The tests below would say nothing of routes that this listing misses."""
    found = {*paths_of(app.routes)}

    described = {
        "/".join("x" if p.startswith("{") else p for p in path.split("/")) for path in app.openapi()["paths"]
    }
    assert described <= found
    assert {"/login", "/logout", "/static/stoker.css", "/api/v1/training/openapi.json"} <= found
    ours = {path for path in found if path.startswith("/api/v1/training/")}
    assert ours
    for path in ours:
        for method in ("GET", "POST", "DELETE"):
            assert current_path(method, path.replace("/api/v1/", "/api/")) == current_path(method, path)


def everything(app: Any) -> Iterator[tuple[str, str]]:
    ours = [*paths_of(app.routes), "/", "/nothing/here"]
    earlier = [path.replace("/api/v1/", "/api/") for path in ours if path.startswith("/api/v1/training/")]
    for path in (*ours, *earlier, JOBS_EARLIER, f"{JOBS_EARLIER}/x/cancel"):
        for method in METHODS:
            yield method, path


def test_no_route_answers_a_stranger_another_site_or_another_name(here: Services, token: Any) -> None:
    app = create_app(here)
    cookie = {"cookie": f"{here.auth.cookie}={here.auth.log_in(here.auth.new_code())}"}
    tried = 0
    for method, path in everything(app):
        foreign = {
            "no token": (401, {}),
            "a wrong token": (401, {"authorization": "Bearer " + "x" * 43}),
            "a foreign host": (403, {**token, "host": "evil.example"}),
            "a foreign origin": (403, {**token, "origin": "http://evil.example"}),
            "another port": (403, {**cookie, "origin": "http://127.0.0.1:9999"}),
            "a page without origin": (403, {**cookie, "origin": "null"}),
            "another site": (403, {**token, "sec-fetch-site": "cross-site"}),
            "a site beside ours": (403, {**cookie, "sec-fetch-site": "same-site"}),
        }
        if method not in ("GET", "HEAD", "OPTIONS"):
            foreign["a session without origin"] = (403, cookie)
            typed = {**cookie, "sec-fetch-site": "none"}
            foreign["a session without origin, asked by hand"] = (403, typed)
        for what, (status, headers) in foreign.items():
            if (method, path) in PUBLIC and what in (
                "no token",
                "a wrong token",
                "a session without origin",
                "a session without origin, asked by hand",
            ):
                continue
            assert ask(app, method, path, headers).status == status, f"{method} {path} with {what}"
            tried += 1

    assert tried > 2000
    assert here.jobs.count() == 0


def test_a_session_changes_things_from_our_own_page_and_without_a_wrong_token(
    app: Any, here: Services
) -> None:
    asked = {
        "cookie": f"{here.auth.cookie}={here.auth.log_in(here.auth.new_code())}",
        "content-type": "application/json",
    }
    ours = {"origin": "http://127.0.0.1:8765"}
    pages = {
        "ours": (422, ours),
        "ours, by its other header": (422, {"sec-fetch-site": "same-origin"}),
        "of another site": (403, {"origin": "http://evil.example"}),
        "ours and of another site": (403, {**ours, "sec-fetch-site": "cross-site"}),
        "not named": (403, {}),
        "named by an empty header": (403, {"origin": ""}),
    }

    for what, (status, headers) in pages.items():
        assert ask(app, "POST", JOBS, asked | headers, b"{}").status == status, what
        assert ask(app, "DELETE", f"{JOBS}/x", asked | headers).status == (404 if status == 422 else 403), (
            what
        )
    assert ask(app, "GET", JOBS, asked).status == 200
    wrong = ask(app, "GET", JOBS, asked | {"authorization": "Bearer " + "x" * 43})
    assert wrong.status == 401, "whoever sends a token means it"
    token = {"authorization": "Bearer " + here.folder.token.read_text().strip()}
    assert ask(app, "POST", JOBS, asked | token, b"{}").status == 422, "the token needs no page"


@pytest.mark.parametrize(
    "host", ["", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example:8765", "127.0.0.1:8765@x",
             "[::1", "localhost:8765:1", "127.0.0.2:8765", "0177.0.0.1", "localhost\t", "8.8.8.8"]
)  # fmt: skip
def test_a_name_that_is_not_ours_is_refused(app: Any, token: Any, host: str) -> None:
    assert ask(app, "GET", JOBS, {**token, "host": host}).status == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8765", "[::1]:8765"])
def test_names_of_the_loopback_are_ours_at_any_port(app: Any, token: Any, host: str) -> None:
    """A tunnel may lead to us from another port."""
    assert ask(app, "GET", JOBS, {**token, "host": host, "origin": f"http://{host.lower()}"}).status == 200


def test_the_address_that_a_request_came_to_is_ours(app: Any, token: Any) -> None:
    """On another address than the loopback; a name is not, whatever it resolves to."""
    asked = {
        host: ask(app, "GET", JOBS, {**token, "host": host}, server=server).status
        for host, server in (
            ("10.1.2.3:8765", "10.1.2.3"),
            ("10.1.2.4:8765", "10.1.2.3"),
            ("[fd00::1]:8765", "fd00::1"),
            ("evil.example:8765", "evil.example"),
        )
    }

    assert [*asked.values()] == [200, 403, 200, 403]


@pytest.mark.parametrize("name", ["host", "origin", "authorization", "cookie", "content-length"])
def test_a_header_that_decides_comes_once(app: Any, token: Any, name: str) -> None:
    twice = [(name, "http://127.0.0.1:8765" if name == "origin" else "0")] * 2

    assert ask(app, "GET", JOBS, [*(p for p in token.items() if p[0] != name), *twice]).status == 400


def test_who_has_no_token_is_shown_the_login_however_often_others_ask(here: Services) -> None:
    """Neither the tabs of a session that has ended nor visitors without a cookie guess at a token."""
    page, limit = {"accept": "text/html"}, 60
    ended = here.auth.log_in(here.auth.new_code())
    session = here.auth.session(str(ended))
    assert session is not None
    here.auth.end(session)
    old = {"cookie": f"{here.auth.cookie}={ended}"}
    app = create_app(here)

    assert {ask(app, "GET", "/api/v1/training/events", old).status for _ in range(2 * limit)} == {401}
    assert {ask(app, "GET", JOBS).status for _ in range(2 * limit)} == {401}
    guesses = ({"authorization": f"Bearer {n}"} for n in range(2 * limit))
    assert {ask(app, "GET", JOBS, guess).status for guess in guesses} == {401}
    assert "token" in ask(app, "GET", JOBS).json()["error"], "a program gets no page"
    assert ask(app, "GET", JOBS).headers["www-authenticate"] == "Bearer"
    for headers in (page, page | old):
        answer = ask(app, "GET", "/", headers)
        assert answer.status == 401
        assert b"Code or token" in answer.body
    told = ask(app, "GET", "/", page | {"authorization": "Bearer x"})
    assert told.status == 401
    assert b"Code or token" in told.body, "a page in any case"


def test_every_answer_tells_the_browser_to_run_only_what_is_ours(here: Services, token: Any) -> None:
    app = create_app(here)

    answers = [
        ask(app, "GET", "/health"),
        ask(app, "GET", JOBS),
        ask(app, "GET", "/", {"accept": "text/html"}),
        ask(app, "GET", JOBS, token),
        ask(app, "GET", "/nothing", token),
        ask(app, "PUT", JOBS, token),
        ask(app, "POST", JOBS, token, b"{"),
        ask(app, "GET", "/static/stoker.css", token),
    ]

    assert [answer.status for answer in answers] == [200, 401, 401, 200, 404, 405, 422, 200]
    for answer in answers:
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in answer.headers


def test_a_browser_keeps_files_and_asks_whether_they_are_current(here: Services, token: Any) -> None:
    app = create_app(here)
    vendor = next((Path(pages.__file__).parent / "static/vendor").glob("htmx*.js")).name

    script = ask(app, "GET", "/static/stoker.js", token)
    again = ask(app, "GET", "/static/stoker.js", {**token, "if-none-match": script.headers["etag"]})
    fixed = ask(app, "GET", f"/static/vendor/{vendor}", token)

    assert (again.status, again.body) == (304, b"")
    for answer in (script, again):
        assert answer.headers["cache-control"] == "private, no-cache"
        assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert "immutable" in fixed.headers["cache-control"]
    assert "private" in fixed.headers["cache-control"]
    for path in (JOBS, "/static/nothing.js", "/machine"):
        assert ask(app, "GET", path, token).headers["cache-control"] == "no-store"
    old = {"if-none-match": script.headers["etag"]}
    assert ask(app, "GET", "/static/stoker.js", old).status == 401, "without a session nothing is said"


def post(app: Any, token: Any, body: bytes | list[bytes], **headers: str) -> Answer:
    return ask(app, "POST", JOBS, {**token, "content-type": "application/json", **headers}, body)


BAD_BODIES = {
    "deep": (b"[" * 33 + b"]" * 33, "deeper than 32"),
    "very deep": (b'{"a":' * 100_000, "deeper than 32"),
    "unclosed": (b'{"job_name": "', "not JSON"),
    "NaN": (b'{"job_name": NaN}', "NaN"),
    "infinity": (b'{"config": {"learning_rate": 1e999}}', "too large"),
    "twice": (b'{"job_name": "a", "job_name": "b"}', "twice"),
    "long string": (json.dumps({"job_name": "x" * 5000}).encode(), "5,000 characters"),
    "long name": (json.dumps({"x" * 5000: 1}).encode(), "5,000 characters"),
    "NUL": (b'{"job_name": "a\\u0000"}', "NUL"),
    "half a pair": (b'{"job_name": "\\ud800"}', "surrogate"),
    "huge number": (b'{"epochs": ' + b"9" * 5000 + b"}", "not JSON"),
    "not text": (b"\xff\xfe\x00", "not JSON"),
    "many members": (json.dumps({str(n): n for n in range(60_000)}).encode(), "more than 5,000 values"),
}


@pytest.mark.parametrize(("body", "said"), BAD_BODIES.values(), ids=BAD_BODIES)
def test_a_body_that_nothing_should_have_to_read_is_refused(
    app: Any, token: Any, body: bytes, said: str
) -> None:
    answer = post(app, token, body)

    assert answer.status == 422
    assert said in answer.json()["error"]
    assert len(answer.json()["error"]) < 500


def test_a_body_that_does_not_say_what_it_is_is_looked_at_as_well(app: Any, token: Any) -> None:
    answer = ask(app, "POST", JOBS, token, b"[" * 33 + b"]" * 33)

    assert (answer.status, "deeper than 32" in answer.json()["error"]) == (422, True)


def test_a_large_body_is_refused_whether_it_says_so_or_not(app: Any, token: Any) -> None:
    piece = b" " * (1 << 18)

    assert post(app, token, b"", **{"content-length": str(2 << 20)}).status == 413
    assert post(app, token, [piece] * 5).status == 413
    assert post(app, token, b"", **{"content-length": "9" * 5000}).status == 400
    assert post(app, token, b"", **{"content-length": "-1"}).status == 400
    assert ask(app, "POST", "/login", {}, b"secret=" + b"x" * 9000).status == 413, "strangers may send less"


def test_large_headers_and_control_characters_are_refused(app: Any, token: Any) -> None:
    assert ask(app, "GET", JOBS, {**token, "x-large": "x" * 17_000}).status == 431
    assert ask(app, "GET", f"{JOBS}/a\x00b", token).status == 400
    assert ask(app, "GET", f"{JOBS}?status=%00", token).status == 400


def test_a_refusal_is_a_page_for_a_browser_and_json_for_a_program(app: Any, token: Any) -> None:
    large = b"x" * 3_000_000
    page = {"accept": "text/html"}
    for method, path, headers, body, status in (
        ("GET", "/", {"host": "evil.example"}, b"", 403),
        ("POST", "/logout", {"origin": "http://evil.example"}, b"", 403),
        ("POST", "/login", {}, large, 413),
        ("GET", "/jobs/%00", token, b"", 400),
        ("POST", "/logout", {}, b"", 401),
    ):
        told, shown = (ask(app, method, path.replace("%00", "\0"), {**headers, **more}, body)
                       for more in ({}, page))  # fmt: skip

        assert (told.status, shown.status) == (status, status)
        assert told.json()["fact"]
        assert shown.headers["content-type"].startswith("text/html")
        assert shown.headers["x-frame-options"] == "DENY"
        if status == 401:
            assert 'name="next" value="/"' in shown.body.decode()
        else:
            assert html.escape(told.json()["fact"], quote=False) in shown.body.decode()


def test_a_logout_that_cannot_be_stored_ends_the_session_and_says_so(
    here: Services, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise ResourceError("no space left on the disk", hint="Free space")

    monkeypatch.setattr(security, "replace_atomically", full)
    for accept in ("text/html", "application/json"):
        cookie = here.auth.log_in(here.auth.new_code())
        headers = {"cookie": f"{here.auth.cookie}={cookie}", "origin": f"http://{HOST.decode()}"}
        answer = ask(app, "POST", "/logout", {**headers, "accept": accept})

        assert answer.status == 507
        assert answer.headers["content-type"].startswith(accept)
        assert b"no space left on the disk" in answer.body
        assert "Max-Age=0" in answer.headers["set-cookie"]
        assert here.auth.session(str(cookie)) is None


def test_an_answer_that_does_not_come_in_time_is_told(
    here: Services, token: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(here.jobs, "list", lambda *_args, **_more: time.sleep(0.3) or [])
    app = create_app(replace(here, limits=RequestLimits(answer_s=0.1)))

    answer = ask(app, "GET", JOBS, token)

    assert (answer.status, answer.headers["retry-after"]) == (504, "5")


def test_a_fault_of_ours_is_one_line_without_what_went_wrong(
    app: Any, here: Services, token: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(here.jobs, "list", lambda *_args, **_more: 1 / 0)

    answer = ask(app, "GET", JOBS, token)

    assert answer.status == 500
    assert "zero" not in answer.json()["error"]
    assert "content-security-policy" in answer.headers
