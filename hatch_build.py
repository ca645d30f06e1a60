"""Build `src/stoker/native/core.c` into the wheel, by the C compiler of this machine.

Without a compiler, or not on Linux, the wheel is one of Python alone, and Stoker runs the twins in Python.

    STOKER_NATIVE=0             build without it
    CC=aarch64-linux-gnu-gcc    another compiler; the wheel is for the processor that it compiles for
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = (
    "-std=gnu11", "-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-fPIC", "-shared", "-fvisibility=hidden",
    "-g0", "-fno-ident", "-Wl,--build-id=none", "-Wl,-z,relro,-z,now",
)  # fmt: skip
PLATFORMS = {"x86_64": "manylinux_2_17_x86_64", "aarch64": "manylinux_2_17_aarch64"}
"""Tags of wheels: the library needs `memcpy` and `syscall` of glibc, nothing newer."""


class CompileHook(BuildHookInterface[Any]):
    """Compiles the library before a wheel, or an editable install, is made."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and say for which processor the wheel is."""
        folder = Path(self.root) / "src" / "stoker" / "native"
        for old in folder.glob("core-*.so"):
            old.unlink()
        compiler = shlex.split(os.environ.get("CC", "cc"))
        if os.environ.get("STOKER_NATIVE") == "0" or sys.platform != "linux" or not shutil.which(compiler[0]):
            return
        machine = self._output([*compiler, "-dumpmachine"]).split("-")[0]
        if machine not in PLATFORMS:
            return
        target = folder / f"core-{machine}.so"
        try:
            subprocess.run([*compiler, *FLAGS, "-o", str(target), str(folder / "core.c")], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            self.app.display_warning(f"core.c was not compiled ({error}): Stoker runs in Python alone")
            return
        if version == "standard":
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{PLATFORMS[machine]}"
            build_data["artifacts"].append(f"src/stoker/native/{target.name}")

    @staticmethod
    def _output(command: list[str]) -> str:
        try:
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return ""
