"""Layouts of features on disk: which files belong to a sample, and which fields their arrays are.

Each named layout follows what a public program writes. `recognize` looks at names, and at the arrays in the
first files, and says why it chose.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import PurePosixPath
from typing import Protocol

import numpy as np

from stoker.errors import ConfigError, DecodeError, SourceError
from stoker.extras.adopt.formats import Array, Arrays

IMAGE = r"\.(?i:jpe?g|png|webp|bmp|gif|tiff?|avif)"
LABEL = r"(?:(?P<label>[^/]+)/)?"
"""The first folder of a name is a class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One of the files of a sample."""

    name: str
    """The file in words, as `latents`."""
    pattern: str
    """A regular expression for the names of such files, relative to the folder. The group `key` names the
    sample, after `folder` where there is one; `base` names what samples share; others are fields."""
    named: str = "{key}"
    """What the sample is called, below `folder`."""
    whole: tuple[str, ...] = ()
    """Groups that are whole numbers; other groups are numbered in the order of their texts."""
    kind: str = "file"
    """`file`, a kind of container, `labels` (a `dataset.json`), or `image`, which is not read."""
    optional: bool = False
    """Samples without it are complete."""
    shared: bool = False
    """Several samples have it, those whose `base` is its key."""

    def match(self, name: str) -> re.Match[str] | None:
        """Return the match of a file's name."""
        return re.fullmatch(self.pattern, name, re.DOTALL)  # a name may have a line break


def no_change(role: str, arrays: Arrays) -> Arrays:
    """Return arrays under standard names."""
    return rename(arrays, STANDARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to lay out features."""

    name: str
    roles: tuple[Role, ...]
    """In the order in which names are compared."""
    fields: Callable[[str, Arrays], Arrays] = no_change
    """Makes fields of the arrays of one file, given its role."""
    ragged: tuple[str, ...] = ()
    """Fields whose axis 0 varies."""
    sized: tuple[str, ...] = ()
    """Fields of several sizes: each axis varies along which one sample differs."""
    time: tuple[str, ...] = ()
    """Fields whose axis 0 is time."""
    steps: str = ""
    """One of these: axis 0 of each other field that is as long is time as well."""
    dense: tuple[str, ...] = ()
    """Fields of which no row along axis 0 is all zeros, unless a job was killed before it wrote that row."""
    numbered: bool = False
    """Keys end in numbers from 0, so that a missing file is seen."""


class FolderLook(Protocol):
    """The first files of a folder."""

    names: Sequence[str]
    """Names of some thousand files, relative to the folder."""
    unreadable: str
    """The first of these that cannot be read, and why; empty: none is known."""

    def arrays(self, pattern: str) -> tuple[str, Mapping[str, tuple[int, ...]]] | None:
        """Return name and shapes of the arrays of a file of such a name, one like most of the first."""
        ...


# ----------------------------------------------------------------------------------------------------------
# Fields of the arrays of one file.


STANDARD = {
    "latents": "latent", "latents_flip": "latent_flip", "latents_flipped": "latent_flip", "labels": "label",
}  # fmt: skip
TEXT = {
    "t5_out": "hidden", "t5_attn_mask": "mask", "hidden_state": "hidden", "hidden_state1": "hidden",
    "hidden_state2": "hidden_2", "pool2": "pooled", "l_pooled": "pooled", "lg_pooled": "pooled",
    "attention_mask": "mask", "attention_masks": "mask", "prompt_attention_mask": "mask",
    "prompt_embeds": "hidden", "pooled_prompt_embeds": "pooled", "text_embed": "hidden",
    "pooled_embed": "pooled", "llama": "hidden", "llama_vec": "hidden", "llama_mask": "mask",
    "llama_attention_mask": "mask", "t5": "hidden", "vl_embed": "hidden", "llm_embed": "hidden",
    "clipL": "pooled", "clip_l_pooler": "pooled",
}  # fmt: skip
"""Outputs of text encoders."""
MAY_BE_ZERO = ("txt_ids", "text_ids", "mask", "alpha_mask")
"""Float fields that are all zeros in sound files."""


def rename(arrays: Arrays, names: Mapping[str, str]) -> Arrays:
    """Return the arrays under other names.

    Raises:
        DecodeError: Two would have one name.
    """
    found: Arrays = {}
    for name, array in arrays.items():
        new = names.get(name, name)
        if new in found:
            raise DecodeError(f"two of its arrays would both be the field {new!r}: {', '.join(arrays)}")
        found[new] = array
    return found


def without_batch(array: Array, axes: int) -> Array:
    """Return an array of so many axes: one with an axis more, of one entry, is a batch of one.

    An axis of one entry says nothing without the number of axes: a text may have one token.
    """
    values = array.values
    return array._replace(values=values[0]) if values.ndim == axes + 1 and len(values) == 1 else array


def counts_of(arrays: Arrays, names: Sequence[str]) -> dict[str, int]:
    """Return the length of axis 0 of those of the named arrays that are there.

    Raises:
        DecodeError: One is a single number.
    """
    found = {name: arrays[name].values for name in names if name in arrays}
    if scalar := [name for name, values in found.items() if not values.ndim]:
        raise DecodeError(f"{scalar[0]!r} is a single number, expected an array")
    return {name: len(values) for name, values in found.items()}


def _mean_and_std(role: str, arrays: Arrays) -> Arrays:
    data = arrays["data"]
    if data.values.ndim < 3 or data.values.shape[0] % 2:
        raise DecodeError(f"is {data.dtype} {data.values.shape}, expected mean and std (2C, H, W)")
    mean, std = np.split(data.values, 2)
    return {"mean": Array(mean.copy(), data.dtype), "std": Array(std.copy(), data.dtype)}


def _fast_dit(role: str, arrays: Arrays) -> Arrays:
    data = arrays["data"]
    return {"latent": without_batch(data, 3)} if role == "features" else {"label": without_batch(data, 0)}


_SIZE = re.compile(r"(latents|latents_flipped|alpha_mask|original_size|crop_ltrb)_\d+x\d+")


def _sd_scripts(role: str, arrays: Arrays) -> Arrays:
    if role != "latents":
        return rename(arrays, TEXT)
    plain: dict[str, str] = {name: match[1] for name in arrays if (match := _SIZE.fullmatch(name))}
    return rename(rename(arrays, plain), STANDARD)


_MUSUBI = re.compile(
    r"(?:varlen_)?(.+?)(?:_\d+(?:x\d+)+)?(?:_(?:float|bfloat|int|uint)\d+|_bool|_float8_\w+)?"
)


def _musubi(role: str, arrays: Arrays) -> Arrays:
    plain = {name: match[1] for name in arrays if (match := _MUSUBI.fullmatch(name))}
    return rename(rename(arrays, plain), {**STANDARD, **TEXT})


def _text_and_latents(role: str, arrays: Arrays) -> Arrays:
    found = rename(arrays, {"data": "latent", **STANDARD, **TEXT})
    axes = {"hidden": 2, "mask": 1, "pooled": 1}
    return {name: without_batch(array, axes[name]) if name in axes else array
            for name, array in found.items()}  # fmt: skip


_HIDDEN = {
    "hidden_state": "hidden", "hidden_states": "hidden", "aux_hidden_state": "aux_hidden",
    "aux_hidden_states": "aux_hidden", "verifier_last_hidden_states": "last_hidden", "token_ids": "input_ids",
    "attention_mask": "mask",
}  # fmt: skip
_LISTED = re.compile(r"hidden_states_(\d+)")


def _hidden_states(role: str, arrays: Arrays) -> Arrays:
    listed = {int(match[1]): name for name in arrays if (match := _LISTED.fullmatch(name))}
    if listed:  # one tensor for each layer
        layers = [without_batch(arrays[listed[number]], 2) for number in sorted(listed)]
        if len({layer.values.shape for layer in layers}) > 1 or not layers[0].values.ndim:
            raise DecodeError("its layers of hidden states have different shapes, or none")
        stacked = Array(np.stack([layer.values for layer in layers], axis=1), layers[0].dtype)
        rest = {name: array for name, array in arrays.items() if name not in listed.values()}
        arrays = {**rest, "hidden_states": stacked}
    found = rename(arrays, _HIDDEN)
    found |= {name: without_batch(found[name], 1) for name in _TOKEN_IDS if name in found}
    counts = [len(found[name].values) for name in _TOKEN_IDS if name in found and found[name].values.ndim]
    for name, array in found.items():
        # (1, T, D) is a batch of one; (T, D) and, of several layers, (T, L, D) are none.
        shape, axes = array.values.shape, 2 if name in _TOKEN_STATES else len(array.values.shape) - 1
        if shape[:1] == (1,) and (not counts or shape[1:2] == (counts[0],)):
            found[name] = without_batch(array, axes)
    if len(set((lengths := counts_of(found, _TOKEN_FIELDS)).values())) > 1:
        raise DecodeError(f"its fields have different numbers of tokens: {lengths}")
    return found


_SIZED_FIELDS = ("latent", "latent_flip", "alpha_mask", "hidden", "hidden_2", "mask")
_TOKEN_IDS = ("input_ids", "loss_mask", "mask")
_TOKEN_STATES = ("hidden", "aux_hidden", "last_hidden")
_TOKEN_FIELDS = (*_TOKEN_STATES, *_TOKEN_IDS)


def _bags(role: str, arrays: Arrays) -> Arrays:
    found = {"features": arrays["data"]} if "data" in arrays else dict(arrays)
    if "features" not in found:
        raise DecodeError("it has no 'features'")
    found["features"] = without_batch(found["features"], 2)
    counts = counts_of(found, ("features", "coords"))
    if len(set(counts.values())) > 1:
        raise DecodeError(f"features and coords have different numbers of rows: {counts}")
    return {name: found[name] for name in counts}


_LAYER = re.compile(r"(representations|mean_representations|bos_representations)_(\d+)")
_ESM = {"representations": "hidden", "mean_representations": "pooled", "bos_representations": "bos"}


def _esm(role: str, arrays: Arrays) -> Arrays:
    found = {match: array for name, array in arrays.items() if (match := _LAYER.fullmatch(name))}
    if not found:
        raise DecodeError("it has no representations")
    several = len({match[2] for match in found}) > 1
    return {_ESM[match[1]] + (f"_{match[2]}" if several else ""): array for match, array in found.items()}


def _lola(role: str, arrays: Arrays) -> Arrays:
    return rename(arrays, {"state": "latent"})


def _audio(role: str, arrays: Arrays) -> Arrays:
    if role == "latents":
        return {"latent": arrays["data"]}
    known = {"padding_mask": "mask", "seconds_start": "seconds_start", "seconds_total": "seconds_total"}
    found = {new: arrays[name] for name, new in known.items() if name in arrays}
    seconds = [name for name in found if name != "mask"]
    return {
        **found,
        **{name: Array(np.asarray(found[name].values, np.float64), "float64") for name in seconds},
    }


def _by_class(role: str, arrays: Arrays) -> Arrays:
    return {"features": arrays["data"]}


def _sample_pt(role: str, arrays: Arrays) -> Arrays:
    latent = arrays.get("latent")
    if latent is None or latent.values.ndim != 3:
        shape = None if latent is None else latent.values.shape
        raise DecodeError(f"its 'latent' is {shape}, expected a tensor (T, L, D)")
    return dict(sorted(arrays.items()))


def _webdataset(role: str, arrays: Arrays) -> Arrays:
    return rename(arrays, STANDARD)


# ----------------------------------------------------------------------------------------------------------
# The named layouts.


_HASH = r"_[\w-]{22}"
_SIZED = r"(?:_\d{4,}x\d{4,}(?:_[a-z0-9]+)?)"
LAYOUTS: Mapping[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout(
            name="mar",
            roles=(Role(name="moments", pattern=rf"(?P<key>{LABEL}.+?)(?:{IMAGE})?\.npz"),),
        ),
        Layout(
            name="edm2",
            roles=(
                Role(
                    name="latents",
                    pattern=r"(?:vae-sd/)?(?P<folder>.*?)/?img-mean-std-(?P<key>\d+)\.npy",
                    named="img{key}",
                ),
                Role(name="labels", pattern=r"(?:vae-sd/)?dataset\.json", kind="labels"),
                Role(
                    name="image",
                    pattern=rf"images/(?P<folder>.*?)/?(?P<key>img\d+){IMAGE}",
                    kind="image",
                    optional=True,
                ),
                Role(name="archive", pattern=r".+\.zip", kind="zip"),
            ),
            fields=_mean_and_std,
        ),
        Layout(
            name="fast-dit",
            roles=(
                Role(name="features", pattern=r"(?:.*/)?[^/]*features/(?P<key>[^/]+)\.npy"),
                Role(name="labels", pattern=r"(?:.*/)?[^/]*labels/(?P<key>[^/]+)\.npy"),
            ),
            fields=_fast_dit,
        ),
        Layout(
            name="lightningdit",
            roles=(Role(name="rows", pattern=r"(?P<key>.+)\.safetensors", kind="safetensors-rows"),),
        ),
        Layout(
            name="sd-scripts",
            roles=(
                Role(name="text", pattern=r"(?P<key>.+?)_(?:te_outputs|[a-z0-9]+_te)\.npz"),
                Role(name="latents", pattern=rf"(?P<key>.+?){_SIZED}?\.npz"),
                Role(name="image", pattern=rf"(?P<key>.+){IMAGE}", kind="image", optional=True),
            ),
            fields=_sd_scripts,
            sized=_SIZED_FIELDS,
        ),
        Layout(
            name="musubi-tuner",
            roles=(
                Role(name="text", pattern=r"(?P<key>.+)_[a-z0-9]+_te\.safetensors", shared=True),
                Role(
                    name="latents",
                    pattern=r"(?P<key>(?P<base>.+?)(?:_\d{5}-\d{3})?)_\d{4,}x\d{4,}_[a-z0-9]+\.safetensors",
                ),
            ),
            fields=_musubi,
            sized=_SIZED_FIELDS,
        ),
        Layout(
            name="ai-toolkit",
            roles=(
                Role(
                    name="latents",
                    pattern=rf"(?:(?P<folder>.+)/)?_latent_cache/(?P<key>[^/]+){_HASH}\.safetensors",
                ),
                Role(
                    name="text",
                    pattern=rf"(?:(?P<folder>.+)/)?_t_e_cache/(?P<key>[^/]+){_HASH}\.safetensors",
                ),
                Role(
                    name="image",
                    pattern=rf"(?:(?P<folder>.+)/)?(?P<key>[^/]+){IMAGE}",
                    kind="image",
                    optional=True,
                ),
            ),
            fields=_text_and_latents,
            sized=_SIZED_FIELDS,
        ),
        Layout(
            name="simpletuner",
            roles=(Role(name="embeddings", pattern=r"(?P<key>.+)\.pt"),),
            fields=_text_and_latents,
            sized=_SIZED_FIELDS,
        ),
        Layout(
            name="hidden-states",
            roles=(Role(name="hidden states", pattern=r"(?P<key>.+)\.(?:pt|ckpt|safetensors)"),),
            fields=_hidden_states,
            ragged=_TOKEN_FIELDS,
        ),
        Layout(
            name="bags",
            roles=(Role(name="features", pattern=r"(?:h5_files/)?(?P<key>.+)\.(?:h5|hdf5)"),),
            fields=_bags,
            ragged=("features", "coords"),
            dense=("features",),
        ),
        Layout(
            name="esm",
            roles=(Role(name="representations", pattern=r"(?P<key>.+)\.pt"),),
            fields=_esm,
            ragged=("hidden",),
        ),
        Layout(
            name="lola",
            roles=(Role(name="trajectories", pattern=r"(?P<key>.+)\.(?:h5|hdf5)", kind="hdf5-rows"),),
            fields=_lola,
            time=("latent",),
            dense=("latent",),
        ),
        Layout(
            name="stable-audio",
            roles=(
                Role(name="latents", pattern=r"(?P<key>.+)\.npy"),
                Role(name="metadata", pattern=r"(?P<key>.+/.+)\.json"),
            ),
            fields=_audio,
        ),
        Layout(
            name="class-folders",
            roles=(Role(name="features", pattern=r"(?P<key>(?P<label>[^/]+)/.+)\.npy"),),
            fields=_by_class,
        ),
        Layout(name="lmdb", roles=(Role(name="rows", pattern=r"(?P<key>.*?)/?data\.mdb", kind="lmdb"),)),
        Layout(
            name="sample-pt",
            roles=(Role(name="sample", pattern=r"(?P<key>sample_\d{5,9})\.pt"),),
            fields=_sample_pt,
            time=("latent",),
            steps="latent",
            numbered=True,
        ),
        Layout(
            name="webdataset",
            roles=(Role(name="archive", pattern=r"(?P<key>.+)\.tar", kind="tar"),),
            fields=_webdataset,
        ),
        Layout(
            name="parquet", roles=(Role(name="rows", pattern=r"(?P<key>.+)\.(?:parquet|pq)", kind="parquet"),)
        ),
        Layout(name="npy", roles=(Role(name="array", pattern=r"(?P<key>.+)\.npy"),)),
        Layout(name="npz", roles=(Role(name="arrays", pattern=r"(?P<key>.+)\.npz"),)),
        Layout(name="safetensors", roles=(Role(name="tensors", pattern=r"(?P<key>.+)\.safetensors"),)),
        Layout(name="pt", roles=(Role(name="tensors", pattern=r"(?P<key>.+)\.(?:pt|pth|ckpt)"),)),
        Layout(name="hdf5", roles=(Role(name="datasets", pattern=r"(?P<key>.+)\.(?:h5|hdf5)"),)),
    )
}
"""By name. The last ones are the formats themselves, one sample in a file."""


# ----------------------------------------------------------------------------------------------------------
# Which layout a folder has.


def choose_layout(wanted: str, look: FolderLook, where: str) -> tuple[Layout, str]:
    """Return the layout of a folder, and why it is that one.

    Args:
        wanted: `auto`, a name, or a pattern.
        look: The first files of the folder.
        where: Names the folder.

    Raises:
        ConfigError: There is no such layout, or the pattern makes no sense.
        SourceError: `auto` recognizes nothing.
    """
    if "{" in wanted:
        return layout_of_pattern(wanted), "it was given as a pattern"
    if wanted != "auto":
        if wanted not in LAYOUTS:
            near = get_close_matches(wanted, LAYOUTS, n=1)
            raise ConfigError(
                f"there is no layout {wanted!r}",
                hint=(f"Did you mean {near[0]!r}? " if near else "")
                + f"Expected auto, one of {', '.join(LAYOUTS)}, or a pattern such as '{{key}}.npy'",
            )
        return LAYOUTS[wanted], "it was named"
    for name, why in _looks(look):
        return LAYOUTS[name], why
    if look.unreadable:
        raise SourceError(
            f"{where}: none of the first files can be read. {look.unreadable}",
            hint="Replace such files; if later ones can be read, name the layout",
        )
    if not look.names:
        raise SourceError(
            f"{where} holds no files", hint="Check the path; names that begin with a dot are left out"
        )
    suffixes = sorted({PurePosixPath(name).suffix for name in look.names} - {""})
    ends = f"its files end in {', '.join(suffixes[:8])}" if suffixes else "its files have no suffix"
    raise SourceError(
        f"{where} has no layout that is known: {ends}",
        hint="Name a layout, or give a pattern such as '{split}/{key}_{label:int}.npy'",
    )


def _looks(look: FolderLook) -> Sequence[tuple[str, str]]:
    """Return names of the layouts that fit, and why, the best first."""
    suffixes = Counter(PurePosixPath(name).suffix.lower() for name in look.names)
    checks: tuple[tuple[set[str], Callable[[FolderLook], tuple[str, str] | None]], ...] = (
        ({".mdb"}, lambda look: _named(look, "lmdb", r"(.*/)?data\.mdb", "data.mdb is there")),
        ({".npy", ".zip"}, _of_npy),
        ({".npz"}, _of_npz),
        ({".safetensors"}, _of_safetensors),
        ({".pt", ".pth", ".ckpt"}, _of_pt),
        ({".h5", ".hdf5"}, _of_hdf5),
        ({".tar"}, lambda look: _named(look, "webdataset", r".+\.tar", "there are tar files")),
        ({".parquet", ".pq"}, lambda look: _named(look, "parquet", r".+\.(parquet|pq)", "it is Parquet")),
    )  # fmt: skip
    # Most files decide: a few others next to them, as statistics, are not the features.
    often = sorted(checks, key=lambda pair: -sum(suffixes[suffix] for suffix in pair[0]))
    found = (check(look) for wanted, check in often if wanted & suffixes.keys())
    return [entry for entry in found if entry is not None]


def _first(look: FolderLook, pattern: str) -> str | None:
    return next((name for name in look.names if re.fullmatch(pattern, name)), None)


def _named(look: FolderLook, layout: str, pattern: str, why: str) -> tuple[str, str] | None:
    return (layout, why) if _first(look, pattern) else None


def _of_npy(look: FolderLook) -> tuple[str, str] | None:
    if name := _first(look, r"(.*/)?img-mean-std-\d+\.npy"):
        return "edm2", f"{name} is named as edm2 and REPA name latents"
    if not _first(look, r".+\.npy"):
        return ("edm2", f"{name} is an archive of latents") if (name := _first(look, r".+\.zip")) else None
    features, labels = (_first(look, rf"(.*/)?[^/]*{word}/[^/]+\.npy") for word in ("features", "labels"))
    if features and labels:
        return "fast-dit", f"{features} and {labels} are a pair of features and label"
    if (name := _first(look, r".+/.+\.json")) and name.removesuffix(".json") + ".npy" in set(look.names):
        return "stable-audio", f"{name} has a .npy of its name"
    arrays = [name for name in look.names if name.endswith(".npy")]
    if all("/" in name for name in arrays) and len({name.partition("/")[0] for name in arrays}) > 1:
        return "class-folders", f"{arrays[0]} is in one of several folders, which are taken as classes"
    return "npy", f"{arrays[0]} is an array"


def _of_npz(look: FolderLook) -> tuple[str, str] | None:
    if (found := look.arrays(r".+\.npz")) is None:
        return None
    name, arrays = found
    if "moments" in arrays:
        return "mar", f"{name} holds moments"
    if any(array.startswith("latents") for array in arrays) or re.search(r"_(te|te_outputs)\.npz", name):
        return "sd-scripts", f"{name} holds {', '.join(list(arrays)[:3])}"
    return "npz", f"{name} holds {', '.join(list(arrays)[:3])}"


def _of_safetensors(look: FolderLook) -> tuple[str, str] | None:
    if name := _first(look, rf"(.+/)?_latent_cache/[^/]+{_HASH}\.safetensors"):
        return "ai-toolkit", f"{name} is in _latent_cache"
    latents = LAYOUTS["musubi-tuner"].roles[1].pattern
    if (found := look.arrays(latents)) and any(re.match(r"latents_\d+x", array) for array in found[1]):
        return "musubi-tuner", f"{found[0]} holds {next(iter(found[1]))}"
    if (found := look.arrays(r".+\.safetensors")) is None:
        return None
    name, arrays = found
    if {"latents", "labels"} <= arrays.keys() and arrays["latents"][:1] == arrays["labels"][:1]:
        return "lightningdit", f"{name} holds {arrays['labels'][0]:,} rows of latents and labels"
    if _is_hidden(arrays):
        return "hidden-states", f"{name} holds {', '.join(list(arrays)[:3])}"
    return "safetensors", f"{name} holds {', '.join(list(arrays)[:3])}"


def _of_pt(look: FolderLook) -> tuple[str, str] | None:
    # CLAM writes each bag twice: with the places of its patches in h5_files, without them in pt_files.
    if _first(look, r"pt_files/.+\.pt") and _first(look, r"h5_files/.+\.h5") and (bags := _of_hdf5(look)):
        return bags
    if (found := look.arrays(r"(.+/)?[^/]+\.(pt|pth|ckpt)")) is None:
        return None
    name, arrays = found
    held = f"{name} holds {', '.join(list(arrays)[:3])}"
    if re.fullmatch(r"sample_\d{5,9}\.pt", name) and len(arrays.get("latent", ())) == 3:
        return "sample-pt", held
    if any(_LAYER.fullmatch(array) for array in arrays):
        return "esm", held
    if _is_hidden(arrays):
        return "hidden-states", held
    if "prompt_embeds" in arrays or "latents" in arrays:
        return "simpletuner", held
    return "pt", held


def _is_hidden(arrays: Mapping[str, object]) -> bool:
    names = {_LISTED.sub("hidden_states", name) for name in arrays}
    return bool(names & {"hidden_state", "hidden_states"}) and bool(names & {"input_ids", "token_ids"})


def _of_hdf5(look: FolderLook) -> tuple[str, str] | None:
    if (found := look.arrays(r".+\.(h5|hdf5)")) is None:
        return None
    name, arrays = found
    held = f"{name} holds {', '.join(list(arrays)[:3])}"
    if "features" in arrays and "coords" in arrays:
        return "bags", held
    return ("lola" if len(arrays.get("state", ())) >= 3 else "hdf5"), held


# ----------------------------------------------------------------------------------------------------------
# Layouts that a pattern states.


_GROUP = re.compile(r"\{(\w+)(?::(\w+))?\}|(\*)")
_KINDS = {"npy", "npz", "safetensors", "json", "pt", "pth", "ckpt", "h5", "hdf5"}


def layout_of_pattern(pattern: str) -> Layout:
    """Return the layout of files that are named as a pattern says.

    `{key}` names the sample and may include folders. Other groups are fields: `{label:int}` a whole number,
    `{split}` the number of a text among all of them. `*` stands for anything within a name.

    >>> layout_of_pattern("{split}/{key}_{label:int}.npy").roles[0].match("train/a/b_7.npy").groupdict()
    {'split': 'train', 'key': 'a/b', 'label': '7'}

    Raises:
        ConfigError: It has no `{key}`, a group twice, or a suffix that is not read.
    """
    parts: list[str] = []
    names: list[str] = []
    whole: list[str] = []
    end = 0
    for match in _GROUP.finditer(pattern):
        parts.append(re.escape(pattern[end : match.start()]))
        end = match.end()
        name, kind = match[1], match[2]
        if name is None:
            parts.append("[^/]*")
            continue
        names.append(name)
        whole += [name] if kind == "int" else []
        if kind not in (None, "int") or (kind and name == "key"):
            raise ConfigError(f"layout {pattern!r}: {match[0]} is not a group", hint=_FORM)
        value = r"-?\d+" if kind == "int" else ".+?" if name == "key" else "[^/]+?"
        parts.append(f"(?P<{name}>{value})")
    parts.append(re.escape(pattern[end:]))
    if names.count("key") != 1 or len(set(names)) < len(names) or {"folder", "base"} & {*names}:
        raise ConfigError(f"layout {pattern!r} does not name a sample by one {{key}}", hint=_FORM)
    suffix = PurePosixPath(pattern).suffix.lower().removeprefix(".")
    if suffix not in _KINDS:
        raise ConfigError(
            f"layout {pattern!r} ends in .{suffix}, which is not read", hint=f"Expected {', '.join(_KINDS)}"
        )
    return Layout(name=pattern, roles=(Role(name="file", pattern="".join(parts), whole=tuple(whole)),))


_FORM = "Expected a pattern such as '{split}/{key}_{label:int}.npy', with each group once"
