"""Runs the programs of this folder on request, each in a fork of one process that has imported everything.

The tests use it, since importing torch takes longer than most of what they look at. A request is a line of
JSON, `[program, *arguments]`, the answer a line with its figures; it ends with its input.
"""

from __future__ import annotations

import json
import sys

import torch

from tests.chaos import children, enumerate, flips, fuzz, image, preload, trees, writers

PROGRAMS = {
    "enumerate": enumerate.run,
    "flips": flips.run,
    "fuzz": fuzz.run,
    "image": image.run,
    "trees": trees.run,
    "writers": writers.run,
}
DEADLINE_S = 170.0


def serve() -> None:
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        ended = children.run(lambda say: say(PROGRAMS[name](arguments)), deadline_s=DEADLINE_S)
        found = ended.said[-1] if ended.code == 0 else {"failed": ended.error or repr(ended)}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    preload.spare_children()
    serve()
