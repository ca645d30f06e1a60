"""Machines of one box: a network namespace for each where that is permitted, else the loopback interface."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

NODES, RANKS_A_NODE = 2, 2
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Node:
    """One machine: how a command is run there, and by which interface it reaches the others."""

    number: int
    prefix: tuple[str, ...]
    interface: str
    folder: Path


@dataclass(frozen=True)
class Net:
    """All of them, and where they meet."""

    nodes: tuple[Node, ...]
    address: str
    apart: bool
    """In namespaces of their own, which reach each other over a pair of virtual interfaces alone."""


@contextmanager
def two_nodes(folders: Sequence[Path]) -> Generator[Net]:
    """Two machines that work in these folders (which may be one)."""
    with ExitStack() as stack:
        if names := stack.enter_context(_namespaces()):
            prefixes = [("ip", "netns", "exec", name) for name in names]
            nodes = (Node(k, prefixes[k], f"{names[k]}v", folders[k]) for k in range(NODES))
            yield Net(tuple(nodes), "10.77.0.1", apart=True)
        else:
            yield Net(tuple(Node(k, (), "lo", folders[k]) for k in range(NODES)), "127.0.0.1", apart=False)


@contextmanager
def _namespaces() -> Generator[list[str]]:
    names = [f"st{os.getpid() % 100_000}{letter}" for letter in "ab"]
    ends = [f"{name}v" for name in names]
    commands = [["netns", "add", name] for name in names]
    commands += [
        [
            "link",
            "add",
            ends[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            ends[1],
            "netns",
            names[1],
        ]
    ]
    for place, (name, end) in enumerate(zip(names, ends, strict=True)):
        commands.append(["-n", name, "addr", "add", f"10.77.0.{place + 1}/24", "dev", end])
        commands += [["-n", name, "link", "set", one, "up"] for one in (end, "lo")]
    try:
        possible = shutil.which("ip") is not None and os.geteuid() == 0
        made = possible and all(
            subprocess.run(["ip", *words], capture_output=True, timeout=20).returncode == 0
            for words in commands
        )
        yield names if made else []
    finally:
        for name in names if shutil.which("ip") else ():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def free_port() -> int:
    """One that nobody uses here at the moment; in a namespace of its own nobody does in any case."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextmanager
def launched(net: Net, *words: str) -> Generator[list[subprocess.Popen[str]]]:
    """`torchrun --nnodes 2 ... words` on each machine; whatever is left of them is killed at the end."""
    port, begun = free_port(), list[subprocess.Popen[str]]()
    path = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    try:
        for node in net.nodes:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(NODES)]
            torchrun += ["--node-rank", str(node.number), "--nproc-per-node", str(RANKS_A_NODE)]
            torchrun += ["--master-addr", net.address, "--master-port", str(port), *words]
            process = subprocess.Popen(
                [*node.prefix, *torchrun],
                cwd=node.folder,
                env={**os.environ, "GLOO_SOCKET_IFNAME": node.interface, "OMP_NUM_THREADS": "1"} | path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            begun.append(process)
        yield begun
    finally:
        for process in begun:
            kill_node(process)
            with suppress(ValueError):  # its output was read
                process.communicate()


def kill_node(launcher: subprocess.Popen[str]) -> None:
    """SIGKILL to all that runs on a machine, as when its power goes."""
    seen: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        seen = [psutil.Process(launcher.pid)]
        seen += seen[0].children(recursive=True)
    for one in seen:
        with suppress(psutil.NoSuchProcess):
            one.suspend()  # or a launcher would begin something new meanwhile
    for one in seen:
        with suppress(psutil.NoSuchProcess):
            one.kill()
