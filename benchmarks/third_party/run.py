"""Fetch a benchmark that others wrote, make its environment, and run it with Stoker next to its own readers.

    python benchmarks/third_party/run.py dlio --only unet3d --save
    python benchmarks/third_party/run.py dlio --original FOLDER --quick

The original is cloned at a pinned revision into `--work`, or taken from `--original`. `--work` keeps checkouts and
environments for the next run. Stoker is installed from this checkout each time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from originals import ORIGINALS, Original

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def clone(original: Original, folder: Path) -> None:
    """Check out the pinned revision, only the folders that are needed."""
    if not folder.exists():
        subprocess.run(
            ["git", "clone", "--filter=blob:none", "--no-checkout", original.url, str(folder)], check=True
        )
    if original.folders:
        subprocess.run(["git", "sparse-checkout", "set", *original.folders], cwd=folder, check=True)
    subprocess.run(["git", "checkout", "--quiet", original.revision], cwd=folder, check=True)


def environment(original: Original, folder: Path) -> Path:
    """Return the interpreter of a virtual environment with torch, the requirements and this Stoker."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    constraints = ["-c", str(ROOT / "constraints" / "cpu.txt")]
    torch = [
        line for line in (ROOT / "constraints" / "cpu.txt").read_text().split() if line.startswith("torch=")
    ]
    pip = [str(python), "-m", "pip", "install", "--quiet", *constraints]
    subprocess.run([*pip, *torch], check=True)
    if original.requires:
        subprocess.run([*pip, *original.requires], check=True)
    subprocess.run([*pip, str(ROOT)], check=True)
    # The version number stays while the code changes.
    subprocess.run([*pip, "--force-reinstall", "--no-deps", str(ROOT)], check=True)
    return python


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Run a benchmark that others wrote, with Stoker next to its own readers.",
        epilog="Further options go to the benchmark: NAME.py --help shows them. dlio has --only MODEL "
        "(unet3d, cosmoflow, resnet50) and --accelerators N [N ...], torch_dataloader --contender NAME.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "name", choices=sorted(path.stem for path in HERE.glob("*.py") if path.stem in ORIGINALS)
    )
    parser.add_argument("--original", type=Path, help="a checkout that is already there")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "stoker-third-party",
        help="folder for checkouts, environments, data and caches (%(default)s)",
    )
    parser.add_argument("--save", action="store_true", help="replace the file in benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="see that it works; the figures say nothing")
    given, more = parser.parse_known_args()
    original, work = ORIGINALS[given.name], given.work.resolve()
    checkout = given.original or work / given.name
    if given.original is not None and (obstacle := original.obstacle(checkout)):
        parser.error(obstacle)
    work.mkdir(parents=True, exist_ok=True)
    if given.original is None:
        clone(original, checkout)
    python = environment(original, work / f"venv-{given.name}")
    command = [
        str(python),
        str(HERE / f"{given.name}.py"),
        "--original",
        str(checkout),
        "--work",
        str(work),
        *(["--save"] if given.save else []),
        *(["--quick"] if given.quick else []),
        *more,
    ]
    # The installed package, not a folder of sources.
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    raise SystemExit(subprocess.run(command, env=clean).returncode)


if __name__ == "__main__":
    main()
