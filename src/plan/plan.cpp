// SPDX-License-Identifier: Apache-2.0
// The public plan: a program with its checks.
#include "kvstride/plan.h"

#include <fmt/format.h>

#include "kvstride/error.h"
#include "plan/program.h"

namespace kvstride {
namespace {

plan::BuildOptions to_build(const PlanOptions& options) {
  plan::BuildOptions out;
  out.plan = options;
  return out;
}

}  // namespace

Plan::Plan(const Layout& src, const Layout& dst, const PlanOptions& options)
    : program_(std::make_unique<plan::Program>(std::make_shared<plan::Recipe>(
          "plan", plan::End{&src, nullptr}, plan::End{&dst, nullptr}, to_build(options)))) {}
Plan::Plan(const Cache& src, const Cache& dst, const PlanOptions& options)
    : program_(std::make_unique<plan::Program>(plan::recipe_for("plan", src, dst, to_build(options)))) {}
Plan::~Plan() = default;
Plan::Plan(Plan&&) noexcept = default;
Plan& Plan::operator=(Plan&&) noexcept = default;

void Plan::bind(std::span<const Pair> pairs) { program_->bind(pairs); }
void Plan::bind_tokens(std::span<const std::int64_t> src_blocks, std::span<const std::int64_t> dst_blocks,
                       RangePair tokens) {
  program_->bind_tokens(src_blocks, dst_blocks, tokens);
}
void Plan::bind_slots(std::span<const std::int64_t> src_slots, std::span<const std::int64_t> dst_slots) {
  if (src_slots.size() != dst_slots.size()) {
    throw Error(ErrorCode::kArgument,
                fmt::format("plan: {} source slots, {} destination slots", src_slots.size(), dst_slots.size()));
  }
  program_->bind_slots(src_slots, dst_slots);
}
std::int64_t Plan::num_copies() const { return program_->num_copies(); }
std::int64_t Plan::num_bytes() const { return program_->num_bytes(); }
std::map<std::int64_t, std::int64_t> Plan::sizes() const { return program_->sizes(); }

void Plan::check() const { program_->check_memory(); }

void Plan::run(const Stream& stream) {
  program_->check_memory();
  program_->run(stream);
}

}  // namespace kvstride
