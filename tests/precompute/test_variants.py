"""Variants of each sample at encode time: what they follow from, and which fields have them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import stoker
from stoker.encoders.wrappers import VariantEncoder, content_keys
from stoker.errors import ConfigError, EncoderError
from stoker.transforms import Flip, Noise, uniform
from tests.precompute.test_engine import assert_same, records

COUNT = 24


def pictures(count: int = COUNT, *, first: int = 0) -> list[dict[str, Tensor]]:
    """Sample `i` is the same whatever the others are."""
    found: list[dict[str, Tensor]] = []
    for number in range(first, first + count):
        chance = torch.Generator().manual_seed(number)
        image = torch.rand((3, 6, 6), generator=chance)
        found.append({"image": image, "label": torch.tensor(number % 5)})
    return found


def network() -> stoker.ModuleEncoder:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = torch.nn.Conv2d(3, 4, 3)
    return stoker.ModuleEncoder(module.eval().requires_grad_(False), field="image")


def noisy(batch: Any, keys: Tensor) -> Any:
    shift = uniform(keys, 1).view(-1, 1, 1, 1)
    return {**batch, "image": batch["image"] + shift}


def in_place(batch: Any, keys: Tensor) -> Any:
    batch["image"] += uniform(keys, 1).view(-1, 1, 1, 1)
    return batch


def fill(folder: Path, data: Any = None, encoder: Any = "network", **settings: Any) -> Any:
    given: dict[str, Any] = {"variants": 3, "augment": noisy, "workers": 0, "name": "v", **settings}
    encoder = network() if encoder == "network" else encoder
    return stoker.precompute(pictures() if data is None else data, encoder, folder, progress=None, **given)


def test_records_hold_the_encoder_of_each_augmented_sample(tmp_path: Path) -> None:
    cache = fill(tmp_path)
    encoder, data = network(), pictures()
    keys = VariantEncoder(None, 3, noisy)

    assert cache.variants == {"latent": 3}
    assert cache.schema["latent"].shape == (3, 4, 4, 4)
    assert cache.schema["label"].shape == ()
    for number, record in records(cache).items():
        sample = {name: value[None] for name, value in data[number].items()}
        images = keys.encode(sample)["image"][0]
        assert len({image.sum().item() for image in images}) == 3
        expected = torch.stack([encoder.encode({"image": image[None]})["latent"][0] for image in images])
        torch.testing.assert_close(record["latent"], expected)
        assert record["label"].item() == number % 5


def test_variants_of_a_sample_differ_and_none_depends_on_how_many_there_are(tmp_path: Path) -> None:
    two, four = (records(fill(tmp_path / str(n), variants=n)) for n in (2, 4))
    for number, record in four.items():
        assert torch.equal(record["latent"][:2], two[number]["latent"])
        assert len({variant.sum().item() for variant in record["latent"]}) == 4
    other = records(fill(tmp_path / "seed", variants=2, variant_seed=1))
    assert all(not torch.equal(other[n]["latent"][0], two[n]["latent"][0]) for n in two)


@settings(max_examples=12, deadline=None)
@given(
    order=st.permutations(range(9)),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    count=st.integers(1, 9),
)
def test_a_variant_follows_from_the_content_of_its_sample_alone(
    order: list[int], sizes: tuple[int, int], count: int
) -> None:
    """Not from its place, its neighbors, or how many are encoded in one call."""
    data = pictures(9)
    with tempfile.TemporaryDirectory() as folder:
        first = records(fill(Path(folder, "a"), data, None, encode_batch=sizes[0]))
        moved = [data[number] for number in order[:count]]
        second = records(fill(Path(folder, "b"), moved, None, encode_batch=sizes[1]))
    for place, number in enumerate(order[:count]):
        assert torch.equal(second[place]["image"], first[number]["image"])


@pytest.mark.parametrize("workers", [None, 1, 2])
def test_workers_change_no_bit_of_a_variant(tmp_path: Path, workers: int | None) -> None:
    whole = fill(tmp_path / "one", encode_batch=2, workers=0)
    other = fill(tmp_path / "many", encode_batch=2, workers=workers)
    assert whole.fingerprint == other.fingerprint
    assert_same(records(whole), records(other))


def test_a_resumed_run_gives_the_same_variants(tmp_path: Path) -> None:
    whole = fill(tmp_path / "one", encode_batch=4)
    broken = fill(tmp_path / "two", encode_batch=4)
    path = broken.path
    for shard in broken.index.shards:
        (path / shard.file).unlink()
    again = fill(tmp_path / "two", encode_batch=4)
    assert again.path == path
    assert_same(records(whole), records(again))


class Counted:
    """Counts the batches that it augments."""

    calls = 0

    def __call__(self, batch: Any, keys: Tensor) -> Any:
        type(self).calls += 1
        return noisy(batch, keys)


def test_an_edited_and_a_new_sample_are_encoded_and_no_other(tmp_path: Path) -> None:
    data = pictures(20)
    before = records(fill(tmp_path, data, augment=Counted(), encode_batch=1))
    data[5] = {"image": data[5]["image"] * 0.5, "label": data[5]["label"]}
    data.insert(3, pictures(1, first=100)[0])
    Counted.calls = 0
    after = records(fill(tmp_path, data, augment=Counted(), encode_batch=1))

    assert 0 < Counted.calls <= 3 * (2 + 3)  # of two samples, and checks of the encoder
    for number, record in before.items():
        place = number + (number >= 3)
        assert torch.equal(after[place]["latent"], record["latent"]) == (number != 5)


def test_an_augmentation_in_place_harms_no_other_variant(tmp_path: Path) -> None:
    pure, inside = records(fill(tmp_path / "a")), records(fill(tmp_path / "b", augment=in_place))
    assert_same(pure, inside)


def test_each_of_several_augmentations_draws_for_itself(tmp_path: Path) -> None:
    def two(batch: Any, keys: Tensor) -> Any:
        return {**batch, "label": uniform(keys, 1)[:, 0]}

    cache = fill(tmp_path, encoder=None, augment=[noisy, two], variants=2)
    assert cache.variants == {"image": 2, "label": 2}
    drawn = torch.stack([record["label"] for record in records(cache).values()])
    images = torch.stack([record["image"] for record in records(cache).values()])
    originals = torch.stack([sample["image"] for sample in pictures()])
    shifts = (images - originals[:, None]).mean((2, 3, 4))
    assert ((shifts - drawn).abs() < 1e-5).sum() < 3, "both drew the same words"


def test_transforms_of_stoker_are_described_by_their_settings(tmp_path: Path) -> None:
    augment = [Flip(axis=-1, fields=("image",)), Noise(std=0.1, fields=("image",))]
    one = fill(tmp_path, augment=augment)
    again = fill(tmp_path, augment=[Flip(axis=-1, fields=["image"]), Noise(std=0.1, fields=["image"])])
    others = [
        fill(tmp_path, augment=[Flip(axis=-2, fields=("image",)), augment[1]]),
        fill(tmp_path, augment=augment[::-1]),
        fill(tmp_path, augment=augment, variants=2),
        fill(tmp_path, augment=augment, variant_seed=5),
        fill(tmp_path, augment=noisy),
    ]
    assert one.fingerprint == again.fingerprint
    assert len({one.fingerprint, *(other.fingerprint for other in others)}) == 6


def test_an_augmentation_with_weights_is_told_by_them(tmp_path: Path) -> None:
    class Blur(torch.nn.Module):
        def __init__(self, weight: float) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(weight), requires_grad=False)

        def forward(self, batch: Any, keys: Tensor) -> Any:
            return {**batch, "image": batch["image"] * self.weight}

    caches = [fill(tmp_path, augment=Blur(weight)) for weight in (0.5, 0.25, 0.5)]
    assert caches[0].fingerprint == caches[2].fingerprint != caches[1].fingerprint


def test_kept_and_selected_fields_stay_what_they_are(tmp_path: Path) -> None:
    cache = fill(tmp_path, keep="image", fields="latent")
    assert cache.variants == {"latent": 3}
    assert {name: field.shape for name, field in cache.schema.items()} == {
        "image": (3, 6, 6), "latent": (3, 4, 4, 4)
    }  # fmt: skip
    assert torch.equal(cache[4]["image"], pictures()[4]["image"])
    assert stoker.precompute(pictures(), network(), tmp_path, name="w", progress=None).variants == {}


def test_cached_hands_both_on(tmp_path: Path) -> None:
    given_: dict[str, Any] = {"batch_size": 4, "device": "cpu", "variants": 2, "augment": noisy}
    loader = stoker.cached(pictures(), network(), cache_dir=tmp_path, name="c", **given_)
    assert next(iter(loader))["label"].shape == (4,)
    assert stoker.open_cache(tmp_path / "c").variants == {"latent": 2}


def test_one_of_several_caches_may_have_variants(tmp_path: Path) -> None:
    caches = stoker.precompute(
        pictures(), {"latents": network(), "labels": ["label"]}, tmp_path, name="c",
        variants={"latents": 3}, augment={"latents": noisy}, progress=None,
    )  # fmt: skip
    assert {key: cache.variants for key, cache in caches.items()} == {"latents": {"latent": 3}, "labels": {}}
    assert_same(records(caches["latents"]), records(fill(tmp_path / "alone", name="c_latents")))


# ----------------------------------------------------------------------------------------------------------
# What is refused.


def test_random_numbers_that_do_not_follow_from_the_keys_are_refused(tmp_path: Path) -> None:
    def drawn(batch: Any, keys: Tensor) -> Any:
        return {**batch, "image": batch["image"] + torch.rand(())}

    with pytest.raises(EncoderError, match="other values when it is called again"):
        fill(tmp_path, augment=drawn)


def test_a_field_that_is_changed_for_some_samples_only_is_refused(tmp_path: Path) -> None:
    def sometimes(batch: Any, keys: Tensor) -> Any:
        if batch["image"].any():
            batch = {**batch, "label": batch["label"] + 1}
        return noisy(batch, keys)

    with pytest.raises(EncoderError, match=r"'label' was handed on untouched .* and is changed now"):
        fill(tmp_path, augment=sometimes)


def test_variants_without_augmentation_and_the_reverse_are_refused(tmp_path: Path) -> None:
    for settings_ in ({"augment": ()}, {"variants": None}, {"variants": 0}):
        with pytest.raises(ConfigError, match="variants"):
            fill(tmp_path, **settings_)
    made: dict[str, Any] = {}
    exec("def unseen(batch, keys): return batch", made)
    with pytest.raises(EncoderError, match="augmentation cannot be described"):
        fill(tmp_path, augment=made["unseen"])


def test_an_augmentation_that_fails_or_returns_no_batch_is_named(tmp_path: Path) -> None:
    def wrong(batch: Any, keys: Tensor) -> Any:
        return batch["picture"]

    with pytest.raises(EncoderError, match=r"failed on one sample of zeros .*KeyError"):
        fill(tmp_path, augment=wrong)
    with pytest.raises(EncoderError, match="returned a Tensor"):
        fill(tmp_path, augment=lambda batch, keys: batch["image"])


class FullBatches(stoker.ModuleEncoder):
    """Takes nothing but four samples."""

    def encode(self, batch: dict[str, Tensor], /) -> dict[str, Tensor]:
        if len(batch["image"]) != 4:
            raise ValueError("four, please")
        return super().encode(batch)

    def schema(self, sample_schema: Any) -> Any:
        return network().schema(sample_schema)


def test_an_encoder_that_cannot_be_tried_on_one_sample_is_refused(tmp_path: Path) -> None:
    encoder = FullBatches(torch.nn.Conv2d(3, 4, 3).requires_grad_(False), field="image")
    with pytest.raises(EncoderError, match=r"failed on one augmented sample of zeros.*four, please"):
        fill(tmp_path, encoder=encoder)


# ----------------------------------------------------------------------------------------------------------
# Keys.


def test_a_key_differs_by_each_byte_name_dtype_and_shape() -> None:
    """Also beyond the words that are digested at a time."""
    base = torch.zeros(2**23 + 13, dtype=torch.uint8)
    batches: list[dict[str, Tensor]] = [{"x": base[None]}]
    for place in (0, 7, 8, 2**23, len(base) - 1):
        changed = base.clone()
        changed[place] = 1
        batches.append({"x": changed[None]})
    batches += [{"y": base[None]}, {"x": base[None].view(torch.int8)}, {"x": base[None, :, None]}]
    batches += [{"x": base[None], "y": torch.zeros(1)}, {"x": base[None], "y": torch.zeros((1, 0))}]
    assert len({content_keys(batch).item() for batch in batches}) == len(batches)


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int16", "int64", "float16", "bfloat16", "float32", "float64"]
)
def test_a_key_does_not_depend_on_layout_or_neighbors(dtype: str) -> None:
    values = (torch.arange(5 * 7 * 3).view(5, 7, 3) % 5).to(getattr(torch, dtype))
    whole = content_keys({"x": values, "n": torch.arange(5)})
    strided = content_keys({"n": torch.arange(5), "x": values.transpose(1, 2).contiguous().transpose(1, 2)})
    alone = [content_keys({"x": values[i : i + 1], "n": torch.arange(5)[i : i + 1]}).item() for i in range(5)]
    assert whole.tolist() == strided.tolist() == alone
    assert len({*alone}) == 5
    odd = torch.arange(17, dtype=torch.uint8)[1:].view(1, 16)  # as the second half of a batch may begin
    assert torch.equal(content_keys({"x": odd}), content_keys({"x": odd.clone()}))
