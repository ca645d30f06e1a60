"""Caches on a real S3 server on loopback, with and without a wire that fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.errors import AccessError, ConfigError
from stoker.store import index, make_recipe, open_cache, open_folder
from stoker.store.mirror import open_remote
from stoker.store.remote import ReplacedError
from stoker.store.storage import attach_mirror, open_storage
from stoker.store.transfer import pull, push
from stoker.units import MIB
from tests.store.fakes import FakeSource, fill, make_cache
from tests.store.faulty_s3 import Faults, a_wire
from tests.store.s3_server import SECRET_KEY, S3Server, an_s3_server, missing
from tests.store.test_mirror import BIG, check

SOURCE = FakeSource(BIG, [("a", 6)])


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    """A server with an empty bucket."""
    if (why := missing()) is not None:
        pytest.skip(why)
    with an_s3_server("moto") as server:
        yield server


@pytest.fixture
def variables(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, with the environment that leads there."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3.variables().items():
        monkeypatch.setenv(name, value)
    return s3


def test_a_cache_in_a_bucket_is_read_elsewhere_and_comes_back_whole(
    variables: S3Server, tmp_path: Path
) -> None:
    made = make_cache(attach_mirror("s3://bucket/one", tmp_path / "a"), SOURCE)

    cache = open_cache(attach_mirror("s3://bucket/one/x", tmp_path / "b", 16 * MIB))
    pulled = pull("s3://bucket/one/x", tmp_path / "c")
    push(tmp_path / "c" / "x", "s3://bucket/two", mirror_dir=tmp_path / "d")

    check(cache, SOURCE)
    check(open_cache(tmp_path / "c" / "x"), SOURCE)
    assert pulled.complete
    shard = f"x/{made.fingerprint}/{made.index.shards[0].file}"
    assert variables.get(f"two/{shard}") == variables.get(f"one/{shard}")


def test_an_index_is_replaced_only_by_who_saw_it(variables: S3Server, tmp_path: Path) -> None:
    storage = open_storage(attach_mirror("s3://bucket/cas", tmp_path / "a") / "x" / "0123456789abcdef")

    assert storage.version("index.json") is None
    storage.put("index.json", b"1", expected=None)
    first = storage.version("index.json")
    storage.put("index.json", b"2", expected=first)

    for stale in (None, first):
        with pytest.raises(ReplacedError):
            storage.put("index.json", b"3", expected=stale)
    assert storage.read("index.json", limit_bytes=10) == b"2"


def test_two_machines_that_finish_at_once_both_count(
    variables: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(SOURCE, None, dtype=None)
    a, b = (open_folder(attach_mirror("s3://bucket/both", tmp_path / name), "x", recipe) for name in "ab")
    fill(a, SOURCE, range(3))
    fill(b, SOURCE, range(3, 6))
    build, met = index.build_index, list[str]()

    def meanwhile(*args: object) -> object:
        index = build(*args)  # type: ignore[arg-type]
        if not met:
            met.append("b")
            b.finish()
        return index

    monkeypatch.setattr(index, "build_index", meanwhile)

    assert a.finish().complete


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(("cut", "short"), id="cut-and-truncated"),
        pytest.param(("busy", "broken", "refused"), id="503-500-and-refused"),
        pytest.param(("flipped", "padded"), id="wrong-bytes"),
    ],
)
def test_a_wire_that_fails_serves_right_records_or_none(
    variables: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...]
) -> None:
    name = kinds[0]
    make_cache(attach_mirror(f"s3://bucket/{name}", tmp_path / "a"), SOURCE)
    with a_wire(variables.url, Faults(rate=1.0, kinds=kinds, most=1, seed=3)) as wire:
        monkeypatch.setenv("AWS_ENDPOINT", wire.url)

        cache = open_cache(attach_mirror(f"s3://bucket/{name}/x", tmp_path / "b"))

        check(cache, SOURCE)
        assert {request.fault for request in wire.requests} & {*kinds}


def test_what_goes_wrong_with_bytes_that_came_is_not_called_the_stores_fault(variables: S3Server) -> None:
    remote = open_remote("s3://bucket")
    etag = remote.put("bytes", b"12345")

    def full(_: bytes) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left") as caught:
        remote.read("bytes", 0, 5, etag=etag, sink=full)

    assert caught.value.errno == 28


def test_a_bucket_that_is_not_there_is_said_at_once(variables: S3Server) -> None:
    with pytest.raises(AccessError, match="there is no such bucket"):
        open_remote("s3://no-such-bucket/x").list()


def test_lacking_credentials_are_said_with_the_variables_to_set(
    variables: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")

    with pytest.raises(AccessError, match=r"no credentials were found.*AWS_ACCESS_KEY_ID") as caught:
        open_remote("s3://bucket/x").list()

    assert caught.value.exit_code == 3


def test_no_error_or_file_holds_a_secret(variables: S3Server, tmp_path: Path) -> None:
    make_cache(attach_mirror("s3://bucket/secret", tmp_path / "a"), SOURCE)
    texts = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    with pytest.raises(FileNotFoundError) as caught:
        open_remote("s3://bucket/secret").get("none")

    assert SECRET_KEY.encode() not in b"".join(texts)
    assert SECRET_KEY not in repr(caught.value)


@pytest.mark.slow
def test_a_forked_process_is_told_instead_of_waiting_for_ever(variables: S3Server) -> None:
    code = (
        "import os, sys\n"
        "from stoker.errors import ConfigError\n"
        "from stoker.store.mirror import open_remote\n"
        "remote = open_remote('s3://bucket/x')\n"
        "remote.list()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        "        remote.list()\n"
        "    except ConfigError as error:\n"
        "        os._exit(7 if 'spawn' in str(error) else 8)\n"
        "    os._exit(9)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )

    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 7


def test_an_address_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "stoker.store.object_store", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)

    with pytest.raises(ConfigError, match=r"pip install 'stoker\[objects\]'"):
        open_remote("gs://bucket/x")
