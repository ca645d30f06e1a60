"""Write what a run of the tests came to into a page; that of `./run test-all` is docs/project/reliability.md.

    python -m pytest -p tools.test_summary --summary PAGE ...

The page has two marks; what is between them is replaced, also after a run that failed or was interrupted.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

BEGIN, END = "<!-- the last run of test-all begins here -->", "<!-- the last run of test-all ends here -->"
PACKAGES = ("torch", "numpy", "h5py", "pytest")
MESSAGE_CHARACTERS = 200


@dataclass
class Area:
    """What the tests of one folder came to."""

    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


def area_of(nodeid: str) -> str:
    """Return the folder below `tests` that a test is in, or what else it is."""
    parts = nodeid.partition("::")[0].split("/")
    if parts[0] != "tests":
        return "doctests" if parts[0] == "src" else "others"
    return parts[1] if len(parts) > 2 else "whole package"


class Summary:
    """Counts reports, and writes the page at the end."""

    def __init__(self, page: Path, words: list[str]) -> None:
        self.page, self.words = page, words
        self.areas: dict[str, Area] = defaultdict(Area)
        self.skipped: Counter[str] = Counter()
        self.failures: dict[str, str] = {}
        self.begin = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test: once, however many of its phases failed."""
        area = self.areas[area_of(report.nodeid)]
        area.seconds += report.duration
        if report.failed:
            if report.nodeid not in self.failures:
                area.outcomes["failed"] += 1
                area.outcomes["passed"] -= report.when == "teardown"
            self.failures.setdefault(report.nodeid, message_of(report))
        elif report.skipped:
            area.outcomes["skipped"] += 1
            self.skipped[reason_of(report)] += 1
        elif report.when == "call":
            area.outcomes["passed"] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a file that is skipped, or that cannot be imported."""
        area = self.areas[area_of(report.nodeid)] if not report.passed else Area()
        if report.failed:
            area.outcomes["failed"] += 1
            self.failures[report.nodeid] = message_of(report)
        elif report.skipped:
            area.outcomes["skipped"] += 1
            self.skipped[f"{report.nodeid}: {reason_of(report)}"] += 1

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the page."""
        text = self.page.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        self.page.write_text(f"{before}{BEGIN}\n{self.text(exitstatus)}{END}{after}", encoding="utf-8")

    def text(self, exitstatus: int) -> str:
        """Return the section, as Markdown."""
        total = Area()
        for area in self.areas.values():
            total.outcomes += area.outcomes
            total.seconds += area.seconds
        minutes = (time.monotonic() - self.begin) / 60
        rows = [*sorted(self.areas.items()), ("all", total)]
        lines = [
            f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, commit {commit()}, "
            f"exit code {exitstatus}, {minutes:.0f} minutes. {versions()}. {hardware()}.",
            *([f"Not all tests: `pytest {shlex.join(self.words)}`."] if self.words else []),
            "",
            "| area | passed | failed | skipped | minutes of its tests |",
            "|---|---|---|---|---|",
            *(
                f"| {name} | {area.outcomes['passed']:,} | {area.outcomes['failed']:,} "
                f"| {area.outcomes['skipped']:,} | {area.seconds / 60:.1f} |"
                for name, area in rows
            ),
            "",
        ]
        if self.failures:
            lines += ["Failed:", *(f"- `{name}`: {why}" for name, why in sorted(self.failures.items())), ""]
        if self.skipped:
            lines += ["Skipped:", *(f"- {count} × {why}" for why, count in self.skipped.most_common()), ""]
        return "\n".join(lines)


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return why a test was skipped."""
    if isinstance(report.longrepr, tuple):
        return one_line(report.longrepr[2].removeprefix("Skipped: "))
    return one_line(f"fails as expected: {getattr(report, 'wasxfail', '')}")


def message_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the error of a test, in one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return one_line(crash.message)
    text = str(report.longrepr)
    errors = [line[1:] for line in text.splitlines() if line.startswith("E ")]
    return one_line(errors[-1] if errors else text)


def one_line(text: str) -> str:
    """Return a text that fits into a list of Markdown."""
    words = " ".join(text.split())
    return words if len(words) <= MESSAGE_CHARACTERS else words[:MESSAGE_CHARACTERS] + "…"


def commit() -> str:
    """Return the commit that was tested, and whether files had been changed since."""
    root = Path(__file__).resolve().parent.parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    name = git("rev-parse", "--short=12", "HEAD") or "unknown"
    return f"{name} with changes" if git("status", "--porcelain", "--untracked-files=no") else name


def versions() -> str:
    """Return what else may decide how tests end."""
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join([*found, f"{platform.system()} {platform.release()}"])


def hardware() -> str:
    """Return processor, memory and GPUs."""
    model, memory = platform.machine(), ""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        models = [line for line in info.splitlines() if line.startswith("model name")]
        model = models[0].partition(":")[2].strip() if models else model
        size_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        memory = f", {size_bytes / 2**30:.0f} GiB"
    except (OSError, ValueError):
        pass  # not Linux
    try:
        words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
        gpu = ", ".join(done.stdout.split("\n")).strip(", ")
    except (OSError, subprocess.SubprocessError):
        gpu = "no GPU"
    return f"{os.cpu_count()} × {model}{memory}, {gpu}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the page."""
    parser.addoption("--summary", type=Path, help="a page with marks to write the result of this run into")


def pytest_configure(config: pytest.Config) -> None:
    """Count where the reports of all workers come together."""
    page = config.getoption("--summary")
    if page is not None and not hasattr(config, "workerinput"):
        text = page.read_text(encoding="utf-8")
        if text.count(BEGIN) != 1 or text.count(END) != 1:
            raise pytest.UsageError(f"{page} has no place for a summary, between {BEGIN} and {END}")
        words = list(config.invocation_params.args)
        config.pluginmanager.register(Summary(page, selection(words)))


def selection(words: list[str]) -> list[str]:
    """Return the arguments that `./run test-all` does not give by itself."""
    own = {"-p": 1, "--summary": 1, "-n": 1, "--dist": 1, "-m": 1}
    rest, left = [], 0
    for place, word in enumerate(words):
        if left:
            left -= 1
        elif word in own and not (word == "-m" and words[place + 1 : place + 2] != ["slow or not slow"]):
            left = own[word]
        else:
            rest.append(word)
    return rest
