"""What a node of a Ray cluster sees before it encodes anything. Ray itself is not needed here."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from stoker.config import load_config
from stoker.errors import ConfigError
from stoker.extras.ray import board as ray_board
from stoker.extras.ray import task as ray_task
from stoker.precompute import PrecomputeSettings
from stoker.sources.files import confine_sources, confined_sources
from stoker.sources.protocol import FileRef
from stoker.store import Digests, make_recipe, open_folder
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource


def refs(folder):
    return [FileRef(name=path.name, path=path) for path in sorted(folder.iterdir())]


class Unasked:
    """A `Digester` that must not be needed."""

    def files(self, refs):
        raise AssertionError(refs)


def test_a_node_with_another_torch_is_refused_by_name():
    driver = {**ray_task.versions(), "torch": "1.0.0"}

    with pytest.raises(ConfigError, match=r"node b has torch .* \(driver: 1\.0\.0\)"):
        ray_task._check_versions(driver, "b")


def test_files_that_look_as_they_did_to_the_driver_are_not_read_again(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(name)
    known = Digests().files(refs(tmp_path))

    assert ray_task.DriverDigests(known, Unasked()).files(refs(tmp_path)) == known


@pytest.mark.parametrize("change", ["content", "copy", "more"])
def test_files_that_differ_are_digested_by_the_node_itself(tmp_path, change):
    """Otherwise a node that has other data would store its records under the driver's fingerprint."""
    for name in "ab":
        (tmp_path / name).write_text(name)
    known = Digests().files(refs(tmp_path))
    times = (tmp_path / "b").stat()
    if change == "content":
        (tmp_path / "b").write_text("c")
    elif change == "copy":  # of the same size and times, as `cp -p` makes them
        (tmp_path / "b").rename(tmp_path / "old")
        (tmp_path / "b").write_text("c")
        (tmp_path / "old").unlink()
    else:
        (tmp_path / "c").write_text("c")
    os.utime(tmp_path / "b", ns=(times.st_atime_ns, times.st_mtime_ns))

    found = ray_task.DriverDigests(known, Digests()).files(refs(tmp_path))

    assert found == Digests().files(refs(tmp_path))
    assert found != known


def test_a_task_reads_source_files_only_where_the_driver_may(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray_task, "find_folder", lambda told, node: tmp_path)
    confine_sources(["/data/x"])
    order = {
        "run": "a", "versions": ray_task.versions(), "folder": {}, "process": ray_task.process_state(),
    }  # fmt: skip
    confine_sources(None)
    confined = []

    def unpickle(payload):
        confined.append(confined_sources())
        raise ConfigError("far enough")

    monkeypatch.setattr(ray_task, "_load", unpickle)
    try:
        with pytest.raises(ConfigError, match="far enough"):
            ray_task._prepare(order, [], "b")
    finally:
        confine_sources(None)

    assert confined == [["/data/x"]]


def test_a_ray_client_address_is_refused():
    with pytest.raises(ConfigError, match=r"precompute\.ray\.address is .ray://head:10001"):
        load_config(None, ["precompute.engine=ray", "precompute.ray.address=ray://head:10001"])


@pytest.mark.parametrize("address", ["foo", "10.0.0.1", ":6379", "host:port", ""])
def test_an_address_of_no_cluster_is_refused_with_the_form_of_one(address):
    with pytest.raises(ConfigError, match=r"precompute\.ray\.address is .*10\.0\.0\.1:6379"):
        load_config(None, ["precompute.engine=ray", f"precompute.ray.address='{address}'"])


@pytest.mark.parametrize(("lasts_s", "stored"), [(1e-6, range(4)), (float("inf"), range(24))])
def test_a_task_whose_time_is_up_seals_what_it_has_and_names_the_rest(tmp_path, lasts_s, stored):
    source, encoder = FakeSource((24,)), FakeEncoder()
    settings = PrecomputeSettings(workers=0)
    load = ray_task.TaskLoad(source=source, encoder=encoder, settings=settings, files=())
    folder = open_folder(tmp_path, "c", make_recipe(source, encoder))
    numbers = np.array([n for n in range(24) if n])
    order = {
        "threads": torch.get_num_threads(), "num_cpus": 1.0, "commit_after_s": 30.0, "device": "cpu",
        "numbers": numbers, "lasts_s": lasts_s,
    }  # fmt: skip

    answer = ray_task._encode(order, ray_task._LoadedRun(run="", load=load, folder=folder), None)

    found = np.setdiff1d(numbers, folder.missing()).tolist()
    assert found == [n for n in numbers.tolist() if n in stored]
    assert answer["rest"].tolist() == [n for n in numbers.tolist() if n not in stored]
    assert (answer["encoded"], answer["finished"]) == (len(found), lasts_s > 1)


def test_the_board_has_the_latest_word_of_those_that_are_asked_for(monkeypatch):
    monkeypatch.setattr(ray_board, "MOST_REPORTS", 2)
    board = ray_board.Board()
    for place, encoded in (((0, 0), 1), ((1, 0), 1), ((0, 0), 2), ((2, 0), 1)):
        board.report(place, {"encoded": encoded})
    board.note("said once")

    words, notes = board.read([(0, 0), (1, 0)])

    assert (words, notes) == ({(0, 0): (3, {"encoded": 2})}, ["said once"])
    assert board.read([]) == ({}, [])
