"""The container example names what exists: options, variables, files and routes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from stoker.cli import serving
from stoker.service.folders import StateFolder
from stoker.service.security import PUBLIC

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "service"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((FOLDER / "compose.yaml").read_text())


def test_the_command_has_options_and_variables_of_the_service(compose: dict[str, Any]) -> None:
    app = typer.Typer()
    app.command()(serving.serve)
    command: Any = typer.main.get_command(app)
    options = {option for param in command.params for option in param.opts}
    script = compose["services"]["service"]["command"][0].replace("$$", "$")
    words = shlex.split(script.partition("exec stoker serve")[2])

    named = {word for word in words if word.startswith("--")}
    assert named
    assert named <= options
    assert re.findall(r"export (\w+)=", script) == [serving.DATABASE]
    values = dict(zip(words[::2], words[1::2], strict=True))
    assert f"/run/secrets/token {StateFolder(Path(values['--state-dir'])).token}" in script
    mounts = [volume.split(":")[1] for volume in compose["services"]["service"]["volumes"]]
    assert all(
        any(Path(values[name]).is_relative_to(one) for one in mounts) for name in ("--root", "--state-dir")
    )
    assert compose["services"]["service"]["ports"] == [f"127.0.0.1:{values['--port']}:{values['--port']}"]


def test_the_parts_of_the_file_name_each_other(compose: dict[str, Any]) -> None:
    for one in compose["services"].values():
        assert set(one["secrets"]) <= set(compose["secrets"])
        named = {volume.split(":")[0] for volume in one["volumes"] if not volume.startswith(".")}
        assert named <= set(compose["volumes"])
        assert set(one.get("depends_on", {})) <= set(compose["services"])
    (path,) = re.findall(
        r"127\.0\.0\.1:8765(/\w+)", " ".join(compose["services"]["service"]["healthcheck"]["test"])
    )
    assert ("GET", path) in PUBLIC


def test_the_image_is_built_from_files_that_exist(compose: dict[str, Any]) -> None:
    build = compose["services"]["service"]["build"]
    context = (FOLDER / build["context"]).resolve()
    text = (context / "Dockerfile").read_text()
    assert context == ROOT
    assert set(build["args"]) <= set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))
    for kept in re.findall(r"^!(\S+)", (context / ".dockerignore").read_text(), re.MULTILINE):
        assert (context / kept).exists()
    for source in re.findall(r"^COPY (?!--from)(\S+)", text, re.MULTILINE):
        assert (context / source).exists()
    extras = (context / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in extras for extra in build["args"]["EXTRAS"].strip("[]").split(","))
