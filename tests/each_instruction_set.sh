#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the tests with each instruction set that this machine has: once with every call written past the caches, once
# with none. Usage: each_instruction_set.sh KVSTRIDE_TESTS
set -euo pipefail
tests=$1
# A name that no machine has: the answer lists those that this one has.
sets=$(KVSTRIDE_CPU_TARGET=? "$tests" --gtest_list_tests 2>&1 > /dev/null | sed -n 's/.*this machine has //p' | tr -d ,)
[[ -n $sets ]]
for set in $sets; do
  for bytes in 0 1000000000000; do
    echo "== $set, KVSTRIDE_STREAM_BYTES=$bytes"
    KVSTRIDE_CPU_TARGET=$set KVSTRIDE_STREAM_BYTES=$bytes KVSTRIDE_EXPECT_TARGET=$set "$tests" --gtest_brief=1 --gtest_filter="Kernels.*:Blocks.*:*Format*:Bf16.*"
  done
  for matrix in auto off emulated; do
    echo "== $set, KVSTRIDE_MATRIX=$matrix"
    KVSTRIDE_CPU_TARGET=$set KVSTRIDE_MATRIX=$matrix KVSTRIDE_EXPECT_TARGET=$set "$tests" --gtest_brief=1 --gtest_filter="Attention.*:Products.*"
  done
done
