"""A pass beside the filling of its cache: each example once, in an order that does not depend on arrival."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.errors import (
    ConfigError,
    EncoderError,
    IncompleteError,
    MissingRecordError,
    StaleStateError,
    StalledError,
)
from stoker.loader import Loader, Windows
from stoker.loader.outputs import Normalization
from stoker.store import Cache, make_recipe, open_cache, open_folder
from stoker.store.cache import GrowingCache, fill_blocks
from stoker.store.failures import Failure
from tests.loader.caches import Arrays, trajectories

COUNT = 64
AT_ONCE = 3
"""Blocks stored at a time; windows are of 4."""


class Steps:
    """A filling that stores some blocks each time somebody waits, in its order or in a shuffled one."""

    def __init__(
        self, folder: Path, fields: dict[str, Any], *, bad: Sequence[int] = (), chance: int | None = None
    ) -> None:
        source = Arrays(fields, ["latent", "time"])
        recipe = make_recipe(source, None)
        self.fields, self.bad, self.error, self.served = fields, set(bad), None, False
        self.agreed = True
        self.folder = open_folder(folder, "c", recipe)
        self.blocks = [range(a, b) for a, b in fill_blocks(recipe).tolist()]
        if chance is not None:
            random.Random(chance).shuffle(self.blocks)
        self.growing = GrowingCache(self.folder.path, recipe, {})
        self.filled: list[int] = []

    def cache(self) -> Cache:
        found, _ = self.growing.look()
        found.filling = found.filler = self
        return found

    def look(self) -> Any:
        self._check()
        return self.growing.look()

    def done(self) -> bool:
        self._check()
        return not self.blocks and self.folder.complete() is not None

    def _check(self) -> None:
        if self.error is not None:
            raise self.error

    def wait(self, timeout_s: float) -> None:
        if self.blocks:
            self.fill([n for block in self.blocks[:AT_ONCE] for n in block], 0)
            del self.blocks[:AT_ONCE]
        else:
            self.folder.finish()

    def forget(self) -> None:
        self.growing.forget()

    def begin(self) -> Steps:
        return self

    def fill(self, numbers: Sequence[int], deadline_s: float) -> None:
        """Store these: with a deadline as a filler, which writes the index too, else as one step."""
        good = [number for number in numbers if number not in self.bad]
        self.filled += good
        writer = self.folder.writer()
        if good:
            writer.append(good, {name: chosen(rows, good) for name, rows in self.fields.items()})
        writer.commit()
        for number in sorted(self.bad.intersection(numbers)):
            why = Failure(number=number, stage="read", error="broken", attempts=2, kind="sample")
            self.folder.quarantine(why)
        if deadline_s:
            open_folder(self.folder.path.parent.parent, "c", self.folder.recipe).finish()


def chosen(rows: Any, numbers: Sequence[int]) -> Any:
    """The rows of some samples; a list for a field of varying length."""
    return [rows[number] for number in numbers] if isinstance(rows, list) else rows[numbers]


def numbers(batches: Any) -> list[int]:
    return [n for batch in batches for n in batch["index"].tolist()]


def same(batch: Any, fields: dict[str, Any]) -> bool:
    index = batch["index"]
    return all(torch.equal(batch[name], rows[index]) for name, rows in fields.items())


def groups_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each record is a block."""
    from stoker.encoders.protocol import EncodeBatchSize
    from stoker.store import recipe

    monkeypatch.setattr(recipe, "_default_group", lambda _schema: EncodeBatchSize(samples=1))
    monkeypatch.setattr("os.fsync", lambda _fd: None)


@pytest.fixture
def fields(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    groups_of_one(monkeypatch)
    return trajectories(COUNT)


def test_every_record_comes_once_and_the_next_epoch_is_that_of_a_complete_cache(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    loader = Loader(Steps(tmp_path, fields).cache(), batch_size=5, seed=5, shuffle=True)
    assert len(loader) == 13
    assert loader.plan.tier == "encode"
    assert "block order" in loader.plan.reason

    batches = list(loader)

    assert len(batches) == len(loader) == 13
    assert all(same(batch, fields) for batch in batches)
    assert sorted(numbers(batches)) == [*range(COUNT)]
    plain = Loader(open_cache(tmp_path / "c"), batch_size=5, seed=5, shuffle=True)
    plain.set_epoch(1)
    for ours, theirs in zip(loader, plain, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert loader.plan.tier == plain.plan.tier


def test_batches_come_before_the_cache_is_complete(tmp_path: Path, fields: dict[str, Any]) -> None:
    steps = Steps(tmp_path, fields)
    next(iter(Loader(steps.cache(), batch_size=4, shuffle=True)))
    assert len(steps.filled) < 10


def test_quarantined_samples_are_passed_over_and_the_length_settles(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    bad = [*range(10, 18), 50]
    loader = Loader(Steps(tmp_path, fields, bad=bad).cache(), batch_size=5, shuffle=True)
    before = len(loader)

    batches = list(loader)

    assert before == 13
    assert len(batches) == len(loader) == 11
    assert sorted(numbers(batches)) == [n for n in range(COUNT) if n not in bad]
    assert [len(batch["index"]) for batch in batches] == [5] * 11
    assert sorted(numbers(loader)) == [n for n in range(COUNT) if n not in bad]


def test_the_order_does_not_depend_on_what_was_ready_when(tmp_path: Path, fields: dict[str, Any]) -> None:
    found = []
    for place, chance in enumerate((None, 1, 2)):
        steps = Steps(tmp_path / str(place), fields, bad=[17], chance=chance)
        found.append(numbers(Loader(steps.cache(), batch_size=5, seed=3, shuffle=True)))
    assert found[0] == found[1] == found[2]
    other = Loader(Steps(tmp_path / "other", fields, bad=[17]).cache(), batch_size=5, seed=4, shuffle=True)
    assert numbers(other) != found[0]


@pytest.mark.parametrize("stop", [1, 7, 12])
def test_a_saved_place_goes_on_beside_the_filling_and_after_it(
    tmp_path: Path, fields: dict[str, Any], stop: int
) -> None:
    steps = Steps(tmp_path, fields, bad=[5, 6, 63])
    loader = Loader(steps.cache(), batch_size=5, seed=3, shuffle=True)
    batches = iter(loader)
    head = [next(batches) for _ in range(stop)]
    state = loader.state_dict()

    beside = Loader(steps.cache(), batch_size=5, seed=3, shuffle=True)
    beside.load_state_dict(state)
    rest = numbers(beside)
    complete = Loader(open_cache(steps.folder.path), batch_size=5, seed=3, shuffle=True)
    complete.load_state_dict(state)

    assert sorted(numbers(head) + rest) == [n for n in range(COUNT) if n not in steps.bad]
    assert numbers(complete) == rest == numbers(batches)
    assert complete.state_dict()["epoch"] == 1
    plain = Loader(open_cache(steps.folder.path), batch_size=5, seed=3, shuffle=True)
    plain.set_epoch(1)
    assert numbers(complete) == numbers(plain)


def test_a_place_between_two_epochs_is_one_of_a_complete_cache_too(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    steps = Steps(tmp_path, fields, bad=[4])
    loader = Loader(steps.cache(), batch_size=5, seed=3, shuffle=True)
    list(loader)

    again = Loader(open_cache(steps.folder.path), batch_size=5, seed=3, shuffle=True)
    again.load_state_dict(loader.state_dict())

    assert numbers(again) == numbers(loader)


def test_a_place_in_a_whole_epoch_waits_for_the_cache(tmp_path: Path, fields: dict[str, Any]) -> None:
    done = Steps(tmp_path / "a", fields)
    list(Loader(done.cache(), batch_size=5, shuffle=True))
    plain = Loader(open_cache(done.folder.path), batch_size=5, shuffle=True)
    batches = iter(plain)
    next(batches)
    state = plain.state_dict()

    loader = Loader(Steps(tmp_path / "b", fields).cache(), batch_size=5, shuffle=True)
    loader.load_state_dict(state)

    assert numbers(loader) == numbers(batches)
    with pytest.raises(StaleStateError, match="seed 0 there, 1 here"):
        Loader(Steps(tmp_path / "c", fields).cache(), batch_size=5, seed=1, shuffle=True).load_state_dict(
            state
        )


def test_windows_indices_and_a_dropped_last_batch(tmp_path: Path, fields: dict[str, Any]) -> None:
    chosen = [3, 63, 44, 44]
    loader = Loader(
        Steps(tmp_path, fields).cache(),
        batch_size=5,
        windows=Windows(stride=2, horizon=2),
        indices=chosen,
        drop_last=True,
        shuffle=True,
    )
    batches = list(loader)

    places = [tuple(place) for batch in batches for place in batch.index.tolist()]
    assert len(batches) == len(loader) == 4 * 5 // 5
    assert sorted(places) == sorted((number, start) for number in chosen for start in range(5))
    for batch in batches:
        number, start = batch.index.unbind(1)
        assert torch.equal(batch.z1, fields["latent"][number, start + 2])
        assert torch.equal(batch.future, fields["latent"][number, start + 4][:, None])
        assert torch.equal(batch.cond["nu"], fields["nu"][number][:, None])


def test_in_sequential_order_the_first_epoch_is_that_of_a_complete_cache(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    loader = Loader(Steps(tmp_path, fields, bad=[9]).cache(), batch_size=5, shuffle=False)
    assert numbers(loader) == [n for n in range(COUNT) if n != 9] == numbers(loader)


def test_a_filling_that_fails_is_raised_as_what_it_was(tmp_path: Path, fields: dict[str, Any]) -> None:
    steps = Steps(tmp_path, fields)
    batches = iter(Loader(steps.cache(), batch_size=5, shuffle=True))
    next(batches)
    steps.error = EncoderError("the encoder has gone")

    with pytest.raises(EncoderError, match="has gone"):
        list(batches)
    with pytest.raises(EncoderError, match="has gone"):
        Loader(open_folder_again(steps), batch_size=5, shuffle=True)


def test_an_epoch_without_samples_that_were_too_many_to_leave_out_fails(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    """Whether they are too many is said after the last sample was read."""

    class Strict(Steps):
        def wait(self, timeout_s: float) -> None:
            if not self.blocks:
                self.error = IncompleteError("63 of 64 samples stored")
            super().wait(timeout_s)

    loader = Loader(Strict(tmp_path, fields, bad=[50]).cache(), batch_size=5, shuffle=True)

    with pytest.raises(IncompleteError, match="63 of 64"):
        list(loader)


def open_folder_again(steps: Steps) -> Cache:
    found, _ = steps.growing.look()
    found.filling = steps
    return found


def test_a_window_that_does_not_come_in_time_is_an_error(tmp_path: Path, fields: dict[str, Any]) -> None:
    steps = Steps(tmp_path, fields)
    steps.wait = lambda timeout_s: None  # type: ignore[method-assign]
    with pytest.raises(StalledError, match=r"not encoded within 0\.2 s"):
        next(iter(Loader(steps.cache(), batch_size=5, timeout=0.2, shuffle=True)))


def test_an_epoch_given_up_begins_anew(tmp_path: Path, fields: dict[str, Any]) -> None:
    loader = Loader(Steps(tmp_path, fields).cache(), batch_size=5, shuffle=True)
    head = numbers([next(iter(loader)), next(iter(loader))])
    assert head[:5] == head[5:]
    assert sorted(numbers(loader)) == [*range(COUNT)]


@pytest.mark.parametrize(
    "wish",
    [{"shuffle": True, "partition": "static(2)"}, {"shuffle": "bucket"}, {"static": True, "tier": "device"}],
    ids=lambda wish: next(iter(wish)),
)
def test_what_needs_a_complete_cache_says_so(
    tmp_path: Path, fields: dict[str, Any], wish: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"needs a complete cache.*Leave wait=False out"):
        Loader(Steps(tmp_path, fields).cache(), batch_size=5, **{"shuffle": True, **wish})


def test_loaders_made_after_a_full_epoch_serve_a_complete_cache(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    steps = Steps(tmp_path, fields)
    steps.agreed = False  # no ranks
    cache = steps.cache()
    loader = Loader(cache, batch_size=5, seed=3, shuffle=True)
    while not steps.done():
        steps.wait(0)
    ended = Loader(cache, batch_size=5, seed=3, shuffle=True)
    first = numbers(loader)

    assert numbers(ended) == first
    later = Loader(cache, batch_size=5, seed=3, shuffle=True)
    assert sorted(numbers(later)) == [*range(COUNT)]
    later.set_epoch(0)
    assert (
        numbers(later)
        == numbers(Loader(open_cache(steps.folder.path), batch_size=5, seed=3, shuffle=True))
        != first
    )
    assert len([*Loader(cache, batch_size=5, shuffle=True, partition="static(2)", world_size=2)]) > 0


def test_indices_are_samples_of_the_source(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(MissingRecordError, match="from 0 to 63"):
        Loader(Steps(tmp_path, fields).cache(), indices=[64], shuffle=True)


def test_the_encode_tier_begins_the_filling_by_itself(tmp_path: Path, fields: dict[str, Any]) -> None:
    steps = Steps(tmp_path, fields)
    cache = steps.cache()
    cache.filling = None
    assert sorted(numbers(Loader(cache, batch_size=5, tier="encode", shuffle=True))) == [*range(COUNT)]


def damage(steps: Steps) -> None:
    """Change a byte of the record that was stored last."""
    wanted = steps.fields["latent"][steps.filled[-1]].numpy().tobytes()[:64]
    for shard in steps.folder.path.glob("shard-*"):
        data = bytearray(shard.read_bytes())
        if (at := data.find(wanted)) >= 0:
            data[at] ^= 1
            shard.write_bytes(bytes(data))


def test_a_damaged_record_is_repaired_on_the_way(tmp_path: Path, fields: dict[str, Any]) -> None:
    steps = Steps(tmp_path, fields)
    loader = Loader(steps.cache(), batch_size=5, shuffle=True)
    batches = iter(loader)
    head = [next(batches)]
    for _ in range(3):
        steps.wait(0)
    damage(steps)

    rest = list(batches)

    assert all(same(batch, fields) for batch in head + rest)
    assert sorted(numbers(head + rest)) == [*range(COUNT)]
    assert loader.repaired == 1


def test_a_place_beside_the_filling_is_still_one_after_a_mending(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    steps = Steps(tmp_path, fields, bad=[5, 6])
    beside = Loader(steps.cache(), batch_size=5, shuffle=True)
    batches = iter(beside)
    next(batches)
    state = beside.state_dict()
    rest = numbers(batches)
    cache = open_cache(steps.folder.path)
    cache.filler = steps
    damage(steps)

    loader = Loader(cache, batch_size=5, shuffle=True)
    whole = [*loader]
    loader.load_state_dict(state)

    assert loader.repaired == 1
    assert all(same(batch, fields) for batch in whole)
    assert numbers(loader) == rest


def test_records_of_varying_length_are_served_too(tmp_path: Path, fields: dict[str, Any]) -> None:
    points = [torch.full((1 + number % 5, 2), float(number)) for number in range(COUNT)]
    loader = Loader(Steps(tmp_path, {**fields, "points": points}).cache(), batch_size=5, shuffle=True)

    first, second = list(loader), list(loader)

    for epoch in (first, second):
        assert sorted(numbers(epoch)) == [*range(COUNT)]
        for batch in epoch:
            assert same(batch, fields)
            for number, own in zip(batch["index"].tolist(), batch["points"], strict=True):
                assert torch.equal(own, points[number])


def test_values_are_normalised_as_they_are_later(tmp_path: Path, fields: dict[str, Any]) -> None:
    how = {"latent": Normalization(mean=2.0, std=4.0, axis=-1)}
    loader = Loader(Steps(tmp_path, fields).cache(), batch_size=5, normalize=how, shuffle=True)
    wanted = {**fields, "latent": fields["latent"] * 0.25 - 0.5}
    for _ in range(2):
        assert all(same(batch, wanted) for batch in loader)


def test_two_passes_at_once_do_not_meet(tmp_path: Path, fields: dict[str, Any]) -> None:
    loader = Loader(Steps(tmp_path, fields).cache(), batch_size=1, shuffle=True)
    older = iter(loader)
    first = [next(older)]
    newer = iter(loader)
    second = [next(newer) for _ in range(10)]
    first += older
    third = iter(loader)  # of the complete cache
    second += newer
    later = [*third]

    assert all(same(batch, fields) for batch in first + second + later)
    assert numbers(first) == numbers(second)
    assert sorted(numbers(first)) == sorted(numbers(later)) == [*range(COUNT)]
    assert loader.plan.tier != "encode"


@pytest.mark.parametrize(
    ("size", "drop_last", "count"),
    [(5, False, 12), (5, True, 11), (8, False, 7), (8, True, 7), (60, True, 0)],
)
def test_an_epoch_whose_end_is_quarantined_is_over_with_its_last_batch(
    tmp_path: Path, fields: dict[str, Any], size: int, drop_last: bool, count: int
) -> None:
    steps = Steps(tmp_path, fields)
    steps.bad = {n for block in steps.blocks[-8:] for n in block}  # the last two windows
    loader = Loader(steps.cache(), batch_size=size, drop_last=drop_last, shuffle=True)

    batches, places = [], []
    for batch in loader:
        batches.append(batch)
        places.append((loader.state_dict()["epoch"], loader.state_dict()["position"]))

    assert len(batches) == len(loader) == count
    assert places[-1:] == [(1, 0)] * min(1, count)
    assert all(epoch == 0 for epoch, _ in places[:-1])
    assert loader.epoch == 1


@pytest.mark.usefixtures("fields")
@pytest.mark.parametrize("count", [1, 3, 63, 64, 257, 1000, 5000])
def test_a_shuffled_window_is_four_blocks_or_a_64th_or_holds_64_samples(tmp_path: Path, count: int) -> None:
    steps = Steps(tmp_path, trajectories(count))
    blocks = {n: begin for begin, end in fill_blocks(steps.folder.recipe).tolist() for n in range(begin, end)}
    fill = Loader(steps.cache(), batch_size=1, shuffle=True)._serving.design.fill
    assert fill is not None
    windows = [fill.indices[window.slots].tolist() for window in fill.windows]

    assert sorted(n for window in windows for n in window) == [*range(count)]
    held = [{blocks[n] for n in window} for window in windows]
    assert sum(map(len, held)) == len(set(blocks.values()))  # no block is in two
    for window, own in list(zip(windows, held, strict=True))[:-1]:
        assert len(own) >= len(set(blocks.values())) // 64
        assert len(own) >= 4 or len(window) >= 64


def test_blocks_cover_every_sample_once_in_a_fixed_shuffled_order(tmp_path: Path) -> None:
    source = Arrays(trajectories(100), ["latent", "time"], parts=[37, 1, 62])
    recipe = make_recipe(source, None)
    blocks = fill_blocks(recipe).tolist()
    assert sorted(n for begin, end in blocks for n in range(begin, end)) == [*range(100)]
    assert fill_blocks(recipe).tolist() == blocks
