#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs each libFuzzer target of a folder: fuzz.sh FOLDER SECONDS. New inputs stay in build/corpus, the inputs of
# crashes and hangs in build/crashes.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
seconds=$2

for target in "$folder"/*_fuzz; do
  name=$(basename "$target")
  mkdir -p "build/corpus/$name" build/crashes
  options=(-max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -malloc_limit_mb=512 -max_len=512 -print_final_stats=1)
  dictionary=fuzz/${name%_fuzz}.dict
  [[ -e $dictionary ]] && options+=(-dict="$dictionary")
  echo "== $name, $seconds s"
  if ! "$target" "${options[@]}" -artifact_prefix="build/crashes/$name-" "build/corpus/$name" "fuzz/corpus/$name" \
       > "build/$name.log" 2>&1; then
    tail -n 60 "build/$name.log"
    exit 1
  fi
  grep -E '^(Done|stat::(number_of_executed_units|peak_rss_mb))' "build/$name.log"
done
