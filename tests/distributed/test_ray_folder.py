"""The cache folder as a node of a Ray cluster finds it. Ray itself is not needed here."""

from __future__ import annotations

import shutil

import pytest

from stoker.errors import ConfigError
from stoker.extras.ray import task as ray_task
from stoker.store import make_recipe, open_folder
from stoker.store.storage import attach_mirror, mirror_limit
from tests.store.fakes import FakeSource, fill


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(ray_task, "SIGHT_S", 0.0)


@pytest.fixture(params=["path", "address"])
def folder(request, tmp_path):
    """The driver's, on a path that all nodes share or behind an address."""
    address = f"file://{tmp_path}/there"
    cache_dir = (
        tmp_path / "there" if request.param == "path" else attach_mirror(address, tmp_path / "mirrors")
    )
    return opened(cache_dir)


def opened(cache_dir):
    return open_folder(cache_dir, "c", make_recipe(FakeSource(), None))


def mark_of(tmp_path):
    (mark,) = (tmp_path / "there/c").glob("*/.ray-*")
    return mark


def test_a_node_finds_the_folder_of_the_driver_and_nothing_stays_behind(folder, tmp_path):
    with ray_task.marked_folder(folder, "driver") as told:
        assert ray_task.find_folder(told, "b") == folder.path.parent.parent
        mark_of(tmp_path)

    assert not [*tmp_path.rglob(".ray-*")]


def test_a_node_that_sees_another_place_says_which_it_is(folder, tmp_path):
    with ray_task.marked_folder(folder, "driver") as told:
        mark_of(tmp_path).write_text("of another driver")
        with pytest.raises(ConfigError, match=rf"node b does not find c/.* in .*{tmp_path}/there, where"):
            ray_task.find_folder(told, "b")
        shutil.rmtree(tmp_path / "there")
        with pytest.raises(ConfigError, match="where driver has just"):
            ray_task.find_folder(told, "b")


def test_a_node_has_a_mirror_of_its_own_and_the_driver_sees_what_it_stores(tmp_path):
    """With the driver's limit; the disks are two."""
    source = FakeSource()
    driver = opened(attach_mirror(f"file://{tmp_path}/there", tmp_path / "one", 2**20))
    with ray_task.marked_folder(driver, "driver") as told:
        cache_dir = ray_task.find_folder({**told, "mirrors": str(tmp_path / "other")}, "b")
    node = opened(cache_dir)
    fill(node, source, range(8))

    assert node.path.parents[2] == tmp_path / "other"
    assert mirror_limit(node.path) == 2**20
    assert driver.missing().tolist() == [*range(8, 16)]
    assert driver.finish().indices.tolist() == [*range(8)]
