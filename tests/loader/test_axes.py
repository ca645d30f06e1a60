"""Fields of which several axes vary: found in a Dataset, stored folded, handed out in their own shapes."""

from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker.errors import ConfigError, SourceError
from stoker.schema import Field, schema_from_json, schema_to_json
from stoker.sources.torch_dataset import TorchSource
from stoker.testing import check_source
from tests.loader.caches import folded, write_cache

COUNT = 24


class Pictures(torch.utils.data.Dataset[Any]):
    """Latents `(4, H, W)`, videos `(T, H, W, 2)` and a label; `odd` gives the shape of one latent."""

    def __init__(self, odd: dict[int, tuple[int, ...]] | None = None) -> None:
        self.odd = odd or {}

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        made = torch.Generator().manual_seed(number)
        shape = self.odd.get(number, (4, 2 + number % 3, 2 + number % 2))
        video = torch.randint(
            0, 255, (1 + number % 4, 3, 2 + number % 2, 2), generator=made, dtype=torch.uint8
        )
        latent = torch.randn(shape, generator=made).to(torch.bfloat16)
        return {"latent": latent, "video": video, "label": torch.tensor(number)}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> stoker.Cache:
    return stoker.precompute(Pictures(), None, tmp_path_factory.mktemp("axes"), name="pictures", workers=0)


def test_fields_whose_axes_vary_are_found_by_probing() -> None:
    schema = TorchSource(Pictures()).schema()
    assert schema["latent"].axes == ("4", "*", "*")
    assert schema["latent"].shape == (-1,)
    assert schema["video"].axes == ("*", "3", "*")
    assert schema["video"].shape == (-1, 2)
    assert schema["latent.shape"] == Field(shape=(3,), dtype="int64")
    assert schema["label"] == Field(shape=(), dtype="int64")
    assert schema_from_json(schema_to_json(schema)) == schema
    check_source(TorchSource(Pictures()))


def test_a_record_comes_back_with_its_own_shape(cache: stoker.Cache) -> None:
    for number in range(COUNT):
        record, item = cache[number], Pictures()[number]
        assert record.keys() == item.keys()
        assert all(torch.equal(record[name], item[name]) for name in item)


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_lists_and_padded_batches_have_the_shapes_of_records(cache: stoker.Cache, tier: str) -> None:
    for batch in stoker.Loader(cache, 5, tier=tier, shuffle=True, ragged="list"):
        assert {*batch} == {"latent", "video", "label", "index"}
        for place, number in enumerate(batch["index"].tolist()):
            item = Pictures()[number]
            assert torch.equal(batch["latent"][place], item["latent"])
            assert torch.equal(batch["video"][place], item["video"])
    for batch in stoker.Loader(cache, 5, tier=tier, shuffle=True, ragged="pad"):
        for place, number in enumerate(batch["index"].tolist()):
            item = Pictures()[number]["latent"]
            assert torch.equal(batch["latent"][place][batch["latent.mask"][place]], item.flatten())
            assert batch["latent.shape"][place].tolist() == [*item.shape]


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((4, 9, 1), ""),
        ((5, 2, 2), r"\(5, 2, 2\), expected bfloat16 \(4, -1, -1\).*ragged={'latent': \(0, 1, 2\)}"),
        ((4, 2), r"\(4, 2\), expected bfloat16"),
    ],
)
def test_every_sample_is_compared_with_what_the_probes_showed(shape: tuple[int, ...], said: str) -> None:
    source = TorchSource(Pictures({1: shape}))  # sample 1 is no probe
    source.schema()
    if not said:
        assert source.read(1)["latent.shape"].tolist() == [*shape]
        return
    with pytest.raises(SourceError, match=said):
        source.read(1)


def test_axes_may_be_declared(tmp_path: Path) -> None:
    same = {number: (4, 3, 3) for number in range(COUNT) if number != 1}
    odd = Pictures({**same, 1: (5, 2, 2)})
    with pytest.raises(SourceError, match=r"ragged=\{'latent':"):
        TorchSource(odd).read(1)

    source = TorchSource(odd, ragged={"latent": (0, 1, 2)})
    found = stoker.precompute(source, None, tmp_path, name="declared", workers=0)

    assert found[1]["latent"].shape == (5, 2, 2)
    assert found[2]["latent"].shape == (4, 3, 3)
    for wrong, why in (({"latent": ()}, "Expected the axes"), ({"latent": (7,)}, "has 3 axes")):
        with pytest.raises(ConfigError, match=why):
            TorchSource(odd, ragged=wrong).schema()
    with pytest.raises(ConfigError, match="axis 0 alone may vary"):
        TorchSource(Pictures(), time=("video",)).schema()


def test_a_declaration_of_axis_0_leaves_fingerprints_as_they_were() -> None:
    listed, by_axis = (TorchSource(Pictures(), ragged=r) for r in (("latent",), {"latent": (0,)}))
    assert listed.identity() == by_axis.identity()
    assert listed.identity().settings["ragged"] == ["latent"]


def test_a_field_with_the_name_of_the_sizes_is_refused() -> None:
    class Named(Pictures):
        def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
            return {**super().__getitem__(number), "latent.shape": torch.tensor(1)}

    with pytest.raises(SourceError, match=r"stored as 'latent.shape'"):
        TorchSource(Named()).schema()


def test_a_module_is_given_images_of_their_own_size_and_may_return_them(tmp_path: Path) -> None:
    net = torch.nn.Conv2d(4, 6, 2, padding=1)
    pooled = torch.nn.Sequential(net, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())

    class Floats(Pictures):
        def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
            item = super().__getitem__(number)
            return {"image": item["latent"].float(), "label": item["label"]}

    encoder = stoker.ModuleEncoder(net, field="image")
    maps = stoker.precompute(Floats(), encoder, tmp_path, name="maps", workers=0)
    vectors = stoker.precompute(
        Floats(), stoker.ModuleEncoder(pooled, field="image"), tmp_path, name="vectors"
    )

    assert maps.schema["latent"].axes == ("6", "*", "*")
    assert vectors.schema["latent"] == Field(shape=(6,), dtype="float32")
    with torch.inference_mode():
        for number in range(COUNT):
            wanted = net(Floats()[number]["image"][None])[0]
            assert torch.allclose(maps[number]["latent"], wanted, atol=1e-6)
            assert maps[number]["latent"].shape == wanted.shape


def test_axes_that_no_field_can_have_are_refused() -> None:
    for axes in (("*", "3"), ("t", "*"), ("*",)):
        with pytest.raises(stoker.StokerError, match="do not fit"):
            Field(shape=(-1,), dtype="uint8", ragged=True, axes=axes)


def test_long_records_are_copied_whole_with_the_same_bytes(tmp_path: Path) -> None:
    """Records of many rows take another way than short ones."""
    made = torch.Generator().manual_seed(0)
    images = [torch.randn((3, 40 + n, 30), generator=made) for n in range(8)]
    cache = write_cache(tmp_path, folded("x", images, 3), axes={"x": ("3", "*", "*")}, shards=(3, 5))
    for tier in ("device", "host", "disk"):
        for batch in stoker.Loader(cache, 3, tier=tier, shuffle=True, dtype="float16"):
            numbers = batch["index"].tolist()
            assert all(torch.equal(x, images[n].half()) for x, n in zip(batch["x"], numbers, strict=True))
