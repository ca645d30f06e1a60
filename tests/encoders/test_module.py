from __future__ import annotations

import functools
import importlib.util
import linecache
import operator
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stoker.encoders.module import ModuleEncoder, describe_function
from stoker.encoders.protocol import EncodeBatchSize, Encoder
from stoker.errors import EncoderError
from stoker.schema import Field

VECTOR = {"data": Field(shape=(4,), dtype="float32"), "label": Field(shape=(), dtype="int64")}
SERIES = {"data": Field(shape=(6, 4), dtype="float32", time=True)}


class Scaled(nn.Module):
    """A linear map, with a plain number and a buffer that matter as much as its weights."""

    def __init__(self, scale: float = 1.0, shift: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        self.scale = scale
        self.register_buffer("shift", torch.tensor(shift), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.linear(x) + self.shift


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def test_encodes_and_passes_other_fields_through() -> None:
    module = Scaled()
    encoder = ModuleEncoder(module, output="z")
    batch = {"data": torch.randn(5, 4), "label": torch.arange(5)}

    record = encoder.encode(batch)

    assert isinstance(encoder, Encoder)
    assert list(record) == ["z", "label"]
    torch.testing.assert_close(record["z"], module(batch["data"]))
    assert encoder.schema(VECTOR) == {"z": Field(shape=(3,), dtype="float32"), "label": VECTOR["label"]}


def test_a_module_is_probed_where_its_weights_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """`meta` stands for a GPU; without its two refusals, which are about other things."""
    monkeypatch.setattr("stoker.encoders.module.module_weights", lambda m: dict(m.named_parameters()))
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    encoder = ModuleEncoder(nn.Linear(8, 4, device="meta"))

    schema = encoder.schema({"data": Field(shape=(8,), dtype="float32")})

    assert schema["latent"].shape == (4,)


def test_freezes_the_module() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).train()

    encoder = ModuleEncoder(module)

    assert not module.training
    assert not any(p.requires_grad for p in module.parameters())
    x = {"data": torch.randn(8, 4)}
    assert torch.equal(encoder.encode(x)["latent"], encoder.encode(x)["latent"])


def test_time_steps_reach_the_module_one_by_one() -> None:
    seen: list[torch.Size] = []

    def spy(x: Tensor) -> Tensor:
        seen.append(x.shape)
        return x.sum(-1, keepdim=True)

    encoder = ModuleEncoder(spy, time="steps", version="1")

    latent = encoder.encode({"data": torch.ones(2, 6, 4)})["latent"]

    assert seen == [torch.Size([12, 4])]
    assert latent.shape == (2, 6, 1)
    assert encoder.independent_steps
    assert encoder.schema(SERIES)["latent"] == Field(shape=(6, 1), dtype="float32", time=True)


def test_whole_trajectories_can_keep_or_lose_their_time() -> None:
    kept = ModuleEncoder(doubled, time="whole").schema(SERIES)["latent"]
    lost = ModuleEncoder(lambda x: x.mean(1), version="1").schema(SERIES)["latent"]

    assert kept == Field(shape=(6, 4), dtype="float32", time=True)
    assert lost == Field(shape=(4,), dtype="float32")
    assert not ModuleEncoder(doubled, time="whole").independent_steps


def test_several_fields_and_outputs() -> None:
    encoder = ModuleEncoder(
        lambda a, b: (a + b, a - b), field=("a", "b"), output=("sum", "difference"), version="1"
    )

    record = encoder.encode({"a": torch.full((2, 3), 5.0), "b": torch.ones(2, 3), "c": torch.zeros(2)})

    assert list(record) == ["sum", "difference", "c"]
    assert record["difference"].tolist() == [[4.0] * 3] * 2


def test_ragged_fields_stay_ragged_or_become_fixed() -> None:
    ragged = {"data": Field(shape=(-1, 4), dtype="float32", ragged=True)}

    assert ModuleEncoder(doubled).schema(ragged)["latent"] == Field(
        shape=(-1, 4), dtype="float32", ragged=True
    )
    assert ModuleEncoder(lambda x: x.mean(1), version="1").schema(ragged)["latent"] == Field(
        shape=(4,), dtype="float32"
    )
    assert ModuleEncoder(doubled).encode_batch_size(ragged) == EncodeBatchSize(samples=1)


def test_the_group_is_from_the_schema_or_given() -> None:
    assert ModuleEncoder(doubled).encode_batch_size(VECTOR) == EncodeBatchSize(samples=256)
    assert ModuleEncoder(doubled, encode_batch=3).encode_batch_size(VECTOR) == EncodeBatchSize(samples=3)


def identity(module: Any, **settings: Any) -> Any:
    return ModuleEncoder(module, **settings).identity()


def test_equal_encoders_have_equal_identities() -> None:
    assert identity(Scaled()) == identity(Scaled())
    assert identity(doubled) == identity(doubled)
    assert identity(functools.partial(F.pad, pad=(1, 1))) == identity(functools.partial(F.pad, pad=(1, 1)))


def change_weight() -> nn.Module:
    module = Scaled()
    with torch.no_grad():
        module.linear.weight[0, 0] += 1e-7
    return module


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(change_weight, id="one-weight"),
        pytest.param(lambda: Scaled(shift=1e-6), id="a-buffer-that-is-not-saved"),
        pytest.param(lambda: Scaled(scale=1.5), id="a-plain-number"),
    ],
)
def test_whatever_changes_the_output_changes_the_identity(other: Any) -> None:
    assert identity(other()) != identity(Scaled())


def test_equal_weights_under_another_stride_are_another_encoder() -> None:
    first, second = nn.Conv1d(4, 4, 3, stride=1), nn.Conv1d(4, 4, 3, stride=2)
    second.load_state_dict(first.state_dict())

    assert identity(first) != identity(second)


def closure_of(factor: object) -> Any:
    def encode(x: Tensor) -> Tensor:
        return x * factor

    return encode


def test_what_a_function_captures_is_part_of_it() -> None:
    assert identity(closure_of(2.0)) == identity(closure_of(2.0))
    assert identity(closure_of(2.0)) != identity(closure_of(3.0))
    assert identity(closure_of(torch.ones(2))) != identity(closure_of(torch.zeros(2)))
    assert identity(functools.partial(F.pad, pad=(1, 1))) != identity(functools.partial(F.pad, pad=(2, 1)))


class Vae(nn.Module):
    """Encodes by a method, as autoencoders do."""

    def __init__(self, fill: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        nn.init.constant_(self.linear.weight, fill)
        nn.init.zeros_(self.linear.bias)

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def mean(self, x: Tensor) -> Tensor:
        return self.linear(x)


@pytest.mark.parametrize("bound", [lambda v: v.encode, lambda v: functools.partial(v.encode)])
def test_a_method_of_a_module_is_known_by_the_module(bound: Any) -> None:
    vae = Vae().train()

    encoder = ModuleEncoder(bound(vae))

    assert not vae.training
    assert not any(p.requires_grad for p in vae.parameters())
    assert set(encoder.weights()) == {"linear.weight", "linear.bias"}
    assert encoder.identity() == identity(bound(Vae()))
    assert encoder.identity() != identity(bound(Vae(fill=2.0)))
    assert encoder.identity() != identity(Vae().mean)
    vae.train()
    with pytest.raises(EncoderError, match="training mode"):
        encoder.encode({"data": torch.zeros(1, 4)})


def test_a_partial_of_a_module_is_known_by_its_weights() -> None:
    assert identity(functools.partial(Vae())) != identity(functools.partial(Vae(fill=2.0)))


class Codec:
    """No module, but settings of its own."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def encode(self, x: Tensor) -> Tensor:
        return self.scale * x


def test_a_method_of_a_plain_object_is_known_by_its_settings() -> None:
    assert identity(Codec(1.0).encode) == identity(Codec(1.0).encode)
    assert identity(Codec(1.0).encode) != identity(Codec(2.0).encode)


@pytest.mark.parametrize(
    "compiled",
    [torch.relu, torch.ones(2).add, functools.partial(torch.add, alpha=2), operator.itemgetter(0)],
    ids=["function", "method", "partial", "object"],
)
def test_compiled_code_needs_a_version(compiled: Any) -> None:
    with pytest.raises(EncoderError, match="version="):
        ModuleEncoder(compiled)
    assert identity(compiled, version="1")["version"] == "1"


def module_in(folder: Path, code: str) -> Any:
    """An instance of class `Net` from a module file with this code."""
    path = folder / "net_of_test.py"
    path.write_text("import torch\nlog = __import__('logging').getLogger('x')\n" + code)
    linecache.clearcache()
    spec = importlib.util.spec_from_file_location("net_of_test", path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["net_of_test"] = module
    try:
        exec(compile(path.read_text(), path, "exec"), vars(module))  # the loader would take old bytecode
        return identity(module.Net())
    finally:
        del sys.modules["net_of_test"]


NET = """
FACTOR = 2.0
class Base(torch.nn.Module):
    def forward(self, x):
        return self.step(x) * FACTOR
    def step(self, x):
        return x + 1
class Net(Base):
    @torch.no_grad()
    def forward(self, x):
        log.debug("forward")
        return super().forward(x)
"""


@pytest.mark.parametrize(("old", "new"), [("x + 1", "x + 2"), ("FACTOR = 2.0", "FACTOR = 3.0")])
def test_base_classes_and_globals_of_forward_are_part_of_a_module(tmp_path: Path, old: str, new: str) -> None:
    first = module_in(tmp_path, NET)

    assert module_in(tmp_path, NET) == first
    assert module_in(tmp_path, NET.replace(old, new)) != first


def test_a_version_stands_for_the_code() -> None:
    assert identity(lambda x: x, version="1")["version"] == "1"
    assert identity(Scaled(), version="1")["weights"] == identity(Scaled())["weights"]


def test_code_that_cannot_be_told_apart_needs_a_version() -> None:
    with pytest.raises(EncoderError, match="version="):
        ModuleEncoder(closure_of(object()))
    made: dict[str, Any] = {}
    exec("def hidden(x): return x", made)
    with pytest.raises(EncoderError, match="version="):
        ModuleEncoder(made["hidden"])
    assert ModuleEncoder(made["hidden"], version="1").identity()["version"] == "1"


def test_weights_loaded_later_are_seen() -> None:
    """In a notebook one encoder object lives long, and its digest is remembered."""
    module = Scaled()
    encoder = ModuleEncoder(module)
    before = encoder.identity()
    module.load_state_dict({name: value + 1 for name, value in module.state_dict().items()})

    assert encoder.identity() != before


def test_weights_are_parameters_and_buffers() -> None:
    assert set(ModuleEncoder(Scaled()).weights()) == {"linear.weight", "linear.bias", "shift"}
    assert ModuleEncoder(doubled).weights() == {}


def test_weights_without_a_value_are_refused_with_the_cure() -> None:
    with pytest.raises(EncoderError, match=r"'0\.weight'.*module\(sample\).*load_state_dict"):
        ModuleEncoder(nn.Sequential(nn.LazyLinear(8)))


def test_statistics_of_the_batch_are_refused() -> None:
    with pytest.raises(EncoderError, match="neighbors"):
        ModuleEncoder(nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)))


def test_a_module_put_back_into_training_is_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    encoder = ModuleEncoder(module)
    module[1].train()

    with pytest.raises(EncoderError, match="training mode"):
        encoder.encode({"data": torch.randn(3, 4)})


@pytest.mark.parametrize(
    ("settings", "schema", "said"),
    [
        pytest.param({"field": "x"}, VECTOR, "'x'", id="no-such-field"),
        pytest.param({"time": "steps"}, VECTOR, "time='none'", id="no-time"),
        pytest.param({"output": "label"}, VECTOR, "label", id="names-clash"),
        pytest.param({"output": ("a", "b")}, VECTOR, r"\['a', 'b'\]", id="too-few-outputs"),
    ],
)
def test_samples_that_do_not_fit_are_refused(settings: Any, schema: Any, said: str) -> None:
    with pytest.raises(EncoderError, match=said):
        ModuleEncoder(doubled, **settings).schema(schema)


def test_a_module_that_fails_is_named_with_the_shapes() -> None:
    with pytest.raises(EncoderError, match=r"\(1, 5\)"):
        ModuleEncoder(Scaled()).schema({"data": Field(shape=(5,), dtype="float32")})


def test_a_module_of_single_steps_that_gets_trajectories_is_told_how_to_get_steps() -> None:
    trajectory = {"data": Field(shape=(7, 5), dtype="float32", time=True)}

    with pytest.raises(EncoderError, match=r"time='steps'"):
        ModuleEncoder(nn.Conv1d(1, 2, 3)).schema(trajectory)
    with pytest.raises(EncoderError) as caught:
        ModuleEncoder(nn.Conv1d(1, 2, 3), time="steps").schema(trajectory)
    assert "steps" not in caught.value.problem.hint


def test_outputs_must_count_the_samples() -> None:
    with pytest.raises(EncoderError, match="Axis 0"):
        ModuleEncoder(lambda x: x.mean(), version="1").encode({"data": torch.randn(3, 4)})


def test_outputs_that_cannot_be_stored_are_refused() -> None:
    with pytest.raises(EncoderError, match="complex64"):
        ModuleEncoder(torch.fft.fft, version="1").schema(VECTOR)


def test_that_a_module_is_frozen_in_place_is_said_when_it_changes(caplog) -> None:
    module = nn.Linear(2, 2)

    for _ in range(2):
        ModuleEncoder(module)

    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "Linear (2 weight tensors) is frozen in place" in record.message
    assert "copy.deepcopy(module)" in record.message


def test_nothing_is_said_of_a_module_that_needs_no_gradients(caplog) -> None:
    module = nn.Linear(2, 2).requires_grad_(False)

    ModuleEncoder(module)

    assert not caplog.records
    assert not module.training


def _from_file(path: Path, text: str) -> Any:
    path.write_text(text)
    linecache.clearcache()
    spec = importlib.util.spec_from_file_location("used_by_an_encoder", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CALLS_A_HELPER = """
def scale(x): return x * {factor} if x is not None else scale(x)
def encode(x): return scale(x).reshape(-1)
{extra}
"""


def _helper_identity(folder: Path, name: str, factor: str, extra: str = "") -> Any:
    text = CALLS_A_HELPER.format(factor=factor, extra=extra)
    return describe_function(_from_file(folder / name, text).encode)


def test_a_changed_function_that_the_encoder_calls_is_another_encoder(tmp_path: Path) -> None:
    first = _helper_identity(tmp_path, "a.py", "1.0")
    assert first == _helper_identity(tmp_path, "b.py", "1.0")
    assert first != _helper_identity(tmp_path, "c.py", "1000.0")


def test_a_global_named_like_an_attribute_is_not_part_of_the_encoder(tmp_path: Path) -> None:
    first = _helper_identity(tmp_path, "a.py", "1.0")
    assert first == _helper_identity(tmp_path, "b.py", "1.0", "reshape = object()")


def scripted(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(module)


def traced(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(module, torch.ones(1, 3))


@pytest.mark.parametrize("compiled", [scripted, traced])
def test_a_module_of_torchscript_encodes_with_a_version(compiled: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.ReLU())).eval()
    encoder = ModuleEncoder(compiled(plain), version="1")
    values = torch.randn(5, 3)

    assert torch.equal(encoder.encode({"data": values})["latent"], plain(values))
    assert not any(weight.requires_grad for weight in encoder.weights().values())
    again = ModuleEncoder(compiled(plain), version="1").identity()
    assert encoder.identity() == again
    with torch.no_grad():
        plain[0].weight += 1
    assert ModuleEncoder(compiled(plain), version="1").identity() != again
    assert ModuleEncoder(compiled(plain), version="2").identity()["version"] == "2"
    with pytest.raises(EncoderError, match="version="):
        ModuleEncoder(compiled(plain))


def test_a_module_of_torchscript_that_normalises_by_its_batch_is_refused() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False))

    with pytest.raises(EncoderError, match=r"BatchNorm1d.* normalizes by its batch"):
        ModuleEncoder(scripted(module), version="1")


class Moments(nn.Module):
    """Takes images of 16 x 16 and more, and names what it returns."""

    def __init__(self, made: Any = dict) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 4, 16, 16)
        self.made = made

    def forward(self, x: Tensor) -> Any:
        return self.made(mean=self.patches(x), std=self.patches(x))


ONE_SIZE = {"image": Field(shape=(3, 64, 64), dtype="float32")}
ANY_SIZE = {
    "image": Field(shape=(-1,), dtype="float32", ragged=True, axes=("3", "*", "*")),
    "image.shape": Field(shape=(3,), dtype="int64"),
}


@pytest.mark.parametrize("samples", [ONE_SIZE, ANY_SIZE])
def test_a_module_that_returns_a_dict_is_told_so_for_images_of_one_and_of_several_sizes(samples: Any) -> None:
    encoder = ModuleEncoder(Moments(), field="image", output=("mean", "std"), version="1")

    with pytest.raises(EncoderError, match=r"returned \(dict\) .*\['mean', 'std'\]") as caught:
        encoder.schema(samples)

    assert "output=" in caught.value.hint


def failing(x: Tensor) -> Tensor:
    raise RuntimeError(f"the module does not like {x.shape[2]} x {x.shape[3]}")


def test_a_module_that_takes_no_size_is_refused_with_the_error_of_a_usual_one() -> None:
    with pytest.raises(EncoderError, match=r"\(1, 3, 64, 64\).*does not like 64 x 64"):
        ModuleEncoder(failing, field="image").schema(ANY_SIZE)
