"""A connection to a Ray cluster: made within a deadline, asked for room, given up at the end.

Ray reads its own environment (the token, where its files go); nothing of it is read here.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

from stoker.errors import ConfigError, Interrupted, ResourceError, StalledError, StokerError
from stoker.extras.ray.settings import RaySettings
from stoker.plan.resources import probe
from stoker.runtime.signals import Interrupts
from stoker.runtime.threads import start_thread
from stoker.units import MIB

log = logging.getLogger("stoker")
ray: Any = import_module("ray")
"""The library, which is an extra; what comes out of it is checked where it is used."""
STORE_BYTES = 256 * MIB
"""Object store of a cluster of our own, and what is put into it once more."""
_KNOCK_S = 5.0
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one task takes of a node."""

    num_cpus: float
    num_gpus: float

    def __str__(self) -> str:
        """As settings."""
        return f"num_cpus={self.num_cpus:g} num_gpus={self.num_gpus:g}"

    def times(self, resources: dict[str, float]) -> int:
        """How many tasks fit into these resources."""
        rooms = [
            int(resources.get(name, 0.0) / wanted + 1e-9)
            for name, wanted in (("CPU", self.num_cpus), ("GPU", self.num_gpus))
            if wanted > 0
        ]
        return min(rooms, default=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A living node."""

    id: str
    address: str
    resources: dict[str, float]

    def __str__(self) -> str:
        """Its address, and what it has for tasks."""
        cpus, gpus = self.resources.get("CPU", 0.0), self.resources.get("GPU", 0.0)
        return f"{self.address} (CPU {cpus:g}, GPU {gpus:g})"


class RayCluster:
    """Connected from the first use until `close`; a connection that the caller had is used and left alone."""

    def __init__(self, settings: RaySettings) -> None:
        self._settings = settings
        self._ours = False
        self._over = threading.Event()

    @property
    def own(self) -> bool:
        """Whether the cluster is one that we start on this machine."""
        return self._settings.address is None

    def connect(self, interrupts: Interrupts, *, store_bytes: int) -> None:
        """Connect, unless that is done.

        Args:
            interrupts: Ends the wait.
            store_bytes: What is about to be put into the object store, of which a cluster of our own has room
                for that and a little more.

        Raises:
            StalledError: The cluster did not answer in time.
            ConfigError: There is none, or it wants a token.
            Interrupted: A signal came.
        """
        if ray.is_initialized():
            return
        settings = self._settings
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if settings.address is None:
            options |= {
                "address": "local",
                "num_cpus": max(1, int(probe().cpus)),
                "object_store_memory": STORE_BYTES + store_bytes,
                "include_dashboard": False,
            }
        else:
            _knock(settings.address, min(_KNOCK_S, settings.connect_s))
            options |= {"address": settings.address}
        try:
            _within(settings.connect_s, lambda: ray.init(**options), interrupts, self._over)
        except StokerError:
            raise
        except Exception as error:
            raise _explained(error, settings.address) from error
        self._ours = True

    def nodes(self) -> list[Node]:
        """Nodes that live."""
        return [
            Node(id=node["NodeID"], address=node["NodeManagerAddress"], resources=dict(node["Resources"]))
            for node in ray.nodes()
            if node["Alive"]
        ]

    def need(self, *, device: str, threads: int) -> Need:
        """What a task takes, as far as the settings leave it open.

        Args:
            device: Where the encoder runs.
            threads: That torch computes with; a task has as many.
        """
        settings, nodes = self._settings, self.nodes()
        gpus = settings.num_gpus
        if gpus is None:
            gpus = 1.0 if device.startswith("cuda") else 0.0
        if settings.num_cpus is not None:
            return Need(num_cpus=settings.num_cpus, num_gpus=gpus)
        fitting = [node.resources for node in nodes if Need(num_cpus=1, num_gpus=gpus).times(node.resources)]
        shares = [
            found.get("CPU", 1.0) / (max(1.0, found["GPU"] // gpus) if gpus else 1.0) for found in fitting
        ]
        most = float("inf") if gpus else float(threads)
        return Need(num_cpus=max(1.0, float(int(min([*shares, most])))) if shares else 1.0, num_gpus=gpus)

    def refuse(self, need: Need) -> ResourceError:
        """The error for a cluster none of whose nodes has room for a task, however long one waits."""
        nodes = ", ".join(map(str, self.nodes())) or "none"
        return ResourceError(
            f"no node of the Ray cluster can run a task that takes {need}; the nodes: {nodes}. Ask for less "
            "(precompute.ray.num_cpus, precompute.ray.num_gpus), or add such a node"
        )

    def free(self) -> str:
        """Describe the resources that are free at the moment."""
        found = cast("dict[str, float]", ray.available_resources())
        return f"CPU {found.get('CPU', 0.0):g}, GPU {found.get('GPU', 0.0):g}"

    def close(self) -> None:
        """Let go of the connection if it is ours, and of the cluster with it."""
        if self._ours:
            self._ours = False
            ray.shutdown()
            self._over.set()
            self._over = threading.Event()


def _knock(address: str, timeout_s: float) -> None:
    """See whether anybody listens where a cluster is said to be: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # `auto`: Ray knows where
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except OSError as error:
        raise StalledError(
            f"no Ray cluster answers at {address}: {error}. Expected the address that `ray start --head` "
            "prints; start the cluster, or leave --address out for one on this machine"
        ) from error


def _within(
    deadline_s: float, call: Callable[[], Any], interrupts: Interrupts, over: threading.Event
) -> None:
    """Run what may hang in a thread, which is left behind if it does; Ray leaves signals alone there, too.

    The thread stays until `over`: the kernel ends a cluster of our own with the thread that started it.
    """
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  raised in the thread that waits
            ended.append(error)
        else:
            ended.append(None)
            over.wait()

    thread = start_thread(run, "stoker-ray-connect")
    waited = 0.0
    while not ended:
        thread.join(_LOOK_S)
        waited += _LOOK_S
        if interrupts.signal is not None:
            raise Interrupted("stopped while connecting to the Ray cluster; nothing was started")
        if not ended and waited > deadline_s:
            raise StalledError(
                f"the Ray cluster did not answer within {deadline_s:g} s. Look at it with `ray status`; a "
                "wrong RAY_AUTH_TOKEN looks like this, too. Give more time with precompute.ray.connect"
            )
    if ended[0] is not None:
        raise ended[0]


def _explained(error: Exception, address: str | None) -> StokerError:
    text = " ".join(str(error).split())[:600]
    where = "on this machine" if address is None else f"at {address}"
    if isinstance(error, ray.exceptions.AuthenticationError) or "oken" in text or "nauthenticated" in text:
        return ConfigError(
            f"the Ray cluster {where} wants a token: {text}. Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or "
            "RAY_AUTH_TOKEN_PATH) as on the cluster; `ray get-auth-token` prints the one of this account"
        )
    if isinstance(error, ConnectionError):
        return ConfigError(
            f"there is no Ray cluster {where}: {text}. Start one with `ray start --head`, give --address "
            "host:port, or leave it out for one on this machine"
        )
    return StokerError(f"the Ray cluster {where} cannot be used: {type(error).__name__}: {text}")


def whoami() -> str:
    """This node in messages."""
    return os.uname().nodename
