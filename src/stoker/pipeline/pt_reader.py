"""Read `.pt` files through a limited child: whatever a file does, the caller goes on in bounded time."""

from __future__ import annotations

import math
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from torch import Tensor

from stoker.pipeline.pt_child import receive, send
from stoker.units import MIB, format_bytes

START_S = 60.0
END_S = 5.0


class Refused(Exception):  # noqa: N818 -- an answer about one file, turned into a failure of its sample
    """A file was not read; `transient` if another try may help."""

    def __init__(self, why: str, *, transient: bool = False) -> None:
        super().__init__(why)
        self.transient = transient


@dataclass(frozen=True, slots=True, kw_only=True)
class PtContent:
    """What one file holds."""

    tensors: dict[str, Tensor]
    digest: str
    """sha256 of the bytes that were read."""
    left_out: tuple[str, ...]
    """Entries that no field can hold: text, lists, nothing."""


class PtReader:
    """One child, replaced when it dies or takes too long. Not for several threads.

    Args:
        limit_bytes: The largest file it may read.
        deadline_s: Wall time for one file, and, in whole seconds, processor time.
    """

    def __init__(self, limit_bytes: int, *, deadline_s: float = 60.0) -> None:
        self._limit_bytes, self._deadline_s, self._cpu_s = limit_bytes, deadline_s, math.ceil(deadline_s)
        self._child: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._fresh = True

    def __enter__(self) -> PtReader:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self, path: Path) -> PtContent:
        """The tensors of a file.

        Raises:
            Refused: It is not what an earlier cache holds, or the child did not survive it.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load

        sock = self._connected()
        # The first file waits for the child to import torch.
        deadline_s = self._deadline_s + (START_S if self._fresh else 0.0)
        began, self._fresh = time.monotonic(), False
        sock.settimeout(deadline_s)
        try:
            send(sock, {"path": str(path), "limit_bytes": self._limit_bytes})
            head, payload = receive(sock, self._limit_bytes + MIB, began + deadline_s)
        except TimeoutError:
            self.close()
            spent_s = time.monotonic() - began
            raise Refused(f"reading it took longer than {spent_s:.0f} s", transient=True) from None
        except (EOFError, OSError, ValueError) as error:
            raise self._death(error) from None
        if "error" in head:
            raise Refused(str(head["error"]), transient=head.get("transient") is True)
        try:
            tensors = load(bytes(payload))
        except SafetensorError as error:
            raise self._death(error) from None
        left_out = tuple(str(name) for name in head.get("left_out", ()))
        return PtContent(tensors=tensors, digest=str(head.get("digest")), left_out=left_out)

    def close(self) -> None:
        """End the child; one that is stuck in the kernel is left behind."""
        if self._sock is not None:
            self._sock.close()
        if self._child is not None:
            self._child.kill()
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(END_S)
        self._sock = self._child = None

    def _connected(self) -> socket.socket:
        if self._sock is None:
            ours, theirs = socket.socketpair()
            limits = [str(4 * self._limit_bytes), str(self._cpu_s)]
            with theirs:
                # -P: modules come from where ours do, not from a folder of foreign files that we were run in.
                self._child = subprocess.Popen(
                    [sys.executable, "-P", "-m", "stoker.pipeline.pt_child", str(theirs.fileno()), *limits],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            self._sock, self._fresh = ours, True
        return self._sock

    def _death(self, error: Exception) -> Refused:
        """What to say of a file that the child did not survive."""
        child = self._child
        code = None
        if child is not None:
            with suppress(subprocess.TimeoutExpired):
                code = child.wait(END_S)
        self.close()
        if code == -signal.SIGXCPU:
            return Refused(f"reading it took more than {self._cpu_s} s of processor time")
        how = f"ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended: {error}"
        return Refused(
            f"the process that read it {how} (it may use {format_bytes(4 * self._limit_bytes)})",
            transient=code == -signal.SIGKILL,
        )
