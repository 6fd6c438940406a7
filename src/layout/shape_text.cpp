// SPDX-License-Identifier: Apache-2.0
// The text of a declared shape (`B,H,N,2*D`): splitting and evaluating.
#include "layout/shape_text.h"

#include <algorithm>
#include <cctype>

namespace kvstride {
namespace {

bool all_digits(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

/// Recursive descent. A division that leaves a remainder has no value.
class Evaluator {
 public:
  Evaluator(std::string_view text, const Sizes& sizes) : text_(text), sizes_(sizes) {}

  std::optional<std::int64_t> run() {
    const auto value = sum();
    return i_ == text_.size() ? value : std::nullopt;
  }

 private:
  bool accept(std::string_view sign) {
    if (text_.substr(i_, sign.size()) != sign) return false;
    i_ += sign.size();
    return true;
  }

  std::optional<std::int64_t> sum() {
    auto value = product();
    while (value && accept("+")) {
      const auto right = product();
      if (!right) return std::nullopt;
      if (__builtin_add_overflow(*value, *right, &*value)) return std::nullopt;
    }
    return value;
  }

  std::optional<std::int64_t> product() {
    auto value = atom();
    while (value) {
      if (accept("*")) {
        const auto right = atom();
        if (!right || __builtin_mul_overflow(*value, *right, &*value)) return std::nullopt;
      } else if (accept("//")) {
        const auto right = atom();
        if (!right || *right == 0 || *value % *right != 0) return std::nullopt;
        *value /= *right;
      } else {
        break;
      }
    }
    return value;
  }

  std::optional<std::int64_t> atom() {
    if (accept("(")) {
      const auto value = sum();
      return accept(")") ? value : std::nullopt;
    }
    std::size_t end = i_;
    while (end < text_.size() && std::isalnum(static_cast<unsigned char>(text_[end]))) ++end;
    const std::string_view word = text_.substr(i_, end - i_);
    i_ = end;
    if (all_digits(word)) return std::stoll(std::string(word));
    const auto found = sizes_.find(word);
    if (found == sizes_.end()) return std::nullopt;
    return found->second;
  }

  std::string_view text_;
  const Sizes& sizes_;
  std::size_t i_ = 0;
};

}  // namespace

std::string_view trim(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> out;
  while (true) {
    const std::size_t at = text.find(separator);
    out.emplace_back(trim(text.substr(0, at)));
    if (at == std::string_view::npos) return out;
    text.remove_prefix(at + 1);
  }
}

std::optional<std::vector<std::string>> factors(std::string_view dim) {
  if (dim.find_first_of("+()") != std::string_view::npos) return std::nullopt;
  return split(dim, '*');
}

std::optional<std::int64_t> evaluate(std::string_view expression, const Sizes& sizes) {
  return Evaluator(expression, sizes).run();
}

}  // namespace kvstride
