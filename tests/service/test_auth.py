"""Tokens, login codes and sessions."""

from __future__ import annotations

import base64
import hmac
import html
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from stoker.errors import ConfigError
from stoker.service.folders import prepare_state_dir
from stoker.service.security import CODE_S, CODES, Auth, load_token
from stoker.service.server import create_app
from stoker.service.services import open_services
from tests.service.running import Running, ask, serving


def test_the_token_is_made_once_and_is_for_nobody_else(tmp_path: Path) -> None:
    first = load_token(tmp_path / "token")

    assert load_token(tmp_path / "token") == first
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert len(first.get_secret_value()) >= 43
    assert first.get_secret_value() not in repr(first) + str(first)


def test_a_token_that_others_may_read_or_have_put_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    load_token(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="may be read by others"):
        load_token(path)

    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_token(tmp_path / "link")

    short = tmp_path / "short"
    short.write_text("hunter2")
    short.chmod(0o600)
    with pytest.raises(ConfigError, match="holds 7 characters"):
        load_token(short)


def test_a_state_folder_that_others_can_see_or_replace_is_refused(tmp_path: Path) -> None:
    assert prepare_state_dir(tmp_path / "new").path.stat().st_mode & 0o777 == 0o700

    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(ConfigError, match="others may read it"):
        prepare_state_dir(tmp_path / "open")

    (tmp_path / "wild").mkdir()
    (tmp_path / "wild").chmod(0o777)
    with pytest.raises(ConfigError, match="anyone may replace"):
        prepare_state_dir(tmp_path / "wild" / "state")


def test_a_code_opens_one_session_for_a_while(tmp_path: Path) -> None:
    now = [1000.0]
    auth = Auth(load_token(tmp_path / "token"), clock=lambda: now[0])
    code, late = auth.new_code(), auth.new_code()

    cookie = auth.log_in(code)
    assert cookie is not None
    assert auth.log_in(code) is None, "used up"
    assert auth.log_in("") is None
    session = auth.session(cookie)
    assert session is not None
    now[0] += CODE_S + 1
    assert auth.log_in(late) is None, "too late"

    for forged in ("", ".", "..", cookie[:-1], cookie[:-1] + "0", cookie.replace(".1", ".9", 1), session.id,
                   f"{session.id}.9999999999.{cookie.rpartition('.')[2]}", "a.b.c", "é.1.2"):  # fmt: skip
        assert auth.session(forged) is None or forged == cookie

    again = Auth(load_token(tmp_path / "token"), clock=lambda: now[0])
    assert again.session(cookie) == session, "a restart ends no session"
    os.unlink(tmp_path / "token")
    assert Auth(load_token(tmp_path / "token"), clock=lambda: now[0]).session(cookie) is None, (
        "a new token does"
    )
    assert auth.is_open(session)
    auth.end(session)
    assert auth.session(cookie) is None
    assert not auth.is_open(session)
    assert again.is_open(session)
    now[0] = session.until - 1
    assert again.session(cookie) == session
    now[0] = session.until
    assert again.session(cookie) is None
    assert not again.is_open(session), "what is open is asked again, and its time is over"


def test_a_code_cannot_be_guessed_and_strangers_cannot_end_it(tmp_path: Path) -> None:
    auth = Auth(load_token(tmp_path / "token"))
    codes = [auth.new_code() for _ in range(20)]
    assert {len(base64.urlsafe_b64decode(code)) * 8 for code in codes} == {192}, "bits"
    assert len({*codes}) == 20

    for n in range(1000):
        assert auth.log_in(f"guess {n}") is None

    assert auth.log_in(codes[0]) is not None
    assert auth.log_in((tmp_path / "token").read_text().strip()) is not None


def test_so_many_codes_are_good_at_once_and_one_more_ends_the_oldest(tmp_path: Path) -> None:
    auth = Auth(load_token(tmp_path / "token"))
    first, second, *_ = [auth.new_code() for _ in range(CODES)]
    assert auth.log_in(first) is not None
    auth.new_code()
    assert auth.log_in(second) is not None, f"{CODES} are good"

    oldest, *_ = [auth.new_code() for _ in range(CODES + 1)]

    assert auth.log_in(oldest) is None


def test_who_has_logged_out_stays_out_after_a_restart(tmp_path: Path) -> None:
    token, ended = load_token(tmp_path / "token"), tmp_path / "ended-sessions.json"
    auth = Auth(token, ended=ended)
    cookies = [auth.log_in(auth.new_code()) for _ in range(2)]
    assert all(cookies)
    session = auth.session(str(cookies[0]))
    assert session is not None

    auth.end(session)

    again = Auth(token, ended=ended)
    assert again.session(str(cookies[0])) is None
    assert again.session(str(cookies[1])) is not None, "of another browser"


def test_secrets_are_compared_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one of them by the function that takes as long for a wrong byte at the start as at the end."""
    auth = Auth(load_token(tmp_path / "token"))
    token = (tmp_path / "token").read_text().strip()
    cookie = auth.log_in(token)
    assert cookie is not None
    compared: list[str] = []
    compare = hmac.compare_digest

    def noted(given: bytes, expected: bytes) -> bool:
        compared.append(expected.decode())
        return compare(given, expected)

    monkeypatch.setattr(hmac, "compare_digest", noted)
    assert not auth.is_token("?" + token[1:])
    assert auth.log_in(token[:-1] + "?") is None
    assert auth.session(cookie[:-1] + "?") is None

    assert compared == [token, token, cookie.rpartition(".")[2]]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Running:
    with serving(tmp_path_factory.mktemp("auth") / "state") as found:
        yield found


def test_a_login_with_more_fields_than_the_form_has_is_refused_without_a_fault(running: Running) -> None:
    for fields in ("&".join(f"f{n}=1" for n in range(11)), "&".join(["secret=x"] * 500)):
        answer = httpx.post(running.address + "/login", content=fields, trust_env=False,
                            headers={"content-type": "application/x-www-form-urlencoded"})  # fmt: skip

        assert answer.status_code == 401


def test_a_browser_logs_in_with_a_code_and_changes_things_from_our_page(running: Running) -> None:
    code = running.client.post(running.api("/login-codes")).json()["path"]
    with httpx.Client(base_url=running.address, trust_env=False) as browser:
        page = browser.get("/anything", headers={"accept": "text/html"})
        assert page.status_code == 401
        assert 'name="next" value="/anything"' in page.text

        answer = browser.get(f"{code}&next=/anything")
        assert (answer.status_code, answer.headers["location"]) == (303, "/anything"), (
            "no code in the address"
        )
        flags = {part.strip().lower() for part in answer.headers["set-cookie"].split(";")[1:]}
        assert {"httponly", "samesite=strict", "path=/"} <= flags
        assert "secure" not in flags, "it would not come back without TLS"
        assert browser.get(code).status_code == 401, "a second time"

        assert browser.get("/api/v1/training/jobs").status_code == 200
        assert browser.post("/logout").status_code == 403
        session = running.services.auth.session(next(iter(browser.cookies.values())))
        assert session is not None
        kept = dict(browser.cookies)
        left = browser.post("/logout", headers={"Origin": running.address})
        assert left.status_code == 303
        flags = {part.strip().lower() for part in left.headers["set-cookie"].split(";")[1:]}
        assert {"httponly", "samesite=strict", "path=/", "max-age=0"} <= flags
        browser.cookies.update(kept)
        assert browser.get("/api/v1/training/jobs").status_code == 401


def test_a_session_outlives_the_service_and_its_end_leads_back_to_each_page(tmp_path: Path) -> None:
    pages = ["/", "/jobs/new?dataset=a%20b", "/jobs/compare?ids=1,2&ids=3", "/datasets?number=2", "/machine",
             "/activity", "/docs", "/caches/a/0123456789abcdef?other=x"]  # fmt: skip
    with serving(tmp_path / "state") as first:
        cookie = first.services.auth.log_in(first.token)
        name = first.services.auth.cookie
    with serving(tmp_path / "state") as second, httpx.Client(
        base_url=second.address, trust_env=False, headers={"accept": "text/html"}
    ) as browser:  # fmt: skip
        browser.cookies.set(name, str(cookie))
        assert browser.get("/").status_code == 200, "after a restart"
        session = second.services.auth.session(str(cookie))
        assert session is not None
        second.services.auth.end(session)
        for page in pages:
            shown = browser.get(page)
            assert shown.status_code == 401
            found = re.search(r'name="next" value="([^"]*)"', shown.text)
            assert found is not None
            fields = {"secret": second.token, "next": html.unescape(found[1])}
            answer = httpx.post(f"{second.address}/login", data=fields, trust_env=False)
            assert answer.headers["location"] == page


def test_a_browser_logs_in_with_the_token_in_the_form(running: Running) -> None:
    with httpx.Client(base_url=running.address, trust_env=False) as browser:
        assert browser.post("/login", data={"secret": "wrong"}).status_code == 401
        assert browser.post("/login", data={"secret": running.token}).status_code == 303
        assert browser.get("/api/v1/training/jobs").status_code == 200


def test_behind_tls_the_cookie_is_for_tls_alone(tmp_path: Path) -> None:
    services = open_services(tmp_path / "state", public_url="https://Train.Example:8443/")
    app, host = create_app(services), {"host": "train.example:8443"}
    answer = ask(app, "GET", f"/login?code={services.auth.new_code()}", host)
    services.database.close()

    assert answer.status == 303, "its name is one of ours"
    flags = {part.strip().lower() for part in answer.headers["set-cookie"].split(";")[1:]}
    assert {"secure", "httponly", "samesite=strict", "path=/"} <= flags


@pytest.mark.parametrize(
    "url",
    ["train.example", "ftp://train.example", "https://", "https://a/b", "https://a:x", "https://u:p@a", ""],
)
def test_a_public_address_is_one(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="expected https://NAME"):
        open_services(tmp_path / "state", public_url=url)


def test_who_tries_codes_is_refused_and_who_has_one_is_not(running: Running) -> None:
    with httpx.Client(base_url=running.address, trust_env=False) as browser:
        tried = [browser.get(f"/login?code=guess{n}") for n in range(40)]
        tried += [browser.post("/login", data={"secret": f"guess{n}"}) for n in range(40)]
        assert {one.status_code for one in tried} == {401}
        assert browser.get(f"/login?code={running.services.auth.new_code()}").status_code == 303


ELSEWHERE = [
    "//evil.example",
    "/\\evil.example",
    "https://evil.example",
    "\\\\evil.example",
    "evil",
    "/\n/evil",
    "",
    "/ x",
    "///evil.example",
    "javascript:alert(1)",
]


@pytest.mark.parametrize("wanted", ELSEWHERE)
def test_logging_in_never_leads_to_another_site(running: Running, wanted: str) -> None:
    with httpx.Client(base_url=running.address, trust_env=False) as browser:
        answer = browser.post("/login", data={"secret": running.token, "next": wanted})

    assert answer.headers["location"] == "/"
    assert not urlsplit(answer.headers["location"]).netloc


def test_what_is_shown_in_a_form_is_escaped(running: Running) -> None:
    with httpx.Client(base_url=running.address, trust_env=False) as browser:
        page = browser.get('/login?next="><img onerror=alert(1)>')

    assert "<img" not in page.text


def test_a_job_is_called_what_it_likes_and_runs_nothing_in_the_page(running: Running) -> None:
    running.services.jobs.create({}, name="<img src=x onerror=alert(1)>", epochs=1)
    with httpx.Client(base_url=running.address, trust_env=False) as browser:
        browser.post("/login", data={"secret": running.token})
        page = browser.get("/").text

    assert "&lt;img src=x onerror=alert(1)&gt;" in page
    assert "<img src=x" not in page


def test_no_secret_is_in_what_people_print(tmp_path: Path) -> None:
    services = open_services(tmp_path / "state")
    services.database.close()

    assert (tmp_path / "state" / "token").read_text().strip() not in repr(services)
