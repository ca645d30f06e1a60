"""The page that maps the earlier systems names all of their words that are still understood."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

import stoker.compat
from stoker.cli.flags import PrecomputeFlags
from stoker.config.earlier import EARLIER

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()


@pytest.mark.parametrize("name", stoker.compat.__all__)
def test_every_name_is_there_explained_and_mapped(name: str) -> None:
    assert getattr(stoker.compat, name).__doc__
    assert f"`{name}" in PAGE


@pytest.mark.parametrize("key", EARLIER)
def test_every_earlier_setting_is_mapped(key: str) -> None:
    assert f"`{key}`" in PAGE


def test_every_earlier_flag_is_mapped() -> None:
    new = {"retry_quarantined", "devices", "engine", "address"}
    flags = [field.name for field in fields(PrecomputeFlags) if field.name not in new]

    assert [flag for flag in flags if f"`--{flag.replace('_', '-')}" not in PAGE] == []


def test_another_name_lists_those_there_are() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'GridLatentPairDataset'\. Names: GPUCac"):
        stoker.compat.GridLatentPairDataset  # noqa: B018
