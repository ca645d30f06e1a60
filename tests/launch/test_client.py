"""The client against a server with the shapes of the real one: all calls, and every bad end of one."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from stoker.errors import ConfigError, ServiceError, StalledError, StokerError
from stoker.extras.launch.vast import VastClient
from tests.launch.vast import INSTANCE, OFFER, Vast

KEY = "planted-account-key-55555"


def client(vast: Vast, **more: float) -> VastClient:
    return VastClient(KEY, api=vast.url, **({"timeout_s": 5.0, "deadline_s": 20.0, "pause_s": 0.02} | more))


def test_offers_come_cheapest_first_and_the_query_is_sent(vast: Vast) -> None:
    vast.offers = [OFFER | {"id": 8, "dph_total": 0.9}, OFFER]

    offers = client(vast).offers({"gpu_name": {"eq": "RTX 4090"}})

    assert [one.id for one in offers] == [7, 8]
    assert (offers[0].gpu, offers[0].gpu_memory_gib, offers[0].region) == ("RTX 4090", 24.0, "Sweden, SE")
    method, path, query, key = vast.asked[0]
    assert (method, path, key) == ("POST", "/v0/bundles/", f"Bearer {KEY}")
    assert query["gpu_name"] == {"eq": "RTX 4090"}
    assert (query["rentable"], query["rented"]) == ({"eq": True}, {"eq": False})


def test_an_instance_is_made_listed_stopped_and_destroyed(vast: Vast) -> None:
    one = client(vast)

    assert one.create(7, {"image": "a", "onstart": "x"}) == 78
    assert [(found.id, found.label, found.status, found.message) for found in one.instances()] == [
        (77, "stoker:run", "running", "success, running pytorch/ssh")
    ]
    one.stop(77)
    one.destroy(77)

    assert [(method, path.partition("?")[0], body) for method, path, body, _ in vast.asked] == [
        ("PUT", "/v0/asks/7/", {"image": "a", "onstart": "x"}),
        ("GET", "/v1/instances/", None),
        ("PUT", "/v0/instances/77/", {"state": "stopped"}),
        ("DELETE", "/v0/instances/77/", None),
    ]


def test_an_account_with_many_instances_is_listed_page_by_page(vast: Vast) -> None:
    vast.instances = [INSTANCE | {"id": number, "actual_status": None} for number in range(60)]

    found = client(vast).instances()

    assert [one.id for one in found] == list(range(60))
    assert {one.status for one in found} == {"provisioning"}
    assert len(vast.asked) == 3


def test_a_list_that_does_not_end_is_refused(vast: Vast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.extras.launch.vast.PAGES", 3)
    vast.instances = [INSTANCE] * 500

    with pytest.raises(ServiceError, match="does not end after 75"):
        client(vast).instances()


def test_what_is_gone_is_said_with_the_reason(vast: Vast) -> None:
    with pytest.raises(ServiceError, match=r"404 .*no_such_ask") as error:
        client(vast).create(99, {})
    assert error.value.status == 404
    vast.faults = [b'{"success": false, "error": "not_yours", "message": "that is not yours"}']
    with pytest.raises(ServiceError, match="instance 77: that is not yours; not_yours"):
        client(vast).stop(77)


def test_logs_are_waited_for_and_fetched_without_the_key(vast: Vast) -> None:
    vast.log_faults = [404, 403, "reset"]

    assert client(vast).logs(77, 10) == "line 1\nline 2\n"
    assert [(path, key) for _, path, _, key in vast.asked[1:]] == [("/log.txt", "")] * 4


def test_a_log_that_never_comes_is_given_up(vast: Vast) -> None:
    vast.log_faults = [404] * 999

    with pytest.raises((ServiceError, StalledError), match="the log of instance 77"):
        client(vast, deadline_s=1.5).logs(77, 10)


def test_a_limit_of_calls_is_kept(vast: Vast) -> None:
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
    vast.faults = [(429, {"Retry-After": "1"}), (429, {"Retry-After": soon}), 429, 503]
    begin = time.monotonic()

    assert len(client(vast).instances()) == 1

    assert time.monotonic() - begin >= 1
    assert len(vast.asked) == 5


def test_busy_for_too_long_is_a_stall(vast: Vast) -> None:
    vast.faults = [(429, {"Retry-After": "60"})] * 9

    with pytest.raises(StalledError, match=r"GET /v1/instances/: busy for 2 s"):
        client(vast, deadline_s=2).instances()

    assert len(vast.asked) == 1


@pytest.mark.parametrize("limit", ["timeout_s", "deadline_s"])
@pytest.mark.parametrize("fault", ["hang", "hang-in-body"])
def test_no_answer_is_a_stall(vast: Vast, fault: str, limit: str) -> None:
    vast.faults = [fault]

    with pytest.raises(StalledError, match=r"no answer within 0\.3 s"):
        client(vast, **{limit: 0.3}).instances()


def test_an_answer_that_trickles_ends_at_the_deadline(vast: Vast) -> None:
    vast.faults = ["trickle"] * 9

    with pytest.raises(StalledError):
        client(vast, deadline_s=0.5).instances()


@pytest.mark.parametrize("fault", ["half-closed", "nothing", "reset", 502])
def test_a_connection_that_breaks_is_made_again(vast: Vast, fault: object) -> None:
    vast.faults = [fault, fault]

    assert len(client(vast).instances()) == 1
    assert len(vast.asked) == 3


@pytest.mark.parametrize("fault", ["hang", "half-closed", "nothing", "reset", 502, 500])
def test_a_machine_is_never_rented_twice_by_one_call(vast: Vast, fault: object) -> None:
    vast.faults = [fault] * 5

    with pytest.raises(StokerError, match="may have been rented all the same"):
        client(vast, timeout_s=0.3).create(7, {})

    assert len(vast.asked) == 1


def test_a_limit_of_calls_is_no_reason_to_give_up_renting(vast: Vast) -> None:
    vast.faults = [429]

    assert client(vast).create(7, {}) == 78


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        pytest.param(401, ConfigError, "the key is refused", id="key"),
        pytest.param(403, ConfigError, "the key is refused", id="rights"),
        pytest.param(404, ServiceError, "404 Not Found", id="missing"),
        pytest.param(410, ServiceError, "410 Gone", id="retired"),
        pytest.param(500, ServiceError, "500 Internal", id="broken"),
        pytest.param("hang-in-error", ServiceError, "400 Bad Request: no reason given", id="unread"),
        pytest.param(b"<html>", ServiceError, "not a JSON object", id="html"),
        pytest.param(b"", ServiceError, "not a JSON object", id="nothing"),
        pytest.param(b"[]", ServiceError, "not a JSON object", id="list"),
        pytest.param(f"[{KEY}".encode(), ServiceError, r"not a JSON object \(b'\[\*", id="shows-it"),
        pytest.param(b"[" * 100000, ServiceError, "not a JSON object", id="deep"),
        pytest.param(b"{}", ServiceError, "has no instances", id="empty"),
        pytest.param((302, {"Location": "http://127.0.0.1:9/"}), ServiceError, "302", id="elsewhere"),
    ],
)
def test_errors_are_typed_and_never_show_the_key(
    vast: Vast, fault: Any, kind: type[Exception], message: str
) -> None:
    vast.faults = [fault] * 3

    with pytest.raises(kind, match=message) as error:
        client(vast, timeout_s=1.0).instances()

    assert KEY not in str(error.value)


def test_a_server_that_is_not_there_is_a_stall() -> None:
    with pytest.raises(StalledError):
        VastClient(KEY, api="http://127.0.0.1:9", deadline_s=0.3, pause_s=0.05).instances()
