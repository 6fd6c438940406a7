#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs each libFuzzer target of a folder, one on each core: fuzz.sh FOLDER SECONDS. New inputs stay in build/corpus, the
# inputs of crashes and hangs in build/crashes.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
seconds=$2

fuzz() {
  local target=$1 name options dictionary
  name=$(basename "$target")
  mkdir -p "build/corpus/$name" build/crashes
  options=(-max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -malloc_limit_mb=512 -max_len=512 -print_final_stats=1)
  dictionary=fuzz/${name%_fuzz}.dict
  [[ -e $dictionary ]] && options+=(-dict="$dictionary")
  if ! "$target" "${options[@]}" -artifact_prefix="build/crashes/$name-" "build/corpus/$name" "fuzz/corpus/$name" \
       > "build/$name.log" 2>&1; then
    echo "== $name failed"
    tail -n 60 "build/$name.log"
    return 1
  fi
  echo "== $name, $seconds s"
  grep -E '^(Done|stat::(number_of_executed_units|peak_rss_mb))' "build/$name.log"
}

failed=0 running=0
for target in "$folder"/*_fuzz; do
  if ((running == $(nproc))); then
    wait -n || failed=1
    ((running -= 1))
  fi
  fuzz "$target" &
  ((running += 1))
done
for ((; running > 0; --running)); do wait -n || failed=1; done
exit "$failed"
