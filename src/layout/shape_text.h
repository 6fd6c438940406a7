// SPDX-License-Identifier: Apache-2.0
// The text of a declared shape (`B,H,N,2*D`): splitting and evaluating.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvstride {

/// Values of L B N H D and of symbols.
using Sizes = std::map<std::string, std::int64_t, std::less<>>;

std::string_view trim(std::string_view text);
std::vector<std::string> split(std::string_view text, char separator);
/// Factors of a product of names, integers and `A//s`; nothing where the text is no such product.
std::optional<std::vector<std::string>> factors(std::string_view dim);
/// Value of an expression of + * // ( ), or nothing where a size is not known.
std::optional<std::int64_t> evaluate(std::string_view expression, const Sizes& sizes);

}  // namespace kvstride
