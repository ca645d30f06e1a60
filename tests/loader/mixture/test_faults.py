"""Mixtures of caches that are damaged, incomplete or being filled."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from stoker.loader import Loader, Mixture
from stoker.store import Cache, open_cache
from stoker.store.cache import JointCache, reopen
from tests.loader.caches import trajectories, write_cache
from tests.loader.mixture.three import same
from tests.loader.test_filling import Steps
from tests.loader.test_repair import flip
from tests.loader.test_repair import make as make_mendable


def test_damage_in_one_of_several_caches_is_repaired_on_the_way(tmp_path: Path) -> None:
    own = [make_mendable(tmp_path / name) for name in "ab"]
    names = ["a", "b"]
    expected = list(Mixture(own, 5, names=names))
    flip(own[1], 3)

    mixture = Mixture([make_mendable(tmp_path / name) for name in names], 5, names=names, tier="disk")

    assert all(map(same, mixture, expected))
    assert [loader.repaired for loader in mixture.loaders.values()] != [0]


@pytest.mark.parametrize("copied", [True, False], ids=["copied", "twice"])
def test_damage_is_repaired_in_the_folder_where_it_is(tmp_path: Path, *, copied: bool) -> None:
    names = ["a", "b"]
    first = make_mendable(tmp_path / "a")
    if copied:
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    given = [first, make_mendable(tmp_path / names[copied])]
    expected = list(Mixture(given, 5, names=names))
    for number in (3, 15):
        flip(given[1], number)
    mixture = Mixture(given, 5, names=names, tier="disk")

    assert all(map(same, mixture, expected))
    assert [loader.repaired for loader in mixture.loaders.values()] == [2]
    assert open_cache(given[1].path).verify().bad == []


def test_what_a_cache_lacks_is_encoded_once_beside_a_loader(tmp_path: Path, caches: dict[str, Cache]) -> None:
    filling = Steps(tmp_path, trajectories(13, 9))
    cache = filling.cache()
    cache.filling = None

    mixture = Mixture([Loader(caches["b"], 4, shuffle=True), cache], 4)

    assert filling.filled == [*range(13)]
    assert all(own.complete for own in mixture.dataset)
    assert mixture.statistics["c"]["latent"]["count"] > 0


def test_caches_as_one_are_reopened_after_a_fork(alike: list[Cache]) -> None:
    joint = JointCache(alike)
    again = reopen(joint)

    assert isinstance(again, JointCache)
    assert again.fingerprint == joint.fingerprint
    assert torch.equal(again[13 + 2]["latent"], alike[1][2]["latent"])
    assert not {id(member) for member in again.members} & {id(member) for member in alike}
    assert joint.indices.tolist() == list(range(20))


def test_quarantined_samples_keep_their_place_among_the_others(tmp_path: Path) -> None:
    fields = {"x": torch.arange(8.0).view(8, 1)}
    own = [write_cache(tmp_path, fields, skip=skip, name=name) for name, skip in (("a", (7,)), ("b", (0, 3)))]

    batches = list(Mixture(own, 4))
    keys = [key for b in batches for key in zip(b["tasks"].tolist(), b["index"].tolist(), strict=True)]
    served = dict(zip(keys, torch.cat([batch["x"] for batch in batches]).tolist(), strict=True))

    assert set(served) == {(0, n) for n in range(7)} | {(1, n) for n in (1, 2, 4, 5, 6, 7)}
    assert all(x == [float(n)] for (_, n), x in served.items())
