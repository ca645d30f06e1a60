"""A folder's name at the place, and the lock on what is here of it: shared by all that a mirror does."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from stoker.errors import StalledError
from stoker.runtime.locks import lock_range
from stoker.store.mirror.root import MirrorRoot
from stoker.store.mirror.stand import remove_stand
from stoker.store.remote import Remote
from stoker.store.remote.retries import DEADLINE_S

T = TypeVar("T")
LOCK_FILE = ".mirror-lock"


class Place:
    """The folder `name` of a mirror: here, and at its address."""

    def __init__(self, root: MirrorRoot, name: str) -> None:
        self.root, self.name = root, name
        self.path: Path = root.path / name

    def url_of(self, name: str) -> str:
        """The address of a file, for messages."""
        return f"{self.root.url}/{self.name}/{name}"

    def key(self, name: str) -> str:
        """The name of a file below the mirror's address."""
        return f"{self.name}/{name}"

    def ask(
        self, operation: str, name: str, attempt: Callable[[Remote], T], deadline_s: float = DEADLINE_S
    ) -> T:
        """What `attempt` answers, repeated while that may help."""
        remote = self.root.remote
        return self.root.retries.run(lambda: attempt(remote), f"{operation} {self.url_of(name)}", deadline_s)

    @contextmanager
    def locked(self) -> Generator[None]:
        """Keep all others on this machine from changing which files are here.

        Raises:
            ResourceError: The mirror was removed while it was in use.
        """
        self.root.require()
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.path / LOCK_FILE
        path.touch(mode=0o600)
        with lock_range(path, 0, 1, timeout_s=DEADLINE_S) as got:
            if not got:
                raise StalledError(
                    f"{path} has been locked for {DEADLINE_S:g} s. See what hangs on this machine"
                )
            yield

    def forget(self, name: str) -> None:
        """Remove what is here of a shard."""
        with self.locked():
            remove_stand(self.path, name)
