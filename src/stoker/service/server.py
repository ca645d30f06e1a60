"""The web server: uvicorn with limits, on a socket that we open, and an end in order."""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from stoker.errors import ConfigError
from stoker.runtime.files import replacing
from stoker.service.app import create_app
from stoker.service.services import Services

CONNECTIONS = 200
"""Connections at once; more are answered with 503. From three quarters of them on, each new one ends the
oldest that has not sent a whole request."""
LOOK_S = 10.0
"""How often a connection is looked at; one that did nothing between two looks is closed."""
END_S = 5
"""How long answers under way get when the service ends."""


class Watched(H11Protocol):
    """A connection that is closed when it sends no whole request, or does not take what it is sent.

    Without it, somebody who opens connections and sends one byte a minute, or reads none, would hold them for
    ever, and with them the buffers of what they do not read. No setting of uvicorn does this: its
    `timeout_keep_alive` counts between requests, and `limit_concurrency` refuses the newest, not the slow.
    """

    def connection_made(self, transport: Any) -> None:
        """Begin to look."""
        super().connection_made(transport)
        self._seen: tuple[object, ...] = ()
        self._since = self.loop.time()
        if len(self.connections) > CONNECTIONS * 3 // 4:
            self._make_room()
        self.loop.call_later(LOOK_S, self._look)

    @property
    def waits(self) -> bool:
        """Whether its client has yet to send a request, or the rest of one."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing()

    def _make_room(self) -> None:
        """End the connection that has waited longest, so that slow clients hold up no other."""
        others = [
            one for one in self.connections if isinstance(one, Watched) and one is not self and one.waits
        ]
        if others:
            min(others, key=lambda one: one._since).transport.abort()

    def _look(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        if self.transport.is_closing() and not unsent:
            return
        answering = not getattr(self.cycle, "response_complete", True)
        stuck = ("unsent", unsent) if unsent else () if answering else ("waiting", id(self.cycle))
        if stuck and stuck == self._seen:
            self.transport.abort()
            return
        self._seen = stuck
        self.loop.call_later(LOOK_S, self._look)


class Server(uvicorn.Server):
    """A server whose streams end when it does, so that nobody waits for them."""

    def __init__(self, config: uvicorn.Config, services: Services, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._services = services
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let streams go, then the rest."""
        self._services.feed.close()
        await super().shutdown(sockets)


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        ConfigError: The address cannot be had.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server((host, port), family=found[0], backlog=128)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{host} port {port} cannot be opened: {error}. Choose another --port or --host"
        ) from None


def address_of(listening: socket.socket) -> str:
    """The URL of a socket, as a browser on this machine would write it."""
    host, port = listening.getsockname()[:2]
    if ip_address(host).is_unspecified:
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def write_address(path: Path, address: str) -> None:
    """Leave the service's URL in its folder."""
    with replacing(path) as temporary:
        temporary.write_text(address + "\n")
        temporary.chmod(stat.S_IRUSR | stat.S_IWUSR)


def make_server(services: Services, ready: Callable[[], None]) -> Server:
    """The server of a service's application."""
    config = uvicorn.Config(
        create_app(services),
        http=Watched,
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,  # addresses hold login codes
        log_level="error",
        proxy_headers=False,  # nobody may say who they are by a header
        server_header=False,
        limit_concurrency=CONNECTIONS,
        h11_max_incomplete_event_size=services.limits.header_bytes,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=END_S,
    )
    return Server(config, services, ready)


def run_server(server: Server, listening: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM, and end in order; the signal itself is used up."""
    try:
        asyncio.run(server.serve(sockets=[listening]))
    except KeyboardInterrupt:
        pass  # what the server makes of the signal once it has ended
    finally:
        listening.close()
