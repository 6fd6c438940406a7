// SPDX-License-Identifier: Apache-2.0
// Transfers by io_uring, from and to registered buffers.
#include <fmt/format.h>
#include <liburing.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <thread>

#include "store/io.h"

namespace kvstride::store {
namespace {

using std::chrono::nanoseconds;
using std::chrono::steady_clock;

constexpr std::size_t kMaxTransfer = std::size_t{1} << 30;  // of one operation, and of one registered buffer
constexpr std::size_t kMaxDepth = 4096;                     // a kernel limit is 32768
constexpr std::uint64_t kNoSlot = ~std::uint64_t{0};        // what cancellations and the probe are called
constexpr nanoseconds kLongWait = std::chrono::hours(24);   // so that deadlines cannot overflow
constexpr nanoseconds kProbeWait = std::chrono::seconds(1);

__kernel_timespec kernel_time(nanoseconds time) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(time);
  return {.tv_sec = seconds.count(), .tv_nsec = (time - seconds).count()};
}

class RingTransfers final : public Transfers {
 public:
  /// Says in `why` what is missing and leaves `usable()` false, or is ready.
  RingTransfers(std::size_t depth, std::span<const iovec> memory, std::string& why)
      : depth_(std::clamp<std::size_t>(depth, 1, kMaxDepth)), slots_(depth_) {
    if (!(open_ = open_ring(why))) return;
    usable_ = probe(why);
    if (!usable_) return;
    register_buffers(memory);
    for (std::size_t i = depth_; i > 0; --i) free_.push_back(i - 1);
  }

  ~RingTransfers() override {
    if (!open_) return;
    if (forked()) {
      ::close(ring_.ring_fd);
      return;
    }
    std::vector<Transfer> ended;
    while (free_.size() < depth_ && usable_) {
      cancel();
      collect(ended, true, std::chrono::milliseconds(100));
    }
    io_uring_queue_exit(&ring_);
  }
  RingTransfers(const RingTransfers&) = delete;
  RingTransfers& operator=(const RingTransfers&) = delete;

  bool usable() const { return usable_; }

  void submit(const Transfer& transfer, bool more) override {
    io_uring_sqe* sqe = forked() || free_.empty() ? nullptr : io_uring_get_sqe(&ring_);
    if (sqe == nullptr) {
      ended_.push_back(transfer);
      ended_.back().result = -EBUSY;
      return;
    }
    const std::size_t slot = free_.back();
    free_.pop_back();
    slots_[slot] = transfer;
    prepare(*sqe, transfer);
    io_uring_sqe_set_data64(sqe, slot);
    constexpr int kTogether = 8;
    ++unsent_;
    // At once: the caller computes before it collects, and the disk should work meanwhile.
    if (!more || unsent_ >= kTogether) start();
  }

  /// What the kernel does not take now stays in the ring and goes with the next call.
  void start() override {
    if (unsent_ == 0 || forked()) return;
    unsent_ = 0;
    io_uring_submit(&ring_);
  }

  void collect(std::vector<Transfer>& out, bool wait, nanoseconds timeout) override {
    const std::size_t before = out.size();
    out.insert(out.end(), ended_.begin(), ended_.end());
    ended_.clear();
    if (forked()) return;
    start();
    reap(out);
    if (!wait || out.size() > before) return;
    const auto deadline = steady_clock::now() + std::clamp(timeout, nanoseconds(0), kLongWait);
    while (out.size() == before && free_.size() < depth_) {
      const nanoseconds left = deadline - steady_clock::now();
      if (left <= nanoseconds(0)) return;
      wait_for(left);
      reap(out);
    }
  }

  void cancel() override {
    if (forked()) return;
    std::vector<bool> idle(depth_);
    for (const std::size_t slot : free_) idle[slot] = true;
    for (std::size_t slot = 0; slot < depth_; ++slot) {
      if (idle[slot]) continue;
      io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
      if (sqe == nullptr) break;  // full: these first; the rest with the next call
      io_uring_prep_cancel64(sqe, slot, 0);
      io_uring_sqe_set_data64(sqe, kNoSlot);
    }
    io_uring_submit(&ring_);
  }

  std::size_t depth() const override { return depth_; }
  std::size_t under_way() const override { return depth_ - free_.size() + ended_.size(); }
  const char* name() const override { return name_; }

 private:
  struct Registered {
    const std::byte* first;
    const std::byte* end;
    int index;
  };

  bool forked() const { return ::getpid() != pid_; }

  bool open_ring(std::string& why) {
    // Without interrupts of this thread where the kernel knows that. IORING_SETUP_DEFER_TASKRUN is no faster with
    // requests of this size, and buffered reads would stand still until somebody collects.
    constexpr std::array<unsigned, 2> kWays{IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG, 0};
    int made = -EINVAL;
    io_uring_params params{};
    for (const unsigned flags : kWays) {
      params = {};
      params.flags = flags;
      made = io_uring_queue_init_params(static_cast<unsigned>(depth_), &ring_, &params);
      if (made != -EINVAL) break;
    }
    if (made < 0) {
      why = fmt::format("io_uring_setup: {}", std::strerror(-made));
      return false;
    }
    if ((params.features & IORING_FEAT_EXT_ARG) == 0) {  // without it, liburing's waits with a time limit differ
      why = "io_uring_enter: no time limits before Linux 5.11";
      io_uring_queue_exit(&ring_);
      return false;
    }
    return true;
  }

  /// A sandbox may give a ring and refuse what is done with it: writes a few bytes to a file in memory. (Reading it
  /// would need a buffer that outlives a request which never ends.)
  bool probe(std::string& why) {
    static constexpr std::array<char, 8> kText{"kvprobe"};
    const int fd = ::memfd_create("kvstride", MFD_CLOEXEC);
    if (fd < 0) {
      why = fmt::format("memfd_create: {}", std::strerror(errno));
      return false;
    }
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    io_uring_prep_write(sqe, fd, kText.data(), kText.size(), 0);
    io_uring_sqe_set_data64(sqe, kNoSlot);
    __kernel_timespec time = kernel_time(kProbeWait);
    io_uring_cqe* cqe = nullptr;
    int result = retry([&] { return io_uring_submit_and_wait_timeout(&ring_, &cqe, 1, &time, nullptr); });
    if (result >= 0 && cqe != nullptr) {
      result = cqe->res;
      io_uring_cqe_seen(&ring_, cqe);
    }
    std::array<char, 8> read{};
    const bool same = ::pread(fd, read.data(), read.size(), 0) == kText.size() && read == kText;
    ::close(fd);
    if (result < 0) {
      why = fmt::format("io_uring write: {}", std::strerror(-result));
    } else if (!same) {
      why = "io_uring write: other bytes in the file";
    }
    return why.empty();
  }

  void register_buffers(std::span<const iovec> memory) {
    std::vector<iovec> buffers;
    for (const iovec& all : memory) {
      for (std::size_t at = 0; at < all.iov_len; at += kMaxTransfer) {
        buffers.push_back({static_cast<std::byte*>(all.iov_base) + at, std::min(kMaxTransfer, all.iov_len - at)});
      }
    }
    if (buffers.empty()) return;
    if (io_uring_register_buffers(&ring_, buffers.data(), static_cast<unsigned>(buffers.size())) < 0) {
      name_ = "io_uring, buffers not registered";
      return;
    }
    for (const iovec& buffer : buffers) {
      const auto* first = static_cast<const std::byte*>(buffer.iov_base);
      registered_.push_back({first, first + buffer.iov_len, static_cast<int>(registered_.size())});
    }
    std::sort(registered_.begin(), registered_.end(), [](auto& a, auto& b) { return a.first < b.first; });
  }

  /// Index of the registered buffer that holds all these bytes, or −1.
  int buffer_of(const std::byte* data, std::size_t bytes) const {
    const auto after = std::upper_bound(registered_.begin(), registered_.end(), data,
                                        [](const std::byte* at, const Registered& r) { return at < r.first; });
    if (after == registered_.begin()) return -1;
    const Registered& found = *std::prev(after);
    return data < found.end && bytes <= static_cast<std::size_t>(found.end - data) ? found.index : -1;
  }

  void prepare(io_uring_sqe& sqe, const Transfer& t) const {
    const auto bytes = static_cast<unsigned>(std::min(t.bytes, kMaxTransfer));
    const auto offset = static_cast<std::uint64_t>(t.offset);
    const int buffer = buffer_of(t.data, bytes);
    if (buffer < 0) {
      t.write ? io_uring_prep_write(&sqe, t.fd, t.data, bytes, offset)
              : io_uring_prep_read(&sqe, t.fd, t.data, bytes, offset);
    } else {
      t.write ? io_uring_prep_write_fixed(&sqe, t.fd, t.data, bytes, offset, buffer)
              : io_uring_prep_read_fixed(&sqe, t.fd, t.data, bytes, offset, buffer);
    }
  }

  void reap(std::vector<Transfer>& out) {
    std::array<io_uring_cqe*, 32> batch;
    while (const unsigned count = io_uring_peek_batch_cqe(&ring_, batch.data(), batch.size())) {
      for (unsigned i = 0; i < count; ++i) {
        const std::uint64_t slot = io_uring_cqe_get_data64(batch[i]);
        if (slot == kNoSlot) continue;
        out.push_back(slots_[slot]);
        out.back().result = batch[i]->res;
        free_.push_back(slot);
      }
      io_uring_cq_advance(&ring_, count);
    }
  }

  void wait_for(nanoseconds time) {
    __kernel_timespec left = kernel_time(time);
    io_uring_cqe* cqe = nullptr;
    const int result = io_uring_submit_and_wait_timeout(&ring_, &cqe, 1, &left, nullptr);
    if (result >= 0 || result == -ETIME || result == -EINTR) return;
    // EAGAIN, EBUSY: the kernel is short of memory.
    std::this_thread::sleep_for(std::min<nanoseconds>(time, std::chrono::milliseconds(1)));
  }

  const pid_t pid_ = ::getpid();
  const std::size_t depth_;
  int unsent_ = 0;  ///< submitted, and not yet told to the kernel
  io_uring ring_{};
  bool open_ = false;
  bool usable_ = false;
  const char* name_ = "io_uring";
  std::vector<Registered> registered_;  // by address
  std::vector<Transfer> slots_;         // what is under way
  std::vector<std::size_t> free_;       // slots that are not
  std::vector<Transfer> ended_;         // what the ring did not take
};

}  // namespace

std::unique_ptr<Transfers> ring_transfers(std::size_t depth, std::span<const iovec> memory, std::string* why) {
  std::string reason;
  auto ring = std::make_unique<RingTransfers>(depth, memory, reason);
  if (why != nullptr) *why = reason;
  if (!ring->usable()) return nullptr;
  return ring;
}

}  // namespace kvstride::store
