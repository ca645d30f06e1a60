from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from stoker.config.names import in_settings
from stoker.errors import ConfigError
from stoker.loader import RecordBatch, WindowBatch
from stoker.loader.order import child_keys, example_keys, integers, uniform
from stoker.transforms import Crop, Flip, Roll, Take, padded

KEYS = example_keys(0, 0, torch.arange(40))


def images(*shape: int, dtype: torch.dtype = torch.float32) -> RecordBatch:
    total = 40 * torch.Size(shape).numel()
    batch = RecordBatch(image=torch.arange(total).reshape(40, *shape).to(dtype), index=torch.arange(40))
    batch.position = (0, 40)
    return batch


def states(*shape: int, horizon: int = 3) -> WindowBatch:
    z = torch.randn(40, horizon + 1, *shape, generator=torch.Generator().manual_seed(0))
    cond = {"nu": torch.randn(40, 1)}
    return WindowBatch(z[:, 0], z[:, 1], z[:, 2:], cond, torch.zeros(40, 2, dtype=torch.int64), (0, 40))


def test_flip_mirrors_the_examples_whose_key_says_so() -> None:
    batch = images(4, 6, 3)
    made = Flip(axis=-2, p=0.3)(batch, KEYS)["image"]

    mirrored = uniform(KEYS, 1)[:, 0] < 0.3
    assert 4 < mirrored.sum() < 22
    for before, after, yes in zip(batch["image"], made, mirrored.tolist(), strict=True):
        assert torch.equal(after, before.flip(1) if yes else before)


def test_flip_always_and_never() -> None:
    batch = images(4, 6, 3, dtype=torch.uint8)

    assert torch.equal(Flip(p=1)(batch, KEYS)["image"], batch["image"].flip(2))
    assert torch.equal(Flip(p=0)(batch, KEYS)["image"], batch["image"])


def test_a_mirrored_velocity_changes_its_sign() -> None:
    batch = images(4, 6, 3)

    made = Flip(axis=-3, p=1, negate=(1,))(batch, KEYS)["image"]

    assert torch.equal(made, batch["image"].flip(1) * torch.tensor([1.0, -1.0, 1.0]))
    with pytest.raises(ConfigError, match=r"values are torch\.uint8 with 3 channels"):
        Flip(negate=(0,))(images(4, 6, 3, dtype=torch.uint8), KEYS)
    with pytest.raises(ConfigError, match="places among the channels"):
        Flip(negate=(3,))(batch, KEYS)


def test_roll_shifts_every_example_by_its_own_distance() -> None:
    batch = images(5, 7, 2)
    made = Roll(axes=(-3, -2))(batch, KEYS)["image"]

    distances = [integers(child_keys(KEYS, place), 1, size)[:, 0] for place, size in ((0, 5), (1, 7))]
    assert len(torch.unique(distances[1])) == 7
    for i, (before, after) in enumerate(zip(batch["image"], made, strict=True)):
        assert torch.equal(after, before.roll((-distances[0][i].item(), -distances[1][i].item()), (0, 1)))


@pytest.mark.parametrize("border", ["zeros", "wrap", "reflect"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
def test_crop_is_the_piece_of_the_padded_example_that_its_key_says(border: str, dtype: torch.dtype) -> None:
    batch = images(6, 8, 3, dtype=dtype)
    made = Crop(size=(5, 7), padding=2, border=border)(batch, KEYS)["image"]

    tops, lefts = (
        integers(child_keys(KEYS, place), 1, room)[:, 0].tolist() for place, room in ((0, 6), (1, 6))
    )
    mode = {"zeros": "constant", "wrap": "circular", "reflect": "reflect"}[border]
    wide = F.pad(batch["image"].float().movedim(-1, 1), (2, 2, 2, 2), mode=mode).movedim(1, -1).to(dtype)
    for i, (top, left) in enumerate(zip(tops, lefts, strict=True)):
        assert torch.equal(made[i], wide[i, top : top + 5, left : left + 7])
    assert len(set(tops)) == len(set(lefts)) == 6
    assert made.dtype == dtype


@pytest.mark.parametrize("axes", [(-1,), (-2,), (-3,), (-1, -2)])
def test_crop_takes_any_axes_of_channels_first_images(axes: tuple[int, ...]) -> None:
    batch = images(3, 6, 8)
    made = Crop(size=2, axes=axes)(batch, KEYS)["image"]

    assert [made.shape[axis] for axis in axes] == [2] * len(axes)
    for before, after in zip(batch["image"], made, strict=True):
        first = (before == after.flatten()[0]).nonzero()[0].tolist()
        cut = before
        for axis in axes:
            cut = cut.narrow(axis, first[axis], 2)
        assert torch.equal(after, cut)


@pytest.mark.parametrize(
    "transform", [Flip(axis=-2), Roll(axes=(-2,)), Crop(size=3, axes=(-2,), padding=1)], ids=repr
)
def test_all_states_of_a_window_are_moved_alike(transform) -> None:
    batch = states(5, 4)
    made = transform(batch, KEYS)

    together = torch.stack((batch.z0, batch.z1, *batch.future.unbind(1)), 1)
    alone = RecordBatch(z=together, index=batch.index)
    alone.position = (0, 40)
    expected = transform(alone, KEYS)["z"]

    assert torch.equal(torch.stack((made.z0, made.z1, *made.future.unbind(1)), 1), expected)
    assert not torch.equal(made.z0, batch.z0)
    assert made.cond is not batch.cond
    assert torch.equal(made.cond["nu"], batch.cond["nu"])
    assert made.position == batch.position


def test_only_the_fields_that_are_named_change() -> None:
    batch = states(5, 4)

    made = Flip(p=1, fields=("z0", "future"))(batch, KEYS)

    assert torch.equal(made.z0, batch.z0.flip(1))
    assert torch.equal(made.future, batch.future.flip(2))
    assert made.z1 is batch.z1
    short = batch._replace(future=None)
    assert Flip(p=1, fields=("z0", "future"))(short, KEYS).future is None


def test_what_is_not_there_or_not_clear_is_named() -> None:
    two = images(4, 6, 3)
    two["mask"] = two["image"]

    with pytest.raises(ConfigError, match=r"2 fields could be meant .* as `fields` \['image'\]"):
        Flip()(two, KEYS)
    with pytest.raises(ConfigError, match=r"'imag', which is not in the batch. It has image \(40, 4, 6, 3\)"):
        Flip(fields=("imag",))(two, KEYS)
    with pytest.raises(ConfigError, match="at least 4 axes"):
        Flip(axis=-4, fields=("image",))(two, KEYS)
    ragged = images(4, 6, 3)
    ragged["points"] = [torch.zeros(2, 2)]
    with pytest.raises(ConfigError, match="'points' has another length in every record"):
        Flip(fields=("points",))(ragged, KEYS)
    with pytest.raises(ConfigError, match="a batch of type int"):
        Flip()(3, KEYS)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Flip(axis=1), "negative numbers"),
        (lambda: Flip(p=1.5), "a probability"),
        (lambda: Roll(axes=()), "negative numbers"),
        (lambda: Roll(axes=(-1, -1)), "different"),
        (lambda: Crop(size=0), "at least 1"),
        (lambda: Crop(size=(1, 2, 3)), "for each axis"),
        (lambda: Crop(size=2, padding=-1), "padding of at least 0"),
        (lambda: Crop(size=2, border="mirror"), "Expected zeros, wrap, reflect"),
        (lambda: Crop(size=9)(images(6, 8, 3), KEYS), "axis -3 has 6 points"),
        (
            lambda: Crop(size=2, padding=6, border="reflect")(images(6, 8, 3), KEYS),
            "smaller size= or padding=",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(make, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_take_cuts_every_example_alike() -> None:
    batch = states(8, 6, 2)
    take = Take({-3: slice(2, 6), -2: slice(None, None, 3)})
    made = take(batch, KEYS)

    assert torch.equal(made.z0, batch.z0[:, 2:6, ::3])
    assert torch.equal(made.future, batch.future[:, :, 2:6, ::3])
    assert made.z0.is_contiguous()
    with pytest.raises(ConfigError, match="leaves nothing"):
        Take({-2: slice(9, None)})(batch, KEYS)
    with pytest.raises(ConfigError, match="steps must be at least 1"):
        Take({-2: slice(None, None, -1)})


def test_padding_of_none_copies_nothing() -> None:
    values = torch.zeros(2, 3)

    assert padded(values, -1, 0, "wrap") is values


def test_the_obvious_argument_may_go_without_its_name() -> None:
    assert (Crop(6).size, Flip(-1).axis, tuple(Roll((-2,)).axes)) == (6, -1, (-2,))
    with pytest.raises(ConfigError, match="axes is -2"):
        Roll(-2)  # type: ignore[arg-type]


def test_a_field_that_is_not_there_is_no_matter_of_the_data_settings() -> None:
    batch = RecordBatch(image=torch.zeros(2, 4, 4, 1), index=torch.arange(2))

    with pytest.raises(ConfigError, match="`fields` of a transform names 'foo'") as found:
        Flip(fields=("foo",))(batch, batch["index"])

    assert in_settings(found.value) == str(found.value)
