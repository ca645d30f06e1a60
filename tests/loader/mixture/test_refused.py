"""Members, settings and states that do not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.errors import ConfigError, StaleStateError
from stoker.loader import Loader, Mixture
from stoker.store import Cache
from tests.loader.caches import trajectories, write_cache
from tests.loader.mixture.three import MODES, TIMED, WINDOWS


@pytest.mark.parametrize("mode", [*MODES, {"mix": "example"}], ids=str)
def test_a_state_of_other_caches_is_refused_and_named(
    caches: dict[str, Cache], tmp_path: Path, mode: Any
) -> None:
    changed = write_cache(tmp_path, {k: v[:6] for k, v in trajectories(13, 9).items()}, timed=TIMED, name="c")
    weights = {"weights": None} if mode.get("mode") == "weighted" else {}
    common = {"windows": WINDOWS, **mode, **weights}
    own = [caches["a"], caches["c"]]
    state = Mixture(own, 4, **common).state_dict()

    with pytest.raises(StaleStateError, match=f"cache 'c' has fingerprint {caches['c'].fingerprint} there"):
        Mixture([caches["a"], changed], 4, **common).load_state_dict(state)
    with pytest.raises(StaleStateError, match="caches a, c there, c, a here"):
        Mixture(own[::-1], 4, **common).load_state_dict(state)
    with pytest.raises(StaleStateError, match="seed 0 there, 3 here"):
        Mixture(own, 4, seed=3, **common).load_state_dict(state)
    with pytest.raises(StaleStateError, match="global_batch 4 there, 8 here"):
        Mixture(own, 8, **common).load_state_dict(state)
    with pytest.raises(StaleStateError, match="not the state of a mixture"):
        Mixture(own, 4, **common).load_state_dict(Loader(own[0], shuffle=True).state_dict())


def test_a_state_of_another_mode_or_other_weights_is_refused(alike: list[Cache]) -> None:
    state = Mixture(alike, 4, mode="weighted").state_dict()

    with pytest.raises(StaleStateError, match="counts"):
        Mixture(alike, 4, mode="weighted", weights=[3, 1]).load_state_dict(state)
    with pytest.raises(StaleStateError, match="mode 'weighted' there, 'concat of examples' here"):
        Mixture(alike, 4).load_state_dict(state)
    beyond = {**state, "position": 10**6}
    with pytest.raises(StaleStateError, match="step 1000000"):
        Mixture(alike, 4, mode="weighted").load_state_dict(beyond)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mode": "both"}, "mode is 'both'"),
    ({"mode": "round_robin", "exhausted": "all"}, "exhausted is 'all'"),
    ({"mix": "example"}, "mix='batch'"),
    ({"mix": "example", "mode": "weighted"}, "mix is 'example' in mode 'weighted'"),
    ({"weights": [1, 1, 1]}, "weights= belongs to mode 'weighted'"),
    ({"epoch_examples": 9}, "epoch_examples= belongs to mode 'weighted'"),
    ({"exhausted": "longest"}, "exhausted= belongs to mode 'round_robin', and mode is 'concat'"),
    ({"mode": "weighted", "exhausted": "first"}, "exhausted= belongs to mode 'round_robin'"),
    ({"mode": "weighted", "weights": {"a": 1, "bb": 1, "c": 1}}, "names 'bb', .* Did you mean b"),
    ({"mode": "weighted", "weights": {"a": 1, "b": 1}}, "weights has no entry for c"),
    ({"mode": "weighted", "weights": [1, 1]}, "for each of a, b, c"),
    ({"mode": "round_robin", "shuffle": False}, "cache after cache"),
    ({"names": ["x", "x", "y"]}, "called 'x'"),
    ({"names": ["x"]}, "1 names for 3 caches"),
    ({"indices": [1]}, "indices= has no effect"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_has_no_meaning_is_refused(abc: list[Cache], given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Mixture(abc, 4, windows=WINDOWS, **given)


def test_members_that_do_not_go_together_are_refused(caches: dict[str, Cache]) -> None:
    a = Loader(caches["a"], 4, windows=WINDOWS, shuffle=True)
    for other, words in (
        (Loader(caches["b"], 4, shuffle=True), "differ in windows"),
        (
            Loader(caches["b"], 4, windows=WINDOWS, rank=1, world_size=2, shuffle=True),
            "differ in rank: 0 and 1",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            Mixture([a, other])
    with pytest.raises(ConfigError, match="batch_size: settings of loaders that are made already"):
        Mixture([a], 4)
    with pytest.raises(ConfigError, match="mixture is 3"):
        Mixture([3])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"got Cache.*Give a list of them"):
        Mixture(caches["a"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"got \[\]"):
        Mixture([])
    with pytest.raises(ConfigError, match="no items by number"):
        Mixture([a])[0]


def test_a_field_called_as_a_batch_calls_its_own_is_refused(tmp_path: Path) -> None:
    cache = write_cache(tmp_path, {"task": torch.randn(6, 2)}, name="a")

    with pytest.raises(ConfigError, match="field 'task'"):
        Mixture([cache], 2)


@pytest.mark.parametrize("lacks", ["index", "nu"])
@pytest.mark.parametrize("mix", ["batch", "example"])
def test_a_batch_that_transforms_leave_without_what_a_mixture_needs_is_named(
    alike: list[Cache], lacks: str, mix: Any
) -> None:
    def without(batch: Any, keys: torch.Tensor) -> dict[str, Any]:
        return {name: value for name, value in batch.items() if name != lacks}

    mixture = Mixture(alike, 4, mix=mix, transforms=[without])

    with pytest.raises(ConfigError, match=f"transforms= of 'a.*lacks '{lacks}'.*`index`.*Return them too"):
        next(iter(mixture))


@pytest.mark.parametrize("given", [5, None, [1]])
def test_what_is_no_state_is_refused(alike: list[Cache], given: Any) -> None:
    with pytest.raises(StaleStateError, match="a mixture's state is a dict"):
        Mixture(alike, 4).load_state_dict(given)


def test_an_argument_that_nobody_knows_is_the_mixtures(alike: list[Cache]) -> None:
    with pytest.raises(TypeError, match=r"Mixture.__init__\(\) .*'mod'. Did you mean mode\?"):
        Mixture(alike, 4, mod="weighted")
    with pytest.raises(TypeError, match=r"Mixture.__init__\(\) .*'window'. Did you mean windows\?"):
        Mixture(alike, 4, window=WINDOWS)


def test_going_on_with_other_transforms_is_said(alike: list[Cache], caplog: pytest.LogCaptureFixture) -> None:
    for mix in ("batch", "example"):
        state = Mixture(alike, 4, mix=mix, transforms=[lambda batch, _: batch]).state_dict((0, 2))
        Mixture(alike, 4, mix=mix).load_state_dict(state)

        assert "this loader has none: the same examples follow" in caplog.text
        caplog.clear()
