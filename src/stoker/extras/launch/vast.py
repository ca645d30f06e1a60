"""The work of `stoker launch vast`: search machines, rent one, show its log, take it down."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, cast
from urllib.parse import urlencode

from stoker.errors import ConfigError, ServiceError, StalledError, StokerError
from stoker.extras.launch.plan import LaunchPlan
from stoker.extras.launch.script import API
from stoker.runtime.http import Answer, FailureKind, HttpClient, HttpFailure, json_object, retry_after_s
from stoker.runtime.threads import RetryPolicy, retry
from stoker.schema import Json, JsonResult

# ----------------------------------------------------------------------------------------------------------
# The REST interface of Vast.ai, as far as it is needed: offers, instances, logs.
#
# Every call ends within its deadline, its pauses for rate limits included. What may have changed something
# at the other side is not sent a second time on its own.


Method: TypeAlias = Literal["GET", "POST", "PUT", "DELETE"]
BUSY = frozenset({429, 502, 503, 504})
LOG_BYTES = 16 * 1024 * 1024
PAGE, PAGES = 25, 100
"""Instances that one answer lists at most, and answers that are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A machine that can be rented."""

    id: int
    gpu: str
    gpus: int
    gpu_memory_gib: float
    price: float
    """Dollars an hour, all of it."""
    disk_gib: float
    region: str
    reliability: float
    down_mbps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RentedMachine:
    """A machine that is rented."""

    id: int
    label: str
    status: str
    wanted: str
    """The state that it should be in, as far as the provider says."""
    gpu: str
    gpus: int
    price: float
    message: str


class _BusyError(StokerError):
    """The other side may do it later."""

    def __init__(self, wait_s: float) -> None:
        super().__init__("the other side is busy")
        self.wait_s = wait_s


class VastClient:
    """Calls with one key. Errors never show it."""

    def __init__(
        self,
        key: str,
        *,
        api: str = API,
        timeout_s: float = 30.0,
        deadline_s: float = 120.0,
        pause_s: float = 1.0,
    ) -> None:
        if not api.startswith(("http://", "https://")):
            raise ConfigError(f"{api} is not the URL of an API", hint="Expected https://...")
        self._key, self._api = key, api.rstrip("/")
        self._timeout_s, self._deadline_s, self._pause_s = timeout_s, deadline_s, pause_s
        self._http = HttpClient(timeout_s=timeout_s)

    def offers(self, query: Mapping[str, Any]) -> list[Offer]:
        """Return machines that fit a query, the cheapest first."""
        free: dict[str, Any] = {"external": {"eq": False}, "rentable": {"eq": True}, "rented": {"eq": False}}
        found = self._call("POST", "/v0/bundles/", {**free, **query, "order": [["dph_total", "asc"]]})
        offers = [_offer(one) for one in _list(found, "offers")]
        return sorted(offers, key=lambda one: (one.price, one.id))

    def create(self, offer: int, request: Mapping[str, Any]) -> int:
        """Rent a machine; returns the number of the instance. Sent once: twice might be two machines."""
        found = self._call("PUT", f"/v0/asks/{offer}/", request, once=True)
        number = found.get("new_contract")
        if not isinstance(number, int):
            raise ServiceError(
                f"offer {offer} was not rented: {_said(found)}",
                hint="Take another: stoker launch vast search",
            )
        return number

    def instances(self) -> list[RentedMachine]:
        """Return all instances of the account."""
        order = json.dumps([{"col": "id", "dir": "asc"}])
        asked = {"select_filters": "{}", "order_by": order, "limit": str(PAGE)}
        rows: list[dict[str, Any]] = []
        for _ in range(PAGES):
            found = self._call("GET", f"/v1/instances/?{urlencode(asked)}")
            rows += _list(found, "instances")
            token = found.get("next_token")
            if not token:
                return [_instance(one) for one in rows]
            asked["after_token"] = str(token)
        raise ServiceError(f"the list of instances does not end after {len(rows):,}", hint="Destroy some")

    def stop(self, number: int) -> None:
        """Stop an instance; its disk stays."""
        self._changed(number, self._call("PUT", f"/v0/instances/{number}/", {"state": "stopped"}))

    def destroy(self, number: int) -> None:
        """Give an instance back; its disk is gone."""
        self._changed(number, self._call("DELETE", f"/v0/instances/{number}/"))

    def logs(self, number: int, lines: int) -> str:
        """Return the last lines of an instance's log; waits until the provider has put them somewhere."""
        until = time.monotonic() + self._deadline_s
        found = self._call("PUT", f"/v0/instances/request_logs/{number}/", {"tail": str(lines)})
        url = found.get("result_url")
        if not isinstance(url, str) or not url.startswith(("https://", "http://")):
            raise ServiceError(f"instance {number} has no log yet: {_said(found)}")

        def attempt() -> Answer:
            answer = self._http.ask("GET", url, total_s=until - time.monotonic())  # without our key
            if not answer.is_success:
                raise ServiceError(
                    f"the log of instance {number} is not there ({answer.status})",
                    hint="Try again in a minute",
                    status=answer.status,
                )
            return answer

        def is_passing(error: Exception) -> bool:
            return isinstance(error, HttpFailure) or (
                isinstance(error, ServiceError) and error.status in (403, 404, *BUSY)
            )

        left_s = until - time.monotonic()
        policy = RetryPolicy(first_s=self._pause_s, factor=1.0, timeout_s=left_s)
        try:
            return retry(attempt, is_passing, policy).body[:LOG_BYTES].decode(errors="replace")
        except HttpFailure as error:
            raise StalledError(f"the log of instance {number}: {error}", hint="Try again") from None

    def _changed(self, number: int, found: Mapping[str, Any]) -> None:
        if found.get("success") is False:
            raise ServiceError(f"instance {number}: {_said(found)}")

    def _call(
        self, method: Method, path: str, body: Mapping[str, Any] | None = None, *, once: bool = False
    ) -> dict[str, Any]:
        """Send a request, again while the other side is busy, and return the answer.

        Raises:
            ConfigError: The key is refused.
            ServiceError: The request is, or the answer cannot be read.
            StalledError: No answer in time.
        """
        until = time.monotonic() + self._deadline_s
        shown = f"{method} {path.partition('?')[0]}"
        headers = {"Authorization": f"Bearer {self._key}", "Accept": "application/json"}

        def attempt() -> dict[str, Any]:
            left_s = until - time.monotonic()
            try:
                answer = self._http.ask(method, self._api + path, headers=headers, body=body, total_s=left_s)
            except HttpFailure as failure:
                raise self._unanswered(failure, shown, once) from None
            if not answer.is_success:
                raise self._refused(answer, shown, once)
            return json_object(answer.body.replace(self._key.encode() or b"\0", b"***"), shown)

        def give_up(_: object) -> StalledError:
            return StalledError(
                f"{shown}: busy for {self._deadline_s:g} s", hint="Try again later, and less often"
            )

        policy = RetryPolicy(first_s=self._pause_s, longest_s=15.0, timeout_s=self._deadline_s)
        return retry(
            attempt,
            _BusyError,
            policy,
            asked_pause_s=lambda error: error.wait_s if isinstance(error, _BusyError) else 0.0,
            give_up=give_up,
        )

    def _refused(self, answer: Answer, shown: str, once: bool) -> Exception:
        """Return the error for an answer without success."""
        if answer.status in BUSY and not (once and answer.status != 429):
            return _BusyError(retry_after_s(answer.headers))
        if answer.status in (401, 403):
            return ConfigError(
                f"{shown}: the key is refused ({answer.status})",
                hint="Set VAST_API_KEY to one that may do this",
            )
        said = self._hide(answer.body[:2000].decode(errors="replace"))
        note = _maybe_created() if once and answer.status >= 500 else ""
        return ServiceError(
            f"{shown}: {answer.shown_status}: {said or 'no reason given'}{note}", status=answer.status
        )

    def _unanswered(self, failure: HttpFailure, shown: str, once: bool) -> Exception:
        """Return the error for a request that had no answer."""
        said = self._hide(failure.reason)
        if once and failure.kind is not FailureKind.UNREACHABLE:
            return StalledError(f"{shown}: {said}{_maybe_created()}")
        if failure.kind is FailureKind.TIMEOUT:
            limit_s = min(self._timeout_s, self._deadline_s)
            return StalledError(f"{shown}: no answer within {limit_s:g} s", hint="Try again")
        if failure.kind in (FailureKind.UNREACHABLE, FailureKind.BROKEN, FailureKind.CUT):
            return _BusyError(0.0)
        return ServiceError(f"{shown}: {failure.kind.value}: {said}")

    def _hide(self, text: str) -> str:
        return " ".join(text.replace(self._key, "***").split()) if self._key else text


def _maybe_created() -> str:
    return ". It may have been rented all the same: look with `stoker launch vast status`"


def _list(found: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    items = found.get(key)
    if not isinstance(items, list):
        raise ServiceError(f"the answer has no {key}: {_said(found)}")
    return [cast("dict[str, Any]", one) for one in cast("list[Any]", items) if isinstance(one, dict)]


def _said(found: Mapping[str, Any]) -> str:
    words = (found.get("msg") or found.get("message"), found.get("error"))
    return "; ".join(str(word) for word in words if word)[:500] or "no reason given"


def _number(entry: Mapping[str, Any], key: str) -> float:
    value = entry.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def _offer(entry: Mapping[str, Any]) -> Offer:
    return Offer(
        id=int(_number(entry, "id")),
        gpu=str(entry.get("gpu_name") or "?"),
        gpus=int(_number(entry, "num_gpus")),
        gpu_memory_gib=_number(entry, "gpu_ram") / 1024,
        price=_number(entry, "dph_total"),
        disk_gib=_number(entry, "disk_space"),
        region=str(entry.get("geolocation") or "?"),
        reliability=_number(entry, "reliability2") or _number(entry, "reliability"),
        down_mbps=_number(entry, "inet_down"),
    )


def _instance(entry: Mapping[str, Any]) -> RentedMachine:
    return RentedMachine(
        id=int(_number(entry, "id")),
        label=str(entry.get("label") or ""),
        status=str(entry.get("actual_status") or "provisioning"),
        wanted=str(entry.get("intended_status") or ""),
        gpu=str(entry.get("gpu_name") or "?"),
        gpus=int(_number(entry, "num_gpus")),
        price=_number(entry, "dph_total"),
        message=str(entry.get("status_msg") or "").strip(),
    )


OTHERS = 3
"""OfferList that are tried after another customer took the first."""
GONE = (400, 404, 410)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rental:
    """A machine that was just rented."""

    launch: LaunchPlan
    instance: int
    offer: Offer

    def to_json(self) -> dict[str, Json]:
        """Return the keys that scripts rely on."""
        return {
            "instance": self.instance,
            "label": self.launch.label,
            "offer": asdict(self.offer),
            "commit": self.launch.code.commit,
            "onstart": self.launch.onstart,
            "request": self.launch.request(shown=True),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPreview:
    """The request that would be sent."""

    launch: LaunchPlan

    def to_json(self) -> dict[str, Json]:
        """Return the keys that scripts rely on."""
        return {
            "onstart": self.launch.onstart,
            "bytes": len(self.launch.onstart.encode()),
            "request": self.launch.request(shown=True),
            "query": self.launch.query(),
            "label": self.launch.label,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferList(JsonResult):
    """Offers that can be rented."""

    offers: tuple[Offer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineList(JsonResult):
    """Rented machines of one run."""

    label: str
    instances: tuple[RentedMachine, ...]
    done: str = ""
    """Machines, and the action taken on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLog(JsonResult):
    """The end of a machine's log."""

    instance: int
    log: str


def search(client: VastClient, launch: LaunchPlan) -> OfferList:
    """Return machines that the settings allow, the cheapest first."""
    return OfferList(offers=tuple(client.offers(launch.query())))


def up(client: VastClient, launch: LaunchPlan, offer: int | None = None) -> Rental:
    """Rent the cheapest machine, or the one that was chosen.

    Raises:
        ConfigError: A machine of this run is rented already, or none fits.
    """
    running = [one for one in client.instances() if one.label == launch.label and one.status != "stopped"]
    if running:
        raise ConfigError(
            f"instance {running[0].id} of {launch.label} is {running[0].status} already",
            hint="Take it down first, or give this run another training.run_dir",
        )
    offers = client.offers(launch.query())
    chosen = offers if offer is None else [one for one in offers if one.id == offer]
    if not chosen:
        what = "fits launch.gpu, gpus, disk, region and max_price" if offer is None else f"is number {offer}"
        raise ConfigError(
            f"no offer {what} ({len(offers)} offers found)", hint="Ask for less, or try again later"
        )
    for one in chosen[: 1 + OTHERS]:
        try:
            number = client.create(one.id, launch.request(shown=False))
        except ServiceError as error:
            if error.status in GONE and one is not chosen[: 1 + OTHERS][-1]:
                continue  # another customer was faster
            raise
        return Rental(launch=launch, instance=number, offer=one)
    raise ConfigError("every offer was taken meanwhile", hint="Try again")


def status(client: VastClient, label: str) -> MachineList:
    """Return the machines of a run."""
    found = [one for one in client.instances() if one.label == label]
    return MachineList(label=label, instances=tuple(found))


def logs(client: VastClient, label: str, lines: int, instance: int | None = None) -> MachineLog:
    """Return the end of the log of the newest machine of a run."""
    number = _choose(client, label, instance)[-1].id
    return MachineLog(instance=number, log=client.logs(number, lines))


def down(
    client: VastClient, label: str, instance: int | None = None, *, destroy: bool = False
) -> MachineList:
    """Stop the machines of a run; `destroy` gives them back, with all that is on their disks."""
    found = _choose(client, label, instance)
    for one in found:
        if destroy:
            client.destroy(one.id)
        else:
            client.stop(one.id)
    return MachineList(label=label, instances=tuple(found), done="destroyed" if destroy else "stopped")


def _choose(client: VastClient, label: str, instance: int | None) -> Sequence[RentedMachine]:
    """Return machines of a run, or the one of them that was named. MachineList of other runs are not touched.

    Raises:
        ConfigError: No machine matches.
    """
    found = [one for one in client.instances() if one.label == label]
    chosen = sorted((one for one in found if instance in (None, one.id)), key=lambda one: one.id)
    if not chosen:
        what = "none" if instance is None else f"no instance {instance}"
        raise ConfigError(f"{label} has {what}", hint="`stoker launch vast status CONFIG` lists its machines")
    return chosen
