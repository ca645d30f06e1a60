"""Arguments that errors name are settings on the command line; all other text arrives as it is."""

from __future__ import annotations

import ast
import pickle
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.config import load_config
from stoker.config.names import OTHER_NAMES, all_settings, in_settings, setting_of
from stoker.errors import (
    ConfigError,
    CorruptError,
    ReadOnlyError,
    SourceError,
    StokerError,
    TransferError,
    arg,
)
from stoker.sources.files import refuse_together

SETTINGS = [
    (arg("preset", "well"), "preset='well'", "data.preset=well"),
    (arg("patch", (1, 4)), "patch=(1, 4)", "'encoder.patch_size=[1, 4]'"),
    (arg("fields", {"u": "n t x"}), "fields={'u': 'n t x'}", "'data.fields={u: n t x}'"),
    (arg("workers", 0), "workers=0", "precompute.workers=0"),
    (arg("strict", False), "strict=False", "data.images.strict=false"),
    (arg("stride"), "stride=", "training.time_stride"),
    (arg("dtype", None), "dtype=None", "training.latent_cache_dtype=null"),
    (arg("lock_s", ..., call="Timeouts"), "Timeouts(lock_s=...)", "data.sql.lock_s=..."),
    (arg("ragged", "pad", setting="--ragged"), "ragged='pad'", "--ragged=pad"),
    (arg("no_setting", 3), "no_setting=3", "no_setting=3"),
]
FOREIGN = [
    "fit=1 order=desc",
    "/data/tier=2/preset='well'.h5",
    "SELECT * FROM t WHERE where=1 AND fields={'u': 'n t x'}",
    "unexpected keyword argument batch_size=3, dtype=float16",
    "data.preset=well, see --tier=host",
    "\ufdd0preset=1",
    "",
]


@pytest.mark.parametrize(("marked", "python", "setting"), SETTINGS)
def test_an_argument_is_a_setting_on_the_command_line(marked: str, python: str, setting: str) -> None:
    error = SourceError(f"no layout. Use {marked} now")

    assert str(error) == f"no layout. Use {python} now"
    assert error.args == (str(error),)
    assert in_settings(error) == f"no layout. Use {setting} now"


@pytest.mark.parametrize("text", FOREIGN)
def test_text_of_a_user_or_a_library_arrives_as_it_is(text: str) -> None:
    error = SourceError(f"{text}: {arg('preset', 'well')}, not {text!r}, {arg('fields')} {text}")

    assert in_settings(error) == f"{text}: data.preset=well, not {text!r}, data.fields {text}"
    assert str(error) == f"{text}: preset='well', not {text!r}, fields= {text}"


@given(st.lists(st.text(), min_size=2, max_size=4), st.sampled_from(SETTINGS))
def test_any_text_around_an_argument_arrives_as_it_is(texts: list[str], known: tuple[str, str, str]) -> None:
    marked, python, setting = known
    error = ConfigError(marked.join(texts))

    assert str(error) == python.join(texts)
    assert in_settings(error) == setting.join(texts)


@given(st.text())
def test_any_value_of_an_argument_can_be_read_back(text: str) -> None:
    said = in_settings(SourceError(arg("where", text)))

    assert str(SourceError(arg("where", text))) == f"where={text!r}"
    (word,) = shlex.split(said)
    assert word.startswith("data.sql.where=")


@pytest.mark.parametrize("kind", [ConfigError, SourceError, TransferError, ReadOnlyError, CorruptError])
def test_every_error_keeps_its_arguments_from_process_to_process_and_in_another(
    kind: type[StokerError],
) -> None:
    error = pickle.loads(pickle.dumps(kind(f"Use {arg('preset', 'well')}")))
    again = SourceError(f"x.h5: {error.marked}")

    assert (str(error), in_settings(error)) == ("Use preset='well'", "Use data.preset=well")
    assert (str(again), in_settings(again)) == ("x.h5: Use preset='well'", "x.h5: Use data.preset=well")
    assert str(SourceError(f"x.h5: {error}")) == "x.h5: Use preset='well'"


def test_a_remedy_can_be_pasted_into_the_command() -> None:
    named = (arg("patch", (1, 4)), arg("preset", "well"), arg("fields", {"u": "n t x c"}))
    said = in_settings(ConfigError(f"Use {', '.join(named)}"))

    words = [word.strip(",") for word in shlex.split(said) if "=" in word]
    config = load_config(None, words)

    assert config.encoder.patch_size == (1, 4)
    assert config.data.preset == "well"
    assert config.data.fields == {"u": "n t x c"}


def test_every_other_name_leads_to_a_setting() -> None:
    assert set(OTHER_NAMES.values()) <= all_settings().keys()


PYTHON_ALONE = (
    *("api", "attend", "attention_mask", "max_length", "norm", "out", "pad"),  # encoders and Tokenize
    *("batch_by", "batch_tokens", "drop_last", "part", "variants"),
    *("allow_bad", "zeros"),  # of adopt
    "spill_dir",  # of SQLSource; TMPDIR does it for all
)
"""Arguments of what the settings files do not have."""


def test_every_argument_that_a_message_names_has_a_setting_where_there_is_one() -> None:
    assert not {*PYTHON_ALONE} & {*setting_of()}
    for path in Path(stoker.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "arg"):
                continue
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            name = call.args[0]
            if isinstance(name, ast.Constant) and "setting" not in given and path.name != "errors.py":
                assert name.value in {*setting_of(), *PYTHON_ALONE}, f"{path}:{call.lineno}"
            elif isinstance(setting := given.get("setting"), ast.Constant):
                option = str(setting.value)
                assert option.startswith("--") or option in all_settings(), f"{path}:{call.lineno}"


def test_errors_of_several_files_in_one_name_settings_as_well() -> None:
    bad = [SourceError(f"{name}: no layout. Use {arg('preset', 'well')}") for name in ("a.h5", "b.h5")]

    with pytest.raises(SourceError) as caught:
        refuse_together(bad, 3, "runs")

    assert in_settings(caught.value).count("data.preset=well") == 2
    assert str(caught.value).count(" preset='well'") == 2
