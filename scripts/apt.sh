#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the packages of a list, apt-packages.txt if none is named, that this machine lacks, as root or with sudo;
# else it says which they are.
set -euo pipefail
cd "$(dirname "$0")/.."

mapfile -t wanted < <(sed 's/#.*//; s/[[:space:]]//g; /^$/d' "${1:-apt-packages.txt}")
missing=()
for package in "${wanted[@]}"; do
  state=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null || true)
  [[ $state == installed ]] || missing+=("$package")
done
if ((${#missing[@]} == 0)); then exit 0; fi
as_root=()
if ((EUID != 0)); then
  if ! command -v sudo > /dev/null || ! { [[ -t 0 ]] || sudo -n true 2> /dev/null; }; then
    echo "scripts/apt.sh: not root; please run: apt-get install ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo --preserve-env=DEBIAN_FRONTEND)
fi

echo "scripts/apt.sh: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
install() {
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" apt-get install -qq --yes --no-install-recommends "${missing[@]}"
}
(install > /dev/null) || { sleep 10; install; }
