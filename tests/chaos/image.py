"""Power loss on a real file system: copy the image under an ext4 after every fsync, and look into the copy.

`python -m tests.chaos.image` prints its figures as JSON. The image is a file mounted through a loop device;
what the kernel has not written to it by the moment of the copy is lost, as by a power cut.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.chaos import children, planted, preload, program
from tests.chaos.checks import Promises, broken, not_finished, silence
from tests.chaos.enumerate import DEADLINE_S, promising
from tests.chaos.scenarios import SCENARIOS, Scenario

IMAGE_BYTES = 64 << 20


def call(*command: str) -> None:
    """Run a tool; its words are in the error."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def refused() -> str:
    """Why an image cannot be mounted here; empty if it can."""
    if os.getuid() != 0:
        return "mounting needs root"
    if shutil.which("mkfs.ext4") is None and not Path("/sbin/mkfs.ext4").exists():
        return "needs mkfs.ext4"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with mounted(new_image(Path(folder) / "image"), Path(folder) / "mount"):
                return ""
        except OSError as error:
            return f"mounting is not allowed: {error}"


def new_image(path: Path) -> Path:
    """An empty ext4."""
    with path.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    call("mkfs.ext4", "-q", "-F", str(path))
    return path


@contextmanager
def mounted(image: Path, folder: Path) -> Generator[Path]:
    """An image, mounted at a folder that is made for it."""
    folder.mkdir(exist_ok=True)
    call("mount", "-o", "loop", str(image), str(folder))
    try:
        yield folder
    finally:
        call("umount", str(folder))


def copies(
    scenario: Scenario, image: Path, mount: Path, base: Path, patch: Callable[[], None]
) -> list[tuple[Path, list[Any]]]:
    """Run a scenario, copying the image after every fsync and at the end: copies, and promises by then."""
    root = mount / "run"
    root.mkdir()
    ready = children.run(lambda say: scenario.prepare(root), deadline_s=DEADLINE_S)
    assert ready.code == 0, ready
    os.sync()
    preload.arm(root)
    preload.stop_after("fsync")

    def work(say: children.Say) -> None:
        silence()
        patch()
        scenario.run(root, promising(say))

    pid, pipe = children.start(work)
    os.set_blocking(pipe, False)
    found: list[tuple[Path, list[Any]]] = []
    said = b""
    limit = time.monotonic() + DEADLINE_S
    while True:
        seen, status = os.waitpid(pid, os.WUNTRACED | os.WNOHANG)
        if not seen:
            assert time.monotonic() < limit, "the scenario hangs"
            time.sleep(0.0005)
            continue
        with suppress(BlockingIOError):
            said += os.read(pipe, 1 << 16)
        copy = base / f"{len(found)}.img"
        call("cp", "--sparse=always", str(image), str(copy))
        found.append((copy, [json.loads(line) for line in said.splitlines()]))
        if not os.WIFSTOPPED(status):
            break
        os.kill(pid, signal.SIGCONT)
    preload.disarm()
    os.close(pipe)
    if os.waitstatus_to_exitcode(status) != 0:
        raise RuntimeError(f"the scenario failed: {said.decode()}")
    return found


def look(scenario: Scenario, root: Path, promised: list[Any], say: children.Say) -> None:
    """What is wrong in a copy, then after the scenario has been run again in it."""
    silence()
    say(broken(scenario, root, Promises.of(scenario, promised)))
    scenario.run(root, promising(lambda value: None))
    say(not_finished(scenario, root))


def try_scenario(name: str, base: Path, patch: Callable[[], None]) -> tuple[int, list[str]]:
    """Copies of one scenario, and what is wrong in them."""
    scenario, wrong = SCENARIOS[name], []
    place = base / name
    place.mkdir()
    image = new_image(place / "image")
    with mounted(image, place / "mount") as mount:
        found = copies(scenario, image, mount, place, patch)
    for i, (copy, promised) in enumerate(found):
        with mounted(copy, place / "copy") as mount:
            work = functools.partial(look, scenario, mount / "run", promised)
            ended = children.run(work, deadline_s=DEADLINE_S)
        lines = [text for texts in ended.said if isinstance(texts, list) for text in texts]
        if ended.code != 0 or ended.hung:
            lines.append(f"not resumed: {ended.error or ended}")
        wrong += [f"{name}, image {i}: {text}" for text in lines]
        copy.unlink()
    return len(found), wrong


def run(argv: Sequence[str]) -> program.Figures:
    """Try the scenarios that the arguments name, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scenario", action="append", choices=[*SCENARIOS])
    parser.add_argument("--planted", default="none", choices=[*planted.PROTOCOLS], help="a bad protocol")
    arguments, begun = parser.parse_args(argv), time.monotonic()
    images, wrong = dict[str, int](), list[str]()
    with tempfile.TemporaryDirectory(prefix="stoker-chaos-") as folder:
        for name in arguments.scenario or SCENARIOS:
            images[name], found = try_scenario(name, Path(folder), planted.PROTOCOLS[arguments.planted])
            wrong += found
    return program.figures({"images": sum(images.values()), "by_scenario": images}, wrong, begun)


if __name__ == "__main__":
    preload.ensure("tests.chaos.image")
    sys.exit(program.main(run))
