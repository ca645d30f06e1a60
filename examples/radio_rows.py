"""Rows of a database, read once and trained on: `python examples/radio_rows.py [FOLDER]`."""

import sys
from pathlib import Path

import torch

import stoker
from stoker.extras.radio.demo import (
    TABLE,
    RadioSpec,
    Triangulation,
    TriangulationModel,
    position_errors,
    radio_columns,
    write_radio,
)
from stoker.run.fitting import fit, one_thread
from stoker.train.config import TrainConfig


def main(folder: Path) -> None:
    database, spec = folder / "radio.db", RadioSpec(rows=600)
    write_radio(database, spec)

    rows = stoker.SQLSource(
        database,
        table=TABLE,
        key="recording_session_id",
        columns=radio_columns(),
        where=f"dataset_id = '{spec.dataset_id}'",
        split="train",
        splits={"train": 0.8, "val": 0.2},
    )
    cache = stoker.precompute(rows, None, folder / "cache", name="radio_train", workers=1)
    held_out = stoker.precompute(rows.for_split("val"), None, folder / "cache", name="radio_val", workers=1)

    train = stoker.Loader(cache, batch_size=64, tier="device", shuffle=True)
    val = stoker.Loader(held_out, batch_size=64, shuffle=False)
    torch.manual_seed(0)
    model = TriangulationModel()
    model.set_statistics(rows.statistics)
    before = position_errors(model, val).mean_m
    with one_thread():
        fit(Triangulation(model), train, val, TrainConfig(epochs=24, lr=6e-3))
    after = position_errors(model, val).mean_m
    print(f"{len(cache)} + {len(held_out)} rows: {after:,.0f} m off, {before:,.0f} m before training")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "radio_rows"))
