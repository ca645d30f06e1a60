from __future__ import annotations

import json
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import stoker
from stoker.errors import ConfigError, StalledError
from stoker.plan import Rates, Resources
from stoker.profile.result import check_prices, demand_of, forecast_other_gpus, watch, write_page
from stoker.profile.run import profile_script
from tests.cli.commands import run


class Slow(Dataset[Any]):
    """Every sample takes 2 ms, one of them 60."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> Any:
        time.sleep(0.06 if number == 7 else 0.002)  # the line that is to be named
        return torch.full((8,), float(number)), torch.tensor(number)


def test_a_loop_that_waits_is_told_apart_from_one_that_computes(tmp_path: Path) -> None:
    seen: list[Any] = []

    found = stoker.profile(DataLoader(Slow(), batch_size=4), seen.append, steps=4)
    computing = stoker.profile([torch.zeros(4)] * 9, lambda batch: time.sleep(0.01), steps=4)
    write_page(found, tmp_path / "page.html")

    assert found.loop.stall > 0.8
    assert "the line that is to be named" in found.bottleneck
    assert "test_run.py" in found.bottleneck
    assert found.loop.stragglers()[0][0] == 7
    best = found.best
    assert best is not None
    assert best.wall_s < found.loop.wall_s
    assert "served from the" in found.verdict
    assert computing.loop.stall < 0.5
    still = replace(computing, loop=replace(computing.loop, wait_s=0.0))
    assert "bound by its own steps" in still.verdict
    page = (tmp_path / "page.html").read_text()
    assert "sample 7 takes" in page
    assert "__getitem__  test_run.py" in page, "the picture names the calls that reading passes its time in"
    assert "<script" not in page
    assert "src=" not in page


def test_a_process_of_many_threads_is_watched_without_waking_them_more_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    intervals, before = list[float](), sys.getswitchinterval()
    for threads in (2, 200):
        monkeypatch.setattr(threading, "active_count", lambda threads=threads: threads)
        watch(lambda: intervals.append(sys.getswitchinterval()))

    assert intervals[0] < before, "a thread that computes lets the one that looks in sooner"
    assert intervals[1] == before
    assert sys.getswitchinterval() == before


def test_a_loop_gets_its_own_batches_then_one_at_hand_then_a_made_up_one() -> None:
    seen: list[Any] = []
    batches = [{"x": torch.full((2,), float(n)), "label": torch.tensor([n, n])} for n in range(9)]

    stoker.profile(batches, seen.append, steps=3)

    # one more is for counting its products
    assert [batch["label"][0].item() for batch in seen] == [0, 1, 2, 3, 4, *[4] * 11]
    assert all(torch.equal(batch["x"], batches[4]["x"]) for batch in seen[5:10])
    assert not torch.equal(seen[10]["x"], batches[4]["x"])


def test_other_gpus_are_judged_by_what_a_step_multiplies_and_calls() -> None:
    weight = torch.randn(64, 64, requires_grad=True)

    def step(batch: Any) -> None:
        (batch @ weight).sum().backward()

    found = stoker.profile([torch.ones(8, 64)] * 9, step, steps=3, prices={"H100": 3.6, "V100": 1.0})

    assert found.loop.flops == 2 * 2 * 8 * 64 * 64  # forward, and the gradient of the weight
    assert 0 < found.loop.calls < 20
    rows = {one.gpu: one for one in found.elsewhere}
    small, large = rows["V100 16 GB"], rows["H100 80 GB"]
    assert small.step_s == large.step_s == pytest.approx(5e-6 * found.loop.calls), "calls are the limit here"
    assert large.epoch_s is not None
    assert large.cost == pytest.approx(3.6 / 3600 * large.epoch_s)
    assert rows["H200 141 GB"].cost is None
    assert large.share == 1.0
    heavy = replace(found.loop, flops=1e12, examples=10**9, batch_bytes=8 << 20)
    demand = demand_of(heavy, 2.0)
    machine, rates = Resources(host_bytes=1 << 30, host_total_bytes=1 << 30, host_limit="x"), Rates()
    v100, *_, h100, h200 = forecast_other_gpus(heavy, demand, machine, rates, {})
    assert v100.step_s == pytest.approx(1e12 / (0.3 * 125e12))
    assert v100.share < h100.share < h200.share < 1.0
    with pytest.raises(ConfigError, match="no GPU of the table is called 'RTX'"):
        check_prices({"RTX": 1.0})


def test_a_step_that_cannot_be_counted_is_profiled_all_the_same() -> None:
    taken: list[Any] = []

    def step(batch: Any) -> None:
        taken.append(batch)
        if len(taken) == 13:
            raise RuntimeError("not under a mode")

    found = stoker.profile([torch.ones(4)] * 9, step, steps=2)

    assert len(taken) == 13
    assert found.loop.flops is None
    assert {one.step_s for one in found.elsewhere} == {None}
    assert "could not be counted" in found.elsewhere_note


@pytest.mark.parametrize("batches", [[], [torch.zeros(2)] * 2])
def test_a_loader_with_nothing_to_time_is_refused(batches: list[Any]) -> None:
    with pytest.raises(ConfigError, match="no more than two batches"):
        stoker.profile(batches, lambda batch: None)


SCRIPT = """
import json, sqlite3, sys, torch
from pathlib import Path
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __init__(self):
        self.db = sqlite3.connect("rows.db")
        self.db.execute("create table if not exists t (n integer, z blob)")
        self.db.executemany("insert into t values (?, ?)", ((n, bytes(400)) for n in range(4000)))
        self.db.commit()
    def __len__(self):
        return 200
    def __getitem__(self, n):
        z = self.db.execute("select z from t where n = ?", (n,)).fetchone()[0]
        return torch.tensor(list(z[:100]), dtype=torch.float32)

model = torch.nn.Linear(100, 1)
Path("arguments.json").write_text(json.dumps(sys.argv[1:]))
try:
    for epoch in range(1000):
        for batch in DataLoader(Rows(), batch_size=10):
            model(batch).mean().backward()
finally:
    Path("finally").touch()
Path("never").touch()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    return tmp_path / "train.py"


def test_a_script_is_run_until_its_loader_was_timed_and_the_query_is_named(script: Path) -> None:
    plain = DataLoader.__iter__

    stdout, _ = run("profile", "train.py", "--steps", "4", "--json", "--", "--epochs", "1")

    (line,) = stdout.splitlines()
    found = json.loads(line)
    assert json.loads((script.parent / "arguments.json").read_text()) == ["--epochs", "1"]
    assert "self.db.execute" in found["bottleneck"]
    assert {tier["tier"] for tier in found["tiers"]} >= {"host", "disk"}
    assert (script.parent / "finally").exists()
    assert not (script.parent / "never").exists()
    assert (script.parent / "runs" / "profile.html").exists()
    assert DataLoader.__iter__ is plain


@pytest.mark.usefixtures("script")
def test_a_budget_decides_the_exit_code() -> None:
    _, said = run("profile", "train.py", "--steps", "4", "--budget", "stall=0.01%", exit_code=5)
    run("profile", "train.py", "--steps", "4", "--budget", "100%")
    _, wrong = run("profile", "train.py", "--budget", "wait=2%", exit_code=3)
    _, price = run("profile", "train.py", "--price", "H100", exit_code=3)

    assert "--budget allows" in said
    assert "Expected a part of the time" in wrong
    assert "as H100=2.59" in price


def test_a_script_without_a_loader_or_that_hangs_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("x = 1\n")
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(1000)\n")

    with pytest.raises(ConfigError, match="does not exist"):
        profile_script(tmp_path / "nowhere.py")
    with pytest.raises(ConfigError, match="iterated no torch DataLoader"):
        profile_script(tmp_path / "none.py")
    with pytest.raises(StalledError, match=r"within 0\.2 s"):
        profile_script(tmp_path / "hangs.py", timeout_s=0.2)


def test_an_error_of_the_script_is_told_as_the_scripts_own_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text("import json\nraise ValueError('rows are gone')\n")
    (tmp_path / "library.py").write_text("import json\n\njson.loads('{')\n")
    (tmp_path / "syntax.py").write_text("x = 1\ndef f(:\n")

    _, raised = run("profile", "bad.py", exit_code=3)
    _, library = run("profile", "library.py", exit_code=3)
    _, syntax = run("profile", "syntax.py", exit_code=3)

    assert "ValueError at bad.py:2: rows are gone" in raised
    assert "python bad.py" in raised
    assert "JSONDecodeError at library.py:3: " in library
    assert "SyntaxError at syntax.py:2: " in syntax


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import sys\nsys.exit(2)\n", "exited with code 2 at ends.py:2"),
        ("import sys\nsys.exit('no data')\n", "exited with code 1 at ends.py:2: no data"),
        (
            "import argparse\nparser = argparse.ArgumentParser()\n"
            "parser.add_argument('--data', required=True)\n"
            "parser.parse_args()\n",
            "exited with code 2 at ends.py:4",
        ),
        (
            "import sys, torch\nfor _ in torch.utils.data.DataLoader([1.0] * 9):\n    sys.exit(3)\n",
            "exited with code 3 at ends.py:3",
        ),
        ("raise SystemExit\n", "iterated no torch DataLoader"),
    ],
)
def test_the_code_that_a_script_exits_with_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ends.py").write_text(code)

    assert says in run("profile", "ends.py", exit_code=3)[1]


def test_a_price_of_an_unknown_gpu_is_refused_before_the_script_runs(script: Path) -> None:
    _, said = run("profile", "train.py", "--price", "H101=2", exit_code=3)

    assert "H101" in said
    assert not (script.parent / "arguments.json").exists()
