// SPDX-License-Identifier: Apache-2.0
// The threads of the yardsticks: kept, because starting one takes as long as copying a few hundred KiB.
#include <algorithm>
#include <barrier>
#include <memory>
#include <thread>
#include <vector>

#include "copies.h"

namespace bench {
namespace {

struct Job {
  CopyFunction copy = nullptr;  // none: the end
  std::byte* dst = nullptr;
  const std::byte* src = nullptr;
  std::size_t bytes = 0;
};

class Team {
 public:
  explicit Team(int threads) : size_(static_cast<std::size_t>(threads)), start_(threads), end_(threads) {
    for (std::size_t i = 1; i < size_; ++i) {
      helpers_.emplace_back([this, i] {
        for (;;) {
          start_.arrive_and_wait();
          if (job_.copy == nullptr) return;
          part(i);
          end_.arrive_and_wait();
        }
      });
    }
  }
  ~Team() {
    job_ = {};
    start_.arrive_and_wait();
    for (std::thread& helper : helpers_) helper.join();
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  std::size_t size() const { return size_; }
  void run(const Job& job) {
    job_ = job;
    start_.arrive_and_wait();
    part(0);
    end_.arrive_and_wait();
  }

 private:
  void part(std::size_t i) const {
    constexpr std::size_t kGrain = 4096;
    const std::size_t grains = (job_.bytes + kGrain - 1) / kGrain;
    const std::size_t begin = std::min(job_.bytes, grains * i / size_ * kGrain);
    const std::size_t end = std::min(job_.bytes, grains * (i + 1) / size_ * kGrain);
    job_.copy(job_.dst + begin, job_.src + begin, end - begin);
  }

  std::size_t size_;
  std::barrier<> start_;
  std::barrier<> end_;
  Job job_;
  std::vector<std::thread> helpers_;
};

}  // namespace

void copy_on(int threads, CopyFunction copy, std::byte* dst, const std::byte* src, std::size_t bytes) {
  constexpr std::size_t kWorthAThread = std::size_t{256} << 10;
  threads =
      static_cast<int>(std::min(static_cast<std::size_t>(threads), std::max<std::size_t>(1, bytes / kWorthAThread)));
  if (threads == 1) return copy(dst, src, bytes);
  static std::unique_ptr<Team> team;
  if (team == nullptr || team->size() != static_cast<std::size_t>(threads)) {
    team.reset();
    team = std::make_unique<Team>(threads);
  }
  team->run({copy, dst, src, bytes});
}

}  // namespace bench
