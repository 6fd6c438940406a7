// SPDX-License-Identifier: Apache-2.0
// The kernels: the bodies of grid.h and xxh3.h on the device's blocks.
#include <cstring>

#include "cuda/grid.h"
#include "cuda/kernels.h"
#include "cuda/runtime.h"

namespace kvstride::cuda {
namespace {

/// What grid.h wants of a block.
class DeviceBlock {
 public:
  KVSTRIDE_HD explicit DeviceBlock(std::byte* shared) : shared_(shared) {}
#ifdef __CUDA_ARCH__
  KVSTRIDE_HD std::int64_t index() const { return blockIdx.x; }
  KVSTRIDE_HD std::int64_t count() const { return gridDim.x; }
  template <class Body>
  KVSTRIDE_HD void threads(const Body& body) {
    body(threadIdx.x);
  }
  KVSTRIDE_HD void barrier() { __syncthreads(); }
#else
  std::int64_t index() const;
  std::int64_t count() const;
  template <class Body>
  void threads(const Body& body);
  void barrier();
#endif
  KVSTRIDE_HD std::byte* shared() { return shared_; }

 private:
  std::byte* shared_;
};

/// A small table that goes with the launch.
struct Inline {
  Table table;
  alignas(16) std::byte data[kInlineBytes];
};

constexpr int kResident = 2;  ///< blocks of a processor: with more of them registers spill

__global__ void __launch_bounds__(kThreads, kResident) move_inline(const __grid_constant__ Inline given) {
  __shared__ alignas(16) std::byte shared[kSharedBytes];
  Table table = given.table;
  table.data = given.data;
  DeviceBlock block(shared);
  move(table, block);
}

__global__ void __launch_bounds__(kThreads, kResident) move_table(const __grid_constant__ Table table) {
  __shared__ alignas(16) std::byte shared[kSharedBytes];
  DeviceBlock block(shared);
  move(table, block);
}

__global__ void __launch_bounds__(kThreads, kResident) checksum_all(const __grid_constant__ Checksums work) {
  __shared__ alignas(16) std::byte shared[kSharedBytes];
  DeviceBlock block(shared);
  checksum(work, block);
}

}  // namespace

cudaError_t resident_blocks(int device, int* blocks) {
  int processors = 0;
  cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  int each = 0;
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, move_table, kThreads, 0);
  *blocks = processors * each;
  return error;
}

cudaError_t launch_move(const Table& table, const std::byte* inline_data, std::size_t inline_bytes, int blocks,
                        cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(table.num_tiles < blocks ? table.num_tiles : blocks);
  if (inline_bytes > 0) {
    Inline given;
    given.table = table;
    std::memcpy(given.data, inline_data, inline_bytes);
    move_inline<<<grid, kThreads, 0, stream>>>(given);
  } else {
    move_table<<<grid, kThreads, 0, stream>>>(table);
  }
  return cudaGetLastError();
}

cudaError_t launch_checksum(const Checksums& work, int blocks, cudaStream_t stream) {
  const std::int64_t granules = work.pieces * work.granules;
  checksum_all<<<static_cast<unsigned>(granules < blocks ? granules : blocks), kThreads, 0, stream>>>(work);
  return cudaGetLastError();
}

}  // namespace kvstride::cuda
