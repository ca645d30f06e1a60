"""Run the code on the pages of the documentation, and compare what it prints with what the pages show.

    python tools/pages.py [PAGE ...]            run; exit 1, with lines that say why, if something is wrong
    python tools/pages.py --write [PAGE ...]    also write what was printed, and pictures, into the pages

Each page runs in a folder of its own that is empty at first. Its blocks run in their order:

```python                a part of the page's script: names are shared, as in a notebook
```python title="a.py"   written to the file a.py, not run; the same for ```yaml title="..." and others.
                         `title="a.py, continued"` adds to the file
```console               `$ command` lines run in a shell; the lines below each are its output
```bash                  commands whose output is not shown
```text title="Output"   what the Python block above prints

A line `...` in an output stands for any lines. Numbers, units, paths of the folder and hexadecimal digits are
not compared. Python, YAML, JSON and TOML that is not run must parse. A comment above a block steers it:

<!-- run: skip REASON -->      does not run the next block
<!-- run: fails -->            the next console block ends with an exit code other than 0
<!-- run: needs MODULE ... --> the page is left out, by name, where a module is not installed
<!-- run: hidden               runs the Python lines up to the end of the comment, which readers do not see
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)] if __name__ == "__main__" else []  # for the tests' own way of starting a Python
NOT_RUN = ("LOG.md", "migration.md", "features.md", "design/")
"""Pages of docs/ whose blocks record what once was, or which tests of their own run."""
PAGE_TIMEOUT_S = 400
MARK = "\x1e"
"""Between outputs: a character that no command prints."""
DRIVER = "from pages import begin_block as __begin, end_block as __end, run_console as __console; "

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w-]*)[ \t]*(?P<more>.*)$")
CONTINUED = ", continued"
TITLE = re.compile(r"title=\"(?P<title>[^\"]+)\"")
STEERING = re.compile(r"^<!-- run: (?P<word>\w+) ?(?P<more>.*?)(?P<closed> ?-->)?$")
PICTURE = re.compile(r"!\[[^\]]*\]\((?P<target>[^)#\s]+)")
MASKS = (
    (re.compile(r"(?<=s) \(\d+:\d\d:\d\d\)"), ""),  # pytest, after a minute
    (re.compile(r"\d+\.\d+(?:e[+-]?\d+)?"), "0"),
    (re.compile(r"\b[0-9a-f]{7,64}\b"), "HEX"),
    (re.compile(r"\d[\d,.:]*(?:e[+-]?\d+)?"), "0"),
    (re.compile(r"\b0 ?(?:s|ms|us|min|h|B|KiB|MiB|GiB|KB|MB|GB|x|%)(?=\W|$)"), "0u"),
    (re.compile(r"[ \t]+"), " "),
    (re.compile(r"([─━═-])\1+"), r"\1"),
)
"""What is replaced in both texts before they are compared, in this order."""


@dataclass(slots=True)
class Block:
    """A fenced block of a page, or a hidden one."""

    language: str
    title: str
    begin: int
    """Line of the opening fence, from 0."""
    end: int
    """Line of the closing fence."""
    lines: list[str]
    steering: str = ""
    """The word of the comment above it."""

    @property
    def is_run(self) -> bool:
        """True if the page's script holds it."""
        runs = self.language in {"python", "console", "bash", "sh"} and not self.title
        return runs and self.steering != "skip"

    @property
    def is_output(self) -> bool:
        """True if it shows what the block above prints."""
        return self.language == "text" and self.title == "Output"


@dataclass(slots=True)
class Page:
    """A page: its text and blocks."""

    path: Path
    lines: list[str]
    blocks: list[Block]
    needs: list[str] = field(default_factory=list[str])

    @property
    def name(self) -> str:
        """Its path in the repository."""
        return str(self.path.relative_to(ROOT)) if self.path.is_relative_to(ROOT) else self.path.name

    @property
    def missing(self) -> list[str]:
        """Modules that it needs and that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


def read_page(path: Path) -> Page:
    """Return the blocks of a page.

    Raises:
        ValueError: A block or a comment has no end, or a comment says something unknown.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    page = Page(path, lines, [])
    steering, at = "", 0
    while at < len(lines):
        line = lines[at]
        if match := STEERING.match(line):
            word = match["word"]
            if word == "hidden" and not match["closed"]:
                end = _find(lines, at + 1, "-->", path)
                page.blocks.append(Block("python", "", at, end, lines[at + 1 : end]))
                at = end
            elif word == "needs":
                page.needs += match["more"].split()
            elif word in {"skip", "fails"} and match["closed"] and (word == "fails" or match["more"]):
                steering = word
            else:
                raise ValueError(f"{path}:{at + 1}: {line!r} is not understood")
        elif (match := FENCE.match(line)) and not line.startswith("    "):
            end = _find(lines, at + 1, f"{match['indent']}```", path)
            found = TITLE.search(match["more"])
            inside = [one.removeprefix(match["indent"]) for one in lines[at + 1 : end]]
            title = found["title"] if found else ""
            page.blocks.append(Block(match["language"], title, at, end, inside, steering))
            steering, at = "", end
        elif line.strip():
            steering = ""
        at += 1
    return page


def _find(lines: list[str], begin: int, mark: str, path: Path) -> int:
    for at in range(begin, len(lines)):
        if lines[at].rstrip() == mark:
            return at
    raise ValueError(f"{path}:{begin}: no {mark} ends it")


def script_of(page: Page) -> str:
    """Return the page as a Python script; each line of code keeps the number that it has on the page."""
    script = [""] * (len(page.lines) + 1)
    for number, block in enumerate(page.blocks):
        if not block.is_run:
            continue
        if block.language == "python":
            script[block.begin] = f"__begin({number})"
            script[block.begin + 1 : block.end] = block.lines
            script[block.end] = f"__end({number})"
        else:
            script[block.begin] = f"__console({number})"
    script[0] = DRIVER + script[0]
    return "\n".join(script)


def parse_errors(page: Page) -> Iterator[str]:
    """Yield the blocks whose text is not valid in the language that it names."""
    import yaml

    parsers = {"json": json.loads, "toml": tomllib.loads, "yaml": lambda text: list(yaml.safe_load_all(text))}
    parsers["python"] = lambda text: compile(text, page.name, "exec")
    for block in page.blocks:
        text = "\n".join(block.lines) + "\n"
        # A listing of JSON may leave something out.
        if block.language in parsers and not (block.language == "json" and "..." in text):
            try:
                parsers[block.language](text)
            except Exception as error:  # noqa: BLE001 - each parser has its own
                yield f"{page.name}:{block.begin + 1}: not valid {block.language}: {error}"


# What the page's script calls, in its own process


def _place(number: int) -> Path:
    return Path(os.environ["STOKER_PAGE_OUTPUT"]) / str(number)


_saved = -1


def begin_block(number: int) -> None:
    """Send what this process and its children print from now on to the output of a block."""
    global _saved  # noqa: PLW0603 - the file descriptor of one process
    sys.stdout.flush()
    _saved = os.dup(1)
    with _place(number).open("wb") as out:
        os.dup2(out.fileno(), 1)


def end_block(_number: int) -> None:
    """End what `begin_block` began."""
    sys.stdout.flush()
    os.dup2(_saved, 1)
    os.close(_saved)


def run_console(number: int) -> None:
    """Run the commands of a block in a shell.

    Raises:
        SystemExit: A command failed that should not, or none did where one should.
    """
    page = read_page(Path(os.environ["STOKER_PAGE"]))
    block = page.blocks[number]
    listed = [command for command, _ in commands_of(block)]
    commands = listed if block.language == "console" else ["\n".join(block.lines)]
    where = f"{page.name}:{block.begin + 1}"
    simple = [_words(command) for command in commands]
    by_shell = block.steering == "fails" or not all(simple)  # a shell says how a command died
    ended = _in_bash(commands) if by_shell else [_forked(words) for words in simple]
    for command, (text, code) in zip(commands, ended, strict=False):
        if code and block.steering != "fails":
            sys.exit(f"{where}: {command!r} ended with {code}:\n{text}")
    if len(ended) < len(commands):
        sys.exit(f"{where}: the shell ended early")
    if block.steering == "fails" and not any(code for _, code in ended):
        sys.exit(f"{where}: no command failed")
    _place(number).write_text(MARK.join(text for text, _ in ended))


def _words(command: str) -> list[str]:
    """Return the words of a command that is a Python alone, to be forked; none of one that needs a shell."""
    if re.search(r"[|;&<>$`*?(){}\[\]#!~\n]", command.replace("\\\n", " ")):
        return []
    words = shlex.split(command.replace("\\\n", " "))
    programs = {
        "stoker": ["-m", "stoker.cli.process"],
        "torchrun": ["-m", "torch.distributed.run"],
        "python": [],
    }
    return [sys.executable, *programs[words[0]], *words[1:]] if words and words[0] in programs else []


def _forked(words: list[str]) -> tuple[str, int]:
    """Have the process that runs the pages fork a Python; return what it printed, and its exit code."""
    with tempfile.TemporaryFile() as out, socket.socket(socket.AF_UNIX) as line:
        line.connect(os.environ["STOKER_PAGES"])
        asked = json.dumps([words, str(Path.cwd()), dict(os.environ)]).encode()
        socket.send_fds(line, [struct.pack("<I", len(asked))], [out.fileno()])
        line.sendall(asked)
        code = int(line.makefile("rb").read())
        out.seek(0)
        return out.read().decode(errors="replace"), code


def _in_bash(commands: list[str]) -> list[tuple[str, int]]:
    """Run commands one after another in one shell; return what each printed, and its exit code."""
    script = "".join(f"{command}\nprintf '{MARK}%s{MARK}' $?\n" for command in commands)
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    words = ["bash", "-c", script]
    done = subprocess.run(words, check=False, stdout=pipe, stderr=subprocess.STDOUT, stdin=null)
    pieces = done.stdout.decode(errors="replace").split(MARK)
    return [(text, int(code)) for text, code in zip(pieces[0::2], pieces[1::2], strict=False)]


def commands_of(block: Block) -> list[tuple[str, list[str]]]:
    """Return each command of a console block, with the lines of output below it."""
    found: list[tuple[str, list[str]]] = []
    more = False
    for line in block.lines:
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif more:
            found[-1] = (f"{found[-1][0]}\n{line}", [])
        elif found:
            found[-1][1].append(line)
        if line.startswith("$ ") or more:
            more = line.endswith("\\")
    return found


# Comparing


def masked(line: str) -> str:
    """Return a line without what differs from run to run."""
    for pattern, by in MASKS:
        line = pattern.sub(by, line)
    return line.strip()


def fitted(shown: list[str], printed: list[str]) -> list[str] | None:
    """Return the lines to show, with the figures of this run; None: something else was printed.

    `...` stays where it stands.
    """
    if "..." not in (one.strip() for one in shown):
        same = [masked(one) for one in shown] == [masked(one) for one in printed]
        return list(printed) if same else None
    found: list[str] = []
    at, free = 0, False
    for line in shown:
        if line.strip() == "...":
            found.append(line)
            free = True
            continue
        rest = range(at, len(printed)) if free else range(at, min(at + 1, len(printed)))
        match = next((i for i in rest if masked(printed[i]) == masked(line)), None)
        if match is None:
            return None
        found.append(printed[match])
        at, free = match + 1, False
    return found if free or at == len(printed) else None


def printed_lines(text: str, folder: Path) -> list[str]:
    """Return what was printed as a page shows it: no escape sequences, a plain name for the folder."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace(str(folder), "/home/me/work")
    lines = [line.rpartition("\r")[2].rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    while lines and not lines[0]:
        lines.pop(0)
    return lines


def compared(page: Page, outputs: Path, folder: Path) -> tuple[list[str], dict[int, list[str]]]:
    """Return what differs, and the new lines of each block that shows an output."""
    problems: list[str] = []
    new: dict[int, list[str]] = {}
    above: int | None = None

    def take(number: int, place: str, shown: list[str], text: str) -> list[str]:
        printed = printed_lines(text, folder)
        kept = fitted(shown, printed)
        if kept is None:
            problems.append("\n    ".join([f"{page.name}:{place}: prints otherwise than shown:", *printed]))
        return printed if kept is None else kept

    for number, block in enumerate(page.blocks):
        if block.is_output and above is not None:
            text = (outputs / str(above)).read_text(errors="replace")
            new[number] = take(number, str(block.begin + 1), block.lines, text)
        elif block.is_run and block.language == "console":
            texts = (outputs / str(number)).read_text(errors="replace").split(MARK)
            lines: list[str] = []
            for (command, shown), text in zip(commands_of(block), texts, strict=True):
                blank = [""] if shown and not shown[-1] else []
                kept = take(number, str(block.begin + 1), shown[: len(shown) - len(blank)], text)
                lines += [*f"$ {command}".splitlines(), *kept, *blank]
            new[number] = lines
        above = number if block.is_run and block.language == "python" else None
    return problems, new


def pictures_of(page: Page) -> dict[Path, str]:
    """Return the pictures that the page's run must make: their place, and their name in its folder."""
    found = {page.path.parent / match["target"] for match in PICTURE.finditer("\n".join(page.lines))}
    return {path: path.name for path in found if path.parent == page.path.parent / "images" / page.path.stem}


def run_page(page: Page, *, write: bool) -> list[str]:
    """Run a page; return what is wrong, and with `write` put what was printed and drawn on it."""
    if errors := list(parse_errors(page)):
        return errors
    if not any(block.is_run for block in page.blocks):
        return []
    with tempfile.TemporaryDirectory(prefix="page-", ignore_cleanup_errors=True) as base:
        folder, outputs, home = (Path(base, name) for name in ("work", "out", "home"))
        for path in (folder, outputs, home):
            path.mkdir()
        for block in page.blocks:
            if block.title and not block.is_output and block.steering != "skip":
                path = folder / block.title.removesuffix(CONTINUED)
                path.parent.mkdir(parents=True, exist_ok=True)
                before = path.read_text() + "\n" if block.title.endswith(CONTINUED) else ""
                path.write_text(before + "\n".join(block.lines) + "\n")
        script = folder / f"{page.path.stem.replace('-', '_')}_page.py"
        script.write_text(script_of(page))
        said = run_script(script, outputs, home, page)
        if said:
            return [f"{page.name}: {said}"]
        problems, new = compared(page, outputs, folder)
        pictures = pictures_of(page)
        lacking = [name for name in pictures.values() if not (folder / name).exists()]
        problems += [f"{page.name}: the page's run does not make {name}" for name in lacking]
        if write:
            _write(page, new)
            for place, name in pictures.items():
                if name not in lacking:
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(folder / name, place)
            return [f"{page.name}: the page's run does not make {name}" for name in lacking]
        return problems


def run_script(script: Path, outputs: Path, home: Path, page: Page) -> str:
    """Run a page's script in its folder; return why it failed, or nothing."""
    environment = os.environ | {
        "STOKER_PAGE": str(page.path),
        "STOKER_PAGE_OUTPUT": str(outputs),
        "HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "Agg",
        "NO_COLOR": "1",
        "TERM": "dumb",
        "COLUMNS": "100",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    from tests.kit import forked

    with (outputs / "log").open("w+b") as log:
        child = forked.Popen(
            [sys.executable, str(script)],
            cwd=script.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        timer = threading.Timer(PAGE_TIMEOUT_S, os.killpg, (child.pid, signal.SIGKILL))
        timer.start()
        code = child.wait()
        timer.cancel()
        log.seek(0)
        text = log.read().decode(errors="replace")
    if code:
        where = " ".join(f"line {line}" for line in re.findall(rf"{script.name}\", line (\d+)", text)[-1:])
        return f"{where} ended with {code} (a negative number is a signal):\n{text[-4000:]}"
    return ""


def serve_forks(listener: socket.socket) -> None:
    """Fork the Pythons that pages ask for, until the listener is closed."""
    while True:
        try:
            line, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_fork, args=(line,), daemon=True).start()


def _fork(line: socket.socket) -> None:
    from tests.kit import forked

    with line:
        head, (out,), *_ = socket.recv_fds(line, 4, 1)
        stream = line.makefile("rwb")
        words, folder, environment = json.loads(stream.read(struct.unpack("<I", head)[0]))
        try:
            null = subprocess.DEVNULL
            done = forked.run(words, cwd=folder, env=environment, stdin=null, stdout=out, stderr=out)
        finally:
            os.close(out)
        stream.write(str(done.returncode).encode())
        stream.flush()


def _write(page: Page, new: dict[int, list[str]]) -> None:
    lines = list(page.lines)
    for number in sorted(new, reverse=True):
        block = page.blocks[number]
        lines[block.begin + 1 : block.end] = new[number]
    if lines != page.lines:
        page.path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def all_pages() -> list[Path]:
    """Return the README and the pages of docs/ whose blocks are run."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    kept = [path for path in pages if not str(path.relative_to(ROOT / "docs")).startswith(NOT_RUN)]
    return [ROOT / "README.md", *kept]


def main() -> int:
    """Run pages; return 1 if something is wrong."""
    parser = argparse.ArgumentParser(description="Run the code on the pages of the documentation.")
    parser.add_argument("pages", nargs="*", type=Path, help="pages; all without")
    parser.add_argument(
        "--write", action="store_true", help="write what was printed and drawn into the pages"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="pages run at the same time")
    chosen = parser.parse_args()
    pages = [read_page(path.resolve()) for path in chosen.pages or all_pages()]
    left_out = [page for page in pages if page.missing]
    for page in left_out:
        print(f"{page.name}: not run, since {', '.join(page.missing)} is not installed", file=sys.stderr)

    kept = [page for page in pages if page not in left_out]
    failed = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX) as listener,
        ThreadPoolExecutor(chosen.jobs) as pool,
    ):
        listener.bind(f"{folder}/forks")
        listener.listen()
        os.environ["STOKER_PAGES"] = f"{folder}/forks"
        threading.Thread(target=serve_forks, args=(listener,), daemon=True).start()
        for problems in pool.map(partial(run_page, write=chosen.write), kept):
            for line in problems:
                failed = 1
                print(line, file=sys.stderr)
    return failed


if __name__ == "__main__":
    sys.exit(main())
