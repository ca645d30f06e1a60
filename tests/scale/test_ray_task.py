"""What a node of a Ray cluster sees before it encodes anything. Ray itself is not needed here."""

from __future__ import annotations

import os

import pytest

from stoker.errors import ConfigError
from stoker.scale import ray_task
from stoker.scale.ray_settings import RaySettings
from stoker.sources.protocol import FileRef
from stoker.store import Digests


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

    assert ray_task.Agreed(known, Unasked()).files(refs(tmp_path)) == known


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

    found = ray_task.Agreed(known, Digests()).files(refs(tmp_path))

    assert found == Digests().files(refs(tmp_path))
    assert found != known


def test_a_ray_client_address_is_refused():
    with pytest.raises(ConfigError, match="far from the cache folder"):
        RaySettings(address="ray://head:10001")
