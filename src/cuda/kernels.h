// SPDX-License-Identifier: Apache-2.0
// Launching the kernel: what kernels.cu offers to cudart.cpp.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/table.h"
#include "cuda/xxh3.h"

namespace kvstride::cuda {

/// Blocks of the kernel that a device holds at once.
cudaError_t resident_blocks(int device, int* blocks);
/// The table's arrays go with the launch where `inline_bytes` > 0.
cudaError_t launch_move(const Table& table, const std::byte* inline_data, std::size_t inline_bytes, int blocks,
                        cudaStream_t stream);
cudaError_t launch_checksum(const Checksums& work, int blocks, cudaStream_t stream);

}  // namespace kvstride::cuda
