"""The second process of `torch_elsewhere`: `python -m stoker.sources.torch_child ANSWER PATHS < source`.

It unpickles the source that its parent put on standard input, reads what was probed there, and answers with
digests, a line of JSON each. Its parent kills it when it is late.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Any

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

from stoker.runtime.libc import tie_to_parent

if TYPE_CHECKING:
    from stoker.sources.torch_dataset import TorchSource


def main(arguments: list[str]) -> int:
    """Answer on the descriptor that is named, with these import paths."""
    answer = int(arguments[0])
    tie_to_parent(signal.SIGKILL)
    os.set_inheritable(answer, False)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.putenv(name, "1")  # as in a reader
    sys.path[:] = json.loads(arguments[1])
    try:
        source: TorchSource = cloudpickle.loads(sys.stdin.buffer.read())
    except Exception:  # noqa: BLE001 - a process edge: the parent raises this with the traceback
        _say(answer, {"kind": "refused", "error": traceback.format_exc().rstrip()})
        return 1
    for number in source.probed_numbers():
        _say(answer, {"kind": "begin", "number": number})
        try:
            found: Any = source.probe_again(number)
        except Exception as error:  # noqa: BLE001 - a process edge, and a Dataset may raise anything
            found = f"{type(error).__name__}: {error}"
        _say(answer, {"kind": "item", "number": number, "found": found})
    _say(answer, {"kind": "done"})
    return 0


def _say(answer: int, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(answer, data) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
