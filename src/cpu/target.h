// SPDX-License-Identifier: Apache-2.0
// The choice of an instruction set.
#pragma once

namespace kvstride::cpu {

/// Obeys KVSTRIDE_CPU_TARGET. Called once, before the first kernel.
bool choose_target();

}  // namespace kvstride::cpu
