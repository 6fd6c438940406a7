// SPDX-License-Identifier: Apache-2.0
// merge_states(): two attention results over disjoint keys.
#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "attention/rows.h"
#include "kvstride/attention.h"
#include "kvstride/error.h"

namespace kvstride {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();
constexpr double kLn2 = 0.6931471805599453;

[[noreturn]] void refuse(ErrorCode code, const std::string& what) { throw Error(code, "merge_states: " + what); }

void check(const AttentionState& first, const AttentionState& second) {
  const auto& a = first.out;
  const auto& b = second.out;
  if (a.dtype != DType::kF32 && a.dtype != DType::kF16 && a.dtype != DType::kBF16) {
    refuse(ErrorCode::kDType, fmt::format("out1 is {}, expected f32, f16 or bf16", name_of(a.dtype)));
  }
  if (a.dtype != b.dtype) {
    refuse(ErrorCode::kDType, fmt::format("out1 is {}, out2 {}", name_of(a.dtype), name_of(b.dtype)));
  }
  if (a.shape != b.shape) {
    refuse(ErrorCode::kArgument, fmt::format("out1 has shape [{}, {}, {}], out2 [{}, {}, {}]", a.shape[0], a.shape[1],
                                             a.shape[2], b.shape[0], b.shape[1], b.shape[2]));
  }
}

const std::byte* row_at(const TokenTensor& tensor, std::int64_t row, std::int64_t head) {
  return tensor.data + (row * tensor.strides[0] + head * tensor.strides[1]) * item_size(tensor.dtype);
}

}  // namespace

void merge_states(const AttentionState& first, const AttentionState& second, const AttentionOutput& output,
                  bool lse_log2) {
  check(first, second);
  if (output.shape != first.out.shape) refuse(ErrorCode::kArgument, "the output has another shape than out1");
  const auto& shape = first.out.shape;
  const DType dtype = first.out.dtype;
  const std::int64_t item = item_size(dtype);
  const double unit = lse_log2 ? kLn2 : 1.0;
  std::vector<std::byte> room(static_cast<std::size_t>(shape[2] * item));
  std::vector<float> mine(static_cast<std::size_t>(shape[2]));
  std::vector<float> theirs(mine.size());
  for (std::int64_t r = 0; r < shape[0]; ++r) {
    for (std::int64_t h = 0; h < shape[1]; ++h) {
      const std::int64_t index = r * shape[1] + h;
      const double a = first.lse[index] * unit;
      const double b = second.lse[index] * unit;
      const double top = std::max(a, b);
      // A state of LSE −infinity has no weight, whatever its values are.
      const double weight_a = a == double{kLowest} ? 0.0 : std::exp(a - top);
      const double weight_b = b == double{kLowest} ? 0.0 : std::exp(b - top);
      const double sum = weight_a + weight_b;
      attend::read_row(mine.data(), row_at(first.out, r, h), dtype, first.out.strides[2], shape[2], room.data());
      attend::read_row(theirs.data(), row_at(second.out, r, h), dtype, second.out.strides[2], shape[2], room.data());
      const auto part_a = static_cast<float>(weight_a == 0.0 ? 0.0 : weight_a / sum);
      const auto part_b = static_cast<float>(weight_b == 0.0 ? 0.0 : weight_b / sum);
      for (std::size_t d = 0; d < mine.size(); ++d) {
        // A state without weight may hold anything.
        mine[d] = (weight_a == 0.0 ? 0.0F : part_a * mine[d]) + (weight_b == 0.0 ? 0.0F : part_b * theirs[d]);
      }
      std::byte* to = output.out + (r * output.strides[0] + h * output.strides[1]) * item;
      attend::write_row(to, mine.data(), dtype, output.strides[2], shape[2], room.data());
      if (output.lse == nullptr) continue;
      output.lse[index] = sum == 0.0 ? kLowest : static_cast<float>((top + std::log(sum)) / unit);
    }
  }
}

}  // namespace kvstride
