// SPDX-License-Identifier: Apache-2.0
// Headers of chunk files from anywhere: parsing ends, and what it accepts is consistent and can be used.
#include <cstdlib>
#include <cstring>

#include "cpu/hash.h"
#include "kvstride/error.h"
#include "store/chunk.h"
#include "store/folders.h"
#include "store/form.h"

using namespace kvstride;
using namespace kvstride::store;

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

/// A namespace from the input's first bytes, so that headers can be made that pass the checksum.
Namespace some_space(std::uint8_t which) {
  NamespaceFields fields;
  fields.model = "m";
  fields.revision = "0123abcd";
  fields.planes = {{"key", {DType::kBF16, {}}}, {"value", {DType::kBF16, {}}}};
  if ((which & 1) != 0) fields.planes = {{"latent", {DType::kBF16, 64}}, {"rope", {DType::kBF16, 16}}};
  fields.num_layers = 1 + (which >> 1 & 3);
  fields.num_kv_heads = 1 + (which >> 3 & 7);
  fields.head_size = 16;
  fields.block_size = 8;
  return Namespace(fields);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(data, size));
  parse_header(bytes);
  const std::string text(reinterpret_cast<const char*>(data), size);
  parse_file_name(text);
  try {
    require(Namespace::parse(text).text() == text);
  } catch (const Error&) {
  }
  if (size < 24) return 0;

  // A header with a right checksum around whatever the input says of sizes and order.
  const Namespace space = some_space(data[0]);
  const auto number = [&](std::size_t at) {
    std::uint32_t out = 0;
    std::memcpy(&out, data + at, sizeof out);
    return out;
  };
  Content content;
  content.heads = {static_cast<std::uint16_t>(number(1) % 9), static_cast<std::uint16_t>(number(3) % 9)};
  content.shared_bytes = number(5) % 5000;
  content.head_bytes = number(9) % 5000;
  content.order = text.substr(24);
  if (content.order.size() > 4000 || content.payload_bytes() == 0) return 0;
  const Frame frame(space, content);
  std::vector<std::byte> image(static_cast<std::size_t>(frame.image_bytes()));
  const Key key(bytes.subspan(13, 1 + data[14] % 10));
  frame.seal(image.data(), key);
  require(frame.matches(image.data(), key));
  require(frame.verify(image.data()));
  const std::optional<Header> header = parse_header(image);
  require(header && header->key == key && header->content == content && header->digest == space.digest());
  if (const std::optional<Form> form = form_of(space, content)) {
    // Every element lies in the payload.
    for (const Plane& plane : form->layout.planes()) {
      kvstride::Index last{};
      for (std::size_t axis = 0; axis < last.size(); ++axis) last[axis] = plane.extents[axis] - 1;
      const Location where = form->layout.offset(plane, last);
      const std::int64_t base = where.tensor == 0 ? 0 : form->layout.part_bytes(0);
      require(where.byte >= 0 && base + where.byte + item_size(plane.dtype) <= content.payload_bytes());
    }
  }
  // One byte changed anywhere is seen.
  const std::size_t at = number(16) % image.size();
  image[at] ^= static_cast<std::byte>(1 + data[20] % 255);
  require(!frame.matches(image.data(), key) || !frame.verify(image.data()));
  return 0;
}
