"""An encoder behind HTTP, against a real server on this machine that is at fault on request."""

from __future__ import annotations

import fcntl
import os
import pickle
import random
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker.errors import EncoderError
from stoker.schema import Field, Schema
from stoker.testing import check_encoder
from tests.encoders.model_server import DIM, ModelServer, embedding, running, states

FIXED: Schema = {
    "input_ids": Field(shape=(5,), dtype="int32"),
    "attention_mask": Field(shape=(5,), dtype="bool"),
}
RAGGED: Schema = {"input_ids": Field(shape=(-1,), dtype="int32", ragged=True)}


@pytest.fixture
def server() -> Generator[ModelServer]:
    with running() as one:
        yield one


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.encoders.remote._FIRST_PAUSE_S", 0.01)


def encoder(server: ModelServer, **settings: Any) -> stoker.RemoteEncoder:
    given = {"model": "tiny", "revision": "1", "dim": DIM, "retries": 2, "timeout_s": 5.0, **settings}
    return stoker.RemoteEncoder(server.url, **given)


def batch(*rows: list[int]) -> dict[str, torch.Tensor]:
    """Rows of tokens, padded to 5."""
    ids = torch.zeros((len(rows), 5), dtype=torch.int32)
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    return {"input_ids": ids, "attention_mask": ids > 0, "label": torch.arange(len(rows))}


ROWS = [[11, 12, 13], [21, 22], [31, 32, 33, 34, 35], [41]]


# ----------------------------------------------------------------------------------------------------------
# What comes back.


@pytest.mark.parametrize("per_request", [1, 3])
def test_each_sample_has_its_own_embedding_in_whatever_order_they_come(
    server: ModelServer, per_request: int
) -> None:
    server.shuffled = True

    found = encoder(server, per_request=per_request).encode(batch(*ROWS))

    assert torch.allclose(found["embedding"], torch.tensor([embedding(row) for row in ROWS]))
    assert found["label"].tolist() == [0, 1, 2, 3]
    assert found.keys() == {"embedding", "label"}
    assert len(server.requests) == (4 if per_request == 1 else 2)
    path, body = server.requests[0]
    assert (path, body["model"], body["encoding_format"]) == ("/v1/embeddings", "tiny", "float")


def test_text_is_sent_as_text(server: ModelServer) -> None:
    text = "zwei Hündchen".encode()
    one = torch.frombuffer(bytearray(text), dtype=torch.uint8)[None]

    found = encoder(server, field="caption").encode({"caption": one})

    assert torch.allclose(found["embedding"], torch.tensor([embedding("zwei Hündchen")]))
    empty = encoder(server, field="caption").encode({"caption": one[:, :0]})
    assert empty["embedding"].isnan().all()
    assert len(server.requests) == 1


def test_a_sample_without_text_is_set_aside_as_empty(server: ModelServer, tmp_path: Path) -> None:
    source = stoker.TorchSource([{"caption": "a cat"}, {"caption": ""}], text={"caption": "bytes"})

    cache = stoker.precompute(
        source, encoder(server, field="caption"), tmp_path, name="c", device="cpu", workers=0,
        max_quarantined=0.5,
    )  # fmt: skip

    assert "'caption' of the sample is empty" in cache.quarantined[1].error


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_hidden_states_of_padded_tokens_are_those_of_the_real_ones(server: ModelServer, api: str) -> None:
    found = encoder(server, api=api).encode(batch(*ROWS))

    for row, tokens in enumerate(ROWS):
        assert torch.allclose(found["hidden"][row, : len(tokens)], torch.tensor(states(tokens)))
        assert not found["hidden"][row, len(tokens) :].any()


@pytest.mark.parametrize("api", ["openai", "vllm"])
def test_padding_before_the_tokens_is_not_sent_either(server: ModelServer, api: str) -> None:
    mask = torch.tensor([[False, False, True, True, True], [True, True, False, False, False]])
    ids = torch.tensor([[9, 9, 11, 12, 13], [21, 22, 9, 9, 9]])

    found = encoder(server, api=api).encode({"input_ids": ids, "attention_mask": mask})

    assert sorted(body["input"][0] for _, body in server.requests) == [[11, 12, 13], [21, 22]]
    for row, tokens in enumerate(([11, 12, 13], [21, 22])):
        if api == "openai":
            assert torch.allclose(found["embedding"][row], torch.tensor(embedding(tokens)))
        else:
            assert torch.allclose(found["hidden"][row][mask[row]], torch.tensor(states(tokens)))
            assert not found["hidden"][row][~mask[row]].any()


@pytest.mark.parametrize("pad", [0, 9])
@pytest.mark.parametrize("api", ["openai", "vllm"])
def test_a_sample_without_tokens_is_not_sent(server: ModelServer, tmp_path: Path, api: str, pad: int) -> None:
    """Nor are the samples of zeros with which its batch is filled up."""
    rows = batch([11, 12, 13], [], [31])
    rows["input_ids"][~rows["attention_mask"]] = pad
    samples = [{name: value[n] for name, value in rows.items() if name != "label"} for n in range(3)]

    cache = stoker.precompute(
        samples,
        encoder(server, api=api, encode_batch=4),
        tmp_path,
        name="c",
        device="cpu",
        workers=0,
        max_quarantined=0.5,
    )

    assert {tuple(body["input"][0]) for _, body in server.requests} == {(11, 12, 13), (31,)}
    if api == "openai":
        assert list(cache.quarantined) == [1]
        assert torch.allclose(cache[2]["embedding"], torch.tensor(embedding([31])))
    else:
        assert not cache.quarantined
        assert not cache[1]["hidden"].any()
        assert torch.allclose(cache[2]["hidden"][:1], torch.tensor(states([31])))


@pytest.mark.parametrize("api", ["vllm", "sglang", "vllm-files"])
def test_ragged_samples_come_alone_and_in_a_padded_batch(
    server: ModelServer, tmp_path: Path, api: str
) -> None:
    server.folder = tmp_path
    own = {"layers": [4, 8], "files": tmp_path} if api == "vllm-files" else {}
    remote = encoder(server, api=api, **own)
    lengths = torch.tensor([3, 2, 5, 1])

    several = remote.encode({"input_ids": batch(*ROWS)["input_ids"], "input_ids.lengths": lengths})

    names = ["hidden_4", "hidden_8"] if api == "vllm-files" else ["hidden"]
    assert sorted(remote.schema(RAGGED)) == names
    for place, name in enumerate(names):
        assert several[name + ".lengths"].tolist() == lengths.tolist()
        layer = (4, 8)[place] if len(names) > 1 else 0
        for row, tokens in enumerate(ROWS):
            alone = remote.encode({"input_ids": torch.tensor([tokens], dtype=torch.int32)})[name][0]
            assert torch.equal(several[name][row, : len(tokens)], alone)
            assert torch.allclose(alone, torch.tensor(states(tokens, layer)), rtol=0.01)
    assert not list(tmp_path.glob("*.safetensors")), "files are deleted once they are read"


def test_a_file_is_read_once_its_writer_lets_go_of_the_lock(server: ModelServer, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from stoker.encoders.remote import _read_locked

    path, lock = tmp_path / "a.safetensors", tmp_path / "a.safetensors.lock"
    fd = os.open(lock, os.O_CREAT | os.O_WRONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)

    def write() -> None:
        time.sleep(0.2)
        save_file({"x": torch.ones(3)}, path)
        os.close(fd)

    thread = threading.Thread(target=write)
    thread.start()
    assert _read_locked(path, lock, time.monotonic() + 5)["x"].tolist() == [1.0] * 3
    thread.join()
    held = os.open(lock, os.O_WRONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(OSError):
        _read_locked(path, lock, time.monotonic() + 0.1)
    os.close(held)


def test_it_keeps_the_promises_of_an_encoder(server: ModelServer) -> None:
    check_encoder(encoder(server, encode_batch=3), {"input_ids": FIXED["input_ids"]})
    check_encoder(encoder(server, api="sglang"), RAGGED)


def test_so_many_requests_are_in_flight(server: ModelServer) -> None:
    server.wait_s = 0.1

    encoder(server, in_flight=3).encode(batch(*[[n, n] for n in range(1, 10)]))

    assert server.most_at_once == 3


def test_equal_samples_are_asked_for_once(server: ModelServer) -> None:
    found = encoder(server).encode(batch([7, 8], [7, 8], [7, 8], [9]))

    assert len(server.requests) == 2
    assert torch.equal(found["embedding"][0], found["embedding"][2])


# ----------------------------------------------------------------------------------------------------------
# Faults that pass.


@pytest.mark.parametrize(
    "fault",
    ["status:500", "status:503", "status:429", "closed", "cut", "nan", "null", "text", "short", "swapped",
     "fewer-tokens", "other-id"],
)  # fmt: skip
@pytest.mark.parametrize("api", ["openai", "vllm", "sglang"])
def test_a_fault_that_passes_costs_one_more_request(server: ModelServer, fault: str, api: str) -> None:
    if api == "sglang" and fault == "swapped":
        pytest.skip("one sample a request, with its id")
    server.faults[22] = [fault]

    found = encoder(server, api=api).encode(batch(*ROWS))

    own = found["embedding" if api == "openai" else "hidden"]
    wanted = embedding(ROWS[1]) if api == "openai" else states(ROWS[1])
    assert torch.allclose(own[1] if api == "openai" else own[1, :2], torch.tensor(wanted))
    assert server.asked == {11: 1, 21: 2, 31: 1, 41: 1}


def test_a_request_that_hangs_is_given_up_and_sent_again(server: ModelServer) -> None:
    server.faults[22] = ["hang"]
    began = time.monotonic()

    found = encoder(server, timeout_s=0.5).encode(batch(*ROWS))

    assert torch.allclose(found["embedding"], torch.tensor([embedding(row) for row in ROWS]))
    assert 0.4 < time.monotonic() - began < 4


def test_retry_after_is_respected(server: ModelServer) -> None:
    server.faults[22] = ["status:429:1"]

    encoder(server).encode(batch([21, 22]))

    assert server.times[1] - server.times[0] >= 0.95


def test_headers_are_sent_and_are_not_shown(server: ModelServer) -> None:
    remote = encoder(server, headers={"Authorization": "Bearer secret"})

    remote.encode(batch([1]))

    assert server.headers == ["Bearer secret"]
    assert "secret" not in repr(remote) + str(remote.identity())


# ----------------------------------------------------------------------------------------------------------
# Faults that stay: of one sample, or of the server.


@pytest.mark.parametrize(
    "fault", ["status:500", "status:400", "hang", "cut", "nan", "swapped", "other-id", "fewer-tokens"]
)
@pytest.mark.parametrize("per_request", [1, 4])
def test_a_sample_that_is_always_answered_wrongly_is_quarantined_alone(
    server: ModelServer, tmp_path: Path, fault: str, per_request: int
) -> None:
    server.faults[52] = [f"always:{fault}"]
    samples = [{"input_ids": row.int()} for row in torch.arange(10, 110, 10)[:, None] + torch.arange(1, 4)]
    remote = encoder(server, per_request=per_request, encode_batch=4, timeout_s=0.4, retries=1)

    cache = stoker.precompute(
        samples, remote, tmp_path, name="c", device="cpu", workers=0, max_quarantined=0.5
    )

    assert list(cache.quarantined) == [4]
    assert server.url in cache.quarantined[4].error
    for n in [*range(4), *range(5, 10)]:
        assert torch.allclose(
            cache[n]["embedding"], torch.tensor(embedding(samples[n]["input_ids"].tolist()))
        )


def test_the_search_for_the_sample_at_fault_asks_for_no_other_again(
    server: ModelServer, tmp_path: Path
) -> None:
    server.faults[62] = ["always:status:400"]
    samples = [{"input_ids": row.int()} for row in torch.arange(10, 170, 10)[:, None] + torch.arange(1, 4)]

    stoker.precompute(
        samples,
        encoder(server, encode_batch=8),
        tmp_path,
        name="c",
        device="cpu",
        workers=0,
        max_quarantined=0.5,
    )

    others = {first: server.asked[first] for first in range(11, 170, 10) if first != 61}
    assert others == dict.fromkeys(others, 1)
    assert server.asked[61] <= 2


def test_results_of_earlier_batches_are_not_kept_in_memory(server: ModelServer) -> None:
    """Also where a sample of each batch fails, and batches are filled up with zeros of several lengths."""
    remote = encoder(server, per_request=4, retries=0)
    server.faults[99] = ["always:status:400"]

    for first in range(10, 90, 10):
        rows = batch([first, 1], [first, 99], [])
        ids, mask = (rows[name][:, : 2 + first % 3] for name in ("input_ids", "attention_mask"))
        mask[2] = True
        with pytest.raises(ValueError, match="400"):
            remote.encode({"input_ids": ids, "attention_mask": mask})

    assert len(remote._searched) == 2
    assert len(remote._zeros) == 1


@pytest.mark.parametrize("every", ["status:500", "status:429", "hang", "closed", "nan", "status:400"])
def test_a_server_that_answers_nothing_ends_the_run_and_quarantines_nothing(
    server: ModelServer, tmp_path: Path, every: str
) -> None:
    samples = [{"input_ids": row.int()} for row in torch.arange(10, 110, 10)[:, None] + torch.arange(1, 4)]
    settings: dict[str, Any] = {"encode_batch": 4, "timeout_s": 0.4, "retries": 1}
    server.every = every

    with pytest.raises(EncoderError, match=server.url):
        stoker.precompute(samples, encoder(server, **settings), tmp_path, name="c", device="cpu", workers=0)

    server.every = ""
    cache = stoker.precompute(
        samples, encoder(server, **settings), tmp_path, name="c", device="cpu", workers=0
    )
    assert len(cache) == 10


def test_a_server_that_goes_away_on_the_way_ends_the_run_and_it_resumes(
    server: ModelServer, tmp_path: Path
) -> None:
    samples = [{"input_ids": row.int()} for row in torch.arange(10, 130, 10)[:, None] + torch.arange(1, 4)]
    remote = encoder(server, encode_batch=2, timeout_s=0.4, retries=0)
    server.faults[72] = ["always:go"]
    real = server.fault

    def fault(contents: list[Any]) -> str:
        if real(contents) == "go":
            server.every = "status:503"
        return server.every

    server.fault = fault  # type: ignore[method-assign]
    with pytest.raises(EncoderError, match="503"):
        stoker.precompute(samples, remote, tmp_path, name="c", device="cpu", workers=0)
    server.every, server.faults = "", {}
    before = len(server.requests)

    cache = stoker.precompute(samples, remote, tmp_path, name="c", device="cpu", workers=0)

    assert len(cache) == 12
    assert not cache.quarantined
    again = {one[0] for _, body in server.requests[before:] for one in body["input"]}
    assert 11 not in again, "what was stored is not asked for again"


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refused_key_or_model_ends_the_run_at_once(server: ModelServer, status: int) -> None:
    server.every = f"status:{status}"

    with pytest.raises(EncoderError, match=str(status)):
        encoder(server, in_flight=1).encode(batch([1, 2]))

    assert len(server.requests) == 1


def test_no_server_is_an_error_that_says_so() -> None:
    remote = stoker.RemoteEncoder("http://127.0.0.1:9", model="m", revision="1", dim=2, retries=1)

    with pytest.raises(EncoderError, match=r"127\.0\.0\.1:9.*unreachable"):
        remote.encode(batch([1]))


def test_all_requests_of_a_batch_end_by_the_deadline(server: ModelServer) -> None:
    server.every = "hang"
    began = time.monotonic()

    with pytest.raises(EncoderError):
        encoder(server, timeout_s=30, deadline_s=1.0, retries=9).encode(batch(*ROWS))

    assert time.monotonic() - began < 5


def test_a_file_outside_the_folder_is_not_read(server: ModelServer, tmp_path: Path) -> None:
    folder = tmp_path / "states"
    folder.mkdir()
    server.folder = folder
    remote = encoder(server, api="vllm-files", layers=[4, 8], files=folder, retries=0)
    remote.encode(batch([1, 2]))
    for fault, says in (("outside", "not in"), ("other-tokens", "other tokens"), ("nan", "finite")):
        server.faults[22] = [f"always:{fault}"]
        with pytest.raises(ValueError, match=says):
            remote.encode(batch(*ROWS))
        with pytest.raises(
            ValueError, match=says
        ):  # told once more, as to the search for the sample at fault
            remote.encode(batch(*ROWS))
    server.faults = {}
    assert remote.encode(batch(*ROWS)).keys() == {"hidden_4", "hidden_8", "label"}


# ----------------------------------------------------------------------------------------------------------
# Identity, pickling, arguments.


def test_the_identity_is_model_and_revision_not_the_place_or_the_pace() -> None:
    def one(url: str = "http://a:1", **settings: Any) -> Any:
        given = {"model": "m", "revision": "1", "dim": 4, **settings}
        return stoker.RemoteEncoder(url, **given).identity()

    same = [
        one(),
        one("https://b"),
        one(in_flight=2),
        one(timeout_s=1),
        one(headers={"a": "b"}),
        one(retries=1),
    ]
    assert all(identity == same[0] for identity in same)
    others = [one(model="n"), one(revision="2"), one(dim=5), one(body={"dimensions": 4}), one(api="vllm")]
    assert all(identity != same[0] for identity in others)


def test_it_is_sent_to_another_process_after_use(server: ModelServer) -> None:
    remote = encoder(server)
    wanted = remote.encode(batch(*ROWS))["embedding"]

    found = pickle.loads(pickle.dumps(remote)).encode(batch(*ROWS))["embedding"]

    assert torch.equal(found, wanted)


def test_it_leaves_random_numbers_alone(server: ModelServer) -> None:
    server.faults[22] = ["status:500"]
    before = random.getstate(), torch.get_rng_state()

    encoder(server).encode(batch(*ROWS))

    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize(
    "settings",
    [{"api": "rest"}, {"revision": ""}, {"dim": 0}, {"retries": -1}, {"timeout_s": 0}, {"dtype": "int8"},
     {"api": "vllm-files"}, {"api": "vllm-files", "layers": [1]},
     {"layers": [1]}, {"files": "a"}, {"api": "sglang", "per_request": 2}],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(EncoderError):
        stoker.RemoteEncoder("http://a", **{"model": "m", "revision": "1", "dim": 4, **settings})


def test_fields_that_a_server_cannot_take_are_refused(server: ModelServer) -> None:
    text = {"input_ids": Field(shape=(-1,), dtype="uint8", ragged=True)}
    assert encoder(server).schema(text)["embedding"].shape == (DIM,)
    with pytest.raises(EncoderError, match="Tokenize"):
        encoder(server, api="vllm").schema(text)
    with pytest.raises(EncoderError, match="float32"):
        encoder(server).schema({"input_ids": Field(shape=(5,), dtype="float32")})


def test_a_mask_of_another_shape_than_the_tokens_is_refused(server: ModelServer) -> None:
    tokens, other = Field(shape=(5,), dtype="int32"), Field(shape=(3,), dtype="bool")
    samples = {"input_ids": tokens, "attention_mask": other}

    with pytest.raises(EncoderError, match=r"'attention_mask' is bool \(3,\).*'input_ids' are \(5,\)"):
        encoder(server).schema(samples)

    assert "attention_mask" in encoder(server, attention_mask="none").schema(samples)
