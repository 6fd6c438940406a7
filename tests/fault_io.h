// SPDX-License-Identifier: Apache-2.0
// The operating system with faults: calls that fail, come back short, hang, or are the process's last.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <string_view>
#include <thread>

#include "store/io.h"

namespace kvstride::test {

/// Passes every call on.
class ForwardIo : public store::Io {
 public:
  explicit ForwardIo(std::shared_ptr<store::Io> below = store::system_io()) : below_(std::move(below)) {}
  int open(int at, const char* name, int flags, mode_t mode) override { return below_->open(at, name, flags, mode); }
  int close(int fd) override { return below_->close(fd); }
  std::int64_t pread(int fd, void* data, std::size_t bytes, std::int64_t offset) override {
    return below_->pread(fd, data, bytes, offset);
  }
  std::int64_t pwrite(int fd, const void* data, std::size_t bytes, std::int64_t offset) override {
    return below_->pwrite(fd, data, bytes, offset);
  }
  int fdatasync(int fd) override { return below_->fdatasync(fd); }
  int chmod_fd(int fd, mode_t mode) override { return below_->chmod_fd(fd, mode); }
  int stat_fd(int fd, struct stat& out) override { return below_->stat_fd(fd, out); }
  int stat_at(int at, const char* name, struct stat& out) override { return below_->stat_at(at, name, out); }
  int unlink(int at, const char* name) override { return below_->unlink(at, name); }
  int mkdir(int at, const char* name, mode_t mode) override { return below_->mkdir(at, name, mode); }
  int rmdir(int at, const char* name) override { return below_->rmdir(at, name); }
  int rename_new(int from_at, const char* from, int to_at, const char* to) override {
    return below_->rename_new(from_at, from, to_at, to);
  }
  int exchange(int from_at, const char* from, int to_at, const char* to) override {
    return below_->exchange(from_at, from, to_at, to);
  }
  int set_times(int at, const char* name, std::optional<std::int64_t> used,
                std::optional<std::int64_t> changed) override {
    return below_->set_times(at, name, used, changed);
  }
  int statvfs(int fd, struct statvfs& out) override { return below_->statvfs(fd, out); }
  int list(int fd, const std::function<bool(const char* name, unsigned char type)>& use) override {
    return below_->list(fd, use);
  }
  int lock(int fd, std::int64_t start, std::int64_t bytes, bool exclusive) override {
    return below_->lock(fd, start, bytes, exclusive);
  }
  int unlock(int fd, std::int64_t start, std::int64_t bytes) override { return below_->unlock(fd, start, bytes); }
  int locked(int fd, std::int64_t start, std::int64_t bytes) override { return below_->locked(fd, start, bytes); }
  std::int64_t now() override { return below_->now(); }

 private:
  std::shared_ptr<store::Io> below_;
};

/// Kinds of calls, as a mask.
enum Calls : unsigned {
  kOpen = 1,
  kRead = 2,
  kWrite = 4,
  kSync = 8,
  kStat = 16,  ///< of a descriptor, of a name, of the file system
  kUnlink = 32,
  kMkdir = 64,
  kRename = 128,
  kTimes = 256,
  kList = 512,
  kLock = 1024,
  kAnyCall = ~0U
};

/// What a call is about, as a mask; told from names and from how files were opened.
enum Targets : unsigned { kLedger = 1, kDraft = 2, kPiece = 4, kFolder = 8, kAnyTarget = ~0U };

/// A rule about calls: from the `after`-th on, `times` of them, each with the chance `share`.
struct Fault {
  enum Effect : int {
    kNone,
    kFail,   ///< −error, and nothing is done
    kShort,  ///< half of a read or write
    kHang,   ///< nothing happens until the rule is lifted; then the call is made
    kDone,   ///< it is done, and −error is the answer all the same
    kZero,   ///< 0 bytes
    kKill,   ///< SIGKILL to this process, before the call
    kTear,   ///< half of a write, then SIGKILL
  };
  unsigned calls = kAnyCall;
  unsigned targets = kAnyTarget;
  Effect effect = kFail;
  int error = EIO;
  std::int64_t after = 0;
  std::int64_t times = std::int64_t{1} << 60;
  double share = 1;
};

/// No locks: a forked child may use it, whatever other threads did. Rules may change at any time.
class FaultIo : public ForwardIo {
  struct Rule {
    std::atomic<int> effect{Fault::kNone};
    std::atomic<unsigned> calls{0};
    std::atomic<unsigned> targets{0};
    std::atomic<int> error{0};
    std::atomic<std::int64_t> seen{0};
    std::atomic<std::int64_t> after{0};
    std::atomic<std::int64_t> until{0};
    std::atomic<std::uint32_t> share{0};
    std::atomic<std::int64_t> hits{0};
  };

  static std::size_t half(std::size_t bytes) { return bytes > 8192 ? bytes / 2 / 4096 * 4096 : (bytes + 1) / 2; }

  static unsigned target_of(std::string_view name) {
    if (name == "ledger") return kLedger;
    return name.size() == 32 ? kDraft : kPiece;
  }
  unsigned kind_of(int fd) const {
    return fd >= 0 && fd < static_cast<int>(kinds_.size()) ? kinds_[static_cast<std::size_t>(fd)].load() : 0U;
  }

  /// The first rule that has to say something about a call.
  Rule* ask(Calls call, unsigned target) {
    ++calls_;
    for (Rule& rule : rules_) {
      if (rule.effect == Fault::kNone || (rule.calls & call) == 0 || (rule.targets & target) == 0) continue;
      const std::int64_t at = rule.seen++;
      if (at < rule.after || at >= rule.until) continue;
      std::uint64_t dice = (dice_ += 0x9e3779b97f4a7c15U);
      dice = (dice ^ (dice >> 30)) * 0xbf58476d1ce4e5b9U;
      if (static_cast<std::uint32_t>(dice >> 32) > rule.share) continue;
      ++rule.hits;
      return &rule;
    }
    return nullptr;
  }

  template <typename Call>
  auto around(Calls call, unsigned target, const Call& real) {
    return around(call, target, real, real);
  }
  template <typename Call, typename Half>
  auto around(Calls call, unsigned target, const Call& real, const Half& part) -> decltype(real()) {
    Rule* rule = ask(call, target);
    if (rule == nullptr) return real();
    switch (rule->effect.load()) {
      case Fault::kFail: return -rule->error;
      case Fault::kShort: return part();
      case Fault::kZero: return 0;
      case Fault::kDone:
        if (call != kOpen) real();  // its descriptor would be lost
        return -rule->error;
      case Fault::kTear: part(); [[fallthrough]];
      case Fault::kKill:
        ::kill(::getpid(), SIGKILL);
        ::pause();
        return -EIO;
      case Fault::kHang:
        ++hanging_;
        while (rule->effect == Fault::kHang) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        --hanging_;
        return real();
      default: return real();
    }
  }

 public:
  using ForwardIo::ForwardIo;

  /// Sets rule `slot`. Not from two threads at once.
  void set(const Fault& fault, std::size_t slot = 0) {
    Rule& rule = rules_[slot];
    rule.effect = Fault::kNone;
    rule.calls = fault.calls;
    rule.targets = fault.targets;
    rule.error = fault.error;
    rule.seen = 0;
    rule.after = fault.after;
    rule.until = fault.after + fault.times;
    rule.share = static_cast<std::uint32_t>(fault.share * 4294967295.0);
    rule.effect = fault.effect;
  }
  void lift(std::size_t slot = 0) { rules_[slot].effect = Fault::kNone; }
  /// How often a rule took effect.
  std::int64_t hits(std::size_t slot = 0) const { return rules_[slot].hits; }
  /// Calls that hang now.
  int hanging() const { return hanging_; }
  /// All calls so far that rules could be about.
  std::int64_t calls() const { return calls_; }
  void jump(std::chrono::nanoseconds by) { jump_ += by.count(); }

  /// Descriptors that are open: of all kinds, or of some.
  int num_open(unsigned targets = kAnyTarget) const {
    return static_cast<int>(
        std::count_if(kinds_.begin(), kinds_.end(), [&](const auto& kind) { return (kind & targets) != 0; }));
  }

  int open(int at, const char* name, int flags, mode_t mode) override {
    const unsigned target = (flags & O_DIRECTORY) != 0 ? kFolder : target_of(name);
    return around(kOpen, target, [&] {
      const int fd = ForwardIo::open(at, name, flags, mode);
      if (fd >= 0 && fd < static_cast<int>(kinds_.size())) kinds_[static_cast<std::size_t>(fd)] = target;
      return fd;
    });
  }
  int close(int fd) override {
    if (fd >= 0 && fd < static_cast<int>(kinds_.size())) kinds_[static_cast<std::size_t>(fd)] = 0;
    return ForwardIo::close(fd);
  }
  std::int64_t pread(int fd, void* data, std::size_t bytes, std::int64_t offset) override {
    return around(
        kRead, kind_of(fd), [&] { return ForwardIo::pread(fd, data, bytes, offset); },
        [&] { return ForwardIo::pread(fd, data, half(bytes), offset); });
  }
  std::int64_t pwrite(int fd, const void* data, std::size_t bytes, std::int64_t offset) override {
    return around(
        kWrite, kind_of(fd), [&] { return ForwardIo::pwrite(fd, data, bytes, offset); },
        [&] { return ForwardIo::pwrite(fd, data, half(bytes), offset); });
  }
  int fdatasync(int fd) override {
    return around(kSync, kind_of(fd), [&] { return ForwardIo::fdatasync(fd); });
  }
  int stat_fd(int fd, struct stat& out) override {
    return around(kStat, kind_of(fd), [&] { return ForwardIo::stat_fd(fd, out); });
  }
  int stat_at(int at, const char* name, struct stat& out) override {
    return around(kStat, target_of(name), [&] { return ForwardIo::stat_at(at, name, out); });
  }
  int statvfs(int fd, struct statvfs& out) override {
    return around(kStat, kFolder, [&] { return ForwardIo::statvfs(fd, out); });
  }
  int unlink(int at, const char* name) override {
    return around(kUnlink, target_of(name), [&] { return ForwardIo::unlink(at, name); });
  }
  int mkdir(int at, const char* name, mode_t mode) override {
    return around(kMkdir, kFolder, [&] { return ForwardIo::mkdir(at, name, mode); });
  }
  int rename_new(int from_at, const char* from, int to_at, const char* to) override {
    return around(kRename, target_of(from), [&] { return ForwardIo::rename_new(from_at, from, to_at, to); });
  }
  int exchange(int from_at, const char* from, int to_at, const char* to) override {
    return around(kRename, target_of(from), [&] { return ForwardIo::exchange(from_at, from, to_at, to); });
  }
  int set_times(int at, const char* name, std::optional<std::int64_t> used,
                std::optional<std::int64_t> changed) override {
    return around(kTimes, target_of(name), [&] { return ForwardIo::set_times(at, name, used, changed); });
  }
  int list(int fd, const std::function<bool(const char* name, unsigned char type)>& use) override {
    // An error in the middle: half of the names are told.
    return around(kList, kFolder, [&] { return ForwardIo::list(fd, use); });
  }
  int lock(int fd, std::int64_t start, std::int64_t bytes, bool exclusive) override {
    return around(kLock, kind_of(fd), [&] { return ForwardIo::lock(fd, start, bytes, exclusive); });
  }
  std::int64_t now() override { return ForwardIo::now() + jump_; }

 private:
  std::array<Rule, 4> rules_;
  std::array<std::atomic<unsigned>, 4096> kinds_{};  ///< by descriptor; 0: not open
  std::atomic<std::int64_t> calls_{0};
  std::atomic<std::int64_t> jump_{0};
  std::atomic<std::uint64_t> dice_{1};
  std::atomic<int> hanging_{0};
};

}  // namespace kvstride::test
