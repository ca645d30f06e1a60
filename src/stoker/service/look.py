"""Look at a data set in a process of its own: `python -m stoker.service.look`, a request in, an answer out.

A damaged file can end the library that reads it, and storage can stop to answer. Neither may happen to the
service: so the service waits for this process no longer than a deadline, and then it is killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from stoker import errors
from stoker.errors import SourceError, StalledError, StokerError

if TYPE_CHECKING:
    from stoker.schema import Json

DEADLINE_S = 60.0
_ANSWER_BYTES = 4 << 20


def look(
    what: str, kind: str, spec: Mapping[str, Any], *, deadline_s: float = DEADLINE_S, **given: Any
) -> Any:
    """What `facts`, `check` or `samples` of `looks.py` says, from another process.

    Raises:
        SourceError: The data is not as it should be; or looking at it ended the process.
        StalledError: It took too long.
    """
    request = json.dumps({"what": what, "kind": kind, "spec": dict(spec), **given})
    try:
        done = subprocess.run(
            [sys.executable, "-m", "stoker.service.look"],
            input=request.encode(),
            capture_output=True,
            timeout=deadline_s,
            check=False,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise StalledError(
            f"looking at {_shown(spec)} took more than {deadline_s:g} s and was ended. The storage or the "
            "database does not answer, or there is very much of it"
        ) from None
    try:
        answer = cast("dict[str, Any]", json.loads(done.stdout))
    except ValueError:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2][-300:]
        raise SourceError(
            f"looking at {_shown(spec)} ended the process that did it (status {done.returncode}): {last}. "
            "The data may be damaged"
        ) from None
    if "error" in answer:
        of_class: type[StokerError] = getattr(errors, str(answer.get("class")), SourceError)
        raise of_class(str(answer["error"]))
    return answer["found"]


def _shown(spec: Mapping[str, Any]) -> str:
    from stoker.sources.sql.query import parse_address

    return parse_address(str(spec["url"])).shown if "url" in spec else str(spec.get("path", ""))


def main() -> None:
    """Answer one request from standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not part of the answer
    request: dict[str, Any] = json.loads(sys.stdin.buffer.read(_ANSWER_BYTES))
    from stoker.service.looks import LOOKS
    from stoker.service.security import data_paths
    from stoker.sources.files import confine_sources

    confine_sources(data_paths([request["spec"], *(one["spec"] for one in request.get("datasets", ()))]))
    answer: dict[str, Json]
    try:
        found = LOOKS[request.pop("what")](request.pop("kind"), request.pop("spec"), **request)
        answer = {"found": found}
    except StokerError as error:
        answer = {"error": str(error), "class": type(error).__name__}
    json.dump(answer, answers)
    answers.close()


if __name__ == "__main__":
    main()
