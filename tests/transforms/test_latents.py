"""Latents drawn from stored moments, and conditions that are dropped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker.errors import ConfigError
from stoker.loader import Loader, Pad, RecordBatch, Windows
from stoker.loader.order import example_keys, normal, uniform
from stoker.transforms import DrawLatent, DropCondition
from tests.loader.caches import folded, write_cache

COUNT = 2000
KEYS = example_keys(0, 0, torch.arange(COUNT))
SHAPE = (4, 2, 2)


def batch_of(**fields: Any) -> RecordBatch:
    batch = RecordBatch(index=torch.arange(len(next(iter(fields.values())))), **fields)
    batch.position = (0, COUNT)
    return batch


def moments() -> RecordBatch:
    mean = torch.arange(4.0).view(1, 4, 1, 1).expand(COUNT, *SHAPE)
    return batch_of(mean=mean.clone(), std=torch.full((COUNT, *SHAPE), 0.5), label=torch.arange(COUNT))


def test_latents_have_the_mean_and_deviation_of_their_moments() -> None:
    made = DrawLatent(scale=2.0, shift=1.0)(moments(), KEYS)

    assert [*made] == ["index", "label", "latent"]
    assert torch.allclose(made["latent"].mean((0, 2, 3)), 2 * (torch.arange(4.0) - 1), atol=0.05)
    assert torch.allclose(made["latent"].std((0, 2, 3)), torch.ones(4), rtol=0.05)
    assert made.position == (0, COUNT)


def test_log_variances_and_moments_in_one_field_give_the_same_latents() -> None:
    batch = moments()
    logvar = 2 * batch["std"].log()
    ours = DrawLatent()(batch, KEYS)["latent"]
    by_logvar = DrawLatent(logvar="logvar")(batch_of(mean=batch["mean"], logvar=logvar), KEYS)["latent"]
    whole = batch_of(moments=torch.cat((batch["mean"], logvar), dim=1))
    by_moments = DrawLatent(moments="moments")(whole, KEYS)

    assert torch.allclose(ours, by_logvar, atol=1e-6)
    assert torch.equal(by_logvar, by_moments["latent"])
    assert [*by_moments] == ["index", "latent"]


def test_means_alone_serve_validation_and_channels_have_their_own_scale() -> None:
    how: dict[str, Any] = {"scale": (1.0, 2.0, 3.0, 4.0), "shift": (1.0, 1.0, 0.0, 0.0), "dtype": "bfloat16"}
    made = DrawLatent(random=False, **how)(moments(), KEYS)["latent"]
    assert made.dtype == torch.bfloat16
    assert made[7, :, 1, 1].tolist() == [-1.0, 0.0, 6.0, 12.0]


def test_extreme_log_variances_stay_finite() -> None:
    batch = batch_of(moments=torch.cat((torch.zeros(COUNT, 1, 2), torch.full((COUNT, 1, 2), 1e4)), dim=1))
    assert DrawLatent(moments="moments", axis=-2)(batch, KEYS)["latent"].isfinite().all()


def test_latents_of_many_shapes_are_drawn_one_by_one() -> None:
    sizes = [(4, n, 3) for n in (1, 2, 5)]
    batch = batch_of(mean=[torch.zeros(s) for s in sizes], std=[torch.ones(s) for s in sizes])
    made = DrawLatent()(batch, KEYS[:3])["latent"]
    assert [tuple(one.shape) for one in made] == sizes
    alone = batch_of(mean=[torch.zeros(sizes[2])], std=[torch.ones(sizes[2])])
    assert torch.equal(DrawLatent()(alone, KEYS[2:3])["latent"][0], made[2])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_latents_are_those_of_the_distribution_of_diffusers(dtype: str) -> None:
    vae = pytest.importorskip("diffusers.models.autoencoders.vae")
    moments = torch.randn(6, 8, 3, 5, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    moments[0, 4:], moments[1, 4:] = 60, -60  # beyond what it clamps to

    found = DrawLatent(moments="moments", scale=0.36, shift=0.11)(batch_of(moments=moments), KEYS[:6])

    wanted = vae.DiagonalGaussianDistribution(moments.float())
    noise = normal(KEYS[:6], 60).view(6, 4, 3, 5)
    latents = (wanted.mean + wanted.std * noise - 0.11) * 0.36
    assert found["latent"].dtype == moments.dtype
    assert torch.allclose(found["latent"], latents.to(moments.dtype), rtol=1e-5)


def test_means_that_are_integers_give_latents_with_fractions() -> None:
    batch = batch_of(mean=torch.zeros(COUNT, 4, dtype=torch.int64), std=torch.ones(COUNT, 4))
    latent = DrawLatent()(batch, KEYS)["latent"]
    assert latent.std() > 0.5
    assert latent.shape == (COUNT, 4)


SIZES = [1 + 3 * number % 7 for number in range(12)]
JOINS: list[dict[str, Any]] = [
    {"batch_size": 4},
    {"batch_size": 4, "ragged": "pad"},
    {"batch_size": 3, "ragged": Pad(to=20, value=7)},
    {"batch_size": 5, "ragged": "pack"},
    {"batch_tokens": 12},
]


def records_of(batch: RecordBatch, name: str) -> list[torch.Tensor]:
    """The records of a field, however they are joined."""
    if isinstance(values := batch[name], list):
        return values
    if name + ".lengths" in batch:
        assert (values[~batch[name + ".mask"]] == values.new_tensor(7 if values.shape[1] == 20 else 0)).all()
        return [own[:length] for own, length in zip(values, batch[name + ".lengths"].tolist(), strict=True)]
    offsets = batch["cu_seqlens"] if name + ".offsets" not in batch else batch[name + ".offsets"]
    return [*values.split(offsets.diff().tolist())]


@pytest.mark.parametrize("how", JOINS)
@pytest.mark.parametrize("draw", [DrawLatent(scale=2.0, shift=1.0), DrawLatent(moments="both", axis=-1)])
def test_an_example_has_the_same_latent_however_records_are_joined(
    tmp_path: Path, how: dict[str, Any], draw: DrawLatent
) -> None:
    fields = {
        "mean": [torch.randn(size, 3) for size in SIZES],
        "std": [torch.rand(size, 3) for size in SIZES],
        "both": [torch.randn(size, 6) for size in SIZES],
    }
    names = ["mean", "std"] if draw.moments is None else ["both"]
    cache = write_cache(tmp_path, {name: fields[name] for name in names})
    (whole,) = Loader(cache, 12, seed=5, transforms=draw)
    wanted = dict(zip(whole["index"].tolist(), whole["latent"], strict=True))

    for batch in Loader(cache, seed=5, shuffle=True, transforms=draw, **how):
        assert not {name for name in batch if name.startswith(("mean", "std", "both"))}
        for index, latent in zip(batch["index"].tolist(), records_of(batch, "latent"), strict=True):
            assert torch.equal(latent, wanted[index])


@pytest.mark.parametrize("draw", [DrawLatent(scale=2.0), DrawLatent(moments="both", scale=(1.0, 2.0))])
def test_padding_to_the_largest_image_changes_no_latent(tmp_path: Path, draw: DrawLatent) -> None:
    channels = 2 if draw.moments is None else 4
    images = [torch.randn(channels, 1 + n % 3, 2 + n % 2) for n in range(8)]
    names = ["mean", "std"] if draw.moments is None else ["both"]
    fields = {key: value for name in names for key, value in folded(name, images, 3).items()}
    cache = write_cache(tmp_path, fields, axes=dict.fromkeys(names, (str(channels), "*", "*")))
    (whole,) = Loader(cache, 8, transforms=draw)

    for batch in Loader(cache, 3, ragged="pad", shuffle=True, transforms=draw):
        assert {"latent", "latent.mask", "latent.shape", "index"} == batch.keys()
        for index, latent, mask, shape in zip(
            batch["index"].tolist(), *(batch["latent" + end] for end in ("", ".mask", ".shape")), strict=True
        ):
            wanted = whole["latent"][index]
            assert shape.tolist() == [*wanted.shape]
            assert torch.equal(latent[mask].view(shape.tolist()), wanted)
            assert not latent[~mask].any()
    packed = Loader(cache, 3, ragged="pack", transforms=draw)
    if draw.moments is None:
        flat = [latent.flatten() for latent in whole["latent"][:3]]
        assert torch.equal(next(iter(packed))["latent"], torch.cat(flat))
    else:
        with pytest.raises(ConfigError, match=r"'both' are packed .*ragged='pad'"):
            list(packed)


def test_each_epoch_draws_another_latent_and_ranks_and_resuming_change_nothing(tmp_path: Path) -> None:
    fields = {"moments": torch.randn(24, 8, 2, 2).half()}
    cache = write_cache(tmp_path, fields, shards=(7, 9))

    def latents(**settings: Any) -> dict[int, torch.Tensor]:
        loader = Loader(cache, seed=3, shuffle=True, transforms=DrawLatent(moments="moments"), **settings)
        loader.set_epoch(settings.get("rank", 0) * 0 + 1)
        return {
            n: v for batch in loader for n, v in zip(batch["index"].tolist(), batch["latent"], strict=True)
        }

    alone = latents(batch_size=8)
    ranks = [
        latents(batch_size=4, rank=rank, world_size=2, tier=tier)
        for rank, tier in enumerate(("disk", "host"))
    ]
    for rank in ranks:
        for number, latent in rank.items():
            assert latent.dtype == torch.float16
            assert torch.equal(latent, alone[number])
    loader = Loader(cache, 24, seed=3, transforms=DrawLatent(moments="moments"))
    (first,), (second,) = list(loader), list(loader)
    assert (first["latent"] != second["latent"]).float().mean() > 0.9


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"std": "std", "logvar": "l"}, "std and logvar"),
        ({"scale": float("inf")}, "Expected a finite number"),
        ({"scale": "x"}, "scale is 'x'.*number"),
        ({"scale": []}, "scale is"),
        ({"shift": [1.0, "2"]}, "shift is .*'2'.*number"),
        ({"random": "no"}, "random is 'no'.*True or False"),
        ({"mean": 1}, "the name of a field"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"axis": 1}, "Count from the last"),
        ({"axis": "1"}, "axis is '1'"),
    ],
)
def test_contradicting_settings_are_refused(how: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DrawLatent(**how)


def test_what_a_batch_lacks_is_named(tmp_path: Path) -> None:
    batch = moments()
    with pytest.raises(ConfigError, match=r"takes the field 'logvar'.*'mean', 'std', 'label'"):
        DrawLatent(logvar="logvar")(batch, KEYS)
    with pytest.raises(ConfigError, match="not means and log-variances along axis -3"):
        DrawLatent(moments="x")(batch_of(x=torch.zeros(COUNT, 3, 2, 2)), KEYS)
    with pytest.raises(ConfigError, match="2 channels"):
        DrawLatent(scale=(1.0, 2.0))(batch, KEYS)
    with pytest.raises(ConfigError, match="deviations"):
        DrawLatent()(batch_of(mean=torch.zeros(COUNT, 2), std=torch.zeros(COUNT, 3)), KEYS)
    cache = write_cache(tmp_path, {"latent": torch.randn(4, 9, 2)}, timed=("latent",))
    with pytest.raises(ConfigError, match=r"entire records.*Leave windows= out"):
        list(Loader(cache, windows=Windows(), transforms=DrawLatent()))


DROPPED = uniform(KEYS, 1)[:, 0] < 0.2


def test_conditions_of_an_example_are_dropped_together_with_the_given_probability() -> None:
    batch = batch_of(text=torch.rand(COUNT, 3, 2) + 1, pooled=torch.rand(COUNT, 5).half() + 1, label=KEYS)
    null = {"text": torch.full((3, 2), -1.0), "pooled": torch.full((5,), -2.0), "unused": 3}
    made = DropCondition(("text", "pooled"), p=0.2, null=null)(batch, KEYS)

    assert abs(int(DROPPED.sum()) - 400) < 100
    assert torch.equal(made["text"][DROPPED], null["text"].expand(int(DROPPED.sum()), 3, 2))
    assert torch.equal(made["pooled"][DROPPED], torch.full((int(DROPPED.sum()), 5), -2.0).half())
    for name in ("text", "pooled"):
        assert torch.equal(made[name][~DROPPED], batch[name][~DROPPED])
    assert made["label"] is batch["label"]
    assert not (batch["text"] < 0).any(), "the batch that was given is changed"


def test_a_number_stands_for_no_class_and_nothing_is_left_of_nan() -> None:
    batch = batch_of(label=torch.arange(COUNT), text=torch.full((COUNT, 2), float("nan")))
    made = DropCondition(["label", "text"], p=1.0, null={"label": 1000, "text": 0})(batch, KEYS)
    assert (made["label"] == 1000).all()
    assert (made["text"] == 0).all()
    assert made["label"].dtype == torch.int64
    kept = DropCondition("label", p=0.0, null=7)(batch, KEYS)
    assert torch.equal(kept["label"], batch["label"])


@pytest.mark.parametrize("null_length", [1, 9])
def test_captions_of_varying_length_take_the_length_of_the_null(tmp_path: Path, null_length: int) -> None:
    lengths = [1 + number % 5 for number in range(20)]
    captions = [torch.randn(length, 2) for length in lengths]
    cache = write_cache(tmp_path, {"text": captions})
    null = torch.full((null_length, 2), 7.0)
    found: dict[str, list[torch.Tensor]] = {}
    for ragged in ("list", "pad", "pack"):
        drop = DropCondition("text", p=0.4, null=null)
        (batch,) = Loader(cache, 20, seed=1, ragged=ragged, transforms=drop)
        if ragged == "pad":
            assert batch["text"].shape[1] == batch["text.mask"].shape[1] == max(5, null_length)
            assert torch.equal(batch["text.mask"].sum(1), batch["text.lengths"])
            assert not batch["text"][~batch["text.mask"]].any()
            found[ragged] = [
                t[:n] for t, n in zip(batch["text"], batch["text.lengths"].tolist(), strict=True)
            ]
        elif ragged == "pack":
            found[ragged] = [*batch["text"].split(batch["text.offsets"].diff().tolist())]
        else:
            found[ragged] = batch["text"]
    dropped = [torch.equal(own, null) for own in found["list"]]
    assert 2 < sum(dropped) < 15
    for own, theirs, packed, caption, gone in zip(*found.values(), captions, dropped, strict=True):
        assert torch.equal(own, null if gone else caption)
        assert torch.equal(own, theirs)
        assert torch.equal(own, packed)


def test_zeros_stand_for_a_caption_of_the_same_length() -> None:
    batch = batch_of(text=[torch.ones(3, 2), torch.ones(1, 2)])
    made = DropCondition("text", p=1.0)(batch, KEYS[:2])["text"]
    assert [one.tolist() for one in made] == [[[0, 0]] * 3, [[0, 0]]]


def test_a_record_of_a_cache_is_a_null(tmp_path: Path) -> None:
    cache = write_cache(tmp_path, {"text": torch.randn(5, 3), "mask": torch.ones(5, 3, dtype=torch.bool)})
    drop = DropCondition(("text", "mask"), p=1.0, null=cache[0])
    (batch,) = Loader(cache, 5, transforms=drop)
    assert torch.equal(batch["text"], cache[0]["text"].expand(5, 3))


def test_a_null_that_does_not_fit_is_refused() -> None:
    batch = batch_of(text=torch.ones(4, 3), tokens=[torch.ones(2, 3)] * 4)
    with pytest.raises(ConfigError, match=r"the null of 'text' has the shape \(2,\), examples have \(3\)"):
        DropCondition("text", p=1.0, null=torch.ones(2))(batch, KEYS[:4])
    with pytest.raises(ConfigError, match=r"the null of 'tokens' .*\(any, 3\)"):
        DropCondition("tokens", p=1.0, null=torch.ones(2, 4))(batch, KEYS[:4])
    with pytest.raises(ConfigError, match="the null has no 'tokens', it has text"):
        DropCondition(("text", "tokens"), p=1.0, null={"text": 0})
    with pytest.raises(ConfigError, match="'caption'"):
        DropCondition("caption", p=1.0)(batch, KEYS[:4])


@pytest.mark.parametrize("p", [1.5, -0.1, "0.1", None, True, [0.5], float("nan")])
def test_what_is_no_probability_is_refused(p: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{re.escape(repr(p))}.*0 to 1"):
        DropCondition("text", p=p)


NUMBERS: dict[str, torch.Tensor] = {
    "label": torch.arange(4),
    "byte": torch.arange(4).to(torch.uint8),
    "mask": torch.ones(4, dtype=torch.bool),
    "half": torch.ones(4).half(),
}


@pytest.mark.parametrize(
    ("name", "null"),
    [
        ("label", 0.5),
        ("label", float("nan")),
        ("label", 2**63),
        ("label", torch.tensor(0.5)),
        ("byte", -1),
        ("byte", 256),
        ("byte", torch.tensor(256)),
        ("mask", 2),
        ("mask", torch.tensor(2)),
        ("half", 1e6),
        ("half", torch.tensor(1e6)),
    ],
)
def test_a_null_that_the_dtype_cannot_hold_is_refused(name: str, null: Any) -> None:
    batch = batch_of(**NUMBERS)
    for given in (null, {name: null}):
        with pytest.raises(ConfigError, match=f"'{name}' of {NUMBERS[name].dtype} cannot hold the null"):
            DropCondition(name, p=1.0, null=given)(batch, KEYS[:4])


@pytest.mark.parametrize(
    ("name", "null"), [("label", 1000), ("label", 0), ("byte", 255), ("mask", False), ("half", 0.5)]
)
def test_a_null_that_the_dtype_holds_is_taken(name: str, null: Any) -> None:
    made = DropCondition(name, p=1.0, null=null)(batch_of(**NUMBERS), KEYS[:4])
    assert made[name].tolist() == [null] * 4


@pytest.mark.parametrize("name", ["label", "byte", "mask"])
def test_integers_and_bools_need_a_null_that_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}'.*null=\{{'{name}': ") as refused:
        DropCondition(name, p=0.5)(batch_of(**NUMBERS), KEYS[:4])
    known = eval(str(refused.value).split("as null=")[1].rstrip("."))  # the hint, followed literally
    DropCondition(name, p=0.5, null=known)(batch_of(**NUMBERS), KEYS[:4])


@pytest.mark.parametrize("null", ["0", [1], {"text": "0"}, {"text": [0.0]}])
def test_a_null_is_a_number_or_a_tensor(null: Any) -> None:
    with pytest.raises(ConfigError, match="null"):
        DropCondition("text", p=0.5, null=null)


def test_the_record_of_an_empty_caption_is_a_null_of_joined_caches(tmp_path: Path) -> None:
    text = {"hidden": torch.randn(5, 2, 3), "pooled": torch.randn(5, 3)}
    clip = write_cache(tmp_path, text, name="clip")
    image = write_cache(tmp_path, {"latent": torch.randn(5, 2)}, name="image")
    joined, record = stoker.zip(image=image, clip=clip, on="index"), clip[0]
    fields = ("clip.hidden", "clip.pooled")

    with pytest.raises(ConfigError, match=r"no 'clip\.hidden', it has hidden") as refused:
        DropCondition(fields, p=1.0, null=record)
    null = eval(str(refused.value).split("give null=")[1].rstrip("."), {"record": record})

    (batch,) = Loader(joined, 5, transforms=DropCondition(fields, p=1.0, null=null))
    assert torch.equal(batch["clip.hidden"], record["hidden"].expand(5, 2, 3))
    assert torch.equal(batch["clip.pooled"], record["pooled"].expand(5, 3))


def test_tokens_of_a_dropped_record_are_replaced_where_records_are_packed_to_a_budget(tmp_path: Path) -> None:
    fields = {"ids": [torch.full((size,), n + 1) for n, size in enumerate(SIZES)], "label": torch.arange(12)}
    cache = write_cache(tmp_path, fields)
    drop = DropCondition(("ids", "label"), p=0.5, null={"ids": 0, "label": 99})
    (whole,) = Loader(cache, 12, seed=2, transforms=drop)
    gone = {n for n, label in enumerate(whole["label"].tolist()) if label == 99}
    assert 2 < len(gone) < 10

    for tokens in (9, 100):
        for batch in Loader(cache, batch_tokens=tokens, seed=2, shuffle=True, transforms=drop):
            for index, label, ids in zip(
                batch["index"].tolist(), batch["label"].tolist(), records_of(batch, "ids"), strict=True
            ):
                assert label == (99 if index in gone else index)
                assert ids.tolist() == [0 if index in gone else index + 1] * SIZES[index]


def test_a_caption_of_another_length_cannot_take_the_place_of_tokens(tmp_path: Path) -> None:
    cache = write_cache(tmp_path, {"text": [torch.randn(size, 2) for size in SIZES]})
    for null in (torch.ones(3, 2), torch.ones(2)):
        drop = DropCondition("text", p=0.5, null=null)
        with pytest.raises(ConfigError, match=r"batch_tokens packed keep their lengths.*ragged='pack'"):
            list(Loader(cache, batch_tokens=9, transforms=drop))


def test_rows_that_may_be_tokens_or_records_are_refused(tmp_path: Path) -> None:
    fields = {"ids": [torch.ones(size) for size in (2, 0, 1)], "label": torch.arange(3)}
    cache = write_cache(tmp_path, fields)
    for transform in (DropCondition("label", p=0.5, null=9), DrawLatent(mean="label", std="ids")):
        with pytest.raises(ConfigError, match=r"'label' has 3 rows.*indices="):
            list(Loader(cache, batch_tokens=4, transforms=transform))
    ones = write_cache(tmp_path / "ones", {**fields, "ids": [torch.ones(1)] * 3})
    (batch,) = Loader(ones, batch_tokens=3, transforms=DropCondition(("ids", "label"), p=1.0, null=5))
    assert batch["ids"].tolist() == batch["label"].tolist() == [5, 5, 5]


def test_a_number_in_a_tensor_is_a_null_of_any_length() -> None:
    batch = batch_of(text=[torch.ones(3), torch.ones(1)])
    made = DropCondition("text", p=1.0, null=torch.tensor(4.0))(batch, KEYS[:2])["text"]
    assert [one.tolist() for one in made] == [[4, 4, 4], [4]]
