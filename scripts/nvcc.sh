#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Puts nvcc and cuobjdump into the bin/ of a virtual environment: nvcc.sh VENV auto|pypi|PATH_OF_NVCC
# auto: nvcc on PATH, else of /usr/local/cuda, else (or where that one is older than 12.8, which knows sm_100 and
# sm_120 first) pypi: NVIDIA's wheels, the dependency groups `cuda` and `cuobjdump` of pyproject.toml.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(cd "$1" && pwd)
where=$2

# A command of that name that does no more than call the other one: nvcc finds its parts beside itself.
wrap() {
  printf '#!/bin/sh\nexec "%s" "$@"\n' "$2" > "$venv/bin/$1"
  chmod +x "$venv/bin/$1"
}
outside() { PATH=${PATH//"$venv/bin:"/} type -P "$1" || true; }
install() {
  "$venv/bin/pip" install -qq --group "$1" || { sleep 10; "$venv/bin/pip" install -qq --group "$1"; }
}
wheels() { "$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
is_new() {
  local release
  release=$("$1" --version 2> /dev/null | sed -nE 's/.*release ([0-9]+)\.([0-9]+).*/\1 \2/p')
  read -r major minor <<< "${release:-0 0}"
  ((major * 100 + minor >= 1208))
}

nvcc=$where
if [[ $where == auto ]]; then
  nvcc=pypi
  for candidate in "$(outside nvcc)" /usr/local/cuda/bin/nvcc; do
    if [[ -x $candidate ]] && is_new "$candidate"; then nvcc=$candidate; break; fi
  done
fi
if [[ $nvcc == pypi ]]; then
  echo "== nvcc of PyPI's wheels into ${1}"
  install cuda
  toolkit=$(wheels)/nvidia/cu13
  nvcc=$toolkit/bin/nvcc
  # Where nvcc looks, and what CMake takes a toolkit by: a wheel has no links.
  ln -sfn lib "$toolkit/lib64"
  ln -sf libcudart.so.13 "$toolkit/lib/libcudart.so"
fi
wrap nvcc "$nvcc"

# The compiler's own directory, as a wrapper on PATH may hide it; NVIDIA's images have cuobjdump there.
cuobjdump=$(outside cuobjdump)
[[ $where != pypi && -n $cuobjdump ]] || cuobjdump=$(dirname "$nvcc")/cuobjdump
if [[ ! -x $cuobjdump ]]; then
  install cuobjdump
  cuobjdump=$(wheels)/nvidia/cu13/bin/cuobjdump
fi
wrap cuobjdump "$cuobjdump"
