"""What an encoder's code uses is part of it, wherever that stands."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import stoker
from stoker.encoders.module import ModuleEncoder
from stoker.errors import EncoderError
from stoker.used_code import imported_inside

FILES = {
    "used_values.py": "FACTOR = 2.0\n",
    "used_helpers.py": """
import numpy
import used_values
MEAN = numpy.array([1.0, 2.0])
OTHER = 5.0
class Scaler:
    def __init__(self, by): self.by = by
    def __call__(self, x): return self.inside(x) * self.by
    def inside(self, x): return x + 1
SCALER = Scaler(3.0)
SETTINGS = {"way": "up"}
def scale(x): return x * 7.0
def even(x, n=4): return x if n == 0 else odd(x, n - 1)
def odd(x, n): return x + 11 if n == 0 else even(x, n - 1)
""",
    "used_late.py": "LATE = 19.0\ndef late(x): return x * LATE\n",
    "used_net.py": """
import torch
import used_helpers
import used_helpers as helpers
from used_helpers import scale
class Made(used_helpers.Scaler): pass
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.kinds = {used_helpers.scale, used_helpers.even, used_helpers.odd, used_helpers.Scaler}
        self.call = lambda x: x * 13.0
        self.bound = used_helpers.SCALER.inside
    def forward(self, x):
        return self.other(scale(helpers.even(x))) * used_helpers.used_values.FACTOR
    def other(self, x):
        from used_late import late
        x = late(x)
        return Made(17.0)(x) + used_helpers.OTHER + len(used_helpers.SETTINGS["way"]) * used_helpers.MEAN
""",
}
RUN = """
import json, sys
sys.path.insert(0, sys.argv[1])
import used_net
from stoker.encoders.module import ModuleEncoder
print(json.dumps(ModuleEncoder(used_net.Net()).identity(), sort_keys=True))
"""


def identity_elsewhere(folder: Path, seed: str = "0", **changed: tuple[str, str]) -> Any:
    """The identity of `used_net.Net` in a process of its own, after some text of its files was replaced."""
    folder.mkdir(exist_ok=True)
    for name, text in FILES.items():
        old, new = changed.get(name.removesuffix(".py"), ("", ""))
        assert old in text
        (folder / name).write_text(text.replace(old, new) if old else text)
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder)],
        env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_encoder_is_the_same_in_processes_that_hash_differently(tmp_path: Path) -> None:
    found = [identity_elsewhere(tmp_path / seed, seed) for seed in ("0", "1", "77")]

    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("used_values", "2.0", "2.5"),
        ("used_helpers", "x * 7.0", "x * 8.0"),
        ("used_helpers", "x + 11", "x + 12"),
        ("used_helpers", "x + 1\n", "x + 2\n"),
        ("used_helpers", "OTHER = 5.0", "OTHER = 6.0"),
        ("used_helpers", "[1.0, 2.0]", "[1.0, 3.0]"),
        ("used_helpers", '"up"', '"down"'),
        ("used_helpers", "Scaler(3.0)", "Scaler(4.0)"),
        ("used_late", "19.0", "20.0"),
        ("used_net", "17.0", "18.0"),
        ("used_net", "13.0", "14.0"),
    ],
    ids=[
        *("constant of a module of a module", "helper", "mutual recursion", "method of a helper class"),
        *("constant in another method", "array", "dictionary", "owner of a bound method"),
        "imported inside a method",
        *("other method", "lambda"),
    ],
)
def test_a_change_in_what_the_encoder_uses_makes_another_encoder(
    tmp_path: Path, name: str, old: str, new: str
) -> None:
    assert identity_here(tmp_path / "a") != identity_here(tmp_path / "b", **{name: (old, new)})


def identity_here(folder: Path, **changed: tuple[str, str]) -> Any:
    """As `identity_elsewhere`, in this process, whose modules are as before afterwards."""
    folder.mkdir(exist_ok=True)
    sys.path.insert(0, str(folder))
    try:
        for name, text in FILES.items():
            old, new = changed.get(name.removesuffix(".py"), ("", ""))
            assert old in text
            (folder / name).write_text(text.replace(old, new) if old else text)
        import used_net  # pyright: ignore[reportMissingImports]

        return ModuleEncoder(used_net.Net()).identity()["version"]
    finally:
        sys.path.remove(str(folder))
        for name in FILES:
            sys.modules.pop(name.removesuffix(".py"), None)


def calling(function: Any) -> Any:
    class Calling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.function = function

        def forward(self, x: Tensor) -> Tensor:
            return self.function(x)

    return ModuleEncoder(Calling()).identity()["version"]


OTHER = 3.0


def times(factor: float) -> Any:
    def product(x: Tensor) -> Tensor:
        return x * factor

    return product


def test_a_function_given_to_the_encoder_is_part_of_it() -> None:
    one, two = (lambda: 2 + OTHER), (lambda: 2 - OTHER)

    assert calling(one) != calling(two)
    assert calling(times(2.0)) != calling(times(3.0))
    assert calling(times(2.0)) == calling(times(2.0))


def doubling(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def tripling(module: nn.Module, args: Any) -> Any:
    return (args[0] * 3,)


def test_a_hook_is_part_of_the_encoder() -> None:
    def of(*, after: Any = None, before: Any = None) -> Any:
        module = nn.Sequential(nn.Identity())
        if after is not None:
            module[0].register_forward_hook(after)
        if before is not None:
            module[0].register_forward_pre_hook(before)
        return ModuleEncoder(module).identity()["version"]

    def scaled(by: float) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return output * by

        return hook

    found = [of(), of(after=doubling), of(before=tripling), of(after=scaled(2.0)), of(after=scaled(3.0))]
    assert all(one != other for i, one in enumerate(found) for other in found[i + 1 :])
    assert of(after=scaled(2.0)) == found[3]


def uses_a_package(x: Tensor) -> Any:
    return packaged.work(x)  # type: ignore[name-defined]  # noqa: F821


def test_an_installed_package_is_known_by_name_and_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site-packages").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))

    def of(text: str) -> Any:
        (tmp_path / "site-packages" / "packaged_for_test.py").write_text(text)
        sys.modules.pop("packaged_for_test", None)
        import packaged_for_test  # pyright: ignore[reportMissingImports]

        monkeypatch.setitem(globals(), "packaged", packaged_for_test)
        return ModuleEncoder(uses_a_package).identity()["version"], calling(packaged_for_test.work)

    try:
        first = of("__version__ = '1.0'\ndef work(x): return x\n")
        second = of("__version__ = '2.10'\ndef work(x): return x\n")
    finally:
        sys.modules.pop("packaged_for_test", None)
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert "1.0" in str(first[0])


def reads_what_cannot_be_described(x: Tensor) -> Tensor:
    return x * state_of_handle()


def state_of_handle() -> Any:
    return 1 + HANDLE.locked()


HANDLE = threading.Lock()


class Reading(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return reads_what_cannot_be_described(x)


def test_the_hint_for_what_cannot_be_described_works_as_it_stands(tmp_path: Path) -> None:
    dataset = TensorDataset(torch.arange(8.0).reshape(4, 2))
    module = Reading()
    settings: dict[str, Any] = {"cache_dir": tmp_path, "precompute": {"workers": 0}, "shuffle": False}
    hint = 'stoker.ModuleEncoder(module, version="1", field="0")'

    with pytest.raises(EncoderError, match="HANDLE") as refused:
        ModuleEncoder(module)
    assert hint.replace(', field="0"', "") in str(refused.value)
    with pytest.raises(EncoderError, match="HANDLE") as refused:
        stoker.cached(dataset, encoder=module, **settings)
    assert hint.replace(', field="0"', "") in str(refused.value)

    encoder = eval(hint, {"stoker": stoker, "module": module})
    ((latents,),) = list(stoker.cached(dataset, encoder=encoder, **settings))
    torch.testing.assert_close(latents.cpu(), torch.arange(8.0).reshape(4, 2))


def test_a_settings_array_counts_by_content() -> None:
    assert calling_with(np.arange(3)) != calling_with(np.arange(1, 4))
    assert calling_with(np.arange(3)) == calling_with(np.arange(3))


def calling_with(value: Any) -> Any:
    module = nn.Identity()
    module.value = value
    return ModuleEncoder(module).identity()["version"]


class Keeping(nn.Module):
    """Keeps something of no use."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def holding_itself(value: int, how: str) -> nn.Module:
    if how == "list":
        kept: Any = [value]
        kept.append(kept)
    elif how == "dict":
        kept = {"value": value}
        kept["kept"] = {"again": kept}
    else:
        kept = [value]
        module = Keeping(kept)
        kept.append(module)
        return module
    return Keeping(kept)


@pytest.mark.parametrize("how", ["list", "dict", "module"])
def test_an_attribute_that_holds_itself_is_told_by_what_else_it_holds(how: str) -> None:
    first, again, other = (ModuleEncoder(holding_itself(value, how)).identity() for value in (1, 1, 2))

    assert first == again
    assert first != other


def test_an_attribute_that_is_nested_too_deep_is_refused_with_the_cure() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(EncoderError, match="version="):
        ModuleEncoder(Keeping(deep))


def test_a_module_that_cannot_be_imported_is_tried_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script ends the program that imports it, and one for another machine fails."""
    tries = tmp_path / "tries"
    (tmp_path / "used_script.py").write_text(
        f"import sys\nwith open({str(tries)!r}, 'a') as file: file.write('.')\nsys.exit('no arguments')\n"
    )
    (tmp_path / "used_caller.py").write_text(
        "def late(x):\n    if x is None:\n        import used_script\n        return used_script.run(x) + 1\n"
        "    return x * 2 + 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    late = importlib.import_module("used_caller").late

    assert imported_inside(late) == {}
    assert tries.read_text() == "."
