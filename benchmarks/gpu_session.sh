#!/usr/bin/env bash
# Everything that a GPU is needed for, within ten minutes, the most telling first: ./run gpu [--device cpu] [OUT]
#
# What it answers, with the step that does:
#   kernel, serving    whether the fused kernel gives the bits of plain torch; host time and launches of a batch
#   t_*                whether the tests of the GPU pass
#   b_gather           the device tier's rate against a copy within VRAM, in bytes (goal: 0.85 for 64 MiB and more), and
#                      images/s as bfloat16 (the earlier guide promised 10,000)
#   b_train            stall, GPU utilization and loss curves of real steps on device tier, host tier and DataLoader
#                      (goals: stall below 1 % at steps of 1 ms; promised before: 85-95 % utilization, 5-20x faster)
#   b_encode           samples/s of precompute by encode batch size, against the model alone and a one-by-one loop
#   b_load, b_host     filling VRAM, and the host tier, against the page-locked copy rate (goal: 0.9)
#   t_ways             whether each way to serve (choices, batches of one shape or of a budget of tokens, joined caches, a
#                      cache that is being filled) gives the bits of the CPU, without a wait for the device
#   t_encoders         whether encoders give the records of the CPU within rounding
#   claims, select     what only a GPU can show: out of memory, CUDA graphs, memory that is given back
#
# Installs nothing. Needs a CUDA build of torch >= 2.8, Triton, gcc, pytest, pytest-timeout, h5py, safetensors,
# xxhash, psutil, nvidia-ml-py, cloudpickle and matplotlib, and 16 GB of disk. Leaves the GPU's settings alone.
# Writes to OUT (gpu-session), after each step: summary.txt, a line for each step; facts.jsonl, all figures;
# gpu_serve.jsonl and gpu_probe.jsonl, the same as files for benchmarks/results; tables.md; logs.tar.gz. The last lines
# of summary.txt say what was reached, and which steps failed. Exits 1 where a step failed or plain torch did a kernel's
# work, 2 where there is no GPU. With --device cpu all programs run, on little data, which shows that they work.
#   PYTHON=...             the interpreter
#   STOKER_GPU_SECONDS=570 all that it may take
set -u
cd "$(dirname "$(readlink -f "$0")")/.." || exit
python=${PYTHON:-python3}
export PYTHONPATH="src:.:benchmarks${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONFAULTHANDLER=1
device=cuda
small=()
if [ "${1:-}" = --device ]; then
  device=${2:-}
  shift 2
  [ "$device" = cuda ] || small=(--quick)
fi
case "$device" in cpu|cuda) ;; *) echo "gpu session: --device is '$device', expected cuda or cpu" >&2; exit 2 ;; esac
if [ "$device" = cuda ] && ! timeout 60 "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  echo "gpu session: $python sees no GPU. It needs a CUDA build of torch and an NVIDIA driver (nvidia-smi)" >&2
  exit 2
fi

mkdir -p "${1:-gpu-session}"
out=$(realpath "${1:-gpu-session}")
: >"$out/summary.txt"
work=$(mktemp -d "${TMPDIR:-/tmp}/stoker-gpu-session-XXXXXX")
logs=$work/logs
mkdir -p "$logs" "$work/tmp"
export TRITON_CACHE_DIR=$work/triton TMPDIR=$work/tmp
end=$(( SECONDS + ${STOKER_GPU_SECONDS:-570} ))

save() {
  timeout 30 "$python" benchmarks/gpu_tables.py "$logs" "$out" >"$work/reached" 2>"$logs/tables.log"
  cat "$logs"/*.jsonl >"$out/facts.jsonl" 2>/dev/null
  tar -C "$logs" -czf "$out/logs.tar.gz" . 2>/dev/null
}
trap 'save; rm -rf "$work"' EXIT

say() { echo "$*" | tee -a "$out/summary.txt"; }

# step NAME SECONDS COMMAND...: ends after so many seconds, or when the session does; the others run anyway.
step() {
  local name=$1 most=$2 begin=$SECONDS left=$(( end - SECONDS )) cut=0 rc
  shift 2
  if [ "$left" -lt 8 ]; then
    say "$name: not run, no time left"
    [ "${figures:-0}" = 1 ] || echo skipped >"$logs/$name.failed"
    return 0
  fi
  [ "$most" -le "$left" ] || { most=$left; cut=1; }
  timeout -k 5 "$most" "$@" >"$logs/$name.log" 2>&1
  rc=$?
  if [ "$rc" = 5 ] && [ "$device" = cpu ]; then rc=0; fi  # no test was left to run
  grep -h '^{' "$logs/$name.log" >"$logs/$name.jsonl"
  say "$(printf '%-11s rc=%-3s %4ss  %s' "$name" "$rc" $(( SECONDS - begin )) \
    "$(grep -E '(passed|failed|skipped|error).* in [0-9]|Error: ' "$logs/$name.log" | tail -1 | cut -c1-150)")"
  grep -hE '^(FAILED|ERROR) |plain torch' "$logs/$name.log" | cut -c1-220 | tee -a "$out/summary.txt"
  if grep -q 'plain torch' "$logs/$name.log"; then echo "plain torch" >"$logs/$name.failed"; fi
  if [ "$rc" -ne 0 ] && ! { [ "${figures:-0}$cut" = 11 ] && [ "$rc" = 124 ]; }; then echo "$rc" >"$logs/$name.failed"; fi
  [ "$BASH_SUBSHELL" -gt 0 ] || save
}

# A step for figures alone: that the session's end cuts it short is no failure.
figures() { local figures=1; step "$@"; }

tests=("$python" -m pytest -p no:xdist -p no:cacheprovider -o filterwarnings=default --timeout=100 -q -ra --durations=5)
probing=("$python" benchmarks/gpu_probe.py)
[ "$device" = cuda ] || probing+=(--device "$device")

step env 25 "${probing[@]}" env
# 1. Whether the kernel compiles and gives the bits of its twin; what a batch costs the host, in launches and waits.
step kernel 90 "${probing[@]}" kernel
step serving 150 "${probing[@]}" serving
# 2. The tests: a process for each module, since a lost context takes all that comes after it; side by side, since
#    nothing is timed here. The one that takes all memory is alone.
( step t_tier 150 "${tests[@]}" tests/gpu/test_device_tier.py ) &
( step t_transform 150 "${tests[@]}" tests/gpu/test_transforms.py ) &
( step t_cuda 150 "${tests[@]}" tests/gpu/test_cuda.py -k "not under_pressure" ) &
wait
( step t_ways 200 "${tests[@]}" tests/gpu/test_ways.py ) &
( step t_encoders 200 "${tests[@]}" tests/gpu/test_encoders.py ) &
wait
step t_pressure 60 "${tests[@]}" tests/gpu/test_cuda.py -k under_pressure
# 3. What can be shown on a GPU alone and is no test yet.
step claims 120 "${probing[@]}" encoder_there static_transforms out_of_memory again order capture other_gpus
figures select 60 "${probing[@]}" select host
# 4. Figures for docs/project/benchmarks.md, in the order of their worth.
for part in gather load host train encode; do
  figures "b_$part" 200 "$python" benchmarks/gpu_serve.py --only "$part" --device "$device" ${small[@]+"${small[@]}"}
done
# 5. Where a test failed: the line that did it. Then memory errors of the kernel.
if grep -q '^FAILED' "$out/summary.txt"; then
  CUDA_LAUNCH_BLOCKING=1 figures blocking 120 "${tests[@]}" tests/gpu -k "not under_pressure"
fi
if [ "$device" = cuda ] && command -v compute-sanitizer >/dev/null; then
  step sanitizer 100 compute-sanitizer --error-exitcode 9 "${tests[@]}" tests/gpu/test_transforms.py -k images_cut
fi

save
cat "$work/reached" >>"$out/summary.txt"
cat "$work/reached"
failed=""
for one in "$logs"/*.failed; do
  [ -e "$one" ] && failed="$failed$(basename "$one" .failed) "
done
if [ -n "$failed" ]; then
  say "failed: $failed"
  exit 1
fi
say "all steps passed"
