"""Our threads leave the OpenMP threads of torch to the thread that trains."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.runtime.threads import Pool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")

COUNT = """
import os, sys, threading, time, torch
torch.set_num_threads(4)
def teams():
    # Threads of this process that Python does not know, beyond those of the main thread's team.
    return len(os.listdir("/proc/self/task")) - threading.active_count()
def gone(before):
    until = time.monotonic() + 5
    while teams() > before and time.monotonic() < until:
        time.sleep(0.01)
def exit_code_of_child(work):
    child = os.fork()
    if not child:
        os._exit(work())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
def compute():
    return torch.ones(2_000_000).mul_(3).sum()
"""


def answer(code: str, *words: str) -> str:
    """Run code in a fresh process, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT + textwrap.dedent(code), *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "4"},
    )
    assert not done.returncode, done.stderr
    return done.stdout


def test_a_thread_of_a_pool_computes_on_one_core_and_yours_on_as_many_as_before() -> None:
    def threads() -> int:
        return torch.get_num_threads()

    torch.set_num_threads(3)
    try:
        assert Pool(1, "test").submit(threads).result(10, "threads") == 1
        assert Pool(1, "test", all_cores=True).submit(threads).result(10, "threads") == 3
        assert threads() == 3
    finally:
        torch.set_num_threads(1)


def test_no_thread_of_a_pool_keeps_a_team() -> None:
    told = answer(
        """
        from stoker.runtime.threads import Pool
        compute()
        before = teams()
        pools = [Pool(1, "a"), Pool(1, "b", all_cores=True)]
        for _ in range(3):
            for pool in pools:
                pool.submit(compute).result(10, "a sum")
        gone(before)
        print(teams() - before, threading.active_count())
        """
    )
    assert told.split() == ["0", "3"]


def test_a_loader_leaves_no_team_of_its_own(tmp_path: Path) -> None:
    told = answer(
        """
        import stoker
        class Images(torch.utils.data.Dataset):
            def __len__(self): return 200
            def __getitem__(self, n): return {"x": torch.full((128, 128, 3), float(n))}
        if __name__ == "__main__":
            compute()
            before = teams()
            for tier in ("disk", "host"):
                loader = stoker.cached(
                    Images(), None, cache_dir=sys.argv[1], batch_size=64, tier=tier,
                    precompute={"workers": 0}, version="1", name="images",
                )
                for _ in range(2):
                    for batch in loader:
                        compute()
            gone(before)
            print(teams() - before)
        """,
        str(tmp_path),
    )
    assert told.split() == ["0"]


def test_in_a_process_that_was_forked_the_end_of_a_team_is_not_waited_for() -> None:
    told = answer(
        """
        from stoker.runtime.openmp import end_team
        compute()
        print(exit_code_of_child(lambda: end_team() or 7))
        """
    )
    assert told.split() == ["7"]


def test_a_new_thread_of_a_forked_process_ends_its_team() -> None:
    told = answer(
        """
        from stoker.runtime.threads import Pool
        def work():
            most = Pool(1, "a", all_cores=True).submit(lambda: (compute(), teams())[1]).result(10, "a sum")
            gone(most - 1)
            return 7 if teams() < most else 1
        compute()
        print(exit_code_of_child(work))
        """
    )
    assert told.split() == ["7"]


def test_an_encoder_gets_the_cores_that_the_calling_thread_does_not_need(tmp_path: Path) -> None:
    told: dict[str, Any] = {}
    text = answer(
        """
        import stoker
        class Encoder(torch.nn.Module):
            def forward(self, x):
                compute()
                seen.append((torch.get_num_threads(), teams()))
                return x.mean(1)
        class Samples(torch.utils.data.Dataset):
            def __len__(self): return 600
            def __getitem__(self, n): return {"data": torch.full((8,), float(n))}
        seen = []
        compute()
        print("alone", teams())
        encoder = stoker.ModuleEncoder(Encoder().eval(), version="1")
        stoker.precompute(stoker.TorchSource(Samples(), version="1"), encoder, sys.argv[1], name="a")
        print("threads", seen[-1][0])
        print("beside", seen[-1][1])
        """,
        str(tmp_path),
    )
    for line in text.splitlines():
        name, value = line.split()
        told[name] = int(value)

    assert told["threads"] == 4
    assert told["beside"] == told["alone"]  # the encoder's team, and none of the thread that waits for it
