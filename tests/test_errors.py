"""Fact and hint of errors: apart in the message, in a pickle, and in what other processes are told."""

import copy
import inspect
import pickle
import re
from pathlib import Path

import pytest

import stoker
from stoker import errors
from stoker.errors import ConfigError, CorruptError, IncompleteError, Problem, StokerError, arg

CLASSES = sorted(
    (one for one in vars(errors).values() if inspect.isclass(one) and issubclass(one, StokerError)),
    key=lambda one: one.__name__,
)
OWN = {
    "transient": True, "wait_s": 3.0, "status": 404, "shard": "a.shard", "folder": None, "full": True,
    "state": "running",
}  # fmt: skip


def made(kind: type[StokerError]) -> StokerError:
    """Return an error of a class, with a value for each keyword that it takes."""
    taken = inspect.signature(kind.__init__).parameters
    return kind(
        f"/data/Exp. Big/x.h5: {arg('workers', 3)}",
        hint=f"Leave it out. Or give {arg('workers', 0)}",
        **{name: value for name, value in OWN.items() if name in taken},
    )


@pytest.mark.parametrize("kind", CLASSES)
def test_fact_and_hint_stay_apart_whatever_stands_in_them(kind: type[StokerError]) -> None:
    error = made(kind)

    assert error.fact == "/data/Exp. Big/x.h5: workers=3"
    assert error.hint == "Leave it out. Or give workers=0"
    assert str(error) == f"{error.fact}. {error.hint}"
    assert [one.name for one in error.arguments] == ["workers", "workers"]


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_a_pickled_error_keeps_hint_arguments_and_attributes(kind: type[StokerError], again) -> None:
    error = made(kind)
    found = again(error)

    assert type(found) is kind
    assert (str(found), found.args, found.problem) == (str(error), error.args, error.problem)
    assert vars(found) == vars(error)


@pytest.mark.parametrize("kind", CLASSES)
def test_each_class_leads_to_its_own_heading_of_the_documentation(kind: type[StokerError]) -> None:
    page = (Path(__file__).parents[1] / f"docs/{errors.TROUBLESHOOTING}.md").read_text()

    assert made(kind).docs == errors.docs_url(f"{errors.TROUBLESHOOTING}#{kind.__name__.lower()}")
    assert len(re.findall(rf"^##+ {kind.__name__}$", page, re.MULTILINE)) == 1


def test_links_lead_to_the_documentation_of_this_version() -> None:
    minor = ".".join(stoker.__version__.split(".")[:2])
    settings = (Path(__file__).parents[1] / "mkdocs.yml").read_text()

    assert errors.DOCS.endswith(f"/{minor}")
    assert f"site_url: {errors.DOCS}/\n" in settings


def test_an_error_of_a_module_of_its_own_leads_to_the_public_class_above_it() -> None:
    class Special(CorruptError):
        pass

    assert Special("a").docs == CorruptError("a").docs


def test_errors_of_one_module_alone_can_be_pickled_too() -> None:
    from pathlib import Path

    from stoker.store.index import DamagedShardError

    error = DamagedShardError(Path("/c/s. 1"), CorruptError("a sum differs", hint="Push it again"))
    found = pickle.loads(pickle.dumps(error))

    assert (found.problem, found.shard) == (error.problem, "s. 1")
    assert found.fact == "/c/s. 1 can no longer be read: a sum differs"


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_sent_to_another_process_is_the_same_there(kind: type[StokerError]) -> None:
    error = made(kind)
    sent = error.to_json()
    found = kind(f"node 3: {sent['message']}", hint=sent["hint"])

    assert (found.fact, found.hint) == (f"node 3: {error.fact}", error.hint)
    assert found.arguments == error.arguments


def test_of_several_problems_each_is_a_line_and_one_alone_keeps_its_hint() -> None:
    one, two = Problem("a.yaml: x is 0", "Expected 1. Or 2"), Problem("a.yaml: y is not a setting")

    assert ConfigError.of_all([one]).problem == one
    assert str(ConfigError.of_all([one])) == "a.yaml: x is 0. Expected 1. Or 2"
    both = ConfigError.of_all([one, two])
    assert (str(both), both.hint) == (
        "a.yaml: x is 0. Expected 1. Or 2\na.yaml: y is not a setting",
        "",
    )


def test_an_error_without_a_text_is_called_like_its_class() -> None:
    assert (str(IncompleteError()), IncompleteError().fact, IncompleteError().hint) == (
        "IncompleteError",
        "IncompleteError",
        "",
    )
