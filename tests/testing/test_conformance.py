"""The conformance checks must pass on good sources and encoders, and fail on each planted defect."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from stoker.encoders.protocol import EncodeBatchSize
from stoker.schema import Field
from stoker.sources.protocol import FileRef, Part, SourceIdentity
from stoker.testing import check_encoder, check_source


class GoodSource:
    """Six trajectories in two parts, and what a subclass may get wrong."""

    def __len__(self) -> int:
        return 6

    def schema(self) -> dict:
        return {"u": Field(shape=(5, 3), dtype="float32", time=True), "p": Field(shape=(), dtype="int64")}

    def read(self, number: int, start: int | None = None, stop: int | None = None) -> dict:
        if not 0 <= number < 6:
            raise IndexError(number)
        u = (np.arange(15, dtype="float32") + 100 * number).reshape(5, 3)
        return {"u": u[start:stop].copy(), "p": np.asarray(number)}

    def runs(self) -> list:
        return [range(0, 4), range(4, 6)]

    def keys(self) -> list:
        return [f"k{n}" for n in range(6)]

    def identity(self) -> SourceIdentity:
        parts = (Part(name="a", count=4, digest="0"), Part(name="b", count=2, digest="1"))
        return SourceIdentity(kind="good/1", parts=parts)


def bad_source(**methods):
    return type("BadSource", (GoodSource,), methods)()


def changed_read(change):
    def read(self, number, start=None, stop=None):
        return change(self, GoodSource.read(self, number, start, stop), number, start, stop)

    return read


def replaced(**changes):
    return lambda self: dataclasses.replace(GoodSource.identity(self), **changes)


def count_reads(self, sample, *_):
    self.reads = getattr(self, "reads", 0) + 1
    return {**sample, "p": np.asarray(self.reads)}


def shared_buffer(self, sample, number, *_):
    self.kept = getattr(self, "kept", None) or {}
    return {**sample, "p": self.kept.setdefault(number, sample["p"].copy())}


def test_a_good_source_passes() -> None:
    check_source(GoodSource())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param(object(), "lacks a method", id="no-source"),
        pytest.param(bad_source(__len__=lambda self: 0), "at least one sample", id="empty"),
        pytest.param(bad_source(schema=lambda self: {}), "no field", id="no-field"),
        pytest.param(
            bad_source(runs=lambda self: [range(6)]), "crosses from one part", id="run-across-parts"
        ),
        pytest.param(bad_source(runs=lambda self: [range(0, 4)]), "cover every sample", id="runs-miss"),
        pytest.param(bad_source(runs=lambda self: [range(4, 6), range(0, 4)]), "in order", id="runs-order"),
        pytest.param(
            bad_source(runs=lambda self: [range(4), range(4, 4), range(4, 6)]), "empty", id="run-empty"
        ),
        pytest.param(bad_source(keys=lambda self: ["k"] * 5), "5 keys for 6", id="keys-miss"),
        pytest.param(bad_source(keys=lambda self: list(range(6))), "must be strings", id="keys-int"),
        pytest.param(
            bad_source(keys=lambda self: [str(np.random.random()) for _ in range(6)]),
            "differ from call",
            id="keys-random",
        ),
        pytest.param(bad_source(identity=replaced(parts=())), "parts of 0 samples", id="counts"),
        pytest.param(
            bad_source(identity=replaced(settings={"root": "/data/here"})),
            "absolute path '/data/here'",
            id="absolute",
        ),
        pytest.param(
            bad_source(identity=replaced(parts=(Part(name="a", count=6),))), "needs a digest", id="no-digest"
        ),
        pytest.param(
            bad_source(
                identity=replaced(
                    parts=(Part(name="a", count=4, digest="0"), Part(name="a", count=2, digest="1"))
                )
            ),
            "share a name",
            id="same-name",
        ),
        pytest.param(
            bad_source(
                runs=lambda self: [range(6)],
                identity=replaced(parts=(Part(name="a", count=6, files=(FileRef(name="../x", path=None),)),)),
            ),
            "is not relative",
            id="parent-name",
        ),
        pytest.param(
            bad_source(read=changed_read(count_reads)), "differs when it is read again", id="unstable"
        ),
        pytest.param(
            bad_source(read=changed_read(shared_buffer)), "arrays are written to", id="shared-memory"
        ),
        pytest.param(
            bad_source(read=lambda self, n, start=None, stop=None: GoodSource.read(self, n)),
            "not that slice",
            id="no-range",
        ),
        pytest.param(
            bad_source(read=changed_read(lambda self, s, *_: {**s, "p": s["p"][None][start_all]})),
            "'p'",
            id="shape",
        ),
        pytest.param(
            bad_source(read=changed_read(lambda self, s, *_: {**s, "u": s["u"].astype("f8")})),
            "float64",
            id="dtype",
        ),
        pytest.param(
            bad_source(read=changed_read(lambda self, s, *_: {"u": s["u"]})), r"missing \['p'\]", id="field"
        ),
        pytest.param(
            bad_source(read=lambda self, n, start=None, stop=None: GoodSource.read(self, n % 6, start, stop)),
            r"read\(-1\) answers",
            id="out-of-range",
        ),
        pytest.param(
            bad_source(
                __getstate__=lambda self: {"copied": 1},
                keys=lambda self: [f"{getattr(self, 'copied', 0)}{n}" for n in range(6)],
            ),
            "keys\\(\\) change when copied",
            id="copy-differs",
        ),
    ],
)
def test_a_planted_defect_of_a_source_is_found(source, message: str) -> None:
    with pytest.raises((AssertionError, ValueError), match=message):
        check_source(source)


start_all = slice(None)
SAMPLES = {"u": Field(shape=(6, 4), dtype="float32", time=True), "p": Field(shape=(), dtype="int64")}


class GoodEncoder:
    """A linear map of each step, and what a subclass may get wrong."""

    independent_steps = True

    def __init__(self) -> None:
        self.net = nn.Linear(4, 3)

    def schema(self, sample_schema: dict) -> dict:
        return {"z": Field(shape=(6, 3), dtype="float32", time=True), "p": sample_schema["p"]}

    def encode_batch_size(self, sample_schema: dict) -> EncodeBatchSize:
        return EncodeBatchSize(samples=4)

    @torch.no_grad()
    def encode(self, batch: dict) -> dict:
        return {"z": self.net(batch["u"]), "p": batch["p"]}

    def to(self, device: torch.device) -> None:
        self.net.to(device)

    def weights(self) -> dict:
        return {name: tensor.detach() for name, tensor in self.net.state_dict(keep_vars=True).items()}

    def identity(self) -> dict:
        values = [float(tensor.double().sum()) for tensor in self.weights().values()]
        return {"class": "Good", "config": {}, "weights": repr(values), "version": 1}


def bad_encoder(**members):
    return type("BadEncoder", (GoodEncoder,), members)()


def changed_encode(change):
    @torch.no_grad()
    def encode(self, batch):
        return change(self, GoodEncoder.encode(self, batch), batch)

    return encode


def one_buffer(self, record, batch):
    if not hasattr(self, "buffer"):
        self.buffer = torch.empty_like(record["z"])
    return {**record, "z": self.buffer.copy_(record["z"])}


def counting(self, record, batch):
    self.calls = getattr(self, "calls", 0) + 1
    return {**record, "z": record["z"] + (self.calls > 3)}


def writing(self, record, batch):
    batch["u"].add_(1)
    return record


def test_a_good_encoder_passes() -> None:
    check_encoder(GoodEncoder(), SAMPLES)
    check_encoder(bad_encoder(encode_batch_size=lambda self, s: EncodeBatchSize(samples=1, steps=3)), SAMPLES)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        pytest.param({"schema": lambda self, s: {}}, "no field", id="no-field"),
        pytest.param(
            {"schema": lambda self, s: {"z": Field(shape=(6, 2), dtype="float32", time=True), "p": s["p"]}},
            "'z' has shape",
            id="shape",
        ),
        pytest.param(
            {"schema": lambda self, s: {"z": Field(shape=(6, 3), dtype="float16", time=True), "p": s["p"]}},
            "'z' is torch.float32, not float16",
            id="dtype",
        ),
        pytest.param(
            {"encode": changed_encode(lambda self, r, b: {"z": r["z"]})},
            r"encode\(\) gives \['z'\]",
            id="lost",
        ),
        pytest.param(
            {"encode": changed_encode(lambda self, r, b: {k: v[:2] for k, v in r.items()})},
            "2 rows for 4",
            id="rows",
        ),
        pytest.param(
            {"encode_batch_size": lambda self, s: EncodeBatchSize(samples=int(np.random.randint(1, 10**6)))},
            "encode_batch_size",
            id="group-varies",
        ),
        pytest.param(
            {"encode_batch_size": lambda self, s: EncodeBatchSize(samples=4, steps=2)},
            "must have one sample",
            id="group-steps",
        ),
        pytest.param(
            {
                "encode_batch_size": lambda self, s: EncodeBatchSize(samples=1, steps=2),
                "independent_steps": False,
            },
            "although steps are not independent",
            id="group-dependent",
        ),
        pytest.param(
            {"encode": changed_encode(lambda self, r, b: {**r, "z": r["z"] + torch.rand(1)})},
            "for equal input",
            id="random",
        ),
        pytest.param({"encode": changed_encode(counting)}, "state|reuses|neighbors", id="state"),
        pytest.param({"encode": changed_encode(one_buffer)}, "reuses the memory", id="buffer"),
        pytest.param({"encode": changed_encode(writing)}, "writes to its input", id="writes"),
        pytest.param(
            {"encode": changed_encode(lambda self, r, b: {**r, "z": r["z"] - r["z"].mean(0)})},
            "when its neighbors change",
            id="batch-norm",
        ),
        pytest.param(
            {"encode": changed_encode(lambda self, r, b: {**r, "z": r["z"].cumsum(1)})},
            "independent_steps is not true",
            id="steps",
        ),
        pytest.param(
            {"encode": changed_encode(lambda self, r, b: {**r, "z": r["z"] / 0})}, "is not finite", id="nan"
        ),
        pytest.param(
            {"encode": lambda self, b: {"z": self.net(b["u"]), "p": b["p"]}},
            "requires a gradient",
            id="gradient",
        ),
        pytest.param(
            {"identity": lambda self: {"class": "a"}},
            r"lacks \['config', 'version', 'weights'\]",
            id="identity",
        ),
        pytest.param(
            {"identity": lambda self: {"class": "a", "config": {}, "weights": "fixed", "version": 1}},
            "stays when weight",
            id="stale-identity",
        ),
        pytest.param(
            {"weights": lambda self: {k: v.clone() for k, v in self.net.state_dict().items()}},
            "gives copies",
            id="copies",
        ),
    ],
)
def test_a_planted_defect_of_an_encoder_is_found(members: dict, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_encoder(bad_encoder(**members), SAMPLES)


def test_weights_that_do_not_exist_yet_are_found() -> None:
    class Lazy(GoodEncoder):
        def __init__(self) -> None:
            self.net = nn.LazyLinear(3)

        def weights(self) -> dict:
            return dict(self.net.named_parameters())

        def identity(self) -> dict:
            return {"class": "Lazy", "config": {}, "weights": "", "version": 1}

    with pytest.raises(AssertionError, match="has no value yet"):
        check_encoder(Lazy(), SAMPLES)
