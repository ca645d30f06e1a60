"""Ray's job API, four requests of it, each with a deadline.

Ray's own client waits for an answer as long as it takes, and needs Ray beside the service; the requests are
documented and few. The token goes with each of them and is shown nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.errors import ConfigError, NotFound, ResourceError, ServiceError
from stoker.runtime.http import Answer, HttpClient, HttpFailure, json_object

ANSWER_S = 10.0
"""How long the cluster may take to answer one request."""
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RayTarget:
    """A cluster, and how jobs are run there."""

    address: str
    """`http://host:8265`, as `ray start --head` prints it."""
    python: str
    """The interpreter of nodes."""
    gpus: float = 0.0
    """GPUs that a job takes."""


class RayJobs:
    """The jobs of a cluster.

    Args:
        address: Of its dashboard, over http or https.
        token: What it wants to be shown; None: nothing.

    Raises:
        ConfigError: That is no address.
    """

    def __init__(self, address: str, token: str | None) -> None:
        if not address.startswith(("http://", "https://")):
            raise ConfigError(
                f"--ray-address is {address!r}. Expected http://HOST:8265, the address of the dashboard that "
                "`ray start --head` prints"
            )
        self.address = address.rstrip("/")
        self._token = token
        self._http = HttpClient(timeout_s=ANSWER_S, total_s=3 * ANSWER_S, limit_bytes=_MOST_BYTES)

    def check(self) -> None:
        """See whether the cluster answers, and takes the token. Errors as `submit`."""
        with suppress(NotFound):
            self.look("stoker")

    def submit(self, submission: str, entrypoint: str, *, gpus: float) -> None:
        """Have `entrypoint` run, under a name that no other job has; one that has it is this one.

        Raises:
            ResourceError: The cluster does not answer, or refuses.
            ConfigError: It wants another token.
        """
        body: dict[str, Any] = {"entrypoint": entrypoint, "submission_id": submission}
        if gpus:
            body["entrypoint_num_gpus"] = gpus
        try:
            self._ask("POST", "/api/jobs/", body)
        except ResourceError as error:
            try:  # it may have come through all the same
                self.look(submission)
            except NotFound:
                raise error from None

    def look(self, submission: str) -> dict[str, Any]:
        """What the cluster says of a job: `status`, `driver_exit_code`, `message`.

        Raises:
            NotFound: It knows none of that name.
            ResourceError, ConfigError: As `submit`.
        """
        return self._ask("GET", f"/api/jobs/{submission}")

    def stop(self, submission: str) -> None:
        """End a job: SIGTERM, and SIGKILL a few seconds later. Errors as `look`."""
        self._ask("POST", f"/api/jobs/{submission}/stop")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        try:
            answer = self._http.ask(method, self.address + path, headers=headers, body=body)
            if answer.is_success:
                return json_object(answer.body or b"{}", path)
        except (HttpFailure, ServiceError) as error:
            raise ResourceError(
                f"the Ray cluster at {self.address} does not answer {method} {path}: {error}. Expected its "
                "dashboard there; see `ray status`"
            ) from error
        raise self._refused(answer, path)

    def _refused(self, answer: Answer, path: str) -> ConfigError | NotFound | ResourceError:
        said = " ".join(answer.body[:2000].decode(errors="replace").split())[:500]
        if answer.status in (401, 403):
            return ConfigError(
                f"the Ray cluster at {self.address} wants another token ({answer.status}). Set "
                "RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH, for `stoker serve` as on the cluster"
            )
        if answer.status == 404:
            return NotFound(f"the Ray cluster at {self.address} has nothing at {path}: {said}")
        return ResourceError(f"the Ray cluster at {self.address} refuses {path} ({answer.status}): {said}")


def ray_token(environment: Mapping[str, str]) -> str | None:
    """What a Ray cluster is shown, from where Ray itself takes it; None: nowhere."""
    if token := environment.get("RAY_AUTH_TOKEN"):
        return token
    home = Path(environment.get("HOME", "/nonexistent"))
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or home / ".ray" / "auth_token")
    try:
        return path.read_text().strip() or None
    except OSError:
        return None
