// SPDX-License-Identifier: Apache-2.0
// kvstride_disk_bench: what the disk gives to plain files with O_DIRECT, from and to registered buffers on 2 MiB pages.
//
// Writes `bytes` as files of `chunk` bytes into an empty directory (open, write, close; nothing else) and reads them
// back. With chunk = 0 it is one file whose room is taken beforehand and that was written once: what is left of the
// cost is the disk's. Prints a line of JSON: GB/s both ways, and how many cores were busy.
#include <fcntl.h>
#include <liburing.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace {

struct Options {
  std::string dir = ".";
  std::size_t bytes = std::size_t{2} << 30;
  std::size_t chunk = std::size_t{2} << 20;
  std::size_t piece = std::size_t{2} << 20;  ///< the most that one transfer moves
  std::size_t depth = 4;                     ///< transfers under way, a thread
  std::size_t batch = 1;  ///< transfers handed to the kernel in one call and waited for together, at most depth
  std::size_t threads = 1;
  std::size_t ring = 1;         ///< 0: pread and pwrite, and depth means nothing
  std::size_t allocate = 0;     ///< 1: fallocate() before the first write of a file
  std::size_t small_pages = 0;  ///< 1: buffers on pages of 4 KiB
};

[[noreturn]] void fail(const std::string& what, int error) {
  std::fprintf(stderr, "kvstride_disk_bench: %s: %s\n", what.c_str(), std::strerror(error));
  std::exit(1);
}

int check(const std::string& what, int result) {
  if (result < 0) fail(what, result == -1 ? errno : -result);
  return result;
}

constexpr std::size_t kHugePage = std::size_t{2} << 20;

/// Touched memory, a buffer of `piece` bytes for each transfer under way.
class Buffers {
 public:
  Buffers(std::size_t count, std::size_t piece, bool small_pages) : piece_(piece) {
    bytes_ = (count * piece + kHugePage - 1) / kHugePage * kHugePage + kHugePage;
    mapping_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping_ == MAP_FAILED) fail("mmap", errno);
    madvise(mapping_, bytes_, small_pages ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
    const auto at = reinterpret_cast<std::uintptr_t>(mapping_);
    first_ = reinterpret_cast<std::byte*>((at + kHugePage - 1) / kHugePage * kHugePage);
    std::memset(first_, 0x5a, count * piece);
    range_ = {first_, count * piece};
  }
  ~Buffers() { munmap(mapping_, bytes_); }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  std::byte* at(std::size_t index) const { return first_ + index * piece_; }
  const iovec& range() const { return range_; }

 private:
  std::size_t piece_;
  std::size_t bytes_ = 0;
  void* mapping_ = nullptr;
  std::byte* first_ = nullptr;
  iovec range_{};
};

/// What one thread moves: its files, or its part of the one big file.
class Worker {
 public:
  Worker(const Options& options, int dir, std::size_t index)
      : options_(options),
        dir_(dir),
        index_(index),
        depth_(options.depth),
        buffers_(depth_, options.piece, options.small_pages != 0),
        slots_(depth_) {
    if (options_.ring == 0) return;
    check("io_uring_queue_init", io_uring_queue_init(static_cast<unsigned>(2 * depth_), &ring_, 0));
    check("io_uring_register_buffers", io_uring_register_buffers(&ring_, &buffers_.range(), 1));
  }
  ~Worker() {
    if (options_.ring != 0) io_uring_queue_exit(&ring_);
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void run(bool write) {
    write_ = write;
    free_.clear();
    for (std::size_t i = 0; i < depth_; ++i) free_.push_back(i);
    const std::size_t threads = options_.threads;
    if (options_.chunk == 0) {
      const std::size_t part = options_.bytes / threads;
      move(open("big"), index_ * part, part);
    }
    for (std::size_t file = index_; options_.chunk > 0 && file < options_.bytes / options_.chunk; file += threads) {
      move(open(std::to_string(file)), 0, options_.chunk);
    }
    submit();
    while (free_.size() < depth_) collect();
  }

 private:
  struct Transfer {
    int fd;
    std::size_t bytes;
  };

  int open(const std::string& name) {
    const int flags = write_ ? O_WRONLY | O_CREAT : O_RDONLY;
    const int fd = check("open", openat(dir_, name.c_str(), flags | O_DIRECT | O_CLOEXEC, 0600));
    if (write_ && options_.allocate != 0 && options_.chunk > 0) {
      check("fallocate", fallocate(fd, 0, 0, static_cast<off_t>(options_.chunk)));
    }
    return fd;
  }

  /// Starts all transfers of a range of a file, which is closed when the last of them ends.
  void move(int fd, std::size_t offset, std::size_t bytes) {
    left_[fd] = (bytes + options_.piece - 1) / options_.piece;
    for (std::size_t done = 0; done < bytes; done += options_.piece) {
      start(fd, offset + done, std::min(options_.piece, bytes - done));
    }
  }

  void start(int fd, std::size_t offset, std::size_t bytes) {
    while (free_.size() < (queued_ == 0 ? options_.batch : 1)) collect();
    const std::size_t slot = free_.back();
    free_.pop_back();
    std::byte* const data = buffers_.at(slot);
    const auto at = static_cast<off_t>(offset);
    if (options_.ring == 0) {
      const auto moved = write_ ? pwrite(fd, data, bytes, at) : pread(fd, data, bytes, at);
      if (moved < 0) fail("transfer", errno);
      end(fd, slot, static_cast<std::size_t>(moved) == bytes);
      return;
    }
    slots_[slot] = {fd, bytes};
    io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
    const auto length = static_cast<unsigned>(bytes);
    if (write_) {
      io_uring_prep_write_fixed(entry, fd, data, length, offset, 0);
    } else {
      io_uring_prep_read_fixed(entry, fd, data, length, offset, 0);
    }
    io_uring_sqe_set_data64(entry, slot);
    if (++queued_ == options_.batch) submit();
  }

  void submit() {
    if (queued_ > 0) check("io_uring_submit", io_uring_submit(&ring_));
    queued_ = 0;
  }

  void collect() {
    io_uring_cqe* entry = nullptr;
    int waited = 0;
    do waited = io_uring_wait_cqe(&ring_, &entry);
    while (waited == -EINTR);
    check("io_uring_wait_cqe", waited);
    const auto slot = static_cast<std::size_t>(io_uring_cqe_get_data64(entry));
    const int moved = check("transfer", entry->res);
    io_uring_cqe_seen(&ring_, entry);
    end(slots_[slot].fd, slot, static_cast<std::size_t>(moved) == slots_[slot].bytes);
  }

  void end(int fd, std::size_t slot, bool whole) {
    if (!whole) fail("short transfer", EIO);
    free_.push_back(slot);
    if (--left_[fd] > 0) return;
    left_.erase(fd);
    check("close", close(fd));
  }

  const Options& options_;
  int dir_;
  std::size_t index_;
  std::size_t depth_;
  std::size_t queued_ = 0;  ///< transfers that the kernel has not been told of
  Buffers buffers_;
  io_uring ring_{};
  bool write_ = false;
  std::vector<std::size_t> free_;
  std::vector<Transfer> slots_;
  std::map<int, std::size_t> left_;  ///< transfers of a file that have not ended
};

double cpu_seconds() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

struct Measured {
  double gbps;
  double cpu;  ///< cores that were busy on the way, the kernel's threads for this process included
};

Measured measure(const Options& options, const std::vector<std::unique_ptr<Worker>>& workers, bool write) {
  std::vector<std::thread> threads;
  std::atomic<bool> go = false;
  for (const auto& worker : workers) {
    threads.emplace_back([&] {
      go.wait(false);
      worker->run(write);
    });
  }
  const double cpu = cpu_seconds();
  const auto start = std::chrono::steady_clock::now();
  go = true;
  go.notify_all();
  for (std::thread& thread : threads) thread.join();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return {static_cast<double>(options.bytes) / seconds / 1e9, (cpu_seconds() - cpu) / seconds};
}

Options parse(int argc, char** argv) {
  Options out;
  const std::map<std::string, std::size_t*> numbers = {
      {"--bytes", &out.bytes}, {"--chunk", &out.chunk},       {"--piece", &out.piece},
      {"--depth", &out.depth}, {"--batch", &out.batch},       {"--threads", &out.threads},
      {"--ring", &out.ring},   {"--allocate", &out.allocate}, {"--small-pages", &out.small_pages},
  };
  for (int i = 1; i < argc; ++i) {
    const std::string given = argv[i];
    const std::string name = given.substr(0, given.find('='));
    const std::string value = given.substr(std::min(name.size() + 1, given.size()));
    const auto number = numbers.find(name);
    if (name == "--dir") {
      out.dir = value;
    } else if (number != numbers.end()) {
      *number->second = std::strtoull(value.c_str(), nullptr, 10);
    } else {
      fail("unknown option " + given, EINVAL);
    }
  }
  if (out.chunk > 0) out.piece = std::min(out.piece, out.chunk);
  if (out.ring == 0) out.depth = 1;
  out.batch = std::min(out.batch, out.depth);
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  const int dir = check("open " + options.dir, open(options.dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  std::vector<std::unique_ptr<Worker>> workers;
  for (std::size_t i = 0; i < options.threads; ++i) workers.push_back(std::make_unique<Worker>(options, dir, i));
  if (options.chunk == 0) {
    const int fd = check("open big", openat(dir, "big", O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    check("fallocate big", fallocate(fd, 0, 0, static_cast<off_t>(options.bytes)));
    close(fd);
    measure(options, workers, true);
  }
  const Measured write = measure(options, workers, true);
  const Measured read = measure(options, workers, false);
  std::printf("{\"write_GBps\": %.4f, \"read_GBps\": %.4f, \"write_cpu\": %.3f, \"read_cpu\": %.3f}\n", write.gbps,
              read.gbps, write.cpu, read.cpu);
  return 0;
}
