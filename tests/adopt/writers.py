"""Write folders of features as public programs lay them out: one function for each layout.

`change` says which samples are to be damaged, and how: it makes another array of the main one.
"""

from __future__ import annotations

import io
import json
import tarfile
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

Array = NDArray[Any]
Change = Mapping[int, Callable[[Array], Array]]


def values(number: int, *shape: int, dtype: str = "float32") -> Array:
    """The main array of a sample; no element is zero."""
    found = np.random.default_rng(number).standard_normal(shape)
    return (found + np.where(found < 0, -0.01, 0.01)).astype(dtype)


def nan(array: Array) -> Array:
    """One NaN in the last row."""
    array = array.copy()
    array.reshape(-1)[-1] = np.nan
    return array


def zeros(array: Array) -> Array:
    """What a killed job leaves."""
    return np.zeros_like(array)


def narrow(array: Array) -> Array:
    """Another shape along the last axis."""
    return np.ascontiguousarray(array[..., :-1])


def settle(folder: Path) -> None:
    """Wait until files are so old that their digests are remembered."""
    time.sleep(max(0.0, 2.1 - (time.time() - max(p.stat().st_ctime for p in folder.rglob("*")))))


@dataclass(kw_only=True)
class Written:
    """One folder."""

    root: Path
    files: list[str]
    """The main file of each sample."""
    keys: list[str]
    main: str
    """The field that `change` damages."""
    records: list[Array]
    """What the main field of each sample is stored as."""
    fields: set[str]
    partner: Callable[[int], str] | None = None
    """A second file of a sample, which all have."""
    again: Callable[[int], str] | None = None
    """Another file that has the same key as a sample's."""
    whole_files: bool = True
    """One file for each sample, which may be cut short."""
    more: dict[str, Any] = field(default_factory=dict)


def _changed(change: Change, number: int, array: Array) -> Array:
    return change[number](array) if number in change else array


def _save(path: Path, write: Callable[[Any], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        write(file)


def mar(root: Path, count: int, change: Change) -> Written:
    """Moments and flipped moments of each image, in folders of classes."""
    files, records = [], []
    for number in range(count):
        name = f"n{number * 2 // count:02d}/{number:03d}.JPEG.npz"
        moments = _changed(change, number, values(number, 8, 4, 6))
        flip = values(number + 1000, 8, 4, 6)
        _save(root / name, lambda file, a=moments, b=flip: np.savez(file, moments=a, moments_flip=b))
        files.append(name)
        records.append(moments)
    return Written(
        root=root, files=files, keys=[name.removesuffix(".JPEG.npz") for name in files], main="moments",
        records=records, fields={"moments", "moments_flip", "label"},
        again=lambda number: files[number].replace(".JPEG", ".png"),
    )  # fmt: skip


def _edm2(count: int, change: Change) -> tuple[dict[str, bytes], list[str], list[Array]]:
    made: dict[str, bytes] = {}
    records, labels = [], []
    for number in range(count):
        name = f"{number // 8:05d}/img-mean-std-{number:08d}.npy"
        array = _changed(change, number, values(number, 8, 4, 4))
        np.save(file := io.BytesIO(), array)
        made[name] = file.getvalue()
        records.append(array[:4])
        labels.append([name, number % 3])
    made["dataset.json"] = json.dumps({"labels": labels}).encode()
    return made, [name for name in made if name.endswith(".npy")], records


def edm2(root: Path, count: int, change: Change) -> Written:
    """REPA: images, and mean and std of their latents with labels in dataset.json."""
    made, files, records = _edm2(count, change)
    for name, data in made.items():
        _save(root / "vae-sd" / name, lambda file, data=data: file.write(data))
        if name.endswith(".npy"):
            image = root / "images" / name.replace("img-mean-std-", "img").replace(".npy", ".png")
            _save(image, lambda file: file.write(b"png"))
    files = [f"vae-sd/{name}" for name in files]
    return Written(
        root=root, files=files, main="mean", records=records, fields={"mean", "std", "label"},
        keys=[name[7:].replace("img-mean-std-", "img").removesuffix(".npy") for name in files],
    )  # fmt: skip


def edm2_zip(root: Path, count: int, change: Change) -> Written:
    """The same in one zip, stored."""
    made, files, records = _edm2(count, change)
    root.mkdir(parents=True)
    with zipfile.ZipFile(root / "latents.zip", "w", zipfile.ZIP_STORED) as archive:
        for name, data in made.items():
            archive.writestr(name, data)
    return Written(
        root=root, files=["latents.zip"] * count, main="mean", records=records, whole_files=False,
        keys=[name.replace("img-mean-std-", "img").removesuffix(".npy") for name in files],
        fields={"mean", "std", "label"},
    )  # fmt: skip


def fast_dit(root: Path, count: int, change: Change) -> Written:
    """Pairs of a feature and its label, by number."""
    files, records = [], []
    for number in range(count):
        array = _changed(change, number, values(number, 1, 4, 4, 4))
        name = f"imagenet256_features/{number}.npy"
        _save(root / name, lambda file, a=array: np.save(file, a))
        label = root / f"imagenet256_labels/{number}.npy"
        _save(label, lambda file, n=number: np.save(file, np.array([n % 5])))
        files.append(name)
        records.append(array[0])
    return Written(
        root=root, files=files, keys=[str(number) for number in range(count)], main="latent",
        records=records, fields={"latent", "label"},
        partner=lambda number: f"imagenet256_labels/{number}.npy",
    )  # fmt: skip


def lightningdit(root: Path, count: int, change: Change) -> Written:
    """Shards of many rows."""
    root.mkdir(parents=True)
    files, keys, records = [], [], []
    for shard, first in enumerate(range(0, count, 5)):
        numbers = range(first, min(first + 5, count))
        latents = np.stack([_changed(change, number, values(number, 6, 3, 3)) for number in numbers])
        tensors = {
            "latents": torch.from_numpy(latents),
            "latents_flip": torch.from_numpy(latents[..., ::-1].copy()),
            "labels": torch.arange(first, first + len(latents)),
        }
        name = f"latents_rank00_shard{shard:03d}"
        save_file(tensors, root / f"{name}.safetensors")
        files += [f"{name}.safetensors"] * len(latents)
        keys += [f"{name}:{row}" for row in range(len(latents))]
        records += list(latents)
    return Written(
        root=root, files=files, keys=keys, main="latent", records=records, whole_files=False,
        fields={"latent", "latent_flip", "label"},
    )  # fmt: skip


def sd_scripts(root: Path, count: int, change: Change) -> Written:
    """An npz beside each image, the size of the latent in its keys, and one of the text encoders."""
    files, records = [], []
    for number in range(count):
        stem = root / f"a/{number:03d}"
        latents = _changed(change, number, values(number, 4, 8, 6))
        arrays = {
            "latents_8x6": latents,
            "latents_flipped_8x6": values(number + 1000, 4, 8, 6),
            "original_size_8x6": np.array([48, 64]),
            "crop_ltrb_8x6": np.array([0, 0, 48, 64]),
            "alpha_mask_8x6": np.zeros((8, 6), np.float32),
        }
        _save(Path(f"{stem}_0048x0064_flux.npz"), lambda file, a=arrays: np.savez(file, **a))
        text = {
            "l_pooled": values(number, 5),
            "t5_out": values(number, 7, 3),
            "txt_ids": np.zeros((7, 3), np.float32),
            "t5_attn_mask": np.ones(7, np.int64),
            "apply_t5_attn_mask": np.array(True),
        }
        _save(Path(f"{stem}_flux_te.npz"), lambda file, a=text: np.savez(file, **a))
        _save(Path(f"{stem}.png"), lambda file: file.write(b"png"))
        files.append(f"a/{number:03d}_0048x0064_flux.npz")
        records.append(latents)
    return Written(
        root=root, files=files, keys=[f"a/{number:03d}" for number in range(count)], main="latent",
        records=records,
        fields={
            "latent", "latent_flip", "alpha_mask", "original_size", "crop_ltrb", "hidden", "mask", "pooled",
            "txt_ids", "apply_t5_attn_mask",
        },
        partner=lambda number: f"a/{number:03d}_flux_te.npz",
        again=lambda number: f"a/{number:03d}_0064x0064_flux.npz",
    )  # fmt: skip


def musubi(root: Path, count: int, change: Change) -> Written:
    """Latents and outputs of the text encoder, in bfloat16; lengths of texts differ."""
    root.mkdir(parents=True)
    files, records = [], []
    for number in range(count):
        latent = torch.from_numpy(_changed(change, number, values(number, 4, 1, 4, 4))).bfloat16()
        name = f"{number:03d}_0032x0032_wan.safetensors"
        save_file({"latents_1x4x4_bfloat16": latent}, root / name)
        text = torch.from_numpy(values(number, 3 + number % 4, 5)).bfloat16()
        save_file({"varlen_t5_bfloat16": text}, root / f"{number:03d}_wan_te.safetensors")
        files.append(name)
        records.append(latent.float().numpy())
    return Written(
        root=root, files=files, keys=[f"{number:03d}" for number in range(count)], main="latent",
        records=records, fields={"latent", "hidden"},
        partner=lambda number: f"{number:03d}_wan_te.safetensors",
        again=lambda number: f"{number:03d}_0064x0032_wan.safetensors",
    )  # fmt: skip


def ai_toolkit(root: Path, count: int, change: Change) -> Written:
    """Latents and embeddings in hidden folders next to the images; a hash ends their names."""
    (root / "a/_latent_cache").mkdir(parents=True)
    (root / "a/_t_e_cache").mkdir()
    mark = "_-9AzK5Rk2w_x8uPq-Lb3Qw"
    files, records = [], []
    for number in range(count):
        latent = _changed(change, number, values(number, 4, 4, 4))
        name = f"a/_latent_cache/{number}_x{mark}.safetensors"
        save_file({"latent": torch.from_numpy(latent)}, root / name)
        text = {"text_embed": torch.from_numpy(values(number, 1, 6, 5)), "pooled_embed": torch.ones(1, 4)}
        save_file(text, root / f"a/_t_e_cache/{number}_x{mark}.safetensors")
        (root / f"a/{number}_x.jpg").write_bytes(b"jpg")
        files.append(name)
        records.append(latent)
    return Written(
        root=root, files=files, keys=[f"a/{number}_x" for number in range(count)], main="latent",
        records=records, fields={"latent", "hidden", "pooled"},
        partner=lambda number: f"a/_t_e_cache/{number}_x{mark}.safetensors",
        again=lambda number: files[number].replace("Qw.", "QA."),
    )  # fmt: skip


def _pt(
    root: Path, count: int, change: Change, sample: Callable[[int, torch.Tensor], Any], **more: Any
) -> Written:
    root.mkdir(parents=True, exist_ok=True)
    shape, named = more.pop("shape"), more.pop("named")
    files, records = [], []
    for number in range(count):
        array = _changed(change, number, values(number, *(shape(number) if callable(shape) else shape)))
        name = named(number)
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(sample(number, torch.from_numpy(array)), root / name)
        files.append(name)
        records.append(array)
    return Written(root=root, files=files, records=records,
                   keys=[name.rpartition(".")[0] for name in files], **more)  # fmt: skip


def simpletuner(root: Path, count: int, change: Change) -> Written:
    """Embeddings by the md5 of the caption."""
    return _pt(
        root, count, change,
        lambda number, main: {"prompt_embeds": main[None], "pooled_prompt_embeds": torch.ones(4)},
        shape=(6, 5), named=lambda number: f"{number:032x}-flux.pt", main="hidden",
        fields={"hidden", "pooled"},
    )  # fmt: skip


def specforge(root: Path, count: int, change: Change) -> Written:
    """Hidden states of a chat in a `.ckpt`, with ids and mask."""

    def sample(number: int, main: torch.Tensor) -> dict[str, torch.Tensor]:
        tokens = len(main)
        return {
            "input_ids": torch.arange(tokens),
            "loss_mask": torch.ones(tokens, dtype=torch.int64),
            "hidden_state": main[None],
            "aux_hidden_state": torch.cat([main, main, main], -1)[None],
        }

    return _pt(
        root, count, change, sample, shape=lambda number: (4 + number % 5, 6),
        named=lambda number: f"rows_0-5000/data_{number}.ckpt", main="hidden",
        fields={"input_ids", "loss_mask", "hidden", "aux_hidden"},
    )  # fmt: skip


def speculators(root: Path, count: int, change: Change) -> Written:
    """The same as safetensors: hidden states of several layers, and ids."""
    root.mkdir(parents=True)
    files, records = [], []
    for number in range(count):
        array = _changed(change, number, values(number, 4 + number % 3, 3, 6))
        name = f"hs_{number}.safetensors"
        save_file(
            {"hidden_states": torch.from_numpy(array), "token_ids": torch.arange(len(array))}, root / name
        )
        files.append(name)
        records.append(array)
    return Written(
        root=root, files=files, keys=[f"hs_{number}" for number in range(count)], main="hidden",
        records=records, fields={"hidden", "input_ids"}, again=lambda number: f"hs_{number}.pt",
    )  # fmt: skip


def model_optimizer(root: Path, count: int, change: Change) -> Written:
    """The same by the id of the conversation, which is in the file as text too."""
    return _pt(
        root, count, change,
        lambda number, main: {
            "input_ids": torch.arange(len(main)), "hidden_states": main,
            "aux_hidden_states": torch.cat([main] * 2, -1), "conversation_id": f"c{number}",
        },
        shape=lambda number: (3 + number % 4, 5), named=lambda number: f"c{number:02d}.pt", main="hidden",
        fields={"input_ids", "hidden", "aux_hidden"},
    )  # fmt: skip


def bags(root: Path, count: int, change: Change) -> Written:
    """CLAM and TRIDENT: features and coordinates of each slide."""
    root.mkdir(parents=True)
    files, records = [], []
    for number in range(count):
        array = _changed(change, number, values(number, 5 + number % 4, 8))
        with h5py.File(root / f"slide_{number}.h5", "w") as file:
            file["features"] = array
            file["coords"] = np.arange(2 * len(array)).reshape(-1, 2)
        files.append(f"slide_{number}.h5")
        records.append(array)
    return Written(
        root=root, files=files, keys=[name.removesuffix(".h5") for name in files], main="features",
        records=records, fields={"features", "coords"}, again=lambda number: f"slide_{number}.hdf5",
    )  # fmt: skip


def esm(root: Path, count: int, change: Change) -> Written:
    """Representations of each sequence, by its label."""
    return _pt(
        root, count, change,
        lambda number, main: {
            "label": f"p{number}", "representations": {33: main}, "mean_representations": {33: main.mean(0)},
        },
        shape=lambda number: (6 + number % 5, 7), named=lambda number: f"p{number:02d}.pt", main="hidden",
        fields={"hidden", "pooled"},
    )  # fmt: skip


def lola(root: Path, count: int, change: Change) -> Written:
    """Trajectories of latents, several in each file."""
    root.mkdir(parents=True)
    files, keys, records = [], [], []
    for part, first in enumerate(range(0, count, 4)):
        numbers = range(first, min(first + 4, count))
        state = np.stack([_changed(change, number, values(number, 6, 3, 2, 2)) for number in numbers])
        with h5py.File(root / f"run_{part}.h5", "w") as file:
            file["state"] = state
            file["label"] = np.ones((len(state), 2), np.float32)
        files += [f"run_{part}.h5"] * len(state)
        keys += [f"run_{part}:{row}" for row in range(len(state))]
        records += list(state)
    return Written(
        root=root, files=files, keys=keys, main="latent", records=records, fields={"latent", "label"},
        whole_files=False,
    )  # fmt: skip


def stable_audio(root: Path, count: int, change: Change) -> Written:
    """Latents of sound with a JSON of each, below the number of the rank."""
    files, records = [], []
    for number in range(count):
        name = f"{number % 2}/{number % 2:03d}{number:06d}0000"
        array = _changed(change, number, values(number, 4, 9))
        _save(root / f"{name}.npy", lambda file, a=array: np.save(file, a))
        about = {"padding_mask": [1] * 9, "seconds_total": 4 + number, "prompt": "rain"}
        _save(root / f"{name}.json", lambda file, a=about: file.write(json.dumps(a).encode()))
        files.append(f"{name}.npy")
        records.append(array)
    (root / "details.json").write_text("{}")
    order = sorted(range(count), key=lambda number: files[number])
    return Written(
        root=root, files=[files[n] for n in order], keys=[files[n].removesuffix(".npy") for n in order],
        main="latent", records=[records[n] for n in order], fields={"latent", "mask", "seconds_total"},
        partner=lambda place: files[order[place]].replace(".npy", ".json"), more={"order": order},
    )  # fmt: skip


def class_folders(root: Path, count: int, change: Change) -> Written:
    """An array for each sample, in folders of classes."""
    files, records = [], []
    for number in range(count):
        array = _changed(change, number, values(number, 5))
        name = f"{'cat' if number * 2 < count else 'dog'}/{number:03d}.npy"
        _save(root / name, lambda file, a=array: np.save(file, a))
        files.append(name)
        records.append(array)
    return Written(
        root=root, files=files, keys=[name.removesuffix(".npy") for name in files], main="features",
        records=records, fields={"features", "label"},
    )  # fmt: skip


def raw_lmdb(root: Path, count: int, change: Change) -> Written:
    """Raw arrays by name and row; their shapes as text."""
    root.mkdir(parents=True)
    arrays = [_changed(change, number, values(number, 3, 4, dtype="float16")) for number in range(count)]
    environment = lmdb.open(str(root), map_size=1 << 24)
    with environment.begin(write=True) as transaction:
        transaction.put(b"latents_shape", f"{count} 3 4".encode())
        transaction.put(b"labels_shape", f"{count}".encode())
        for number, array in enumerate(arrays):
            transaction.put(f"latents_{number}_data".encode(), array.tobytes())
            transaction.put(f"labels_{number}_data".encode(), np.int64(number).tobytes())
    environment.close()
    (root / "lock.mdb").unlink()
    return Written(
        root=root, files=["data.mdb"] * count, keys=[str(number) for number in range(count)], main="latent",
        records=arrays, fields={"latent", "label"}, whole_files=False,
    )  # fmt: skip


def sample_pt(root: Path, count: int, change: Change) -> Written:
    """The earlier cache of Stoker: a dict of tensors for each trajectory."""
    return _pt(
        root, count, change,
        lambda number, main: {"latent": main, "params": {"nu": torch.tensor(0.1 * number)}, "bc": None},
        shape=(5, 3, 4), named=lambda number: f"sample_{number:05d}.pt", main="latent",
        fields={"latent", "param_nu"},
    )  # fmt: skip


def webdataset(root: Path, count: int, change: Change) -> Written:
    """Members of tar files that share a stem."""
    root.mkdir(parents=True)
    keys, files, records = [], [], []

    def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))

    for part, first in enumerate(range(0, count, 5)):
        name = f"train-{part:03d}.tar"
        with tarfile.open(root / name, "w") as archive:
            for number in range(first, min(first + 5, count)):
                array = _changed(change, number, values(number, 4, 3))
                np.save(file := io.BytesIO(), array)
                add(archive, f"{number:04d}.latent.npy", file.getvalue())
                add(archive, f"{number:04d}.cls", str(number % 3).encode())
                add(archive, f"{number:04d}.txt", b"a cat")
                keys.append(f"{name}:{number:04d}")
                files.append(name)
                records.append(array)
    return Written(
        root=root, files=files, keys=keys, main="latent", records=records, fields={"latent", "label"},
        whole_files=False,
    )  # fmt: skip


def parquet(root: Path, count: int, change: Change) -> Written:
    """Rows of features, named by a column of text."""
    root.mkdir(parents=True)
    rows = [_changed(change, number, values(number, 6)) for number in range(count)]
    table = pyarrow.table(
        {
            "id": [f"x{number:02d}" for number in range(count)],
            "features": pyarrow.array([row.tolist() for row in rows], pyarrow.list_(pyarrow.float32())),
            "label": list(range(count)),
        }
    )
    pyarrow.parquet.write_table(table, root / "part-0.parquet", row_group_size=5)
    return Written(
        root=root, files=["part-0.parquet"] * count, keys=[f"x{number:02d}" for number in range(count)],
        main="features", records=rows, fields={"features", "label"}, whole_files=False,
    )  # fmt: skip


WRITERS: Mapping[str, tuple[Callable[[Path, int, Change], Written], str]] = {
    "mar": (mar, "mar"),
    "repa": (edm2, "edm2"),
    "edm2 zip": (edm2_zip, "edm2"),
    "fast-dit": (fast_dit, "fast-dit"),
    "lightningdit": (lightningdit, "lightningdit"),
    "sd-scripts": (sd_scripts, "sd-scripts"),
    "musubi-tuner": (musubi, "musubi-tuner"),
    "ai-toolkit": (ai_toolkit, "ai-toolkit"),
    "simpletuner": (simpletuner, "simpletuner"),
    "specforge": (specforge, "hidden-states"),
    "speculators": (speculators, "hidden-states"),
    "model-optimizer": (model_optimizer, "hidden-states"),
    "bags": (bags, "bags"),
    "esm": (esm, "esm"),
    "lola": (lola, "lola"),
    "stable-audio": (stable_audio, "stable-audio"),
    "class folders": (class_folders, "class-folders"),
    "lmdb": (raw_lmdb, "lmdb"),
    "sample_*.pt": (sample_pt, "sample-pt"),
    "webdataset": (webdataset, "webdataset"),
    "parquet": (parquet, "parquet"),
}
"""Each layout, and the name that `auto` gives it."""
