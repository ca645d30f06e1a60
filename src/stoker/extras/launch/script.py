"""The script that a machine starts with, written from a typed model.

Every value from outside stands in it once, quoted, as a variable; the rest is fixed text. The first thing
it does is to set the trap that stops the machine, so that no failure after that leaves one running.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from stoker.errors import ConfigError

ONSTART_BYTES = 4048
"""The longest script that the provider takes; it cuts or refuses a longer one."""
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
        raise ConfigError("is not a setting", hint="Expected key=value")
    return text


Text = Annotated[str, Field(min_length=1, max_length=2000), AfterValidator(_plain)]


def _absolute(text: str) -> str:
    if not text.startswith("/"):
        raise ConfigError(f"{text!r} is not absolute", hint="Give a path that begins with /")
    return text


Word = Annotated[Text, AfterValidator(_no_flag)]
Setting = Annotated[Word, AfterValidator(_setting)]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,199}$")]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}([0-9a-f]{24})?$")]


class StartScript(BaseModel):
    """Everything that a machine does, from its first second to its last."""

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
    command: Annotated[str, Field(max_length=2000), AfterValidator(_plain)] | None = None
    """In place of validate, precompute and train; None or empty runs these."""
    secrets: tuple[Variable, ...] = ()
    workdir: Annotated[Text, AfterValidator(_absolute)]
    gpus: Annotated[int, Field(ge=1, le=64)] = 1
    fetch: bool = False
    """True if there are files to fetch."""
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
        """Return the script.

        Raises:
            ConfigError: It is longer than the provider takes.
        """
        before = [HEAD, self._slurm() if self.target == "slurm" else "", TRAP]
        after = [
            self._stop(),
            self._upload(),
            ENVIRONMENT,
            CODE_TOKEN if self._asks() else CODE,
            END,
            self._environ() if self.target == "vast" else "",
            STEP,
            RUN if self.fetch or not self.command else "",
            "" if self.command else RANKS,
            PULL if self.cache or self.upload else "",
            BEGIN,
            self._steps(),
        ]
        # Half the indentation of what is fixed; values may hold anything, and stay as they are.
        text = "".join(before) + self._variables() + re.sub(r"(?m)^( +)\1", r"\1", "".join(after))
        size = len(text.encode())
        if self.target == "vast" and size > ONSTART_BYTES:
            raise ConfigError(
                f"the start-up script has {size:,} bytes, the provider takes {ONSTART_BYTES:,}",
                hint="Move settings from the command line into the configuration, or shorten paths and names",
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
        if self._uploads():
            values["EVERY"] = f"{self.upload_minutes * 60:g}"
        if self.command:
            values["C"] = self.command
        if self.target == "vast":
            values["API"] = self.api
        lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
        stall = f"{self.stall_minutes:g}"
        lines.append(f"GRACE={self.grace} STALL={stall} LOOK={self._look():g}")
        if not self.command:
            lines.append(f"N=({self.gpus} {self._patience()})")
        lines.append(f"A=({_words((self.config, *self.overrides))})")
        constraints = ("-c", self.constraints) if self.constraints else ()
        lines.append(f"PIP=({_words((*constraints, *self.install))})")
        if self.target == "slurm" and self.scratch:
            lines.append('A+=(data.stage=auto "data.stage_dir=${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/stoker")')
        return "\n".join(lines) + "\n"

    def _place(self, path: str) -> str:
        """Return a path of the configuration as rclone takes it, to which `a:b` would be a remote."""
        return path if path.startswith("/") else f"./{path}"

    def _look(self) -> float:
        """Return seconds between two looks at the log."""
        return min(30.0, self.stall_minutes * 15)

    def _asks(self) -> bool:
        """Return True if git may be asked for a token."""
        return self.target != "vast" or "GIT_TOKEN" in self.secrets

    def _needs(self) -> list[str]:
        """Return programs, under the names of their packages."""
        rclone = ["rclone"] if self.cache or self.upload or self.fetch else []
        return ["git", *rclone, *(["curl"] if self.target == "vast" else [])]

    def _environ(self) -> str:
        """Return where variables of the first process are taken from; those of a remote by one pattern."""
        names = ["CONTAINER_ID=*", "CONTAINER_API_KEY=*"]
        for name in self.secrets:
            remote = re.match(r"RCLONE_CONFIG_[A-Za-z0-9]+_", name)
            names.append(f"{remote[0]}*" if remote else f"{name}=*")
        return ENVIRON.replace("NAMES", "|".join(dict.fromkeys(names)))

    def _stop(self) -> str:
        if self.target == "slurm":
            return STOP_SLURM
        return STOP_VAST if self.target == "vast" and self.auto_shutdown else STOP_NOTHING

    def _uploads(self) -> bool:
        """Return True if there is something to send while the steps run."""
        return bool(self.upload or (self.cache and self.command))

    def _upload(self) -> str:
        """Return the functions of the uploads.

        Stoker's own `precompute` is a step after which the cache goes up. Nothing tells when a command has
        filled it, so there the cache goes up with each upload.
        """
        if not self._uploads():
            return UPLOAD_NOTHING
        parts = [UPLOAD_LOG, UPLOAD_RUN] if self.upload else []
        parts += [UPLOAD_CACHE] if self.cache and self.command else []
        return UPLOAD.replace("PARTS", " &&\n  ".join(parts))

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
            lines.append("run fetch data fetch")
        if self.cache:
            lines.append('pull cache "$FAR" "$CACHE"')
        if self.upload:
            lines.append('pull resume "$UP/run" "$RUN"')
        if self._uploads():
            lines += ["R=1", "setsid bash -c uploads & U=$!; disown"]
        if self.command:
            # The stall watch does not see lines that Python buffers.
            variables = '-u{API,CACHE,DIR,RUN} PYTHONUNBUFFERED=1 "PATH=$W/venv/bin:$PATH"'
            lines.append(f'step command env {variables} bash -c "$C"')
        else:
            lines += ["run validate validate", "ranks precompute"]
            if self.cache:
                lines.append('step cache rclone copy -uv --exclude \'.staged/**\' -- "$CACHE" "$FAR"')
            lines.append("ranks train")
        lines += ['echo "$K" >"$W/finished"', "exit 0"]
        return "\n".join(lines) + "\n"

    def _patience(self) -> int:
        """Return seconds that the ranks have to end in, before this machine's part of the grace ends."""
        return max(1, self.grace * 3 // 4 - 5)


def _words(words: tuple[str, ...]) -> str:
    return " ".join(shlex.quote(word) for word in words)


# ----------------------------------------------------------------------------------------------------------
# The parts of the start-up script that are the same for every run.
#
# Everything in capitals is a variable that the head of the script sets. Nothing here is filled in with text
# from outside, so that nothing can be read as a command that was not meant as one.


HEAD = """\
#!/usr/bin/env bash
"""

TRAP = """\
set -a
S=start P='' G='' U='' R='' E='' LOG=/dev/null
say() { echo "stoker-launch: $*"; }
"""
"""What is set from here on is known to the steps that are functions themselves, up to `set +a`."""

END = """\
set +a
bad() { say "step $1 failed with exit code $2"; [ $rc != 0 ] || rc=1; }
end() {
  rc=$?
  trap - EXIT; trap '' TERM INT HUP USR1
  kill $G 2>/dev/null
  [ -z "$U" ] || kill -KILL -- "-$U" "$U" 2>/dev/null
  E=${E:-$((SECONDS + 1800))}
  [ $rc = 0 ] || bad "$S" $rc
  upload || bad upload $?
  say "ended with exit code $rc"
  echo $rc >"$W/exit_code"
  stop || bad stop $?
  exit $rc
}
quit() {
  say "$2 in step $S"
  E=${E:-$((SECONDS + GRACE))}
  if [ -n "$P" ]; then
    kill -TERM -- "-$P" || kill -TERM "$P"
    while ((SECONDS < E - GRACE / 4)) && kill -0 -- "-$P"; do sleep .2; done
    kill -KILL -- "-$P"
  fi 2>/dev/null
  exit "$1"
}
trap end EXIT
trap 'quit 130 signal' TERM INT HUP
trap 'quit 5 stall' USR1
"""
"""Set before anything that can fail. A quarter of the grace is for the last upload and the stop."""

STEP = """\
step() {
  S=$1; shift
  say "step $S"
  setsid "$@" & P=$!
  wait $P; rc=$?; P=
  [ $rc = 0 ] || exit $rc
}
"""
RUN = """\
run() { step "$1" "$PY" -m stoker "${@:2}" "${A[@]}"; }
"""
RANKS = """\
ranks() { step "$1" "$PY" -m stoker.extras.launch.ranks "${N[@]}" "$1" "${A[@]}"; }
"""
PULL = """\
pull() { step "$1" rclone mkdir -- "$2"; step "$1" rclone copy -uv -- "$2" "$3"; }
"""

ENVIRON = """\
while IFS= read -rd '' v; do
  case $v in
    PATH=*) PATH=$PATH:${v#*=};;
    NAMES) export "${v?}";;
  esac
done 2>/dev/null </proc/1/environ
"""
"""A provider gives variables to the first process; a shell that it starts later may lack them. `NAMES` is
filled in with patterns of names, which are letters, digits and underscores."""

BEGIN = """\
S=environment
mkdir -p "$W/code" && cd "$W" || exit 1
LOG=$W/run.log
exec > >(exec tee -a "$LOG") 2>&1
say "started $(date -u +%FT%TZ)"
K=$(printf '%s\\n' "$COMMIT" "${A[@]}" | sha256sum)
if [ "$K" = "$(cat finished 2>/dev/null)" ]; then say "finished before"; cd "code/$DIR" && R=1; exit; fi
(while sleep "$LOOK" >/dev/null 2>&1; do
  [ -z "$(find "$LOG" -mmin +"$STALL")" ] || { kill -USR1 $$; exit; }
done) &
G=$!
"""
"""A machine that is started again after its run has finished sends what is there and stops."""

ENVIRONMENT = """\
environment() {
  m=
  for x in $NEED; do command -v $x >/dev/null || m+=" $x"; done
  python3 -c 'import ensurepip' || m+=" python3-venv"
  [ -z "$m" ] || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qqy $m; }
}
"""

CODE = """\
code() {
  rm -f code/.git/*.lock
  git init -q code && cd code || exit
  git fetch -q --depth 1 "$REPO" "$COMMIT" && git checkout -qf FETCH_HEAD
}
"""

CODE_TOKEN = CODE.replace(
    "git fetch",
    """git -c credential.helper='!f() { echo username=git; echo "password=$GIT_TOKEN"; }; f' \\\n    fetch""",
)
"""For a repository that asks for a password: the token is read from the environment, by git's own helper."""

STOP_VAST = """\
stop() {
  for i in 1 2 3 4 5; do
    curl -fsS -m 30 -X PUT -H 'Content-Type: application/json' -d '{"state":"stopped"}' -K - \\
      "$API/v0/instances/$CONTAINER_ID/" >/dev/null \\
      <<<"header = \\"Authorization: Bearer $CONTAINER_API_KEY\\"" &&
      { say stopped; return 0; }
    sleep $((i * 5))
  done
  return 1
}
"""
"""The key goes through a pipe: any process can see a command's arguments."""

STOP_SLURM = """\
stop() {
  [ $rc = 130 ] || return 0
  case $(scontrol show job "$SLURM_JOB_ID") in
    *JobState=CANCELLED*) say cancelled;;
    *) scontrol requeue "$SLURM_JOB_ID";;
  esac
}
"""
"""A job that a user cancelled stays so; one that was preempted, or ran out of time, is queued again."""

STOP_NOTHING = """\
stop() { :; }
"""

UPLOAD_NOTHING = """\
upload() { :; }
"""

UPLOAD_LOG = 'far copy "$LOG" "$UP"'
UPLOAD_RUN = '{ [ -z "$R" ] || [ ! -d "$RUN" ] || far sync "$RUN" "$UP/run"; }'
UPLOAD_CACHE = """\
{ [ -z "$R" ] || [ ! -d "$CACHE" ] ||
    far copy "$CACHE" "$FAR" -u --exclude '.{staged/**,tmp-*}'; }"""
UPLOAD = """\
far() {
  timeout $((E > SECONDS ? E - SECONDS : 1)) rclone "$1" -q --local-no-check-updated "${@:4}" -- "$2" "$3"
}
upload() {
  [ -f "$LOG" ] || return 0
  PARTS
}
uploads() {
  while sleep "$EVERY" && kill -0 $PPID; do
    E=$((SECONDS + 1800))
    upload >/dev/null 2>&1 || [ $R = 2 ] || { R=2; say "upload failed, tried again later"; }
  done
}
"""
"""The run's folder goes up only once what was there had come down, so that `sync` removes nothing unseen.
The cache goes last: it can be encoded again.

During the run only the first failure is reported: a stall is detected by a log without new lines.
"""


# ----------------------------------------------------------------------------------------------------------
# Which variables of the environment are secrets, and messages without them.


_SECRET = re.compile(r"KEY|SECRET|TOKEN|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
SHORTEST = 6
"""Shorter values are words that messages have for other reasons."""


def secrets_of(environment: Mapping[str, str], names: Iterable[str] = ()) -> tuple[str, ...]:
    """Values that no output may show, the longest first: those of `names`, and of names that say so."""
    named = set(names)
    values = {
        value
        for name, value in environment.items()
        if (name in named or _SECRET.search(name)) and len(value) >= SHORTEST
    }
    return tuple(sorted(values, key=len, reverse=True))


def shown_in(text: str, environment: Mapping[str, str], names: Iterable[str] = ()) -> list[str]:
    """Return names of variables whose values a text shows."""
    values = secrets_of(environment, names)
    return sorted(name for name, value in environment.items() if value in values and value in text)


def without_secrets(text: str) -> str:
    """Return a message of another program, with the secrets of our environment taken out."""
    for value in secrets_of(os.environ):
        text = text.replace(value, "***")
    return text
