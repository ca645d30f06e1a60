"""An encoder past its deadline is reported with the stacks of all threads."""

from __future__ import annotations

import logging
import subprocess
import sys
import time

from stoker.precompute import Deadlines, PrecomputeSettings, run_precompute
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource


def test_a_hanging_encoder_is_named_with_its_stack(tmp_path, caplog):
    settings = PrecomputeSettings(readers=0, progress=None, deadlines=Deadlines(encode=0.2))
    with caplog.at_level(logging.ERROR, "stoker"):
        run_precompute(FakeSource((4,)), FakeEncoder(sleep_s=0.8), tmp_path, name="c", settings=settings)

    assert "samples 0-3" in caplog.text
    (stack,) = (tmp_path / ".readers").glob("encoder-*.txt")
    assert "fake_encoders.py" in stack.read_text()


class SlowToArrive(FakeEncoder):
    """Takes its time on the way to the device."""

    def to(self, device):
        time.sleep(0.8)


def test_an_encoder_that_hangs_on_its_way_to_the_device_is_named_too(tmp_path, caplog):
    settings = PrecomputeSettings(readers=0, progress=None, deadlines=Deadlines(encode=0.2))
    with caplog.at_level(logging.ERROR, "stoker"):
        run_precompute(FakeSource((4,)), SlowToArrive(), tmp_path, name="c", settings=settings)

    assert "the encoder has been on its way to the device for more than 0.2 s" in caplog.text


PROGRAM = """
from stoker.precompute import Deadlines, PrecomputeSettings, run_precompute
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource
settings = PrecomputeSettings(readers=1, progress=None, deadlines=Deadlines(encode=0.5), on_hang="exit")
run_precompute(FakeSource((4,)), FakeEncoder(sleep_s=60), {folder!r}, name="c", settings=settings)
"""


def test_on_hang_exit_ends_the_process_with_the_code_for_a_stall(tmp_path, pytestconfig):
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(folder=str(tmp_path))],
        cwd=pytestconfig.rootpath,
        timeout=60,
        capture_output=True,
    )
    assert result.returncode == 5
    assert b"on_hang=exit" in result.stderr
