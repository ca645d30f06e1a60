"""The parts of the start-up script that are the same for every run.

Everything in capitals is a variable that the head of the script sets. Nothing here is filled in with text
from outside, so that nothing can be read as a command that was not meant as one.
"""

from __future__ import annotations

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
"""Set before anything is done that can fail. A quarter of the grace is for the last upload and the stop."""

STEPS = """\
step() {
  S=$1; shift
  say "step $S"
  setsid "$@" & P=$!
  wait $P; rc=$?; P=
  [ $rc = 0 ] || exit $rc
}
run() { step "$1" "$PY" -m stoker "$1" "${A[@]}"; }
ranks() { step "$1" "$PY" -m stoker.launch.ranks "${N[@]}" "$1" "${A[@]}"; }
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
"""The key goes through a pipe: a command's arguments are for everybody to see."""

STOP_SLURM = """\
stop() {
  [ $rc = 130 ] || return 0
  case $(scontrol show job "$SLURM_JOB_ID") in
    *JobState=CANCELLED*) say cancelled;;
    *) scontrol requeue "$SLURM_JOB_ID";;
  esac
}
"""
"""A job that a user canceled stays canceled; one that was preempted, or ran out of time, is queued again."""

STOP_NOTHING = """\
stop() { :; }
"""

UPLOAD_NOTHING = """\
upload() { :; }
"""

UPLOAD = """\
far() { timeout $((E > SECONDS ? E - SECONDS : 1)) rclone "$1" -q --local-no-check-updated -- "$2" "$3"; }
upload() {
  [ -f "$LOG" ] || return 0
  far copy "$LOG" "$UP" || return 1
  [ -z "$R" ] || [ ! -d "$RUN" ] || far sync "$RUN" "$UP/run"
}
uploads() {
  while sleep "$EVERY" && kill -0 $PPID; do
    E=$((SECONDS + 1800))
    upload >/dev/null 2>&1 || [ $R = 2 ] || { R=2; say "upload failed, tried again later"; }
  done
}
"""
"""The run's folder goes up only once what was there had come down, so that `sync` removes nothing unseen.

During the run only the first failure is reported: a stall is detected by a log without new lines.
"""
