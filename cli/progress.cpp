// SPDX-License-Identifier: Apache-2.0
// Long commands: a line that says how far they are, and Ctrl-C.
#include "progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>

#include "table.h"

namespace kvstride::cli {
namespace {

std::atomic<bool> interrupted{false};
static_assert(std::atomic<bool>::is_always_lock_free);

std::int64_t now() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

void print(const std::string& text) {
  // What cannot be shown is not worth an error.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
}

}  // namespace

Interruption::Interruption() {
  for (const int signal : {SIGINT, SIGTERM}) {
    struct sigaction action {};
    ::sigaction(signal, nullptr, &action);
    if (action.sa_handler == SIG_IGN) continue;  // whoever started us does not want it
    action.sa_handler = [](int) { interrupted = true; };
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    ::sigaction(signal, &action, nullptr);
  }
}

Interruption::~Interruption() {
  for (const int signal : {SIGINT, SIGTERM}) {
    struct sigaction action {};
    ::sigaction(signal, nullptr, &action);
    if (action.sa_handler != SIG_IGN) std::signal(signal, SIG_DFL);
  }
}

bool Interruption::asked() { return interrupted; }

Progress::Progress(std::string what, std::string unit, std::int64_t number, std::int64_t bytes)
    : what_(std::move(what)),
      unit_(std::move(unit)),
      number_(number),
      bytes_(bytes),
      shown_(::isatty(STDERR_FILENO) == 1),
      start_(now()) {
  if (shown_) draw();
}

Progress::~Progress() {
  if (shown_) print("\r\x1b[K");
}

void Progress::add(std::int64_t number, std::int64_t bytes) {
  done_ += number;
  done_bytes_ += bytes;
  if (shown_ && now() - drawn_ > 100'000'000) draw();
}

void Progress::draw() {
  constexpr int kWidth = 24;
  drawn_ = now();
  std::string line = what_;
  if (bytes_ > 0) {
    const double part = std::min(1.0, static_cast<double>(done_bytes_) / static_cast<double>(bytes_));
    const auto full = static_cast<std::size_t>(part * kWidth);
    line += fmt::format(" [{}{}] {:3.0f} %", std::string(full, '#'), std::string(kWidth - full, '.'), part * 100);
  }
  line += fmt::format("  {}{} {}", done_, number_ > 0 ? fmt::format(" of {}", number_) : "", unit_);
  if (done_bytes_ > 0) {
    const double time = static_cast<double>(drawn_ - start_) * 1e-9;
    const auto rate = static_cast<std::int64_t>(time > 0 ? static_cast<double>(done_bytes_) / time : 0);
    line += fmt::format("  {}/s", size_text(rate));
  }
  print("\r" + line + "\x1b[K");
}

}  // namespace kvstride::cli
