"""What tripped people who tried Stoker for the first time: each line of that list is a test."""

from __future__ import annotations

import pickle
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, Dataset

import stoker
from stoker.config import Config
from stoker.errors import ConfigError, EncoderError, MissingRecordError, RecordError, SourceError
from stoker.schema import TIER_ALIASES

COUNT = 12


class Pair(NamedTuple):
    image: Tensor
    label: int


@dataclass
class Sample:
    image: Tensor
    label: int

    def __post_init__(self) -> None:
        assert self.image.shape == (3, 4), "a sample, not a batch"


class Items(Dataset[Any]):
    """`COUNT` items of one kind, all made of the same images and labels."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.images = torch.arange(COUNT * 12, dtype=torch.float32).view(COUNT, 3, 4)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        image, label = self.images[index], index % 3
        return {
            "tuple": (image, label),
            "list": [image, label],
            "dict": {"image": image, "label": label},
            "nested": {"in": {"image": image}, "out": (label, image[0])},
            "named tuple": Pair(image, label),
            "dataclass": Sample(image, label) if self.kind == "dataclass" else None,
            "tensor": image,
        }[self.kind]


def cached(folder: Path, kind: str = "tuple", encoder: Any = None, **settings: Any) -> stoker.Loader:
    given = {"batch_size": 5, "cache_dir": folder, "precompute": {"workers": 0}, **settings}
    return stoker.cached(Items(kind), encoder, **given)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> stoker.Cache:
    folder = tmp_path_factory.mktemp("cache")
    return stoker.precompute(Items("dict"), None, folder, name="items", workers=0)


# Structure of items, order, and the loop of a plain script.


@pytest.mark.parametrize("kind", ["tuple", "dict", "nested", "named tuple", "tensor"])
def test_batches_have_the_structure_of_items_and_the_values_of_a_dataloader(
    kind: str, tmp_path: Path
) -> None:
    ours = list(cached(tmp_path, kind))
    theirs = list(DataLoader(Items(kind), batch_size=5))

    assert len(ours) == len(theirs) == 3
    for one, other in zip(ours, theirs, strict=True):
        _assert_same(one, other)


def _assert_same(one: Any, other: Any) -> None:
    if isinstance(other, Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(other, dict):
        assert list(one) == list(other)
        for key in other:
            _assert_same(one[key], other[key])
    else:
        assert len(one) == len(other)
        assert getattr(one, "_fields", None) == getattr(other, "_fields", None)
        for a, b in zip(one, other, strict=True):
            _assert_same(a, b)


def test_batches_of_dataclasses_are_not_checked_as_samples(tmp_path: Path) -> None:
    first = next(iter(cached(tmp_path, "dataclass")))

    assert type(first) is Sample
    assert torch.equal(first.image, Items("tuple").images[:5])
    assert first.label.tolist() == [0, 1, 2, 0, 1]


def test_lists_are_unpacked_as_tuples(tmp_path: Path) -> None:
    images, labels = next(iter(cached(tmp_path, "list")))

    assert images.shape == (5, 3, 4)
    assert labels.dtype == torch.int64


def test_shuffle_is_off_unless_asked_for_as_in_a_dataloader(tmp_path: Path) -> None:
    plain, shuffled = cached(tmp_path), cached(tmp_path, shuffle=True)

    assert [i for batch in plain for i in batch.index.tolist()] == [*range(COUNT)]
    orders = [[i for batch in shuffled for i in batch.index.tolist()] for _ in range(2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == [*range(COUNT)]


class Script:
    """Training and evaluation as people write them, for batches that are dicts or pairs."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.kind, self.model = kind, nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def loss(self, batch: Any) -> Tensor:
        image, label = (batch["image"], batch["label"]) if self.kind == "dict" else batch
        return nn.functional.cross_entropy(self.model(image), label)

    def losses(self, training: Any, evaluation: Any) -> list[float]:
        found: list[float] = []
        for _ in range(3):
            for batch in training:
                self.optimizer.zero_grad()
                loss = self.loss(batch)
                loss.backward()
                self.optimizer.step()
                found.append(loss.item())
            with torch.no_grad():
                found += [self.loss(batch).item() for batch in evaluation]
        return found


@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test_a_script_gives_the_same_losses_after_one_line_each_is_changed(kind: str, tmp_path: Path) -> None:
    plain = Script(kind).losses(DataLoader(Items(kind), batch_size=5), DataLoader(Items(kind), batch_size=4))
    changed = Script(kind).losses(cached(tmp_path, kind), cached(tmp_path, kind, batch_size=4))

    assert changed == plain


def test_an_encoder_takes_the_first_of_a_tuple_and_its_place(tmp_path: Path) -> None:
    latents, labels = next(iter(cached(tmp_path, "tuple", nn.Flatten())))

    assert torch.equal(latents, Items("tuple").images[:5].flatten(1))
    assert labels.tolist() == [0, 1, 2, 0, 1]


# What is accepted where.


def test_a_loader_takes_the_path_of_a_cache(cache: stoker.Cache) -> None:
    for path in (cache.path, str(cache.path), str(cache.path.parent)):
        assert torch.equal(next(iter(stoker.Loader(path, 4)))["image"], cache[0:4]["image"])


def test_precompute_takes_a_dataset_and_a_module(tmp_path: Path) -> None:
    made = stoker.precompute(Items("tuple"), nn.Flatten(), tmp_path, name="flat", workers=0)

    assert made[3]["latent"].shape == (12,)
    assert made[3]["1"].item() == 0


def test_text_is_not_taken_for_a_dataset(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'folder/'"):
        stoker.cached("folder/", cache_dir=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'folder/'"):
        stoker.precompute("folder/", None, tmp_path, name="x")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, "float16", np.float16, np.dtype("float16")])
def test_dtypes_are_taken_as_torch_and_numpy_name_them(dtype: Any, tmp_path: Path) -> None:
    loader = cached(
        tmp_path, "dict", precompute={"workers": 0, "dtype": {"image": dtype}}, dtype=torch.float32
    )

    assert loader.dataset.schema["image"].dtype == "float16"
    assert next(iter(loader))["image"].dtype == torch.float32


def test_memory_is_also_called_ram_and_auto_is_a_device(cache: stoker.Cache) -> None:
    loader = stoker.Loader(cache, 4, tier="ram", device="auto")

    assert loader.plan.tier in ("host", "device")
    assert len(list(loader)) == 3


@pytest.mark.parametrize("tier", ["cuda", "cpu"])
def test_a_device_is_not_a_tier(cache: stoker.Cache, tier: str) -> None:
    with pytest.raises(ConfigError, match=tier):
        stoker.Loader(cache, 4, tier=tier)


@pytest.mark.parametrize(("other", "tier"), TIER_ALIASES.items())
def test_settings_take_the_same_names_of_tiers_as_loaders(cache: stoker.Cache, other: str, tier: str) -> None:
    assert Config.model_validate({"training": {"tier": other}}).training.tier == tier
    assert stoker.Loader(cache, 4, tier=other).plan.tier in ("host", tier)


# Transforms.


def test_a_transform_takes_the_batch_as_the_loop_gets_it(tmp_path: Path) -> None:
    loader = cached(tmp_path, transforms=[lambda batch: (batch[0] * 2, batch[1])])

    images, _ = next(iter(loader))

    assert torch.equal(images, Items("tuple").images[:5] * 2)


def test_a_transform_with_a_second_argument_gets_keys(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    def note(batch: Any, keys: Tensor) -> Any:
        seen.append(keys)
        return batch

    list(cached(tmp_path, transforms=note))

    assert [len(keys) for keys in seen] == [5, 5, 2]
    assert len({*torch.cat(seen).tolist()}) == COUNT


def test_transforms_of_one_field_go_by_its_name(tmp_path: Path) -> None:
    by_name = cached(tmp_path / "dict", "dict", transforms={"image": nn.Flatten()})
    by_place = cached(tmp_path / "tuple", "tuple", transforms=[{0: nn.Flatten()}])

    assert next(iter(by_name))["image"].shape == (5, 12)
    assert next(iter(by_place))[0].shape == (5, 12)
    with pytest.raises(ConfigError, match=r"'picture'.*'image', 'label'"):
        list(cached(tmp_path / "dict", "dict", transforms={"picture": nn.Flatten()}))


def test_transforms_of_stoker_and_functions_of_the_batch_may_follow_each_other(tmp_path: Path) -> None:
    flip = stoker.transforms.Flip(p=1.0, fields=("0",))
    loader = cached(tmp_path, transforms=[flip, lambda batch: (batch[0] + 1, batch[1]), flip])

    images, _ = next(iter(loader))

    assert torch.equal(images, Items("tuple").images[:5] + 1)


def test_random_functions_of_a_batch_draw_the_same_after_a_resume(tmp_path: Path) -> None:
    def noisy(batch: Any) -> Any:
        return batch[0] + torch.rand(()), batch[1]

    def loader() -> stoker.Loader:
        return cached(tmp_path, shuffle=True, transforms=[noisy])

    whole = [images for images, _ in loader()]
    stopped = loader()
    next(iter(stopped))
    state, resumed = stopped.state_dict(), loader()
    resumed.load_state_dict(state)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first = torch.rand(())
    rest = [images for images, _ in resumed]

    assert all(torch.equal(a, b) for a, b in zip(rest, whole[1:], strict=True))
    assert torch.equal(torch.stack([first, torch.rand(())]), expected), "the loop's own numbers go on"
    assert not torch.equal(whole[0] - whole[0].floor(), whole[1] - whole[1].floor())


def test_a_transform_may_return_anything(cache: stoker.Cache) -> None:
    loader = stoker.Loader(cache, 5, transforms=[lambda batch: (batch.image, batch.label)])

    batches = list(loader)

    assert [len(batch) for batch in batches] == [2] * 3
    assert all(isinstance(batch, tuple) for batch in batches)
    assert torch.cat([batch.index for batch in batches]).tolist() == [*range(COUNT)]
    assert loader.position == (1, 0)


@pytest.mark.parametrize(
    "wrong", [5, "flip", [None], lambda: None, lambda a, b, c: a, lambda image, label: image, nn.ReLU]
)
def test_what_is_no_transform_is_refused_before_anything_is_encoded(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="transforms"):
        cached(tmp_path / "none", transforms=wrong)
    assert not (tmp_path / "none").exists()


def test_ranks_draw_different_random_numbers(cache: stoker.Cache) -> None:
    def drawn(rank: int) -> list[float]:
        loader = stoker.Loader(
            cache, 3, shuffle=True, rank=rank, world_size=2, transforms=[lambda batch: {"x": torch.rand(1)}]
        )
        return [batch["x"].item() for batch in loader]

    assert not {*drawn(0)} & {*drawn(1)}
    assert drawn(1) == drawn(1)


def test_views_of_functions_without_keys_differ(cache: stoker.Cache) -> None:
    views = stoker.transforms.Views(transforms=[{"image": lambda image: image + torch.rand(())}], count=2)
    loader = stoker.Loader(cache, 4, transforms=[views])

    differences = [
        (one - other).flatten()[0].item() for batch in loader for one, other in [batch.image.unbind(1)]
    ]

    assert 0.0 not in differences
    assert len({*differences}) == len(differences)


def test_threads_that_iterate_do_not_disturb_each_others_random_numbers(cache: stoker.Cache) -> None:
    def passes(seed: int) -> list[Any]:
        loader = stoker.Loader(cache, 2, seed=seed, transforms=[lambda batch: {"x": torch.rand(200).sum()}])
        found = []
        for _ in range(10):
            loader.set_epoch(0)
            found.append([batch["x"].item() for batch in loader])
        return found

    with ThreadPoolExecutor(2) as pool:
        by_thread = [*pool.map(passes, (1, 2))]

    assert [len({*map(tuple, found)}) for found in by_thread] == [1, 1]


def test_libraries_that_map_over_nested_tensors_look_into_batches(
    cache: stoker.Cache, tmp_path: Path
) -> None:
    """As torchvision's transforms do."""

    def double(batch: Any) -> Any:
        leaves, spec = tree_flatten(batch)
        return tree_unflatten([leaves[0] * 2, *leaves[1:]], spec)

    pair = next(iter(cached(tmp_path, transforms=double)))
    fields = next(iter(stoker.Loader(cache, 5, transforms=double)))

    assert torch.equal(pair[0], Items("tuple").images[:5] * 2)
    assert torch.equal(fields.image, pair[0])
    assert pair.index.tolist() == fields.index.tolist() == [0, 1, 2, 3, 4]
    assert pair.position == fields.position == (0, 5)


def test_dictionaries_and_fields_may_follow_each_other(cache: stoker.Cache) -> None:
    loader = stoker.Loader(cache, 4, transforms=[lambda batch: {**batch}, {"image": nn.Flatten()}])

    assert next(iter(loader)).image.shape == (4, 12)


def test_padded_batches_keep_their_masks(tmp_path: Path) -> None:
    items = [{"x": torch.ones(1 + n % 3, 2), "label": n} for n in range(8)]
    loader = stoker.cached(items, name="x", cache_dir=tmp_path, workers=0, batch_size=8, ragged="pad")

    assert next(iter(loader))["x.mask"].sum(1).tolist() == [1 + n % 3 for n in range(8)]


def test_a_mixture_of_structured_loaders_with_transforms_is_refused(tmp_path: Path) -> None:
    loaders = [cached(tmp_path / name, name=name, transforms=lambda batch: batch) for name in "ab"]

    with pytest.raises(ConfigError, match=r"loader\.dataset"):
        stoker.Mixture(loaders)


# Caches as sequences.


def test_caches_take_slices_negative_indices_lists_and_fields(cache: stoker.Cache) -> None:
    images = Items("dict").images

    assert torch.equal(cache[-1]["image"], images[-1])
    assert torch.equal(cache[2:9:3]["image"], images[2:9:3])
    assert cache[2:9:3]["index"].tolist() == [2, 5, 8]
    assert torch.equal(cache[[7, -1, 7]]["image"], images[[7, -1, 7]])
    assert torch.equal(cache[torch.tensor([1, 2])]["image"], images[1:3])
    assert torch.equal(cache[np.arange(COUNT) % 2 == 0]["image"], images[::2])
    assert torch.equal(cache["image"][:], images)
    assert torch.equal(cache["image"][4], images[4])
    assert cache["image"].shape == (COUNT, 3, 4)
    assert np.array_equal(np.asarray(cache["label"]), np.arange(COUNT) % 3)
    assert [record["label"].item() for record in cache] == [i % 3 for i in range(COUNT)]
    assert cache[5:5]["image"].shape == (0, 3, 4)


@pytest.mark.parametrize("wrong", [COUNT, -COUNT - 1, [0, COUNT]])
def test_an_index_beyond_the_set_is_named(cache: stoker.Cache, wrong: Any) -> None:
    with pytest.raises(MissingRecordError, match=r"sample (-13|12) does not exist"):
        cache[wrong]


@pytest.mark.parametrize("wrong", ["picture", None, 1.5, [[1]], {"a": 1}])
def test_what_is_no_index_is_refused_with_an_example(cache: stoker.Cache, wrong: Any) -> None:
    with pytest.raises(RecordError, match="image"):
        cache[wrong]


def test_caches_and_loaders_are_pickled_by_path(cache: stoker.Cache, tmp_path: Path) -> None:
    loader = cached(tmp_path, shuffle=True, seed=3)
    batches = [images for images, _ in loader]
    running = cached(tmp_path, shuffle=True, seed=3)
    next(iter(running))

    again = pickle.loads(pickle.dumps(cache))
    resumed = pickle.loads(pickle.dumps(running))

    assert len(pickle.dumps(cache)) < 1000
    assert torch.equal(again[3]["image"], cache[3]["image"])
    assert all(torch.equal(a, b) for a, (b, _) in zip(batches[1:], resumed, strict=True))


def test_with_closes_caches_and_loaders(cache: stoker.Cache) -> None:
    with stoker.open_cache(cache.path) as opened, stoker.Loader(opened, 4) as loader:
        assert len(list(loader)) == 3
        assert len(opened._shards._open) > 0

    assert len(opened._shards._open) == 0
    assert len(list(loader)) == 3, "what is used again opens its files again"


def test_notebooks_show_tables(cache: stoker.Cache) -> None:
    for html in (cache._repr_html_(), stoker.Loader(cache, 4)._repr_html_(), cache.preview()._repr_html_()):
        assert html.count("<td>") > 2
    assert "image" in repr(cache.preview(2))
    assert len(repr(cache.preview(2)).splitlines()) == 4


def test_why_names_what_differs_between_two_caches(cache: stoker.Cache, tmp_path: Path) -> None:
    other = stoker.precompute(Items("dict"), None, tmp_path, name="half", dtype="float16", workers=0)

    assert cache.why(cache) == []
    assert "dtype" in cache.why(other)[0].entry


# Batches.


def test_batches_move_and_have_their_fields_as_attributes(cache: stoker.Cache, tmp_path: Path) -> None:
    batch = next(iter(stoker.Loader(cache, 4)))
    pair = next(iter(cached(tmp_path)))

    assert batch.image is batch["image"]
    assert batch.to("cpu").position == batch.position
    assert batch.to(torch.device("meta")).image.is_meta
    assert pair.to("meta").index.is_meta
    assert pair.to("meta")[0].is_meta
    with pytest.raises(AttributeError, match=r"'picture'.*image, label, index"):
        _ = batch.picture


# Names, and files beside the cache.


def test_every_source_is_reached_from_stoker() -> None:
    import stoker as package

    for name in ("ArraySource", "ParquetSource", "TarSource", "Normalization", "Weights", "subset"):
        assert name in package.__all__
        assert getattr(package, name).__name__ == name


def test_a_grid_encoder_asks_the_source_for_its_sizes() -> None:
    class Fields(Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {"data": torch.full((5, 16, 32, 2), float(index))}

    source = stoker.TorchSource(Fields(), time=("data",))
    encoder = stoker.GridEncoder.for_source(source, tokens=8, dim=16)

    assert (encoder.grid, encoder.channels) == ((16, 32), 2)
    assert encoder.schema(source.schema())["latent"].shape == (5, 8, 16)
    with pytest.raises(EncoderError, match=r"data \(5, 16, 32, 2\)"):
        stoker.GridEncoder.for_source(source, field="velocity")


def test_a_model_of_the_hub_is_looked_for_in_its_cache_and_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(EncoderError, match=r"facebook/dinov2-base.*download=True"):
        stoker.FeatureEncoder("facebook/dinov2-base")


def test_a_new_cache_folder_is_ignored_by_git(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    cached(tmp_path / ".stoker")

    status = subprocess.run(
        ["git", "-C", str(tmp_path), "status", "--porcelain"], check=True, capture_output=True, text=True
    )
    assert status.stdout == ""


def test_a_dataset_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises((ConfigError, SourceError), match="Dataset"):
        stoker.precompute(5, None, tmp_path, name="x")  # type: ignore[arg-type]
