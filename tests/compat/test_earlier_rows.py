"""Snippets of the earlier guide to rows in GPU memory, each run on a database that is made here."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import stoker.extras.compat.settings
from stoker.compat import collate_gpu_cached
from stoker.errors import ConfigError, ResourceError, SplitError
from stoker.extras.compat.rows import COORDS, GPUCachedRows, GPUDataLoader, create_gpu_cached_dataloaders
from stoker.extras.radio.demo import RadioSpec, write_radio
from tests.compat.page import snippets

SPEC = RadioSpec(rows=160)
KEYS = {"receiver_features", "signal_mask", "target_position", "metadata"}


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """160 rows of one data set."""
    url = f"sqlite:///{tmp_path_factory.mktemp('rows') / 'heimdall.db'}"
    write_radio(url, SPEC)
    return url


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, so that the rows are cached once."""
    return tmp_path_factory.mktemp("caches")


@pytest.fixture
def make(database: str, caches: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The earlier call, with the folder of caches in addition."""
    monkeypatch.setattr(stoker.extras.compat.settings, "_said", set[str]())

    def made(split: str = "train", device: str = "cuda", **more: Any) -> GPUCachedRows:
        return GPUCachedRows(
            dataset_ids=[str(SPEC.dataset_id)],
            split=split,
            db_session=database,
            device=device,
            max_receivers=7,
            preload_to_gpu=more.pop("preload_to_gpu", True),
            cache_path=caches,
            precompute={"workers": 0},
            **more,
        )

    return made


def test_both_splits_through_a_data_loader(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "stoker"):
        train, val = make("train"), make("val")
    loaders = [
        DataLoader(train, batch_size=32, shuffle=True, num_workers=0, collate_fn=collate_gpu_cached),
        DataLoader(val, batch_size=32, shuffle=False, num_workers=0, collate_fn=collate_gpu_cached),
    ]

    no_gpu = [record for record in caplog.records if "no GPU" in record.getMessage()]
    assert len(no_gpu) == (0 if torch.cuda.is_available() else 1)
    assert len(train) + len(val) == 160
    assert 10 <= len(val) <= 50
    for loader, dataset in zip(loaders, (train, val), strict=True):
        batches = list(loader)
        assert sum(len(batch["signal_mask"]) for batch in batches) == len(dataset)
        batch = batches[0]
        count = len(batch["signal_mask"])
        assert set(batch) == KEYS
        assert (batch["receiver_features"].shape, batch["receiver_features"].dtype) == (
            (count, 7, 6), torch.float32,
        )  # fmt: skip
        assert (batch["signal_mask"].shape, batch["signal_mask"].dtype) == ((count, 7), torch.bool)
        assert (batch["target_position"].shape, batch["target_position"].dtype) == ((count, 2), torch.float32)
        metadata = batch["metadata"]
        assert set(metadata) == {"gdop", "num_receivers", "centroids", *COORDS}
        assert metadata["gdop"].dtype == torch.float32
        assert torch.equal(metadata["num_receivers"], (~batch["signal_mask"]).sum(1))
        assert metadata["centroids"].shape == (count, 2)


def test_the_snippet_of_the_page_runs(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = snippets("Rows of a database")
    ids = [str(SPEC.dataset_id)]
    names: dict[str, Any] = {"ids": ids, "session": database, "config": {"dataset_ids": ids}}
    monkeypatch.chdir(tmp_path)

    exec(code, names)

    wanted = torch.Size([128, 7, 6])
    assert len(names["train"]) == len(names["train_loader"].dataset)
    for loader in (names["loader"], names["train_loader"]):
        assert next(iter(loader))["receiver_features"].shape[1:] == wanted[1:]
    assert next(iter(names["train_loader"]))["receiver_features"].shape[0] <= wanted[0]


def test_targets_of_both_splits_are_standardized_by_the_training_rows(make: Any) -> None:
    """The earlier system gave `val` numbers of its own, so losses could not be compared."""
    train, val = make("train"), make("val")
    every = collate_gpu_cached([train[i] for i in range(len(train))])["target_position"]

    known = [dataset[0]["metadata"] for dataset in (train, val)]

    assert [known[0][name] for name in COORDS] == [known[1][name] for name in COORDS]
    torch.testing.assert_close(every.mean(0), torch.zeros(2), rtol=0, atol=1e-4)
    torch.testing.assert_close(every.std(0, correction=0), torch.ones(2), rtol=0, atol=1e-3)
    place = train[0]
    meters = place["target_position"] * torch.tensor([known[0][name] for name in COORDS[2:]])
    assert meters.norm() < 1_000_000
    assert 30 < place["metadata"]["centroid"][0] < 60


@pytest.mark.parametrize("preload", [True, False])
def test_every_way_gives_the_same_rows(make: Any, preload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single rows, a DataLoader, the earlier class over a Loader, and rows that do not fit into memory."""
    dataset = make("val", preload_to_gpu=preload)
    rows = [dataset[i] for i in range(len(dataset))]
    ways = {
        "rows": collate_gpu_cached(rows),
        "DataLoader": next(iter(DataLoader(dataset, len(dataset), collate_fn=collate_gpu_cached))),
        "list": next(
            iter(DataLoader(dataset, len(dataset), collate_fn=lambda batch: collate_gpu_cached([*batch])))
        ),
        "Loader": next(iter(GPUDataLoader(dataset, len(dataset)))),
    }
    monkeypatch.setattr("stoker.extras.compat.rows.check_sufficient_ram", lambda _: False)
    ways["no room"] = next(iter(DataLoader(make("val"), len(dataset), collate_fn=collate_gpu_cached)))

    wanted = ways.pop("rows")
    for name, batch in ways.items():
        for field in ("receiver_features", "signal_mask", "target_position"):
            assert torch.equal(batch[field].cpu(), wanted[field].cpu()), (name, field)
        for field in ("gdop", "num_receivers", "centroids"):
            assert torch.equal(batch["metadata"][field].cpu(), wanted["metadata"][field].cpu()), (name, field)
    assert isinstance(rows[0]["metadata"]["gdop"], float)
    assert isinstance(rows[0]["metadata"]["num_receivers"], int)


def test_the_training_config_as_it_was(database: str, caches: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {
        "dataset_ids": [str(SPEC.dataset_id)], "batch_size": 64, "num_workers": 4, "validation_split": 0.3,
        "epochs": 100, "learning_rate": 1e-3, "preload_to_gpu": True, "accelerator": "gpu",
    }  # fmt: skip
    more: dict[str, Any] = {"cache_path": caches, "precompute": {"workers": 0}}
    with caplog.at_level(logging.WARNING, "stoker"):
        train, val = create_gpu_cached_dataloaders(config, database, **more)

    assert val is not None
    assert len(train.dataset) + len(val.dataset) == 160
    assert 38 <= len(val.dataset) <= 60
    assert set(next(iter(train))) == KEYS
    first, second = ([b["target_position"] for b in train] for _ in range(2))
    assert not torch.equal(first[0], second[0])  # each epoch has its order
    (listed,) = [r.getMessage() for r in caplog.records if "no effect" in r.getMessage()]
    assert all(key in listed for key in ("epochs", "learning_rate", "num_workers"))
    whole, none = create_gpu_cached_dataloaders({**config, "validation_split": 0}, database, **more)
    assert (len(whole.dataset), none) == (160, None)


def test_what_is_wrong_is_said_before_a_row_is_cached(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [str(SPEC.dataset_id)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    wrong: list[tuple[type[Exception], dict[str, Any]]] = [
        (ConfigError, {"device": "tpu"}),
        (ResourceError, {"device": "cuda:7"}),
        (ConfigError, {"validation_split": 0.7}),
        (ConfigError, {"validation_split": 0.2, "splits": {"train": 1.0}}),
        (SplitError, {"split": "test"}),
    ]
    for error, more in wrong:
        given = {"split": "train", "device": "cpu", **more}
        with pytest.raises(error):
            GPUCachedRows(ids, db_session=database, cache_path=tmp_path / "cache", **given)
    with pytest.raises(ConfigError, match="dataset_ids"):
        create_gpu_cached_dataloaders({"batch_size": 3}, database)

    assert not (tmp_path / "cache").exists()


def test_in_postgresql_the_table_has_its_earlier_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def stop(_url: object, *, table: str, **_rest: Any) -> None:
        asked.append(table)
        raise ConfigError("stopped here")

    monkeypatch.setattr("stoker.extras.compat.rows.SQLSource", stop)
    for table in (None, "lab.rows"):
        with pytest.raises(ConfigError, match="stopped"):
            GPUCachedRows([str(SPEC.dataset_id)], "train", "postgresql:///heimdall", "cpu", table=table)

    assert asked == ["heimdall.measurement_features", "lab.rows"]


def test_rows_come_in_order_where_nothing_else_is_asked_for(make: Any) -> None:
    loader = GPUDataLoader(make("train"), 16)

    assert "in order" in repr(loader.loader)


def test_an_epoch_that_is_set_has_its_own_order(make: Any) -> None:
    loader = GPUDataLoader(make("train"), 16, shuffle=True)
    places = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        places.append(next(iter(loader))["target_position"])

    assert torch.equal(places[0], places[2])
    assert not torch.equal(places[0], places[1])
