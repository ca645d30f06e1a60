"""The packages of a release hold what they must, install into an empty environment, and work there."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools import release

ROOT = Path(__file__).parents[1]


def test_the_version_is_written_the_same_everywhere_and_has_its_section_in_the_changelog() -> None:
    release.check_versions(f"v{release.VERSION}")
    with pytest.raises(release.StepError, match=r"v0\.0\.0"):
        release.check_versions("v0.0.0")


def test_every_extra_is_tried_and_all_of_them_are_in_all() -> None:
    extras = release.PROJECT["optional-dependencies"]
    ours = re.findall(r"\w+", extras["all"][0].partition("[")[2])

    assert set(ours) == set(release.USES)
    assert set(extras) - set(ours) == {"all", "dev", "docs", "browser", "release", "all-tests"}


def test_a_child_that_fails_or_hangs_ends_its_step_with_its_output(tmp_path: Path) -> None:
    for words, limit_s, said in (
        (["-c", "import sys; print('one'); sys.exit('two')"], 60, r"exit code 1\none\ntwo"),
        (["-c", "import time; print('x', flush=True); time.sleep(60)"], 1, r"more than 1 s\nx"),
    ):
        with pytest.raises(release.StepError, match=said):
            release.call([sys.executable, *words], limit_s=limit_s, folder=tmp_path)


def test_a_step_that_fails_is_counted_and_one_that_was_not_run_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = release.Report()
    with report.step("good"):
        pass
    with report.step("away"):
        raise release.NotHereError("no server")
    with report.step("bad"):
        release.ensure(False, "a fact")
    with pytest.raises(SystemExit, match="1"):
        report.end()

    out = capsys.readouterr().out
    assert (report.failed, report.not_run) == (["bad"], ["away"])
    for text in ("ok       good", "not run  away", "no server", "FAILED   bad", "a fact"):
        assert text in out


def test_a_wheel_that_lacks_a_file_or_has_one_too_many_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("stoker/extra.py", "")

    with pytest.raises(release.StepError, match=r"lacks .*has also \(1\): stoker/extra.py"):
        release.check_wheel(path)


def test_an_sdist_that_lacks_a_file_is_refused(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git repository")
    path = tmp_path / "x.tar.gz"
    with tarfile.open(path, "w:gz") as sdist:
        sdist.add(ROOT / "README.md", "stoker-0/README.md")

    with pytest.raises(release.StepError, match="lacks"):
        release.check_sdist(path)


def test_the_example_of_the_readme_is_found_with_its_output() -> None:
    code, output = release.readme_example((ROOT / "README.md").read_text())

    assert "stoker.cached(" in code
    assert output
    with pytest.raises(release.StepError):
        release.readme_example("```python\nstoker.cached(x)\n```\nNo output.")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_packages_are_built_installed_into_an_empty_environment_and_used(tmp_path: Path) -> None:
    for name in ("build", "twine"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install 'stoker[release]'")

    command = [sys.executable, str(ROOT / "tools" / "release.py"), "--extras", "--keep", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "not run" not in done.stdout.replace("contents of the sdist", "")
