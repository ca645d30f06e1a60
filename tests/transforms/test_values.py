from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stoker.errors import ConfigError
from stoker.loader import Loader, RecordBatch, WindowBatch, Windows
from stoker.loader.order import example_keys
from stoker.transforms import Crop, CropImages, Decode, Flip, Noise, Normalize, Roll, Take, Views
from tests.loader.caches import trajectories, write_cache

KEYS = example_keys(0, 0, torch.arange(64))


def records(**fields: torch.Tensor) -> RecordBatch:
    batch = RecordBatch(**fields, index=torch.arange(64))
    batch.position = (0, 64)
    return batch


def states(dtype: torch.dtype = torch.float32) -> WindowBatch:
    z = torch.randn(64, 4, 16, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    return WindowBatch(
        z[:, 0], z[:, 1], z[:, 2:], {"nu": torch.ones(64, 1)}, torch.zeros(64, 2, dtype=torch.int64), (0, 64)
    )


def test_normalize_makes_floats_of_bytes() -> None:
    image = torch.randint(0, 256, (64, 5, 4, 3), dtype=torch.uint8)
    mean, std = (100.0, 110.0, 120.0), (50.0, 55.0, 60.0)

    made = Normalize(mean=mean, std=std)(records(image=image), KEYS)["image"]

    assert made.dtype == torch.float32
    assert torch.allclose(made, (image.float() - torch.tensor(mean)) / torch.tensor(std), atol=1e-6)


def test_normalize_knows_channels_first_and_keeps_the_dtype() -> None:
    image = torch.randn(64, 3, 5, 4).half()
    normalize = Normalize(mean=(1.0, 2.0, 3.0), std=2.0, axis=-3)

    made = normalize(records(image=image), KEYS)["image"]

    assert made.dtype == torch.float16
    assert torch.allclose(
        made.float(), (image.float() - torch.tensor([1.0, 2, 3]).view(3, 1, 1)) / 2, atol=2e-3
    )
    wide = Normalize(mean=0.0, std=2.0, dtype="float32")(records(image=image), KEYS)["image"]
    assert torch.equal(wide, image.float() / 2)


def test_normalize_by_the_statistics_of_the_cache(tmp_path: Path) -> None:
    cache = write_cache(tmp_path, trajectories(), timed=("latent", "time"))
    windows = Windows(field="latent", horizon=2)
    transforms = [Normalize.of(cache, "bc"), Normalize.of(cache, "nu")]
    loader = Loader(cache, batch_size=9, windows=windows, transforms=transforms, shuffle=True)

    conds = [batch.cond for batch in loader]
    bc, nu = (torch.cat([cond[name] for cond in conds]) for name in ("bc", "nu"))

    assert torch.allclose(bc.mean(0), torch.zeros(3), atol=1e-3)
    assert torch.allclose(bc.std(0, correction=0), torch.ones(3), atol=1e-3)
    assert nu.std(correction=0).item() == pytest.approx(1, abs=1e-3)
    with pytest.raises(ConfigError, match=r"'u'. Expected one of .*latent"):
        Normalize.of(cache, "u")


def test_statistics_of_records_without_time_want_the_name_of_a_field(tmp_path: Path) -> None:
    cache = write_cache(tmp_path, {"x": torch.randn(6, 2), "y": torch.randn(6, 2)})
    with pytest.raises(ConfigError, match=r"Normalize\.of\(cache, 'x'\).*'x', 'y'") as refused:
        Normalize.of(cache)
    assert "windows" not in str(refused.value)


def test_statistics_of_the_window_field_are_for_all_its_states(tmp_path: Path) -> None:
    fields = {name: v for name, v in trajectories().items() if name in ("latent", "nu")}
    fields["latent"] = fields["latent"].float() * torch.tensor([1.0, 2, 3, 4, 5, 0]) + 7
    cache = write_cache(tmp_path, fields, timed=("latent",))
    transforms = [Normalize.of(cache)]

    batches = [*Loader(cache, batch_size=9, windows=Windows(horizon=2), transforms=transforms, shuffle=True)]

    for name in ("z0", "z1", "future"):
        flat = torch.cat([getattr(batch, name) for batch in batches]).reshape(-1, 6)
        assert flat.mean(0).abs().max() < 0.1, name
        assert torch.allclose(flat.std(0), torch.tensor([1.0, 1, 1, 1, 1, 0]), atol=0.05), name
        assert (flat[:, 5] == 0).all(), "what never varies is shifted, not divided by nothing"


def test_noise_is_the_same_for_all_states_of_a_window() -> None:
    batch = states()
    made = Noise(std=0.5)(batch, KEYS)

    noise = made.z0 - batch.z0
    assert noise.std().item() == pytest.approx(0.5, abs=0.01)
    assert torch.allclose(made.z1 - batch.z1, noise, atol=1e-6)
    assert torch.allclose(made.future - batch.future, noise[:, None].expand(-1, 2, -1, -1), atol=1e-6)
    assert made.cond["nu"] is batch.cond["nu"]


def test_noise_on_the_input_alone() -> None:
    batch = states(torch.float16)
    made = Noise(std=0.5, fields=("z0",))(batch, KEYS)

    assert made.z0.dtype == torch.float16
    assert not torch.equal(made.z0, batch.z0)
    assert made.z1 is batch.z1


def test_noise_of_other_fields_is_their_own() -> None:
    batch = records(a=torch.zeros(64, 3), b=torch.zeros(64, 3))
    made = Noise(std=(1.0, 2.0, 0.0), fields=("a", "b"))(batch, KEYS)

    assert not torch.equal(made["a"], made["b"])
    assert (made["a"][:, 2] == 0).all()
    assert made["a"][:, 1].std() > 1.4 * made["a"][:, 0].std()
    scalar = Noise(std=1.0)(records(x=torch.zeros(64)), KEYS)["x"]
    assert scalar.shape == (64,)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Normalize(mean=0.0, std=0.0), "above 0"),
        (lambda: Normalize(mean=float("nan"), std=1.0), "finite"),
        (lambda: Normalize(mean=0.0, std=1.0, dtype="int8"), "Expected bfloat16"),
        (lambda: Normalize(mean=(0.0, 1.0), std=1.0)(records(x=torch.zeros(64, 3)), KEYS), "2 channels"),
        (lambda: Normalize(mean=(0.0, 1.0), std=1.0)(records(x=torch.zeros(64)), KEYS), "2 channels"),
        (lambda: Noise(std=-1.0), "at least 0"),
        (lambda: Normalize(mean="0.5", std=1.0), r"mean is '0\.5'"),
        (lambda: Normalize(mean=0.0, std=None), "std is None"),
        (lambda: Normalize(mean=[], std=1.0), r"mean is \[\]"),
        (lambda: Normalize(mean=0.0, std=1.0, axis=1), r"\(1,\).*negative"),
        (lambda: Normalize(mean=0.0, std=1.0, fields=1), "fields is 1"),
        (lambda: Noise(std="1"), "std is '1'"),
        (lambda: Noise(std=True), "std is True"),
        (lambda: Noise(std=1.0, fields=()), r"fields is \(\)"),
        (lambda: Flip(p="0.5"), r"'0\.5'"),
        (lambda: Flip(p=True), "True"),
        (lambda: Flip(negate=1), "negate is 1"),
        (lambda: Roll(axes=(-1.5,)), r"-1\.5"),
        (lambda: Crop("6"), "size is '6'"),
        (lambda: Crop((6, 1.5)), r"size is 1\.5"),
        (lambda: Crop(6, padding="1"), "'1'"),
        (lambda: Crop(6, axes=None), "None"),
        (lambda: Take({-1: 3}), "slices is"),
        (lambda: Take({-1: slice(0, 4, 1.5)}), "slices is"),
        (lambda: Take(None), "slices is None"),
        (lambda: Views(transforms="x"), "transforms is 'x'"),
        (lambda: Views(transforms=()), "Views without transforms"),
        (lambda: Views(transforms=[Noise(1.0)], count=1.5), r"count is 1\.5"),
        (lambda: Decode(224), "size is 224"),
        (lambda: Decode((224, 0)), r"size is \(224, 0\)"),
        (lambda: Decode((224, 224), threads=-1), "threads is -1"),
        (lambda: CropImages("224"), "size is '224'"),
        (lambda: CropImages((224, 224), random="no"), "random is 'no'"),
        (lambda: Noise(std=(1.0, 2.0))(records(x=torch.zeros(64, 3)), KEYS), "2 deviations"),
        (lambda: Noise(std=1.0)(records(x=torch.zeros(64, dtype=torch.uint8)), KEYS), "before it"),
    ],
)
def test_settings_that_cannot_be_are_refused(make, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_one_field_may_be_named_without_a_list() -> None:
    batch = records(long=torch.zeros(64, 3), other=torch.zeros(64, 3))
    made = Noise(1.0, fields="long")(batch, KEYS)
    assert made["long"].any()
    assert not made["other"].any()
