"""Who may ask: a client that has the token of the state folder, or a session that was opened with it.

Programs send the token. A browser is given a one-time code, which it trades for a cookie; the cookie carries
its own end and is sealed with a key made from the token, so that it outlives a restart and dies with the
token.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from stoker.errors import ConfigError
from stoker.runtime.files import create_file, replacing

SHORTEST = 32
"""Characters that a token has at least; ours have 43, which are 256 bits."""
CODE_S = 600.0
"""How long a login code may be used."""
SESSION_S = 7 * 86400.0
CODES = 64
"""Login codes that are kept; the oldest goes first."""
CODE_BYTES = 24
"""Random ones in a code: 192 bits."""


@dataclass(frozen=True, slots=True)
class Session:
    """A browser that has logged in."""

    id: str
    until: float
    """When it ends, as unix time, unless it logs out before."""


def load_token(path: Path) -> SecretStr:
    """The token in a file, made at the first call: 256 bits that only its user may read.

    Raises:
        ConfigError: The file is no such file.
        ReadOnlyError, ResourceError: It cannot be made.
    """
    if not path.exists():
        _make_token(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}. Remove it, and a new one is made"
        ) from None
    with os.fdopen(fd, "rb") as file:
        mode = os.fstat(fd).st_mode
        text = file.read(1024).decode("ascii", "replace").strip() if stat.S_ISREG(mode) else ""
    if not stat.S_ISREG(mode) or mode & 0o077:
        raise ConfigError(
            f"{path} may be read by others (mode {stat.S_IMODE(mode):o}). Expected 600; remove it"
        )
    if len(text) < SHORTEST or not text.isprintable():
        raise ConfigError(f"{path} holds {len(text)} characters, expected {SHORTEST} or more. Remove it")
    return SecretStr(text)


def _make_token(path: Path) -> None:
    # Another service may be faster, and its token is as good.
    create_file(path, (secrets.token_urlsafe(32) + "\n").encode(), mode=0o600)


class Auth:
    """Checks tokens, trades codes for sessions. Safe to call from several threads."""

    def __init__(
        self, token: SecretStr, *, ended: Path | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._token = token.get_secret_value()
        self._key = hmac.digest(self._token.encode(), b"stoker session", "sha256")
        self._clock = clock
        self._lock = threading.Lock()
        self._codes: dict[str, float] = {}
        """Until when a code may be used, by its digest. Strangers cannot end one: 192 random bits need no
        count of wrong tries, and such a count would let anybody make a code worthless."""
        self._ended_file = ended
        self._ended = _read_ended(ended)
        """Until when the cookie of a session that logged out would be good, by its id."""
        self.cookie = f"stoker_{hmac.digest(self._key, b'name', 'sha256').hex()[:8]}"
        """Name of the cookie: cookies know no ports, so two services on one machine need two names."""

    def is_token(self, value: str) -> bool:
        """Whether it is the token, in constant time."""
        return same(value, self._token)

    def new_code(self) -> str:
        """A code that opens one session within `CODE_S`."""
        now, code = self._clock(), secrets.token_urlsafe(CODE_BYTES)
        with self._lock:
            kept = [(digest, until) for digest, until in self._codes.items() if until > now]
            self._codes = dict([*kept[-(CODES - 1) :], (_digest(code), now + CODE_S)])
        return code

    def log_in(self, secret: str) -> str | None:
        """The cookie for a code, which is used up, or for the token; None for anything else."""
        with self._lock:
            until = self._codes.pop(_digest(secret), 0.0)
        if until <= self._clock() and not self.is_token(secret):
            return None
        payload = f"{secrets.token_hex(16)}.{int(self._clock() + SESSION_S)}"
        return f"{payload}.{self._seal('session', payload)}"

    def session(self, cookie: str) -> Session | None:
        """The session of a cookie that we gave out, that has not passed, and that was not ended."""
        payload, _, seal = cookie.rpartition(".")
        if not same(seal, self._seal("session", payload)):
            return None
        name, _, until = payload.partition(".")
        session = Session(id=name, until=float(until))
        return session if self.is_open(session) else None

    def is_open(self, session: Session) -> bool:
        """Whether a session has neither logged out nor passed, now."""
        return session.until > self._clock() and session.id not in self._ended

    def end(self, session: Session) -> None:
        """Make a session's cookie worthless, also after a restart.

        Raises:
            ReadOnlyError, ResourceError: It cannot be noted; it is worthless until the restart.
        """
        now = self._clock()
        with self._lock:
            ended = {name: until for name, until in self._ended.items() if until > now}
            self._ended = {**ended, session.id: now + SESSION_S}
            if self._ended_file is not None:
                with replacing(self._ended_file) as temporary:
                    temporary.write_text(json.dumps(self._ended))

    def _seal(self, purpose: str, payload: str) -> str:
        return hmac.digest(self._key, f"{purpose}:{payload}".encode("utf-8", "replace"), "sha256").hex()


def _read_ended(path: Path | None) -> dict[str, float]:
    """Return the sessions that a file says have logged out.

    Raises:
        ConfigError: It is not such a file.
    """
    if path is None or not path.exists():
        return {}
    try:
        return {str(name): float(until) for name, until in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{path} does not say which sessions have logged out: {error}. Remove it and DIR/token; then "
            "everybody logs in again"
        ) from None


def same(given: str, expected: str) -> bool:
    """Whether two secrets are equal, in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())


def _digest(code: str) -> str:
    """Codes are looked up by digest, so that the time of a look-up says nothing about them."""
    return hashlib.sha256(code.encode("utf-8", "replace")).hexdigest()
