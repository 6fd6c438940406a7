#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What a real GPU says, in 8 minutes at most: gpu_check.sh [--pack | --packed] [--json FILE]
#
# On Debian or Ubuntu with NVIDIA's driver and nothing else: builds, then `ctest -L gpu`, `pytest -m gpu` on a torch with
# CUDA, compute-sanitizer (memcheck, racecheck) on some of the tests, and the bandwidths of docs/cuda.md. Each step has a
# time limit. Prints a table and writes it to FILE (build/gpu-check.json).
#   --pack    only builds, for which no device is needed, and leaves what the rest needs in build/gpu-check
#   --packed  runs that, carried from elsewhere: builds nothing, fetches nothing, takes torch from python3
# Ends with 0 where no step failed (the table says what was skipped, and why), 1 where one did, 2 for wrong arguments,
# 3 without a device.
set -euo pipefail
cd "$(dirname "$0")/.."
readonly PACK=$PWD/build/gpu-check
LIMIT=480
mode=all json=build/gpu-check.json
while (($#)); do
  case $1 in
    --pack | --packed) mode=${1#--} ;;
    --json) json=${2:?gpu_check: --json wants a file}; shift ;;
    *) echo "gpu_check: unknown argument $1; see the head of $0" >&2; exit 2 ;;
  esac
  shift
done

logs=$PWD/build/gpu-check-logs
mkdir -p "$logs"
export PACK logs
names=() results=() times=() notes=()

# note TEXT: what the table says of the step that is running. skip TEXT: and that it was left out.
note() { [[ -z $* ]] || echo "$*" > "$logs/note"; }
skip() { note "$*"; exit 77; }

# step NAME SECONDS COMMAND…: runs it with a time limit, what is left of LIMIT at most; its output goes to a log.
step() {
  local name=$1 limit=$2 start=$SECONDS status=0 result=passed
  shift 2
  limit=$((limit < LIMIT - SECONDS ? limit : LIMIT - SECONDS))
  : > "$logs/note"
  echo "== $name"
  if ((limit < 5)); then
    note "no time was left"
    status=124
  else
    export -f note skip "$1"
    timeout --kill-after=5 "$limit" bash -euo pipefail -c '"$@"' - "$@" > "$logs/$name.log" 2>&1 < /dev/null || status=$?
  fi
  case $status in
    0) ;;
    77) result=skipped ;;
    124 | 137) result=failed; [[ -s $logs/note ]] || note "stopped after $limit s" ;;
    *) result=failed; [[ -s $logs/note ]] || note "ended with $status; $logs/$name.log" ;;
  esac
  names+=("$name") results+=("$result") times+=($((SECONDS - start))) notes+=("$(tr -d '"\\' < "$logs/note" | head -n 1)")
  if [[ $result == failed ]]; then tail -n 30 "$logs/$name.log" || true; fi
  [[ $result != failed ]]
}

has_device() { nvidia-smi -L 2> /dev/null | grep -q '^GPU' || compgen -G '/dev/nvidia[0-9]*' > /dev/null; }

build() {
  make gpu
  rm -rf "$PACK" && mkdir -p "$PACK/lib"
  cp build/gpu/tests/kvstride_gpu_tests build/gpu/benchmarks/kvstride_cuda_bench "$PACK"
  ldd "$PACK/kvstride_gpu_tests" | sed -nE 's/.*(libhwy.*) => ([^ ]+).*/\2/p' | xargs -I{} cp -L {} "$PACK/lib"
  cp -r python "$PACK/python"
  cp build/gpu/python/_core*.so "$PACK/python/kvstride/"
  # What the extension runs on is of one CPython each; torch may be another's than .venv's.
  local version
  for version in 3.11 3.12 3.13 3.14; do
    .venv/bin/pip install -qq --no-deps --only-binary=:all: --python-version "$version" \
      --target "$PACK/backend-$version" nanobind-backend || echo "no nanobind-backend for $version"
  done
}

gpu_tests() {
  export KVSTRIDE_REQUIRE_GPU=1
  if [[ $1 == packed ]]; then
    "$PACK/kvstride_gpu_tests"
  else
    .venv/bin/ctest --test-dir build/gpu -L gpu --output-on-failure --verbose
  fi | tee "$PACK/tests.log"
  note "$(grep -oE '\[  PASSED  \] .*' "$PACK/tests.log"); $(grep -oE '\[ DEVICE   \] .*' "$PACK/tests.log")"
}

python_tests() {
  local tests python= candidate
  mapfile -t tests < <(grep -lE 'mark\.gpu\b' tests/python/test_*.py)
  ((${#tests[@]})) || skip "no tests are marked gpu"
  has_torch() { "$1" -c 'import torch; assert torch.cuda.is_available()' 2> /dev/null; }
  for candidate in python3 .venv/bin/python; do
    if has_torch "$candidate"; then python=$candidate; break; fi
  done
  if [[ -z $python && $1 == all ]]; then
    # It is large: at most as long as leaves time for what comes after it.
    timeout "$2" .venv/bin/pip install -qq torch || skip "no torch with CUDA, and none could be installed in $2 s"
    python=.venv/bin/python
    has_torch "$python" || skip "the torch that pip finds does not see the device"
  fi
  [[ -n $python ]] || skip "python3 has no torch that sees the device"
  if [[ $1 == all ]]; then
    "$python" -m pip install -qq pytest hypothesis ml_dtypes || "$python" -c 'import pytest' || skip "no pytest"
  fi
  local version
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  export PYTHONPATH=$PACK/python:$PACK/backend-$version
  "$python" -m pytest -q -m gpu -p no:cacheprovider "${tests[@]}" | tee "$PACK/pytest.log"
  note "$(tail -n 1 "$PACK/pytest.log")"
}

sanitizer() {
  local tool candidate
  for candidate in "$(type -P compute-sanitizer || true)" /usr/local/cuda/bin/compute-sanitizer; do
    if [[ -x $candidate ]]; then tool=$candidate; break; fi
  done
  if [[ -z ${tool:-} ]]; then
    [[ $2 == all ]] || skip "no compute-sanitizer"
    .venv/bin/pip install -qq --group compute-sanitizer || skip "compute-sanitizer could not be installed"
    tool=$(echo .venv/lib/python3*/site-packages/nvidia/cu13/bin/compute-sanitizer)
  fi
  local log=$PACK/$1.log status=0
  # Runs, rows, tiles, casts, ids of the device's: one of each.
  local some='Gpu.IsWhat*:Gpu.IdsInDeviceMemory:Gpu.TokensHeads*:Gpu.Casts*:*/DDShape1:*/DDShape2:*/DDShape7:*/DDShape8'
  "$tool" --tool "$1" --error-exitcode 9 "$PACK/kvstride_gpu_tests" --gtest_brief=1 \
    "--gtest_filter=$some" > "$log" 2>&1 || status=$?
  cat "$log"
  if grep -qiE 'device not supported|unable to initialize|unsupported' "$log"; then
    skip "compute-sanitizer: $(grep -iE 'device not supported|unable to initialize|unsupported' "$log" | head -n 1)"
  fi
  note "$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | head -n 1)"
  return $status
}

bandwidth() {
  local status=0
  "$PACK/kvstride_cuda_bench" --strict --json "$PACK/bandwidth.json" | tee "$PACK/bandwidth.log" || status=$?
  note "$(tail -n 1 "$PACK/bandwidth.log")"
  ((status != 77)) || status=1  # there is a device
  return $status
}

if [[ $mode != pack ]] && ! has_device; then
  echo "gpu_check: no NVIDIA device: nvidia-smi lists none and there is no /dev/nvidia0"
  exit 3
fi
export LD_LIBRARY_PATH=$PACK/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export PYTHONDONTWRITEBYTECODE=1
failed=0
if [[ $mode == packed ]]; then
  [[ -x $PACK/kvstride_gpu_tests ]] || { echo "gpu_check: nothing in build/gpu-check; make it with --pack" >&2; exit 2; }
else
  [[ $mode != pack ]] || LIMIT=3600  # no device waits
  step build "$((LIMIT - 210))" build || failed=1
fi
if [[ $mode != pack ]]; then
  if ((failed == 0)); then
    step ctest 60 gpu_tests "$mode" || failed=1
    step bandwidth 60 bandwidth || failed=1
    step memcheck 60 sanitizer memcheck "$mode" || failed=1
    step racecheck 60 sanitizer racecheck "$mode" || failed=1
    step pytest 240 python_tests "$mode" "$((LIMIT - SECONDS > 90 ? LIMIT - SECONDS - 60 : 30))" || failed=1
  fi
  [[ ! -e $PACK/bandwidth.log ]] || cat "$PACK/bandwidth.log"
fi

printf '\n%-10s %-8s %6s  %s\n' step result s note
{
  printf '{"seconds": %d, "failed": %s, "steps": [' "$SECONDS" "$( ((failed)) && echo true || echo false)"
  for i in "${!names[@]}"; do
    printf '%-10s %-8s %6d  %s\n' "${names[i]}" "${results[i]}" "${times[i]}" "${notes[i]}" >&3
    printf '%s\n  {"name": "%s", "result": "%s", "seconds": %d, "note": "%s"}' "$( ((i)) && echo ,)" \
      "${names[i]}" "${results[i]}" "${times[i]}" "${notes[i]}"
  done
  printf '\n], "bandwidth": '
  cat "$PACK/bandwidth.json" 2> /dev/null || echo null
  echo '}'
} 3>&1 > "$json"
echo "in $SECONDS s; $json"
exit "$failed"
