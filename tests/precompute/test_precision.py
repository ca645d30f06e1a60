"""Records do not depend on how a program has set torch's products of float32."""

from __future__ import annotations

import ctypes
import gc
import locale
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import stoker
from stoker.errors import EncoderError, IncompleteError
from stoker.precompute import PrecomputeSettings, run_precompute
from stoker.precompute.encode import full_precision
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource

SETTINGS = PrecomputeSettings(workers=0, progress=None)
NEW = hasattr(torch.backends.cudnn, "conv")


class Watching(FakeEncoder):
    """Notes what torch would do in its call; fails there when told to."""

    fails = False

    def encode(self, batch):
        self.seen = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
        self.switches = switches()
        if self.fails:
            raise ValueError("no")
        return super().encode(batch)


@pytest.fixture(autouse=True)
def _as_before():
    """What a test sets is gone afterwards."""
    with full_precision():
        yield


def switches():
    """All of them as torch tells, for comparing."""
    asked = [torch.get_float32_matmul_precision, lambda: torch.backends.cudnn.allow_tf32]
    if NEW:
        backends = torch.backends
        asked += [
            lambda s=s: s.fp32_precision
            for s in (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
        ]
    found = []
    for ask in asked:
        try:
            found.append(ask())
        except RuntimeError:
            found.append("mixed")
    return found


def loosen(how):
    if how == "old":
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.allow_tf32 = True
    else:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.mkldnn.conv.fp32_precision = "bf16"


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "how",
    ["old", pytest.param("new", marks=pytest.mark.skipif(not NEW, reason="torch has no such switches"))],
)
def test_an_encoder_is_called_in_full_precision_and_everything_is_as_before_afterwards(tmp_path, how, fails):
    loosen(how)
    before = switches()
    encoder = Watching()
    encoder.fails = fails

    with pytest.raises(EncoderError) if fails else nullcontext():
        run_precompute(FakeSource((6,)), encoder, tmp_path, name="c", settings=SETTINGS)

    assert encoder.seen == ("highest", False)
    assert not {"tf32", "bf16"}.intersection(encoder.switches)
    assert switches() == before


def test_a_shard_says_how_its_records_were_made(tmp_path):
    cache = run_precompute(FakeSource((6,)), FakeEncoder(), tmp_path, name="c", settings=SETTINGS).cache

    assert cache.shard(0).described("environment")["float32"] == "highest"


def test_an_encoder_that_wants_less_says_so_in_its_call(tmp_path):
    """The switches are its own while it runs, and the program's afterwards."""

    class Loose(Watching):
        def encode(self, batch):
            torch.set_float32_matmul_precision("high")
            return super().encode(batch)

    encoder = Loose()
    run_precompute(FakeSource((6,)), encoder, tmp_path, name="c", settings=SETTINGS)

    assert encoder.seen[0] == "high"
    assert torch.get_float32_matmul_precision() == "highest"


class TorchSource(FakeSource):
    """Multiplies matrices in torch when it is read, as a Dataset may."""

    seen = ""

    def read(self, number, start=None, stop=None):
        self.seen = torch.get_float32_matmul_precision()
        return super().read(number, start, stop)


def test_what_is_read_in_this_process_is_read_as_in_a_reader(tmp_path):
    loosen("old")
    source = TorchSource((6,))

    run_precompute(source, FakeEncoder(), tmp_path, name="c", settings=SETTINGS)

    assert source.seen == "highest"


def process_state():
    """What belongs to the program that calls, by name."""
    tiny = torch.tensor([1e-40]) * 1.0
    mask = os.umask(0)
    os.umask(mask)
    return {
        "switches": switches(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic),
        "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark),
        "denormals": tiny.item(),
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
        "numpy": (np.geterr(), np.get_printoptions()),
        "warnings": [*warnings.filters],
        "signals": [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "wakeup": signal.set_wakeup_fd(signal.set_wakeup_fd(-1)),
        "process": (os.getcwd(), dict(os.environ), [*sys.path], mask, os.getpriority(os.PRIO_PROCESS, 0)),
        "affinity": os.sched_getaffinity(0),
        "limits": [resource.getrlimit(one) for one in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "hooks": (sys.excepthook, sys.stdout, sys.stderr, sys.getrecursionlimit(), sys.getswitchinterval()),
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
        "logging": (logging.root.handlers[:], logging.getLogger("stoker").handlers[:], logging.root.level),
        "locale": locale.setlocale(locale.LC_ALL),
    }  # fmt: skip


@pytest.mark.parametrize("loose", [False, True], ids=["as-torch-begins", "as-a-program-may-set-it"])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_state_of_the_process_is_after_a_call_what_it_was_before(tmp_path, loose, workers):
    module = torch.nn.Linear(5, 3).eval().requires_grad_(False)
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    gc.unfreeze()  # what pytest froze would leave the count when it is freed
    try:
        if loose:
            loosen("old")
            torch.set_num_threads(threads + 1)
            torch.backends.cudnn.benchmark = True
            torch.use_deterministic_algorithms(True)
            torch.set_flush_denormal(True)
            np.seterr(over="ignore")
        before = process_state()
        for wrong in (False, True):
            source = FakeSource((8,), faults={3: "raise"} if wrong else None)
            encoder = stoker.ModuleEncoder(module, field="data", time="steps")
            settings = {"workers": workers, "progress": False, "overwrite": wrong}
            try:
                stoker.cached(source, encoder, cache_dir=tmp_path, precompute=settings, shuffle=True)
            except IncompleteError:
                assert wrong
        after = process_state()
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(False)
        torch.set_flush_denormal(False)
        np.seterr(over="warn")

    assert {name for name in before if before[name] != after[name]} == set()


ALLOCATOR = """
import ctypes, sys
from stoker.precompute import PrecomputeSettings, run_precompute
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "a b c d hblkhd f g h i j".split()]

settings = PrecomputeSettings(workers=0, progress=None)
run_precompute(FakeSource((8,)), FakeEncoder(), sys.argv[1], name="c", settings=settings)
libc = ctypes.CDLL(None)
libc.mallinfo2.restype, libc.malloc.restype, libc.malloc.argtypes = Info, ctypes.c_void_p, [ctypes.c_size_t]
before = libc.mallinfo2().hblkhd
libc.malloc(64 << 20)
print(libc.mallinfo2().hblkhd - before)
"""


def test_the_allocator_of_a_program_that_encodes_is_left_as_it_is(tmp_path, pytestconfig):
    """By default glibc maps what is large; `mallopt` would have changed that for good."""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("needs glibc 2.33")
    result = subprocess.run(
        [sys.executable, "-c", ALLOCATOR, str(tmp_path)],
        cwd=pytestconfig.rootpath,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert int(result.stdout) >= 64 << 20, result.stderr


def test_algorithms_of_convolutions_are_the_same_in_each_call(tmp_path):
    """A program that has cuDNN time them would get other last bits from run to run."""

    class Convolving(FakeEncoder):
        def encode(self, batch):
            self.chosen = (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic)
            return super().encode(batch)

    encoder = Convolving()
    torch.backends.cudnn.benchmark, before = True, torch.backends.cudnn.benchmark
    try:
        run_precompute(FakeSource((10,)), encoder, tmp_path, name="c", settings=SETTINGS)
        assert torch.backends.cudnn.benchmark
    finally:
        torch.backends.cudnn.benchmark = before

    assert encoder.chosen == (False, True)
