"""The first job of the guide, as its reader types it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stoker.service.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "service.md"
ENDED = {"completed", "failed", "cancelled"}


def typed(address: str) -> str:
    """The commands of the guide, for a service at another port."""
    found = re.search(r"## The first job\n```\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert found is not None
    commands = (
        found[1].replace("http://127.0.0.1:8765", address).replace("curl ", "curl -sS --fail-with-body ")
    )
    return f'set -e\nstoker() {{ "{sys.executable}" -m stoker "$@"; }}\n{commands}'


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_job_of_the_guide_trains_on_the_data_made_for_it(tmp_path: Path, workers: int) -> None:
    """With two workers the job is taken while another worker still makes its data."""
    command = [sys.executable, "-m", "stoker", "serve", "--root", ".", "--port", "0", "--json"]
    with (
        (tmp_path / "serve.log").open("wb") as log,
        subprocess.Popen(
            [*command, "--workers", str(workers)], cwd=tmp_path, stdout=subprocess.PIPE, stderr=log
        ) as service,
    ):
        try:
            assert service.stdout is not None
            address = json.loads(service.stdout.readline())["address"]
            subprocess.run(["bash", "-c", typed(address)], cwd=tmp_path, check=True, timeout=120)
            client = Client(address, (tmp_path / ".stoker/service/token").read_text().strip())
            jobs: list[dict[str, Any]] = []
            deadline = time.monotonic() + 600
            while not jobs or not {job["status"] for job in jobs} <= ENDED:
                assert time.monotonic() < deadline, jobs
                time.sleep(0.5)
                jobs = client.jobs()["jobs"]

            assert [(job["job_type"], job["status"], job["error_message"]) for job in jobs] == [
                ("training", "completed", None),
                ("generation", "completed", None),
            ]
            trained = jobs[0]
            rows = client.metrics(trained["id"])
            assert trained["job_name"] == "rx-night-run"
            assert [row["epoch"] for row in rows] == [*range(1, trained["current_epoch"] + 1)]
            assert trained["best_val_loss"] < rows[0]["val_loss"]
            assert (tmp_path / ".stoker/service/jobs" / trained["id"] / "model.safetensors").is_file()
        finally:
            service.terminate()
    assert service.returncode == 0
