"""Latents drawn from stored moments, and conditions dropped for a stored null."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stoker
from stoker.errors import ConfigError
from stoker.transforms import DrawLatent, DropCondition

COUNT = 200


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> stoker.Cache:
    torch.manual_seed(0)
    items = [
        {
            "mean": torch.full((2, 4), float(i)),
            "std": torch.full((2, 4), 0.5),
            "logvar": torch.full((2, 4), -1.386294361),  # of the same deviation
            "moments": torch.cat([torch.full((2, 4), float(i)), torch.full((2, 4), -1.386294361)]),
            "text": torch.full((3,), 1.0),
            "words": torch.full((i % 4 + 1,), 7),
            "seen": torch.tensor(True),
        }
        for i in range(COUNT)
    ]
    return stoker.precompute(
        items, None, tmp_path_factory.mktemp("latents"), name="moments", workers=0, progress=None
    )


def drawn(cache: stoker.Cache, *transforms: Any, **options: Any) -> dict[int, Any]:
    """Each example of an epoch, by its sample index."""
    found: dict[int, Any] = {}
    for batch in stoker.Loader(cache, shuffle=True, transforms=transforms, **{"batch_size": 16, **options}):
        for row, index in enumerate(batch["index"].tolist()):
            found[index] = {name: value[row] for name, value in batch.items()}
    return found


def test_a_latent_is_drawn_around_its_mean(cache: stoker.Cache) -> None:
    found = drawn(cache, DrawLatent())
    latents = torch.stack([found[i]["latent"] for i in range(COUNT)])

    noise = (latents - torch.arange(COUNT)[:, None, None]) / 0.5

    assert {"mean", "std"}.isdisjoint(found[0])
    assert abs(noise.mean()) < 0.1
    assert abs(noise.std() - 1) < 0.1


def test_deviations_log_variances_and_moments_give_the_same_draw(cache: stoker.Cache) -> None:
    by_std, by_logvar = drawn(cache, DrawLatent()), drawn(cache, DrawLatent(logvar="logvar"))
    by_moments = drawn(cache, DrawLatent(moments="moments"))

    for i in range(COUNT):
        assert torch.allclose(by_std[i]["latent"], by_logvar[i]["latent"], rtol=1e-5, atol=1e-6)
        assert torch.allclose(by_std[i]["latent"], by_moments[i]["latent"], rtol=1e-5, atol=1e-6)


def test_scale_and_shift_are_those_of_the_model(cache: stoker.Cache) -> None:
    plain = drawn(cache, DrawLatent())
    scaled = drawn(cache, DrawLatent(scale=0.25, shift=2.0, dtype="bfloat16"))

    assert torch.equal(scaled[9]["latent"], ((plain[9]["latent"] - 2.0) * 0.25).bfloat16())


def test_validation_takes_the_mean(cache: stoker.Cache) -> None:
    found = drawn(cache, DrawLatent(random=False, name="z"))

    assert all((found[i]["z"] == i).all() for i in range(COUNT))


@pytest.mark.parametrize("options", [{"batch_size": 7}, {"tier": "disk"}, {"tier": "host"}])
def test_a_draw_belongs_to_its_example_and_epoch(cache: stoker.Cache, options: dict[str, Any]) -> None:
    steps = (DrawLatent(), DropCondition(["text"], p=0.5))
    one, other = drawn(cache, *steps), drawn(cache, *steps, **options)

    assert all(torch.equal(one[i]["latent"], other[i]["latent"]) for i in range(COUNT))
    assert all(torch.equal(one[i]["text"], other[i]["text"]) for i in range(COUNT))
    loader = stoker.Loader(cache, 16, shuffle=True, transforms=steps)
    loader.set_epoch(1)
    again = {int(i): z for batch in loader for i, z in zip(batch["index"], batch["latent"], strict=True)}
    assert not any(torch.equal(again[i], one[i]["latent"]) for i in range(COUNT))


def test_conditions_are_dropped_together(cache: stoker.Cache) -> None:
    null = {"text": torch.tensor([5.0, 6.0, 7.0]), "seen": False}
    found = drawn(cache, DropCondition(["text", "seen"], p=0.25, null=null))

    gone = [i for i in range(COUNT) if not found[i]["seen"]]

    assert 30 < len(gone) < 70
    for i in range(COUNT):
        assert found[i]["text"].tolist() == ([5, 6, 7] if i in gone else [1, 1, 1])


def test_a_list_of_varying_length_gets_the_null_of_its_own_length(cache: stoker.Cache) -> None:
    found = drawn(cache, DropCondition("words", p=0.5, null={"words": torch.tensor([9, 9, 9, 9, 9])}))

    lengths = {len(found[i]["words"]) for i in range(COUNT) if found[i]["words"][0] == 9}

    assert lengths == {5}
    assert any(found[i]["words"][0] == 7 for i in range(COUNT))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda c: DrawLatent(std="std", logvar="logvar"), "Name one of them"),
        (lambda c: drawn(c, DrawLatent(mean="nothing")), "'nothing'.*The batch has"),
        (lambda c: drawn(c, DrawLatent(mean="text")), "shape"),
        (lambda c: drawn(c, DrawLatent(mean="words")), "another length"),
        (lambda c: DropCondition("text", p=1.5), "0 to 1"),
        (lambda c: DropCondition([]), "names no field"),
        (lambda c: drawn(c, DropCondition("text", null={"text": torch.ones(2)})), "its null has the shape"),
        (lambda c: drawn(c, DropCondition("seen", null={"seen": 3})), "cannot hold its null"),
    ],
)
def test_what_does_not_fit_says_so(cache: stoker.Cache, make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(cache)
