"""The script that a machine starts with, written from a typed model.

Every value from outside stands in it once, quoted, as a variable; the rest is fixed text. The first thing
it does is to set the trap that stops the machine, so that no failure after that leaves one running.
"""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from stoker.errors import ConfigError
from stoker.launch import pieces

ONSTART_BYTES = 4048
"""What the provider takes; beyond that it cuts, or refuses."""
API = "https://console.vast.ai/api"


def _plain(text: str) -> str:
    if "\0" in text or (not text.isprintable() and re.search(r"[\ud800-\udfff]", text)):
        raise ValueError("has a character that no argument of a command can have")
    return text


def _no_flag(text: str) -> str:
    if text.startswith("-"):
        raise ValueError("begins with a dash, which commands read as a flag")
    return text


def _setting(text: str) -> str:
    if "=" not in text:
        raise ValueError("is no setting. Expected key=value")
    return text


Text = Annotated[str, Field(min_length=1, max_length=2000), AfterValidator(_plain)]


def _absolute(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError(f"{text!r} is not absolute. Give a path that begins with /")
    return text


Word = Annotated[Text, AfterValidator(_no_flag)]
Setting = Annotated[Word, AfterValidator(_setting)]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,199}$")]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}([0-9a-f]{24})?$")]


class StartScript(BaseModel):
    """What a machine does from its first second to its last."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    target: Literal["vast", "box", "slurm"]
    """A machine of the provider, any machine, or a job of Slurm."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")]
    """Of the run."""
    repo: Word
    commit: Commit
    folder: Text = "."
    """Where in the repository the commands run."""
    config: Word
    overrides: tuple[Setting, ...] = ()
    install: tuple[Word, ...] = (".",)
    constraints: Word | None = None
    secrets: tuple[Variable, ...] = ()
    workdir: Annotated[Text, AfterValidator(_absolute)]
    gpus: Annotated[int, Field(ge=1, le=64)] = 1
    fetch: bool = False
    """Whether there are files to fetch."""
    cache_dir: Text
    run_dir: Text
    cache: Word | None = None
    upload: Word | None = None
    upload_minutes: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    """Between two uploads while it runs."""
    auto_shutdown: bool = True
    stall_minutes: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    grace: Annotated[int, Field(ge=1, le=86400)] = 120
    scratch: bool = False
    api: Word = API

    def render(self) -> str:
        """The script.

        Raises:
            ConfigError: It is longer than the provider takes.
        """
        before = [pieces.HEAD, self._slurm() if self.target == "slurm" else "", pieces.TRAP]
        after = [
            self._stop(),
            pieces.UPLOAD if self.upload else pieces.UPLOAD_NOTHING,
            pieces.ENVIRONMENT,
            pieces.CODE_TOKEN if self._asks() else pieces.CODE,
            pieces.END,
            self._environ() if self.target == "vast" else "",
            pieces.STEPS,
            pieces.BEGIN,
            self._steps(),
        ]
        # Half the indentation of what is fixed; values may hold anything, and stay as they are.
        text = "".join(before) + self._variables() + re.sub(r"(?m)^( +)\1", r"\1", "".join(after))
        size = len(text.encode())
        if self.target == "vast" and size > ONSTART_BYTES:
            raise ConfigError(
                f"the start-up script has {size:,} bytes, the provider takes {ONSTART_BYTES:,}. Move "
                "settings from the command line into the configuration, or shorten paths and names"
            )
        return text

    def _slurm(self) -> str:
        return (
            f"#SBATCH --job-name={self.name}\n#SBATCH --nodes=1\n#SBATCH --gpus-per-node={self.gpus}\n"
            f"#SBATCH --requeue\n#SBATCH --open-mode=append\n#SBATCH --output={self.name}-%j.log\n"
            f"#SBATCH --signal=B:TERM@{self.grace + 60}\n"
        )

    def _variables(self) -> str:
        values = {
            "W": self.workdir,
            "REPO": self.repo,
            "COMMIT": self.commit,
            "DIR": self.folder,
            "RUN": self._place(self.run_dir),
            "NEED": " ".join(self._needs()),
        }
        if self.cache:
            values |= {"FAR": self.cache, "CACHE": self._place(self.cache_dir)}
        if self.upload:
            values["UP"] = f"{self.upload}/{self.name}"
            values["EVERY"] = f"{self.upload_minutes * 60:g}"
        if self.target == "vast":
            values["API"] = self.api
        lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
        stall = f"{self.stall_minutes:g}"
        lines.append(f"GRACE={self.grace} STALL={stall} LOOK={self._look():g}")
        lines.append(f"N=({self.gpus} {self._patience()})")
        lines.append(f"A=({_words((self.config, *self.overrides))})")
        constraints = ("-c", self.constraints) if self.constraints else ()
        lines.append(f"PIP=({_words((*constraints, *self.install))})")
        if self.target == "slurm" and self.scratch:
            lines.append('A+=(data.stage=auto "data.stage_dir=${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/stoker")')
        return "\n".join(lines) + "\n"

    def _place(self, path: str) -> str:
        """A path of the configuration as rclone takes it, to which `a:b` would be a remote."""
        return path if path.startswith("/") else f"./{path}"

    def _look(self) -> float:
        """Seconds between two looks at the log."""
        return min(30.0, self.stall_minutes * 15)

    def _asks(self) -> bool:
        """Whether git may be asked for a token."""
        return self.target != "vast" or "GIT_TOKEN" in self.secrets

    def _needs(self) -> list[str]:
        """Programs, under the names of their packages."""
        rclone = ["rclone"] if self.cache or self.upload or self.fetch else []
        return ["git", *rclone, *(["curl"] if self.target == "vast" else [])]

    def _environ(self) -> str:
        """Where variables of the first process are taken from; those of a remote by one pattern."""
        names = ["CONTAINER_ID=*", "CONTAINER_API_KEY=*"]
        for name in self.secrets:
            remote = re.match(r"RCLONE_CONFIG_[A-Za-z0-9]+_", name)
            names.append(f"{remote[0]}*" if remote else f"{name}=*")
        return pieces.ENVIRON.replace("NAMES", "|".join(dict.fromkeys(names)))

    def _stop(self) -> str:
        if self.target == "slurm":
            return pieces.STOP_SLURM
        return pieces.STOP_VAST if self.target == "vast" and self.auto_shutdown else pieces.STOP_NOTHING

    def _steps(self) -> str:
        lines = [
            "step environment bash -c environment",
            "step code bash -c code",
            'S=dependencies; cd "code/$DIR" || exit 1',
            'step dependencies python3 -m venv --system-site-packages "$W/venv"',
            "PY=$W/venv/bin/python",
            'step dependencies "$PY" -m pip install "${PIP[@]}"',
        ]
        if self.fetch:
            lines.append("run fetch")
        if self.cache:
            lines.append('pull cache "$FAR" "$CACHE"')
        if self.upload:
            lines += ['pull resume "$UP/run" "$RUN"', "R=1", "setsid bash -c uploads & U=$!; disown"]
        lines += ["run validate", "ranks precompute"]
        if self.cache:
            lines.append('step cache rclone copy -uv --exclude \'.staged/**\' -- "$CACHE" "$FAR"')
        lines += ["ranks train", 'echo "$K" >"$W/finished"', "exit 0"]
        return "\n".join(lines) + "\n"

    def _patience(self) -> int:
        """Seconds that the ranks have to end in, before this machine's part of the grace ends."""
        return max(1, self.grace * 3 // 4 - 5)


def _words(words: tuple[str, ...]) -> str:
    return " ".join(shlex.quote(word) for word in words)
