"""Encoders in child processes, one for each device: the records of this process, whoever is lost."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from stoker.errors import ConfigError, DeviceError, EncoderError, Interrupted, ResourceError, StalledError
from stoker.plan.resources import probe
from stoker.precompute import (
    EncodeFiller,
    PrecomputeReport,
    PrecomputeSettings,
    Timeouts,
    encoder_processes,
    precompute,
)
from stoker.precompute import run as run_module
from stoker.sources.arrays import ArraySource
from stoker.store import open_cache
from stoker.units import MIB
from tests.kit import forked as subprocess
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource
from tests.precompute.test_engine import assert_same, records, run

TWO = {"devices": ("cpu", "cpu")}
ONE = {"devices": ()}
MANY = 4 * run_module.FEW_GROUPS + 4
"""Samples of more groups of four than this process encodes by itself."""
AT = 17
"""The sample at which encoders misbehave; in the fifth group of four."""


class Misbehaving(FakeEncoder):
    """Does `how` at the group of sample `AT`, in as many processes as `times`; otherwise as its parent."""

    def __init__(self, how: str, marker: Path, *, times: int = 1, **settings: object) -> None:
        super().__init__(by_shape=True, **settings)
        self.how, self.marker, self.times = how, marker, times

    def encode(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        at_it = bool((batch["nu"] == np.float32(AT) / np.float32(7)).any())
        done = len(list(self.marker.glob("done-*")))
        if at_it and done < self.times:
            (self.marker / f"done-{done}-{os.getpid()}").touch()
            if self.how == "lost":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            if self.how == "memory":
                raise torch.OutOfMemoryError("CUDA out of memory (fake)")
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
        return super().encode(batch)


def without_leftovers() -> bool:
    """Whether no process of ours is left that encodes."""
    return not encoders_of(psutil.Process())


def encoders_of(process: psutil.Process) -> list[psutil.Process]:
    """Processes that encode for this one; their command line ends with its number."""
    found: list[psutil.Process] = []
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            words = [word for word in one.cmdline() if word]  # a command line written over a longer one
            if "stoker.precompute.encoder_processes" in words and words[-1] == str(process.pid):
                found.append(one)
    return found


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    (tmp_path / "marker").mkdir()
    return tmp_path / "marker"


def test_two_devices_store_what_one_stores(tmp_path: Path) -> None:
    """Short groups at the ends of both parts, and an encoder that shows the shape of a call."""
    source = FakeSource((30, 18), run=6)
    whole = run(source, FakeEncoder(by_shape=True), tmp_path / "one", workers=0)

    shared = run(source, FakeEncoder(by_shape=True, sleep_s=0.02), tmp_path / "two", **TWO)

    assert shared.encoded == 48
    assert_same(records(shared.cache), records(whole.cache))
    assert not list((tmp_path / "two").glob(".workers/*")), "nothing was lost, so no output is kept"
    assert without_leftovers()


def test_devices_that_are_none_are_refused(tmp_path: Path) -> None:
    for device in (["cpu", "cuda:99"], ["cpu", "tape"], [], *([] if torch.cuda.is_available() else ["all"])):
        with pytest.raises((ConfigError, ResourceError), match="device"):
            precompute(FakeSource((4,)), FakeEncoder(), tmp_path, name="c", device=device)


class Noting(FakeEncoder):
    """Notes in which process it encodes, and how torch and numpy are set there."""

    def __init__(self, noted: Path, **settings: object) -> None:
        super().__init__(**settings)
        self.noted = noted

    def encode(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        (self.noted / str(os.getpid())).write_text(repr(program_state()))
        with torch.autocast("cpu", enabled=False):  # a record keeps its dtype
            return super().encode(batch)


def program_state() -> tuple[object, ...]:
    """What the bits of a record may depend on, but for products of float32."""
    return (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.backends.mkldnn.enabled,
        torch.backends.cuda.flash_sdp_enabled(),
        (torch.tensor([1e-40], dtype=torch.float32, device="cpu") * 1.0).item(),
        np.geterr(),
    )


def test_one_device_has_a_child_too_and_few_groups_have_none(tmp_path: Path, marker: Path) -> None:
    """The records are the same, also where a run goes on with what another one left."""
    source, encoder = FakeSource((MANY,)), Noting(marker, by_shape=True)
    whole = run(source, encoder, tmp_path / "child")
    (child,) = marker.iterdir()
    assert child.name != str(os.getpid())
    assert without_leftovers()
    assert not encoder.calls

    few = run(FakeSource((MANY - 4,)), encoder, tmp_path / "few")
    assert {path.name for path in marker.iterdir()} == {child.name, str(os.getpid())}
    found = records(few.cache)
    assert_same(found, {number: record for number, record in records(whole.cache).items() if number in found})


def test_a_child_computes_as_its_caller(tmp_path: Path, marker: Path) -> None:
    """Settings of the program that bits may depend on hold in the child, and stay as they are here."""
    threads = torch.get_num_threads()
    plain, encoder = program_state(), Noting(marker)
    try:
        torch.set_num_threads(threads + 1)
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.mkldnn.enabled = False
        torch.backends.cuda.enable_flash_sdp(False)
        flushes = torch.set_flush_denormal(True)
        with torch.autocast("cpu", torch.float16), torch.device("meta"), np.errstate(over="raise"):
            wanted = program_state()
            run(FakeSource((MANY,)), encoder, tmp_path / "c")
            assert program_state() == wanted
    finally:
        torch.set_flush_denormal(False)
        torch.backends.cuda.enable_flash_sdp(True)
        torch.backends.mkldnn.enabled = True
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)

    (child,) = marker.iterdir()
    assert child.name != str(os.getpid())
    assert child.read_text() == repr(wanted)
    differ = [place for place, (a, b) in enumerate(zip(plain, wanted, strict=True)) if a != b]
    assert flushes
    assert differ == [*range(len(plain))]


class Watches:
    """A `ProgressSink` that notes how this process multiplies meanwhile."""

    interval_s = 0.0

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def update(self, _: object) -> None:
        self.seen.add(torch.get_float32_matmul_precision())

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


def test_switches_of_the_program_are_left_alone_while_a_child_encodes(tmp_path: Path) -> None:
    sink = Watches()
    torch.set_float32_matmul_precision("medium")
    try:
        run(FakeSource((MANY,)), FakeEncoder(), tmp_path, progress=sink)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert sink.seen == {"medium"}


def test_an_encoder_that_cannot_be_sent_encodes_here_and_one_line_says_so(
    tmp_path: Path, marker: Path, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = Noting(marker, by_shape=True)
    encoder.lock = threading.Lock()
    here = run(FakeSource((MANY,)), encoder, tmp_path / "here")

    assert [path.name for path in marker.iterdir()] == [str(os.getpid())]
    (line,) = [message for message in caplog.messages if "in this process" in message]
    assert "lock" in line
    whole = run(FakeSource((MANY,)), FakeEncoder(by_shape=True), tmp_path / "child")
    assert_same(records(here.cache), records(whole.cache))


def test_little_memory_is_not_spent_on_another_torch(
    tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = probe()
    monkeypatch.setattr(run_module, "probe", lambda **_: replace(found, host_bytes=400 * MIB))
    run(FakeSource((MANY,)), Noting(marker), tmp_path / "c")
    assert [path.name for path in marker.iterdir()] == [str(os.getpid())]


class Unchanged(FakeEncoder):
    """Gives the only field of its samples back."""

    def schema(self, sample_schema: Any) -> Any:
        return sample_schema

    def encode(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return batch


def test_groups_of_less_than_a_page_arrive(tmp_path: Path) -> None:
    """Shared memory is mapped page by page: one field of a few bytes needs one page, not two."""
    values = np.random.default_rng(0).standard_normal((MANY, 3), dtype=np.float32)
    np.save(tmp_path / "x.npy", values)
    source = ArraySource(tmp_path / "x.npy", layout="rows")
    cache = precompute(source, Unchanged(), tmp_path / "c", name="c", workers=1, progress=None)

    assert np.array_equal(np.stack([cache[n]["data"].numpy() for n in range(MANY)]), values)


def test_a_child_that_cannot_be_started_is_done_without(
    tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ResourceError("no process is left (fake)")

    monkeypatch.setattr(encoder_processes, "LoggedChild", refuse)
    report = run(FakeSource((MANY,)), Noting(marker), tmp_path / "c")

    assert report.encoded == MANY
    assert [path.name for path in marker.iterdir()] == [str(os.getpid())]
    assert "no process is left (fake)" in caplog.text


def test_few_groups_have_a_child_where_the_settings_say_so(tmp_path: Path, marker: Path) -> None:
    run(FakeSource((8,)), Noting(marker), tmp_path / "c", always_in_child=True)

    (child,) = marker.iterdir()
    assert child.name != str(os.getpid())


def test_many_records_on_demand_are_encoded_in_a_child_that_ends(tmp_path: Path, marker: Path) -> None:
    filler = EncodeFiller(
        FakeSource((MANY,)),
        Noting(marker, by_shape=True),
        tmp_path / "c",
        name="c",
        settings=PrecomputeSettings(progress=None),
    )
    filler.fill(range(MANY), 60.0)

    (child,) = marker.iterdir()
    assert child.name != str(os.getpid())
    assert without_leftovers()
    whole = run(FakeSource((MANY,)), FakeEncoder(by_shape=True), tmp_path / "whole")
    assert_same(records(open_cache(tmp_path / "c" / "c")), records(whole.cache))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [ONE, TWO], ids=["one", "two"])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("lost", "the encoder on cpu is lost at samples 16-19.*illegal memory access.*it is started again"),
        ("kill", "lost at samples 16-19: its process was killed by signal 9.*it is started again"),
        ("stop", 'lost at samples 16-19: it made no progress for 2 s in stage "encode".*it is started again'),
        ("memory", "lost at samples 16-19: the encoder has no memory on cpu.*go to the rest: cpu"),
    ],
)
def test_a_device_that_is_lost_costs_no_record_and_no_other_device(
    how: str, said: str, devices: Any, tmp_path: Path, marker: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if how == "memory" and devices is ONE:
        pytest.skip("no device is left then")
    source = FakeSource((41,))
    whole = run(source, FakeEncoder(by_shape=True), tmp_path / "one", workers=0)
    monkeypatch.setattr(run_module, "FEW_GROUPS", 0)
    # Out of memory ends a device when halving a group down to one sample has not helped.
    encoder = Misbehaving(how, marker, times=6 if how == "memory" else 1, sleep_s=0.05)

    shared = run(source, encoder, tmp_path / "two", timeouts=Timeouts(encode=2.0), **devices)

    assert (shared.encoded, shared.quarantined) == (41, 0), "nothing is encoded twice"
    assert sum(shard.rows for shard in shared.cache.index.shards) == 41
    assert_same(records(shared.cache), records(whole.cache))
    (line,) = [message for message in caplog.messages if "the encoder on" in message]
    assert re.search(said, line), line
    assert "encoded again" not in caplog.text, "all in one pass"
    assert without_leftovers()


@pytest.mark.slow
def test_a_group_at_which_every_process_ends_ends_the_run_and_keeps_the_rest(
    tmp_path: Path, marker: Path
) -> None:
    source = FakeSource((200,))
    with pytest.raises(DeviceError, match=r"3 encoders in a row ended at samples 16-19.*killed by signal 9"):
        run(source, Misbehaving("kill", marker, times=9), tmp_path, **TWO)
    assert without_leftovers()

    mended = run(source, FakeEncoder(by_shape=True), tmp_path, workers=0)

    assert mended.reused > 0
    assert mended.encoded + mended.reused == 200


@pytest.mark.slow
def test_where_no_device_is_left_all_are_named(tmp_path: Path, marker: Path) -> None:
    with pytest.raises(ResourceError, match=r"no device is left of cpu, cpu\..*no memory on cpu"):
        run(FakeSource((41,)), FakeEncoder(oom_above=0), tmp_path, **TWO)


@pytest.mark.slow
def test_an_encoder_that_fails_on_anything_ends_the_run_at_once(tmp_path: Path) -> None:
    with pytest.raises(EncoderError, match="the encoder on cpu: the encoder failed on samples 0-3 and fails"):
        run(FakeSource((41,)), FakeEncoder(raises=0.0), tmp_path, **TWO)


@pytest.mark.slow
def test_a_sample_that_the_encoder_refuses_is_set_aside_by_name(tmp_path: Path) -> None:
    report = run(FakeSource((41,)), FakeEncoder(raises=AT), tmp_path, **TWO)

    assert (report.encoded, report.quarantined) == (40, 1)
    assert report.cache.quarantined[AT].stage == "encode"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["lost", "kill"])
def test_a_long_sample_whose_device_is_lost_half_way_is_read_again(
    how: str, tmp_path: Path, marker: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Four stretches a sample; those that come for a device that is gone are let go."""
    source = FakeSource((24,), steps=64, width=5)
    settings = {"memory_bytes": 4096 * 12, "workers": 1}
    whole = run(source, FakeEncoder(samples=1, steps=16, by_shape=True), tmp_path / "one", **settings)
    encoder = Misbehaving(how, marker, samples=1, steps=16)

    shared = run(source, encoder, tmp_path / "two", **settings, **TWO)

    assert shared.encoded == 24
    assert "encoded again" not in caplog.text, "all in one pass"
    assert_same(records(shared.cache), records(whole.cache))


@pytest.mark.slow
def test_a_signal_ends_all_devices_and_the_same_call_resumes(
    tmp_path: Path, during: Callable[[Path], None]
) -> None:
    source = FakeSource((400,))
    encoder = FakeEncoder(by_shape=True, sleep_s=0.05)
    during(tmp_path)
    with pytest.raises(Interrupted):
        run(source, encoder, tmp_path, **TWO)
    assert without_leftovers()

    rest: PrecomputeReport = run(source, FakeEncoder(by_shape=True), tmp_path, workers=0)

    assert rest.reused > 0
    assert rest.records == 400


@pytest.fixture
def during() -> Generator[Callable[[Path], None]]:
    """Sends this process a SIGINT once something has been written below a folder."""
    begun: list[subprocess.Popen[bytes]] = []

    def begin(folder: Path) -> None:
        text = (
            "import os, signal, sys, time, pathlib\n"
            "until = time.monotonic() + 60\n"
            "while time.monotonic() < until:\n"
            "    if any(p.stat().st_size > 4096 for p in pathlib.Path(sys.argv[1]).rglob('*shard-*')):\n"
            "        break\n"
            "    time.sleep(0.05)\n"
            "os.kill(int(sys.argv[2]), signal.SIGINT)\n"
        )
        begun.append(subprocess.Popen([sys.executable, "-c", text, str(folder), str(os.getpid())]))

    yield begin
    for process in begun:
        process.wait(90)


@pytest.mark.slow
@pytest.mark.chaos
def test_encoders_end_with_who_started_them(tmp_path: Path) -> None:
    text = (
        "import sys; from tests.precompute.test_engine import run\n"
        "from tests.precompute.fake_encoders import FakeEncoder\n"
        "from tests.precompute.fake_sources import FakeSource\n"
        "run(FakeSource((4000,)), FakeEncoder(sleep_s=0.2), sys.argv[1], devices=('cpu', 'cpu'))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", text, str(tmp_path)], cwd=Path(__file__).parents[2])
    until = time.monotonic() + 60
    below: list[psutil.Process] = []
    while time.monotonic() < until and len(below) < 2:
        below = encoders_of(psutil.Process(process.pid))
        time.sleep(0.1)
    process.kill()
    process.wait(30)

    assert len(below) == 2
    assert not psutil.wait_procs(below, timeout=30)[1]


@pytest.mark.slow
def test_an_encoder_that_hangs_in_every_process_is_a_stall(tmp_path: Path, marker: Path) -> None:
    encoder = Misbehaving("stop", marker, times=9)
    with pytest.raises(
        StalledError, match=r"3 encoders in a row ended at samples 16-19.*no progress for 1 s"
    ):
        run(FakeSource((41,)), encoder, tmp_path, timeouts=Timeouts(encode=1.0), **TWO)
