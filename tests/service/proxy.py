"""A network between the service and PostgreSQL that can be cut, or swallow whatever it is given."""

from __future__ import annotations

import random
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from tests.sources.sql.server import Server


class Proxy:
    """Listens on TCP and passes on to the server's socket, unless it is to `cut`, `swallow` or `refuse`."""

    def __init__(self, server: Server) -> None:
        self._target = next(Path(server.folder).glob(".s.PGSQL.*[0-9]"))
        self._server = socket.create_server(("127.0.0.1", 0))
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._passing = threading.Event()
        self._passing.set()
        self._refusing = self._over = False
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def url(self, database: str) -> str:
        return f"postgresql://stoker@127.0.0.1:{self.port}/{database}"

    def cut(self, share: float = 1.0) -> int:
        """End connections, each with a chance of `share`; how many."""
        ended = [pair for pair in self._pairs.copy() if random.random() < share]
        for pair in ended:
            _end(pair)
        return len(ended)

    def refuse(self, whether: bool) -> None:
        """End every connection and let none begin."""
        self._refusing = whether
        if whether:
            self.cut()

    def swallow(self, whether: bool) -> None:
        """Take what is sent and pass nothing on, as a server that is stopped does; later it is passed on."""
        self._passing.clear() if whether else self._passing.set()

    def close(self) -> None:
        self._over = True
        self._passing.set()
        self._server.close()
        self.cut()

    def _accept(self) -> None:
        while not self._over:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            pair = (near, far)
            try:
                if self._refusing:
                    raise ConnectionRefusedError
                far.connect(str(self._target))
            except OSError:
                _end(pair)
                continue
            self._pairs.add(pair)
            for from_, to in (pair, (far, near)):
                threading.Thread(target=self._pump, args=(from_, to, pair), daemon=True).start()

    def _pump(
        self, from_: socket.socket, to: socket.socket, pair: tuple[socket.socket, socket.socket]
    ) -> None:
        with suppress(OSError):
            while data := from_.recv(65536):
                self._passing.wait()
                to.sendall(data)
        self._pairs.discard(pair)
        _end(pair)


def _end(pair: tuple[socket.socket, socket.socket]) -> None:
    for one in pair:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
    time.sleep(0)
    for one in pair:
        one.close()
