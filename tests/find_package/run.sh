#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs a build of kvstride to a prefix of its own, then configures, builds and runs the outside project against it.
#   run.sh BUILD_DIR [-DNAME=VALUE ...]
set -eu
build=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --install "$build" --prefix "$work/prefix"
cmake -S "$here" -B "$work/build" -DCMAKE_PREFIX_PATH="$work/prefix" "$@"
cmake --build "$work/build"
"$work/build/consumer"
if [ -e "$work/prefix/bin/kvstride" ]; then "$work/prefix/bin/kvstride" info; fi
