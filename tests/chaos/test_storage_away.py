"""Every command ends in time, and says why, when the mount that it works on gives no answer any more.

The kernel does not let go of a process whose calls a file system's server has taken. So the server is stopped
as a whole: what is asked after that is never taken.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import write_burgers

pytest.importorskip("mfusepy", reason="needs mfusepy and libfuse", exc_type=Exception)
pytestmark = [
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="FUSE is not for this user"),
]
HERE = Path(__file__).parent
CONFIG = HERE.parents[1] / "configs" / "train_burgers_32dim.yaml"
SETTINGS = ["encoder.patch_size=4", "model.width=32", "model.depth=1", "training.batch_size=16"]
WAIT_S = 4.0
"""What every wait of minutes is cut down to (`short_waits`)."""
END_S = 100.0
"""By then a command has ended, on a busy machine too; one that hangs has not."""


class Mount:
    """A folder behind a file system of its own."""

    def __init__(self, folder):
        self.behind, self.path = folder / "behind", folder / "mount"
        for path in (self.behind, self.path):
            path.mkdir()
        words = [sys.executable, HERE / "away_fuse.py", self.behind, self.path]
        self.server = subprocess.Popen(
            [*map(str, words)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 20
        while not os.path.ismount(self.path):
            if self.server.poll() is not None or time.monotonic() > deadline:
                self.end()
                pytest.skip("FUSE cannot be mounted")
            time.sleep(0.05)

    @contextmanager
    def away(self):
        files = [os.open(path, os.O_RDONLY) for path in self.path.rglob("*") if path.is_file()]
        self.server.send_signal(signal.SIGSTOP)
        try:
            for fd in files:  # reads from the page cache would not need the server
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            yield
        finally:
            self.server.send_signal(signal.SIGCONT)
            for fd in files:
                os.close(fd)

    def end(self):
        self.server.send_signal(signal.SIGCONT)
        subprocess.run(["umount", "-l", str(self.path)], stderr=subprocess.DEVNULL, check=False)
        self.server.kill()
        self.server.wait(10)


@pytest.fixture
def mount(tmp_path):
    made = Mount(tmp_path)
    yield made
    made.end()


def stoker(folder, *words, short=True):
    """A command that was started in a folder."""
    path = os.pathsep.join(filter(None, [str(HERE / "short_waits"), os.environ.get("PYTHONPATH")]))
    short_waits = {"PYTHONPATH": path, "STOKER_SHORT_WAITS": str(WAIT_S)} if short else {}
    with open(folder / "stdout", "w") as out, open(folder / "stderr", "w") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "stoker", *map(str, words)],
            cwd=folder, env={**os.environ, **short_waits}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=out, stderr=said,
        )  # fmt: skip


def finish(command, folder):
    """Exit code, and what a command that was started in a folder said on standard output and error."""
    try:
        command.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(command.pid, signal.SIGKILL)
        pytest.fail(f"{command.args} did not end. It said: {(folder / 'stderr').read_text()[-4000:]}")
    return command.returncode, (folder / "stdout").read_text(), (folder / "stderr").read_text()


def data_in(folder, samples):
    path = write_burgers(folder / "1D_Burgers_Sols_Nu0.01.hdf5", samples=samples, steps=20, points=128)
    return [f"data.files={path}", *SETTINGS]


def filled(mount, folder, samples=40):
    """Settings, with their caches on the mount."""
    settings = [
        *data_in(folder, samples),
        f"training.latent_cache_dir={mount.path / 'c'}",
        f"training.run_dir={folder / 'run'}",
    ]
    code, _, said = finish(stoker(folder, "precompute", CONFIG, *settings, short=False), folder)
    assert code == 0, said
    return settings


COMMANDS = {
    "train from a URL": lambda mount, settings: [
        "train", CONFIG, *settings[:-2], f"training.latent_cache_dir=file://{mount.path}/c",
        "training.mirror_dir=mirror", "training.run_dir=run",
    ],
    "plan": lambda _, settings: ["plan", CONFIG, *settings],
    "precompute": lambda _, settings: ["precompute", CONFIG, *settings, "latent.dim=16"],
    "verify": lambda mount, _: ["cache", "verify", mount.path / "c" / "burgers1d_train"],
    "verify at a URL": lambda mount, _: ["cache", "verify", f"file://{mount.path}/c/burgers1d_train"],
    "gc": lambda mount, _: ["cache", "gc", "--yes", mount.path / "c", "--keep", "1"],
    "serve, its folder": lambda mount, _: ["serve", "--port", "0", "--state-dir", mount.path / "state"],
    "serve, its data": lambda mount, _: ["serve", "--port", "0", "--state-dir", "s", "--root", mount.path],
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_begins_while_its_storage_is_away_ends_with_an_error(mount, tmp_path, command):
    settings = filled(mount, tmp_path)

    with mount.away():
        code, out, said = finish(stoker(tmp_path, *COMMANDS[command](mount, settings), "--json"), tmp_path)

    assert code == 5, said
    answer = json.loads(out)
    assert answer["exit_code"] == 5
    assert str(mount.path) in answer["error"]


@pytest.mark.parametrize("place", ["URL", "folder"])
def test_training_whose_storage_goes_away_ends_with_an_error(mount, tmp_path, place):
    settings = filled(mount, tmp_path, samples=400 if place == "URL" else 40)[:-2]
    words = [*settings, "training.epochs=100000", "training.tier=disk", "training.run_dir=run2"]
    if place == "URL":
        words += [
            f"training.latent_cache_dir=file://{mount.path}/c",
            "training.mirror_dir=m",
            "training.mirror_bytes=2MiB",  # less than the cache, which would be enough to go on
        ]
    else:
        words += [f"training.latent_cache_dir={mount.path / 'c'}"]
    command = stoker(tmp_path, "train", CONFIG, *words, "--json")
    deadline = time.monotonic() + 100
    while not (tmp_path / "run2" / "checkpoints").exists() and not [*(tmp_path / "run2").glob("*.pt")]:
        assert command.poll() is None, (tmp_path / "stderr").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.2)

    with mount.away():
        code, out, said = finish(command, tmp_path)

    assert code == 5, said
    assert str(tmp_path) in json.loads(out)["error"]


def ask(folder, path, body=None):
    """What the service in a folder answers; the status alone where it is an error."""
    request = urllib.request.Request(
        (folder / "address").read_text().strip() + "/api/v1/training" + path,
        data=None if body is None else json.dumps(body).encode(),
        headers={
            "Authorization": f"Bearer {(folder / 'token').read_text().strip()}",
            "Content-Type": "application/json",
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("what", ["its folder", "its data"])
def test_a_service_whose_storage_goes_away_ends_when_it_is_told_to(mount, tmp_path, what):
    write_burgers(mount.behind / "data.h5")
    state = (mount.path if what == "its folder" else tmp_path) / "state"
    command = stoker(tmp_path, "serve", "--port", "0", "--state-dir", state, "--root", mount.path)
    deadline = time.monotonic() + 100
    while not (state / "address").exists():
        assert command.poll() is None, (tmp_path / "stderr").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert ask(state, "/jobs") == 200

    with mount.away():
        if what == "its data":
            body = {"kind": "hdf5", "name": "d", "path": str(mount.path / "data.h5")}
            assert ask(state, "/datasets", body) >= 500
            assert ask(state, "/jobs") == 200
        command.send_signal(signal.SIGTERM)
        code, _, said = finish(command, tmp_path)

    assert code in ((0, 5) if what == "its folder" else (0,)), said  # 5: it still had to write there
    assert "Traceback" not in said
