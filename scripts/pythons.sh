#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tries the wheel of dist/ on each newer CPython that PATH or pyenv has: pythons.sh TEST…. A fresh virtual environment
# for each; the wheel with its test extra, an import, `kvstride info`, the tests. Says which were tried.
set -euo pipefail
cd "$(dirname "$0")/.."
wheel=$(echo "$PWD"/dist/kvstride-*-cp311-abi3-*.whl)
tests=("$@")

# Whether $1 is CPython $2, with the lock that an abi3 module needs. A shim of pyenv may be on PATH and not run.
is_python() {
  "$1" -c 'import platform, sys, sysconfig
python = platform.python_implementation(), sysconfig.get_python_version(), bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
sys.exit(python != ("CPython", sys.argv[1], False))' "$2" > /dev/null 2>&1
}

find_python() {
  local candidates=("python$1") candidate
  if command -v pyenv > /dev/null; then
    mapfile -t -O 1 candidates < <(printf '%s\n' "$(pyenv root)/versions/$1".*"/bin/python$1" | sort -rV)
  fi
  for candidate in "${candidates[@]}"; do
    if is_python "$candidate" "$1"; then echo "$candidate"; return; fi
  done
}

try() {
  local venv=$PWD/build/pythons/$1
  "$2" -m venv --clear "$venv"
  install() { "$venv/bin/pip" install -qq "$wheel[test]" pytest-xdist; }
  install || { sleep 10; install; }
  export PATH=$venv/bin:$PATH
  python -c 'import kvstride._core as core; assert core.__file__.endswith("/_core.abi3.so"), core.__file__'
  kvstride info
  python -m pytest -q -n auto -p no:cacheprovider "${tests[@]}"
}

tried=() failed=() missing=()
for version in 3.12 3.13 3.14; do
  python=$(find_python "$version")
  if [[ -z $python ]]; then missing+=("$version"); continue; fi
  tried+=("$version")
  echo "== $(basename "$wheel") on $("$python" --version)"
  set +e  # `if try …` would switch set -e off inside
  (set -e; try "$version" "$python")
  status=$?
  set -e
  if ((status != 0)); then failed+=("$version"); fi
done
echo "== CPython tried: ${tried[*]:-none}; not found: ${missing[*]:-none}; failed: ${failed[*]:-none}"
((${#failed[@]} == 0))
