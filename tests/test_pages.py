"""Code on pages of the documentation is run, and what it prints is compared with what the page shows."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import pages, site, words

ROOT = Path(__file__).parent.parent
SUM = """# A page
<!-- run: hidden
unit = "MB"
-->
```python
size = 5
print(size, unit)
```
```text title="Output"
{shown}
```
```python title="other.py"
print("from a file")
```
```console
$ python other.py; echo /x >&2
{printed}
```
"""


def run(path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/pages.py"), *flags, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)


def page_of(folder: Path, text: str) -> Path:
    path = folder / "page.md"
    path.write_text(text)
    return path


def test_a_page_that_shows_what_its_code_prints_passes(tmp_path: Path) -> None:
    done = run(page_of(tmp_path, SUM.format(shown="7 MB", printed="from a file\n/x")))

    assert (done.returncode, done.stderr) == (0, "")


def test_a_block_that_continues_a_file_adds_to_it(tmp_path: Path) -> None:
    blocks = '```python title="a.py"\nx = 1\n```\n```python title="a.py, continued"\nprint(x)\n```\n'
    done = run(page_of(tmp_path, blocks + "```console\n$ python a.py\n1\n```\n"))

    assert (done.returncode, done.stderr) == (0, "")


def test_a_page_that_shows_something_else_fails_and_is_written_when_asked(tmp_path: Path) -> None:
    page = page_of(tmp_path, SUM.format(shown="five", printed="..."))
    done = run(page)

    assert done.returncode == 1
    assert "page.md:9" in done.stderr
    assert "5 MB" in done.stderr
    assert run(page, "--write").returncode == 0
    assert page.read_text() == SUM.format(shown="5 MB", printed="...")


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ("```python\nraise OSError(17)\n```", "line 2"),
        ("```console\n$ exit 3\n```", "page.md"),
        ("```console\n$ false\n```", "ended with 1"),
        ("```python\nx = (\n```", "not valid python"),
        ("```yaml\na: [\n```", "not valid yaml"),
        ("<!-- run: fails -->\n```console\n$ true\n```", "no command failed"),
        ("<!-- run: never -->", "not understood"),
        ("<!-- run: skip -->\n```bash\nfalse\n```", "not understood"),
        ("![A curve](images/page/a.png)\n```python\nx = 1\n```", "does not make a.png"),
    ],
)
def test_what_is_wrong_with_a_page_is_said(tmp_path: Path, block: str, says: str) -> None:
    done = run(page_of(tmp_path, f"{block}\n"))

    assert done.returncode == 1
    assert says in done.stderr


def test_steered_blocks(tmp_path: Path) -> None:
    text = (
        "<!-- run: skip costs money -->\n```bash\nfalse\n```\n<!-- run: fails -->\n```console\n$ false\n```\n"
    )

    assert run(page_of(tmp_path, text)).returncode == 0
    done = run(page_of(tmp_path, f"<!-- run: needs nosuchmodule -->\n{text}```python\n1 / 0\n```\n"))
    assert done.returncode == 0
    assert "nosuchmodule" in done.stderr


def test_a_picture_that_the_code_draws_is_put_at_its_place(tmp_path: Path) -> None:
    code = "from pathlib import Path\n_ = Path('a.svg').write_text('<svg/>')"
    page = page_of(tmp_path, f"```python\n{code}\n```\n![A line](images/page/a.svg)\n")

    assert run(page, "--write").returncode == 0
    assert (tmp_path / "images/page/a.svg").read_text() == "<svg/>"


def test_a_page_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGE_TIMEOUT_S", 3)
    page = pages.read_page(page_of(tmp_path, "```bash\nsleep 100\n```\n"))

    (said,) = pages.run_page(page, write=False)
    assert "ended with -9" in said


def test_figures_may_differ_and_words_may_not() -> None:
    assert pages.fitted(["took 1.5 s, 12 KiB"], ["took 22 ms, 3.1 MiB"]) == ["took 22 ms, 3.1 MiB"]
    assert pages.fitted(["0.5"], ["0.12345678"]) == ["0.12345678"]
    assert pages.fitted(["took 1.5 s"], ["needed 1.5 s"]) is None
    assert pages.fitted(["a", "...", "d 1"], ["a", "b", "c", "d 2"]) == ["a", "...", "d 2"]
    assert pages.fitted(["a", "...", "x"], ["a", "b"]) is None
    assert pages.fitted(["a"], ["a", "b"]) is None


def test_links_of_pages_lead_to_pages_of_the_site_or_to_the_repository() -> None:
    text = "[a](../../README.md#use) [b](../start/install.md) [c](../../src/stoker) [d](https://x.y)\n```\n[a](b)\n```\n"

    assert site.relinked(text, "docs/how-to/sql.md") == (
        f"[a](../index.md#use) [b](../start/install.md) [c]({site.REPOSITORY}/tree/main/src/stoker) "
        "[d](https://x.y)\n```\n[a](b)\n```\n"
    )
    assert site.relinked('<img src="docs/images/a.svg">', "README.md") == (
        f'<img src="{site.REPOSITORY}/blob/main/docs/images/a.svg">'  # it is not there
    )
    assert site.relinked("[a](docs/start/install.md)", "README.md") == "[a](start/install.md)"


@pytest.mark.parametrize(("link", "code"), [("b.md#two", 0), ("b.md#three", 1), ("c.md", 1)])
def test_a_dead_link_or_anchor_fails_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str, code: int
) -> None:
    pytest.importorskip("mkdocs")
    (tmp_path / "docs").mkdir()
    settings = (ROOT / "mkdocs.yml").read_text()
    checks = settings[settings.index("\nvalidation:") : settings.index("\nnot_in_nav:")]
    (tmp_path / "mkdocs.yml").write_text(f"site_name: x\n{checks}")
    (tmp_path / "docs/index.md").write_text(f"[a]({link})\n")
    (tmp_path / "docs/b.md").write_text("# One\n## Two\n")
    monkeypatch.setattr(site, "ROOT", tmp_path)

    assert site.build(tmp_path / "site") == code


def test_comments_of_a_page_are_not_counted_as_sentences() -> None:
    page = "<!-- run: hidden\nbeside = 1\n\nprint(beside)\n-->\nThis is shown.\n"

    assert list(words.markdown_paragraphs(page)) == [(6, "This is shown.")]


@pytest.mark.slow
def test_the_site_is_searched_without_a_server_or_a_network(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    playwright = pytest.importorskip("playwright.sync_api")
    assert site.build(tmp_path) == 0

    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"file://{tmp_path}/how-to/sql.html")
        page.locator(".md-search__input").press_sequentially("quarantine")  # the theme listens for keys
        page.locator(".md-search-result__link").first.wait_for(timeout=60_000)
        browser.close()

    elsewhere = {url for url in asked if not url.startswith(("file:", "https://api.github.com/repos/"))}
    assert not elsewhere  # the theme asks GitHub how many stars the repository has
