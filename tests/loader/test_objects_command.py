"""Precompute to a bucket and train from it by the command line, the local cache smaller than the set."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from safetensors.torch import load_file

import stoker
from stoker.store.storage import attach_mirror
from stoker.units import MIB
from tests.cli.conftest import SETTINGS
from tests.conftest import write_burgers
from tests.distributed.launch import LONG_S, torchrun
from tests.distributed.nodes import launched, two_nodes
from tests.loader.objects import variables
from tests.store.faulty_s3 import Faults, a_wire
from tests.store.s3_server import S3Server, an_s3_server, missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]
LARGE = ("latent.dim=32", "latent.tokens=32", "training.latent_cache_dtype=float32")
"""About 13 MB of the real trajectories; 200 steps an epoch."""
ROOM = 4 * MIB
SAMPLES = 20_000
"""Of 32 points and 9 steps."""


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with an_s3_server() as one:
        yield one


@pytest.fixture
def project(tmp_path: Path, shared_data: Path) -> Path:
    """A folder with settings, real trajectories to train on, and four of them to validate on."""
    (tmp_path / "raw").mkdir()
    real = shared_data / "pde_exponax" / "1D_Burgers_Sols_Nu0.01.hdf5"
    (tmp_path / "raw" / "burgers1d_train.h5").write_bytes(real.read_bytes())
    with (
        h5py.File(shared_data / "pde_exponax" / "1D_Burgers_Sols_Nu0.1.hdf5") as file,
        h5py.File(tmp_path / "raw" / "burgers1d_val.h5", "w") as few,
    ):
        for name in file:
            few[name] = file[name][:4] if name == "tensor" else file[name][:]
        few.attrs.update(file.attrs)
    (tmp_path / "c.yaml").write_text(SETTINGS)
    return tmp_path


def run(command: str, *words: str, cwd: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "stoker", command, "c.yaml", *LARGE, *words, "--json"],
        cwd=cwd, capture_output=True, text=True, timeout=2 * LONG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def at(address: str, machine: str) -> tuple[str, ...]:
    """Settings of a machine with a small local cache."""
    return (
        f"training.latent_cache_dir={address}", f"training.mirror_dir={machine}/mirror",
        f"training.mirror_bytes={ROOM}", f"training.run_dir={machine}/run",
    )  # fmt: skip


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    newest = max((run_dir / "checkpoints").glob("last-*[0-9]"))
    return load_file(newest / "model.safetensors")


def test_what_is_trained_from_a_bucket_is_what_is_trained_from_a_folder(
    project: Path, server: S3Server
) -> None:
    """Bit for bit; the local cache holds a third of the set, and then a third of the answers fail as well."""
    address = f"s3://{server.bucket}/command"
    run("precompute", "training.latent_cache_dir=local", cwd=project)
    local = run("train", "training.latent_cache_dir=local", "training.run_dir=one", cwd=project)
    with variables(server.variables()):
        made = run("precompute", *at(address, "a"), cwd=project)
        run("train", *at(address, "a"), cwd=project)
    kinds = ("cut", "short", "busy", "broken", "refused", "slow", "flipped", "padded")
    faults = Faults(rate=0.33, kinds=kinds, seed=5, slow_bytes_s=2e6, under=".safetensors")
    with a_wire(server.url, faults) as wire, variables(server.variables(wire.url)):
        through = run("train", *at(address, "b"), cwd=project)
        met = {request.fault for request in wire.requests if request.fault}
        held = sum(path.stat().st_blocks * 512 for path in (project / "b").rglob("shard-*.safetensors"))
        verified = stoker.open_cache(mirror_at(address, project / "b")).verify()

    whole = stoker.open_cache(project / "local" / "burgers1d_train")
    assert made["caches"][0]["complete"]
    assert sum(entry.bytes for entry in whole.index.shards) > 3 * ROOM
    assert held <= ROOM + MIB
    assert len(met) >= 3  # of eight kinds, drawn for a few requests
    assert verified.ok
    assert through["val_nrmse"] == local["val_nrmse"]
    expected = weights(project / "one")
    for machine in ("a", "b"):
        for name, value in weights(project / machine / "run").items():
            assert torch.equal(value, expected[name]), (machine, name)


def mirror_at(address: str, machine: Path) -> Path:
    """The local folder of the training split."""
    return attach_mirror(f"{address}/burgers1d_train", machine / "mirror")


def test_two_ranks_encode_into_a_bucket_once_and_train_from_it(project: Path, server: S3Server) -> None:
    address = f"s3://{server.bucket}/ranks"
    words = ("-m", "stoker", "train", "c.yaml", *LARGE, *at(address, "two"), "--json")
    with variables(server.variables()), torchrun(2, *words, cwd=project) as launcher:
        out, err = launcher.communicate(timeout=2 * LONG_S)
    assert launcher.returncode == 0, err
    report = json.loads(out)

    samples = {cache["name"]: cache["records"] for cache in report["caches"]}
    assert sum(cache["encoded"] for cache in report["caches"]) == sum(samples.values())
    with variables(server.variables()):
        one = run("train", *at(address, "one"), "training.batch_size=32", cwd=project)
    assert one["cache_reused"]
    assert report["val_nrmse"] == pytest.approx(one["val_nrmse"], rel=1e-3)


def test_two_machines_encode_into_one_address_each_its_part(project: Path) -> None:
    """They see each other's shards there, and not each other's claims."""
    write_burgers(project / "raw" / "burgers1d_train.h5", samples=SAMPLES)
    folders = [project / "first", project / "second"]
    for folder in folders:
        folder.mkdir()
        shutil.copytree(project / "raw", folder / "raw")
        shutil.copy(project / "c.yaml", folder)
    words = ("-m", "stoker", "precompute", "c.yaml", "--splits", "train", "--json")
    where = f"training.latent_cache_dir=file://{project}/share"
    with two_nodes(folders) as net, launched(net, *words, where) as launchers:
        told = [one.communicate(timeout=2 * LONG_S) for one in launchers]
    assert launchers[0].returncode == 0, told
    (cache,) = json.loads(told[0][0])["caches"]

    made = stoker.open_cache(f"file://{project}/share/burgers1d_train")
    assert made.complete
    assert len(made) == SAMPLES
    assert sum(shard.rows for shard in made.index.shards) == cache["encoded"] == SAMPLES
