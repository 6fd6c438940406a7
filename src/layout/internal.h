// SPDX-License-Identifier: Apache-2.0
// What the files of src/layout share.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kvstride/layout.h"
#include "kvstride/order.h"

namespace kvstride {

/// Text of a section as it would be written.
std::string print_section(const Section& section);
std::string print_parts(const std::vector<Part>& parts);
/// The same without any `@`.
std::string without_strides(std::vector<Part> parts);

/// Bytes inside the terms of a section, padding included.
std::int64_t content_bytes(const Section& section, const Geometry& geometry);

/// The registry names that a bare `NHD` or `HND` could mean, comma separated.
std::string rows_called(std::string_view letters);

/// Throws Error(kLayout) where two elements of `planes` (all of one tensor) share a byte, or where that cannot
/// be ruled out. `what` names the layout in the message.
void check_no_overlap(const std::vector<Plane>& planes, const std::string& what);

/// Modes in the form in which equal address functions are equal lists: merged, largest stride first.
std::vector<Mode> normal_modes(const Plane& plane);

/// One past the largest byte of an element, relative to the plane's base.
std::int64_t span_of(const std::vector<Mode>& modes, std::int64_t item);

std::int64_t checked_mul(std::int64_t a, std::int64_t b, const char* what);
std::int64_t checked_add(std::int64_t a, std::int64_t b, const char* what);

}  // namespace kvstride
