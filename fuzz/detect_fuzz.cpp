// SPDX-License-Identifier: Apache-2.0
// Any shape, strides and hints: refused with an Error, or readings whose elements all lie in the tensor.
#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "fuzz.h"
#include "kvstride/detect.h"

using namespace kvstride;
using fuzz::require;

namespace {

/// Mostly sizes that caches have.
std::int64_t size_of(FuzzedDataProvider& in) {
  constexpr std::int64_t kSizes[] = {2, 1, 3, 4, 7, 8, 16, 32, 64, 128, 256, 576, 0, -1};
  if (in.ConsumeIntegralInRange(0, 31) == 31) return in.ConsumeIntegral<std::int64_t>();
  return in.PickValueInArray(kSizes);
}

TensorShape tensor_of(FuzzedDataProvider& in) {
  TensorShape tensor;
  tensor.item_size = in.PickValueInArray({std::int64_t{0}, std::int64_t{2}, std::int64_t{4}, std::int64_t{1}});
  tensor.shape.resize(in.ConsumeIntegralInRange<std::size_t>(1, 7));
  for (std::int64_t& size : tensor.shape) size = size_of(in);
  const int kind = in.ConsumeIntegralInRange(0, 3);
  if (kind == 3) {
    tensor.strides.resize(tensor.shape.size());
    for (std::int64_t& stride : tensor.strides) stride = size_of(in);
  } else if (kind > 0) {  // dense in some sequence of the dimensions, padded now and then
    std::vector<std::size_t> sequence(tensor.shape.size());
    for (std::size_t i = 0; i < sequence.size(); ++i) sequence[i] = i;
    for (std::size_t i = sequence.size(); kind == 2 && i > 1; --i) {
      std::swap(sequence[i - 1], sequence[in.ConsumeIntegralInRange<std::size_t>(0, i - 1)]);
    }
    tensor.strides.resize(tensor.shape.size());
    std::int64_t stride = 1;
    for (auto i = sequence.rbegin(); i != sequence.rend(); ++i) {
      if (in.ConsumeIntegralInRange(0, 7) == 7 && __builtin_mul_overflow(stride, 2, &stride)) stride = 1;
      tensor.strides[*i] = stride;
      if (__builtin_mul_overflow(stride, tensor.shape[*i], &stride)) stride = 1;
    }
  }
  return tensor;
}

Hints hints_of(FuzzedDataProvider& in) {
  Hints hints;
  const auto maybe = [&](std::optional<std::int64_t>& hint) {
    if (in.ConsumeIntegralInRange(0, 2) == 2) hint = size_of(in);
  };
  maybe(hints.num_layers);
  maybe(hints.num_blocks);
  maybe(hints.block_size);
  maybe(hints.num_kv_heads);
  maybe(hints.head_size);
  maybe(hints.value_head_size);
  if (in.ConsumeBool()) hints.dtype = static_cast<DType>(in.ConsumeIntegralInRange(0, static_cast<int>(DType::kI32)));
  if (in.ConsumeBool()) hints.symbols["k"] = size_of(in);
  return hints;
}

__extension__ using Wide = __int128;

/// Bytes of a tensor from its first element to the end of its last; a padded one may have more than int64 counts.
Wide span_of(const TensorShape& tensor, std::int64_t item) {
  Wide last = 0;
  Wide dense = 1;
  for (std::size_t i = tensor.shape.size(); i > 0; --i) {
    last += (tensor.shape[i - 1] - 1) * (tensor.strides.empty() ? dense : Wide{tensor.strides[i - 1]});
    dense *= tensor.shape[i - 1];
  }
  return (last + 1) * item;
}

void check_layout(const Layout& layout, const std::vector<TensorShape>& parts, std::int64_t item_hint) {
  for (const Plane& plane : layout.planes()) {
    const TensorShape& tensor = parts[static_cast<std::size_t>(plane.part)];
    Index last{};
    for (std::size_t i = 0; i < last.size(); ++i) last[i] = plane.extents[i] - 1;
    const std::int64_t item = tensor.item_size != 0 ? tensor.item_size : item_hint;
    require(layout.offset(plane, Index{}).byte >= 0, "addresses are in the tensor", layout.str());
    require(layout.offset(plane, last).byte + item_size(plane.dtype) <= span_of(tensor, item),
            "addresses are in the tensor", layout.str());
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  FuzzedDataProvider in(data, size);
  std::vector<TensorShape> parts{tensor_of(in)};
  if (in.ConsumeIntegralInRange(0, 7) == 7) parts.push_back(in.ConsumeBool() ? tensor_of(in) : parts[0]);
  const Hints hints = hints_of(in);
  std::vector<std::string> among;
  if (in.ConsumeBool())
    among.emplace_back(registry()[in.ConsumeIntegralInRange<std::size_t>(0, registry().size() - 1)].name);
  try {
    const std::vector<Reading> readings = candidates(parts, hints, among);
    for (const Reading& reading : readings)
      check_layout(reading.layout, parts, item_size(reading.layout.geometry().dtype));
    std::optional<ErrorCode> code;
    try {
      require(detect(parts, hints, among).layout == readings.at(0).layout, "detect() is the one candidate");
    } catch (const Error& error) {
      fuzz::check_error(error, 1 << 16);
      code = error.code();
    }
    require(!code || *code == (readings.empty() ? ErrorCode::kUnknown : ErrorCode::kAmbiguous), "detect() says why");
    require((readings.size() == 1) == !code, "one candidate is an answer");
  } catch (const Error& error) {
    fuzz::check_error(error, 1 << 16);
  }
  try {
    const std::string name = among.empty() ? in.ConsumeRandomLengthString(40) : among[0];
    check_layout(bind_layout(name, parts, hints), parts, item_size(hints.dtype.value_or(DType::kBF16)));
  } catch (const Error& error) {
    fuzz::check_error(error, 1 << 16);
  }
  return 0;
}
