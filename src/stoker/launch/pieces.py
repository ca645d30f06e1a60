"""The parts of the start-up script that are the same for every run.

Everything in capitals is a variable that the head of the script sets. Nothing here is filled in with text
from outside, so that nothing can be read as a command that was not meant as one.
"""

from __future__ import annotations

HEAD = """\
#!/usr/bin/env bash
"""

TRAP = """\
S=start P='' G='' LOG=/dev/null
say() { echo "stoker-launch: $*"; }
"""

END = """\
end() {
  rc=$?
  trap - EXIT; trap '' TERM INT HUP USR1
  [ -z "$G" ] || kill "$G" 2>/dev/null
  [ $rc = 0 ] || say "step $S failed with exit code $rc"
  upload || { say "step upload failed with exit code $?"; [ $rc != 0 ] || rc=1; }
  say "ended with exit code $rc"
  echo $rc >"$W/exit_code"
  stop || { say "step stop failed with exit code $?"; [ $rc != 0 ] || rc=1; }
  exit $rc
}
quit() {
  say "$2 in step $S"
  if [ -n "$P" ]; then
    kill -TERM -- "-$P" 2>/dev/null
    for ((i = 0; i < GRACE * 5; i++)); do kill -0 -- "-$P" 2>/dev/null || break; sleep .2; done
    kill -KILL -- "-$P" 2>/dev/null
  fi
  exit "$1"
}
trap end EXIT
trap 'quit 130 signal' TERM INT HUP
trap 'quit 5 stall' USR1
"""
"""Set before anything is done that can fail."""

STEPS = """\
step() {
  S=$1; shift
  say "step $S"
  setsid "$@" & P=$!
  wait $P; rc=$?; P=
  [ $rc = 0 ] || exit $rc
}
"""

ENVIRON = """\
while IFS= read -rd '' v; do
  case " $NAMES " in *" ${v%%=*} "*) export "${v?}";; esac
done 2>/dev/null </proc/1/environ
"""
"""A provider gives variables to the first process; a shell that it starts later may lack them."""

BEGIN = """\
S=environment
mkdir -p "$W/code" && cd "$W" || exit 1
LOG=$W/run.log
exec > >(exec tee -a "$LOG") 2>&1
say "started $(date -u +%FT%TZ)"
(while sleep "$LOOK" >/dev/null 2>&1; do
  [ -z "$(find "$LOG" -mmin +"$STALL")" ] || { kill -USR1 $$; exit; }
done) &
G=$!
"""

ENVIRONMENT = """\
environment() {
  for x in $NEED; do command -v $x >/dev/null || m="${m:-} $x"; done
  [ -z "${m:-}" ] || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qqy $m; }
}
"""

CODE = """\
code() {
  rm -f code/.git/*.lock
  git init -q code && cd code || exit
  git -c credential.helper='!f() { echo username=git; echo "password=${GIT_TOKEN:-}"; }; f' \\
    fetch -q --depth 1 "$REPO" "$COMMIT" && git checkout -qf FETCH_HEAD
}
"""

STOP_VAST = """\
stop() {
  for i in 1 2 3 4 5; do
    curl -fsS -m 30 -X PUT -H 'Content-Type: application/json' -d '{"state":"stopped"}' -K - \\
      "$API/instances/$CONTAINER_ID/" >/dev/null \\
      <<<"header = \\"Authorization: Bearer $CONTAINER_API_KEY\\"" &&
      { say stopped; return 0; }
    sleep $((i * PAUSE))
  done
  return 1
}
"""
"""The key goes through a pipe: a command's arguments are for everybody to see."""

STOP_SLURM = """\
stop() { [ $rc != 130 ] || scontrol requeue "$SLURM_JOB_ID"; }
"""

STOP_NOTHING = """\
stop() { :; }
"""
