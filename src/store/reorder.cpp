// SPDX-License-Identifier: Apache-2.0
// Converting a chunk's payload, there and back, before its file is replaced.
#include "store/reorder.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "kvstride/error.h"

namespace kvstride::store {
namespace {

std::int64_t part_sum(const Layout& layout) {
  std::int64_t bytes = 0;
  for (std::int64_t part = 0; part < layout.num_parts(); ++part) bytes += layout.part_bytes(part);
  return bytes;
}

/// Bytes that elements have; what else a payload holds is padding of its order.
std::int64_t element_bytes(const Layout& layout) {
  std::int64_t bytes = 0;
  for (const Plane& plane : layout.planes()) {
    std::int64_t elements = item_size(plane.dtype);
    for (const std::int64_t extent : plane.extents) elements *= extent;
    bytes += elements;
  }
  return bytes;
}

/// The dtype that most planes have.
DType common_dtype(const Layout& layout) {
  std::map<DType, int> counts;
  for (const Plane& plane : layout.planes()) ++counts[plane.dtype];
  return std::max_element(counts.begin(), counts.end(),
                          [](const auto& a, const auto& b) { return a.second < b.second; })
      ->first;
}

/// Writes out what stands for two planes, and every plane's dtype: text for readers that know little of the notation.
void spell_out(Section& section, DType dtype) {
  dtype = section.dtype.value_or(dtype);
  section.dtype = section.members.empty() || section.kv_stride ? std::optional(dtype) : std::nullopt;
  if (section.kv_stride) return;  // padded behind the value: braces have nothing for that
  section.kv = false;
  for (Member& member : section.members) spell_out(member.body, dtype);
}

/// Text with all extents and dtypes.
std::string full_text(const Layout& layout) {
  std::vector<Part> parts = Order::parse(layout.str()).parts();
  for (Part& part : parts) spell_out(part.body, layout.geometry().dtype);
  return Order::from_parts(std::move(parts)).text();
}

Cache cache_over(const Layout& layout, std::byte* payload) {
  std::vector<std::byte*> tensors{payload};
  for (std::int64_t part = 1; part < layout.num_parts(); ++part) {
    tensors.push_back(tensors.back() + layout.part_bytes(part - 1));
  }
  return Cache(std::move(tensors), layout);
}

}  // namespace

Content content_in(const Namespace& space, const Content& like, std::string_view order) {
  const auto wrong = [&](const std::string& what) {
    return Error(ErrorCode::kLayout, fmt::format("convert: order '{}': {}", order, what));
  };
  const std::optional<Form> from = like.order.empty() ? std::nullopt : form_of(space, like);
  if (!from) throw Error(ErrorCode::kLayout, "convert: raw bytes have no order");
  Geometry geometry = from->layout.geometry();
  geometry.dtype = common_dtype(from->layout);
  const Layout layout(order_of(order), geometry);
  if (layout.num_tensors() != layout.num_parts()) {
    throw wrong(fmt::format("no L, and there are {} layers", geometry.num_layers));
  }
  for (const Plane& plane : layout.planes()) {
    if (from->layout.find_plane(plane.name) == nullptr) {
      throw wrong(fmt::format("plane '{}' is none of the namespace's", plane.name));
    }
  }
  for (const Plane& plane : from->layout.planes()) {
    const Plane* twin = layout.find_plane(plane.name);
    if (twin == nullptr) throw wrong(fmt::format("no plane '{}'", plane.name));
    if (twin->dtype != plane.dtype) {
      throw wrong(fmt::format("plane '{}' would be {}, it is {}: write its dtype behind its terms", plane.name,
                              name_of(twin->dtype), name_of(plane.dtype)));
    }
    if (twin->has_head != plane.has_head) {
      throw wrong(fmt::format("plane '{}' has {}", plane.name, plane.has_head ? "heads: no H" : "no heads, and an H"));
    }
    for (int a = 0; a < kNumAxes; ++a) {
      const auto axis = static_cast<Axis>(a);
      if (twin->extent(axis) == plane.extent(axis)) continue;
      throw wrong(fmt::format("plane '{}' would have {} of {}, it has {}", plane.name, twin->extent(axis),
                              letter_of(axis), plane.extent(axis)));
    }
  }
  // The order that stores write has its own text.
  const Form standard = stored_form(space, from->layout, like.heads);
  if (standard.layout == layout) return standard.content;
  Content out{full_text(layout), like.heads, part_sum(layout), 0};
  if (like.heads.count > 0) {
    Content split = out;
    const std::int64_t last = layout.part_bytes(layout.num_parts() - 1);
    split.head_bytes = last / like.heads.count;
    split.shared_bytes -= last;
    if (split.payload_bytes() == out.payload_bytes() && form_of(space, split)) return split;
  }
  if (!form_of(space, out)) throw wrong("readers would not understand it");
  return out;
}

/// From one content to another, between buffers that stay where they are.
struct Reorderer::Conversion {
  Form from;
  std::optional<Form> to;
  std::string why;  ///< there is no `to`
  std::optional<Frame> old_frame;
  std::optional<Frame> new_frame;
  std::optional<Plan> there;
  std::optional<Plan> back;
};

Reorderer::Reorderer(const SpaceFolder& space, std::string order, StoreEditor* editor)
    : space_(space), order_(std::move(order)), editor_(editor) {}
Reorderer::~Reorderer() = default;

Reorderer::Conversion& Reorderer::conversion_for(const Namespace& space, const Content& from) {
  for (const auto& [content, conversion] : conversions_) {
    if (content == from) return *conversion;
  }
  auto made = std::make_unique<Conversion>(Conversion{*form_of(space, from), {}, {}, {}, {}, {}, {}});
  made->old_frame.emplace(space, from);
  try {
    made->to = form_of(space, content_in(space, from, order_));
    made->new_frame.emplace(space, made->to->content);
  } catch (const Error& error) {
    made->to.reset();
    made->why = error.what();
  }
  if (made->to) {
    const auto fit = [&](std::optional<Memory>& memory, std::int64_t bytes) {
      if (memory && memory->size() >= bytes) return;
      conversions_.clear();  // their plans are for the memory that goes
      memory.reset();
      memory.emplace(bytes);
    };
    fit(new_, made->new_frame->image_bytes());
    fit(back_, made->old_frame->image_bytes());
    std::byte* target = new_->data() + made->new_frame->header_bytes();
    const Cache middle = cache_over(made->to->layout, target);
    made->there.emplace(cache_over(made->from.layout, old_->data() + made->old_frame->header_bytes()), middle);
    made->back.emplace(middle, cache_over(made->from.layout, back_->data()));
    made->there->bind(std::array<Pair, 1>{{{0, 0}}});
    made->back->bind(std::array<Pair, 1>{{{0, 0}}});
  }
  conversions_.emplace_back(from, std::move(made));
  return *conversions_.back().second;
}

/// Reads all of a file into old_; the result is what prevented it.
Reorderer::Result Reorderer::read(const ChunkFile& file, struct stat& stat, std::int64_t& length) {
  Io& io = space_.store().io();
  const int fd = space_.open(file, true, stat);
  if (fd == -ENOENT) return {State::kGone, {}, 0, 0};
  if (fd < 0) return {State::kFailed, std::strerror(-fd), 0, 0};
  length = stat.st_size;
  Result out{State::kDone, {}, length, length};
  if (!old_ || old_->size() < whole_pages(length)) {
    conversions_.clear();
    old_.reset();
    old_.emplace(std::max<std::int64_t>(whole_pages(length), kPage));
  }
  for (std::int64_t at = 0; at < length;) {
    const std::int64_t from = at / kPage * kPage;
    const auto got = retry(
        [&] { return io.pread(fd, old_->data() + from, static_cast<std::size_t>(whole_pages(length) - from), from); });
    if (got < 0) {
      out = {State::kFailed, std::strerror(static_cast<int>(-got)), length, length};
      break;
    }
    if (from + got <= at) {
      length = at;  // cut meanwhile
      break;
    }
    at = from + got;
  }
  io.close(fd);
  return out;
}

Reorderer::Result Reorderer::reorder(const ChunkFile& file) {
  struct stat stat {};
  std::int64_t length = 0;
  Result out = read(file, stat, length);
  if (out.state != State::kDone) return out;
  const auto damaged = [&] {
    const Check check = verifier_.check(space_, file);  // says how
    out.state = check.state == Check::State::kGone ? State::kGone : State::kDamaged;
    out.why = check.why.empty() ? "damaged when it was read" : check.why;
    return out;
  };
  const std::byte* image = old_->data();
  const std::optional<Header> header = parse_header({image, static_cast<std::size_t>(length)});
  if (!header || header->digest != space_.digest() || !(header->key == file.key) ||
      header->content.heads != file.heads) {
    return damaged();
  }
  const Namespace space = Namespace::parse(header->space_text);
  const Frame frame(space, header->content);
  if (frame.image_bytes() != length || !frame.matches(image, file.key) || !frame.verify(image)) return damaged();
  if (header->content.order.empty()) {
    out.state = State::kRaw;
    return out;
  }
  if (!form_of(space, header->content)) return damaged();

  Conversion& conversion = conversion_for(space, header->content);
  const auto failed = [&](std::string why) {
    out.state = State::kFailed;
    out.why = std::move(why);
    return out;
  };
  if (!conversion.to) return failed(conversion.why);
  if (conversion.to->content == header->content) {
    out.state = State::kAlready;
    return out;
  }
  out.after = conversion.new_frame->image_bytes();
  std::byte* target = new_->data() + conversion.new_frame->header_bytes();
  std::memset(target, 0, static_cast<std::size_t>(conversion.to->content.payload_bytes()));
  conversion.there->run();
  conversion.new_frame->seal(new_->data(), file.key);

  // And back: every byte of an element must be what it was. The buffer starts with the opposite of all bytes.
  const std::byte* payload = image + conversion.old_frame->header_bytes();
  const auto bytes = static_cast<std::size_t>(header->content.payload_bytes());
  std::byte* back = back_->data();
  for (std::size_t i = 0; i < bytes; ++i) back[i] = ~payload[i];
  conversion.back->run();
  std::int64_t equal = 0;
  bool other = false;
  for (std::size_t i = 0; i < bytes; ++i) {
    equal += back[i] == payload[i] ? 1 : 0;
    other |= back[i] != payload[i] && back[i] != ~payload[i];
  }
  if (other || equal != element_bytes(conversion.from.layout)) {
    return failed("converted and converted back it is another: please report this");
  }
  if (editor_ == nullptr) return out;
  const int error =
      editor_->replace(space_, file, stat, {new_->data(), static_cast<std::size_t>(out.after)}, verifier_);
  if (error == 0) return out;
  if (error == -ENOENT || error == -ESTALE) {
    out.state = State::kGone;
    return out;
  }
  return failed(
      error == -EILSEQ  ? "the disk has other bytes than were written"
      : error == -EBUSY ? "another process counts"
      : error == -ENOSPC
          ? fmt::format("no room for {} bytes beside it, within the directory's limit or on the disk", out.after)
          : std::strerror(-error));
}

}  // namespace kvstride::store
