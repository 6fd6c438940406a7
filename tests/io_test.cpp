// SPDX-License-Identifier: Apache-2.0
// The operating system as the directory tier sees it: calls, and transfers of both kinds against a file in memory.
#include "store/io.h"

#include <dirent.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "child.h"

namespace kvstride::store {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

// --- Calls -----------------------------------------------------------------------------------------------------------

class IoTest : public testing::Test {
 protected:
  int create(const char* name, const std::string& text = "") {
    const int fd = io->open(dir.fd(), name, O_RDWR | O_CREAT | O_EXCL, 0600);
    EXPECT_GE(fd, 0);
    EXPECT_EQ(io->pwrite(fd, text.data(), text.size(), 0), static_cast<std::int64_t>(text.size()));
    return fd;
  }
  std::string text_of(const char* name) {
    const int fd = io->open(dir.fd(), name, O_RDONLY, 0);
    if (fd < 0) return "no " + std::string(name);
    std::string text(100, '\0');
    text.resize(static_cast<std::size_t>(io->pread(fd, text.data(), text.size(), 0)));
    io->close(fd);
    return text;
  }

  Directory dir;
  std::shared_ptr<Io> io = system_io();
};

TEST_F(IoTest, ResultsAreValuesOrNegativeErrors) {
  const int fd = create("a", "hello");
  EXPECT_NE(::fcntl(fd, F_GETFD) & FD_CLOEXEC, 0);
  std::array<char, 16> data{};
  EXPECT_EQ(io->pread(fd, data.data(), data.size(), 1), 4);
  EXPECT_EQ(std::string(data.data()), "ello");
  EXPECT_EQ(io->pread(fd, data.data(), data.size(), 5), 0);
  EXPECT_EQ(io->fdatasync(fd), 0);
  struct stat now {};
  EXPECT_EQ(io->stat_fd(fd, now), 0);
  EXPECT_EQ(now.st_size, 5);
  struct statvfs space {};
  EXPECT_EQ(io->statvfs(fd, space), 0);
  EXPECT_GT(space.f_blocks, 0U);
  EXPECT_EQ(io->close(fd), 0);

  EXPECT_EQ(io->close(fd), -EBADF);
  EXPECT_EQ(io->pread(fd, data.data(), 1, 0), -EBADF);
  EXPECT_EQ(io->pwrite(fd, data.data(), 1, 0), -EBADF);
  EXPECT_EQ(io->fdatasync(fd), -EBADF);
  EXPECT_EQ(io->stat_fd(fd, now), -EBADF);
  EXPECT_EQ(io->chmod_fd(fd, 0600), -EBADF);
  EXPECT_EQ(io->statvfs(fd, space), -EBADF);
  EXPECT_EQ(io->lock(fd, 0, 1, true), -EBADF);
  EXPECT_EQ(io->locked(fd, 0, 1), -EBADF);
  EXPECT_EQ(io->list(fd, [](const char*, unsigned char) { return true; }), -EBADF);
  EXPECT_EQ(io->open(dir.fd(), "none", O_RDONLY, 0), -ENOENT);
  EXPECT_EQ(io->stat_at(dir.fd(), "none", now), -ENOENT);
  EXPECT_EQ(io->unlink(dir.fd(), "none"), -ENOENT);
  EXPECT_EQ(io->set_times(dir.fd(), "none", 0, 0), -ENOENT);
  EXPECT_EQ(io->mkdir(dir.fd(), "a", 0700), -EEXIST);
  EXPECT_EQ(io->rmdir(dir.fd(), "a"), -ENOTDIR);
  EXPECT_EQ(io->mkdir(dir.fd(), "d", 0700), 0);
  EXPECT_EQ(io->unlink(dir.fd(), "d"), -EISDIR);
  EXPECT_EQ(io->rmdir(dir.fd(), "d"), 0);
  EXPECT_EQ(io->unlink(dir.fd(), "a"), 0);
  const std::int64_t time = io->now();
  EXPECT_NEAR(static_cast<double>(time) / 1e9, static_cast<double>(::time(nullptr)), 5);
}

TEST_F(IoTest, LinksAreNotFollowed) {
  io->close(create("target", "x"));
  ASSERT_EQ(::symlinkat("target", dir.fd(), "link"), 0);
  struct stat now {};
  EXPECT_EQ(io->open(dir.fd(), "link", O_RDONLY, 0), -ELOOP);
  EXPECT_EQ(io->open(dir.fd(), "link", O_RDWR | O_CREAT, 0600), -ELOOP);
  EXPECT_EQ(io->stat_at(dir.fd(), "link", now), 0);
  EXPECT_TRUE(S_ISLNK(now.st_mode));
  EXPECT_EQ(io->set_times(dir.fd(), "link", 5, 5), 0);
  EXPECT_EQ(io->stat_at(dir.fd(), "target", now), 0);
  EXPECT_NE(now.st_mtim.tv_sec, 0);
}

TEST_F(IoTest, ModesDoNotDependOnTheUmask) {
  const mode_t before = ::umask(077);
  const int fd = io->open(dir.fd(), "a", O_RDWR | O_CREAT, 0660);
  ::umask(before);
  struct stat now {};
  ASSERT_EQ(io->stat_fd(fd, now), 0);
  EXPECT_EQ(now.st_mode & 07777, 0600U);
  EXPECT_EQ(io->chmod_fd(fd, 0660), 0);
  ASSERT_EQ(io->stat_fd(fd, now), 0);
  EXPECT_EQ(now.st_mode & 07777, 0660U);
  io->close(fd);
}

TEST_F(IoTest, TimesToTheNanosecond) {
  io->close(create("a"));
  struct stat now {};
  ASSERT_EQ(io->set_times(dir.fd(), "a", 1'700'000'000'123'456'789, 1'600'000'000'000'000'001), 0);
  ASSERT_EQ(io->set_times(dir.fd(), "a", std::nullopt, 1'500'000'000'000'000'002), 0);
  ASSERT_EQ(io->stat_at(dir.fd(), "a", now), 0);
  EXPECT_EQ(now.st_atim.tv_sec, 1'700'000'000);
  EXPECT_EQ(now.st_atim.tv_nsec, 123'456'789);
  EXPECT_EQ(now.st_mtim.tv_sec, 1'500'000'000);
  EXPECT_EQ(now.st_mtim.tv_nsec, 2);
  ASSERT_EQ(io->set_times(dir.fd(), "a", -1, std::nullopt), 0);
  ASSERT_EQ(io->stat_at(dir.fd(), "a", now), 0);
  EXPECT_EQ(now.st_atim.tv_sec, -1);
  EXPECT_EQ(now.st_atim.tv_nsec, 999'999'999);
  EXPECT_EQ(now.st_mtim.tv_sec, 1'500'000'000);
}

TEST_F(IoTest, RenamesOnlyToNewNames) {
  const auto check = [&] {
    io->close(create("a", "one"));
    io->close(create("b", "two"));
    if (io->rename_new(dir.fd(), "a", dir.fd(), "b") != -EEXIST) return 1;
    if (text_of("a") != "one" || text_of("b") != "two") return 2;
    if (io->rename_new(dir.fd(), "a", dir.fd(), "c") != 0) return 3;
    if (text_of("a") != "no a" || text_of("c") != "one") return 4;
    if (io->rename_new(dir.fd(), "a", dir.fd(), "d") != -ENOENT) return 5;
    io->unlink(dir.fd(), "b");
    io->unlink(dir.fd(), "c");
    return 0;
  };
  EXPECT_EQ(check(), 0);
  for (const int error : {EINVAL, ENOSYS}) {
    EXPECT_EQ(in_child([&] {
                refuse(SYS_renameat2, error);
                return check();
              }),
              0);
  }
  io->close(create("a", "one"));
  EXPECT_EQ(in_child([&] {
              refuse(SYS_renameat2, EINVAL);
              refuse(SYS_linkat, EPERM);
              return io->rename_new(dir.fd(), "a", dir.fd(), "b") == -EOPNOTSUPP ? 0 : 1;
            }),
            0);
  EXPECT_EQ(text_of("a"), "one");
}

TEST_F(IoTest, ListsEveryNameEachTime) {
  std::map<std::string, unsigned char> names;
  for (int i = 0; i < 1500; ++i) {
    const std::string name = std::string(static_cast<std::size_t>(i % 200), 'x') + std::to_string(i);
    io->close(create(name.c_str()));
    names[name] = DT_REG;
  }
  ASSERT_EQ(io->mkdir(dir.fd(), "d", 0700), 0);
  ASSERT_EQ(::symlinkat("d", dir.fd(), "l"), 0);
  names["d"] = DT_DIR;
  names["l"] = DT_LNK;
  for (int round = 0; round < 2; ++round) {
    int seen = 0;
    EXPECT_EQ(io->list(dir.fd(), [&](const char*, unsigned char) { return ++seen < 10; }), 0);
    EXPECT_EQ(seen, 10);
    std::map<std::string, unsigned char> listed;
    EXPECT_EQ(io->list(dir.fd(),
                       [&](const char* name, unsigned char type) {
                         EXPECT_TRUE(listed.emplace(name, type).second) << name;
                         return true;
                       }),
              0);
    EXPECT_EQ(listed, names);
  }
  // Names may go while they are listed.
  EXPECT_EQ(io->list(dir.fd(),
                     [&](const char* name, unsigned char type) {
                       EXPECT_EQ(type == DT_DIR ? io->rmdir(dir.fd(), name) : io->unlink(dir.fd(), name), 0);
                       return true;
                     }),
            0);
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST_F(IoTest, LocksBelongToDescriptions) {
  const int a = create("a");
  const int b = io->open(dir.fd(), "a", O_RDWR, 0);
  EXPECT_EQ(io->locked(b, 0, 100), 0);
  EXPECT_EQ(io->lock(a, 10, 10, true), 0);
  EXPECT_EQ(io->lock(b, 0, 100, true), -EAGAIN);
  EXPECT_EQ(io->lock(b, 0, 100, false), -EAGAIN);
  EXPECT_EQ(io->lock(b, 20, 80, true), 0);
  EXPECT_EQ(io->locked(b, 10, 1), 1);
  EXPECT_EQ(io->locked(b, 9, 1), 0);
  EXPECT_EQ(io->locked(a, 10, 10), 0) << "one's own";
  EXPECT_EQ(io->unlock(a, 10, 10), 0);
  EXPECT_EQ(io->locked(b, 10, 1), 0);
  EXPECT_EQ(io->lock(a, 0, 5, false), 0);
  EXPECT_EQ(io->lock(b, 0, 5, false), 0);
  EXPECT_EQ(io->locked(a, 0, 1), 1);
  EXPECT_EQ(io->lock(a, 0, 5, true), -EAGAIN);

  // A forked child has the description, too, and keeps its locks until it ends.
  std::array<int, 2> gate{};
  ASSERT_EQ(::pipe(gate.data()), 0);
  const pid_t child = start_child([&] {
    ::close(gate[1]);
    char end = 0;
    return static_cast<int>(::read(gate[0], &end, 1));
  });
  io->close(b);
  EXPECT_EQ(io->locked(a, 20, 1), 1);
  ::close(gate[1]);
  EXPECT_EQ(wait_for_child(child), 0);
  EXPECT_EQ(io->locked(a, 20, 1), 0);
  ::close(gate[0]);
  io->close(a);
}

TEST(Retry, CallsAgainOnlyAfterEintr) {
  int calls = 0;
  EXPECT_EQ(retry([&] { return ++calls < 3 ? -EINTR : 7; }), 7);
  EXPECT_EQ(calls, 3);
  EXPECT_EQ(retry([&]() -> std::int64_t { return -EAGAIN; }), -EAGAIN);
}

// --- Transfers -------------------------------------------------------------------------------------------------------

constexpr std::size_t kPage = 4096;

/// Page-aligned memory.
class Pages {
 public:
  explicit Pages(std::size_t count) : bytes_(count * kPage) {
    void* at = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) std::abort();
    data_ = static_cast<std::byte*>(at);
  }
  ~Pages() { ::munmap(data_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  std::byte* data() const { return data_; }
  iovec range() const { return {data_, bytes_}; }

 private:
  std::size_t bytes_;
  std::byte* data_;
};

Transfer reading(int fd, std::byte* data, std::size_t bytes, std::int64_t offset, std::uint64_t token = 0) {
  return {.fd = fd, .data = data, .bytes = bytes, .offset = offset, .write = false, .token = token};
}

Transfer writing(int fd, std::byte* data, std::size_t bytes, std::int64_t offset, std::uint64_t token = 0) {
  return {.fd = fd, .data = data, .bytes = bytes, .offset = offset, .write = true, .token = token};
}

/// Results by token, of all that is under way.
std::map<std::uint64_t, std::int64_t> finish(Transfers& transfers) {
  std::map<std::uint64_t, std::int64_t> results;
  std::vector<Transfer> ended;
  while (transfers.under_way() > 0) {
    ended.clear();
    transfers.collect(ended, true, seconds(10));
    if (ended.empty()) break;
    for (const Transfer& t : ended) EXPECT_TRUE(results.emplace(t.token, t.result).second);
  }
  EXPECT_EQ(transfers.under_way(), 0U);
  return results;
}

std::int64_t run(Transfers& transfers, const Transfer& transfer) {
  transfers.submit(transfer);
  EXPECT_EQ(transfers.under_way(), 1U);
  return finish(transfers)[transfer.token];
}

enum class Kind { kBlocking, kRing, kRegistered };

class TransfersTest : public testing::TestWithParam<std::tuple<Kind, bool>> {
 protected:
  static constexpr std::size_t kPieces = 8;
  static constexpr std::size_t kPiecePages = 16;

  void SetUp() override {
    if (kind == Kind::kBlocking) {
      transfers = blocking_transfers(io);
    } else {
      const std::array<iovec, 2> ranges{memory[1].range(), memory[0].range()};
      std::string why;
      transfers = ring_transfers(kPieces, kind == Kind::kRegistered ? ranges : std::span<const iovec>{}, &why);
      if (!transfers) GTEST_SKIP() << why;
      EXPECT_EQ(why, "");
      EXPECT_STREQ(transfers->name(), "io_uring");
    }
    fd = io->open(dir.fd(), "file", O_RDWR | O_CREAT | (direct ? O_DIRECT : 0), 0600);
    if (fd == -EINVAL) GTEST_SKIP() << "no O_DIRECT in " << dir.path();
    ASSERT_GE(fd, 0);
  }
  void TearDown() override {
    if (fd >= 0) io->close(fd);
  }

  const Kind kind = std::get<0>(GetParam());
  const bool direct = std::get<1>(GetParam());
  Directory dir;
  std::shared_ptr<Io> io = system_io();
  std::array<Pages, 2> memory{Pages(kPieces / 2 * kPiecePages), Pages(kPieces / 2 * kPiecePages)};
  Pages elsewhere{kPieces * kPiecePages};
  std::unique_ptr<Transfers> transfers;
  int fd = -1;
};

std::string name_of(const testing::TestParamInfo<std::tuple<Kind, bool>>& info) {
  constexpr std::array<const char*, 3> kNames{"Blocking", "Ring", "RegisteredRing"};
  return std::string(kNames[static_cast<std::size_t>(std::get<0>(info.param))]) +
         (std::get<1>(info.param) ? "Direct" : "");
}
INSTANTIATE_TEST_SUITE_P(All, TransfersTest,
                         testing::Combine(testing::Values(Kind::kBlocking, Kind::kRing, Kind::kRegistered),
                                          testing::Bool()),
                         name_of);

// Each piece of memory works on a part of the file of its own, so that what is under way never overlaps.
TEST_P(TransfersTest, RandomReadsAndWritesEqualAFileInMemory) {
  constexpr std::size_t kPart = 40 * kPage;
  std::mt19937_64 random(7);
  const std::size_t unit = direct ? kPage : 1;
  std::vector<std::byte> file(kPieces * kPart);
  ASSERT_EQ(::ftruncate(fd, static_cast<off_t>(file.size())), 0);
  const auto below = [&](std::size_t limit) { return static_cast<std::size_t>(random() % limit); };
  std::vector<std::size_t> idle;
  for (std::size_t i = 0; i < std::min(kPieces, transfers->depth()); ++i) idle.push_back(i);
  std::vector<Transfer> ended;
  std::size_t most = 0;
  for (int left = 1000; left > 0 || transfers->under_way() > 0;) {
    while (left > 0 && !idle.empty()) {
      std::swap(idle[below(idle.size())], idle.back());
      const std::size_t piece = idle.back();
      idle.pop_back();
      --left;
      Transfer t{.fd = fd, .write = random() % 2 == 0, .token = piece};
      t.data = memory[piece / 4].data() + piece % 4 * kPiecePages * kPage;
      if (random() % 4 == 0) t.data = elsewhere.data() + piece * kPiecePages * kPage;
      const std::size_t skipped = below(4 * kPage) / unit * unit;
      t.data += skipped;
      t.bytes = (1 + below((kPiecePages * kPage - skipped) / unit)) * unit;
      const std::size_t at = piece * kPart + below((kPart - t.bytes) / unit + 1) * unit;
      t.offset = static_cast<std::int64_t>(at);
      for (std::size_t i = 0; i < t.bytes; i += 8) {
        const std::uint64_t word = random();
        std::memcpy(t.data + i, &word, std::min<std::size_t>(8, t.bytes - i));
      }
      if (t.write) std::memcpy(file.data() + at, t.data, t.bytes);
      transfers->submit(t);
      most = std::max(most, transfers->under_way());
    }
    ended.clear();
    transfers->collect(ended, random() % 2 == 0, seconds(10));
    for (const Transfer& t : ended) {
      ASSERT_EQ(t.result, static_cast<std::int64_t>(t.bytes));
      if (!t.write) {
        ASSERT_EQ(std::memcmp(t.data, file.data() + t.offset, t.bytes), 0);
      }
      idle.push_back(t.token);
    }
  }
  EXPECT_EQ(most, std::min(kPieces, transfers->depth()));
  std::vector<std::byte> read(file.size() + 1);
  const int plain = io->open(dir.fd(), "file", O_RDONLY, 0);
  EXPECT_EQ(io->pread(plain, read.data(), read.size(), 0), static_cast<std::int64_t>(file.size()));
  read.pop_back();
  EXPECT_TRUE(read == file);
  io->close(plain);
}

TEST_P(TransfersTest, ShortReadsAndErrorsComeBackAsTheyAre) {
  std::byte* data = memory[0].data();
  EXPECT_EQ(run(*transfers, writing(fd, data, 3 * kPage, 0)), 3 * kPage);
  ASSERT_EQ(::ftruncate(fd, 2 * kPage + 100), 0);
  EXPECT_EQ(run(*transfers, reading(fd, data, 4 * kPage, 0)), 2 * kPage + 100);
  EXPECT_EQ(run(*transfers, reading(fd, data, kPage, 2 * kPage)), 100);
  EXPECT_EQ(run(*transfers, reading(fd, data, kPage, 4 * kPage)), 0);
  EXPECT_EQ(run(*transfers, reading(-1, data, kPage, 0)), -EBADF);
  EXPECT_EQ(run(*transfers, writing(dir.fd(), data, kPage, 0)), -EBADF);
  EXPECT_EQ(run(*transfers, reading(dir.fd(), data, kPage, 0)), -EISDIR);
  const int read_only = io->open(dir.fd(), "file", O_RDONLY, 0);
  EXPECT_EQ(run(*transfers, writing(read_only, data, kPage, 0)), -EBADF);
  io->close(read_only);
  if (const auto odd = run(*transfers, reading(fd, data, 100, 1)); odd != 100) {
    EXPECT_TRUE(direct && odd == -EINVAL) << odd;
  }
  // Not one registered range: the end of it and beyond, another one, and one that is in none.
  Pages none(1);
  EXPECT_EQ(run(*transfers, reading(fd, memory[0].data() + (kPieces / 2 * kPiecePages - 1) * kPage, kPage, 0)), kPage);
  EXPECT_EQ(run(*transfers, reading(fd, memory[1].data(), kPage, 0)), kPage);
  EXPECT_EQ(run(*transfers, reading(fd, none.data(), kPage, 0)), kPage);
}

TEST_P(TransfersTest, CollectWaitsOnlyForWhatIsUnderWay) {
  std::vector<Transfer> ended;
  const auto start = steady_clock::now();
  transfers->collect(ended, true, seconds(10));
  transfers->collect(ended, false, seconds(10));
  EXPECT_TRUE(ended.empty());
  EXPECT_LT(steady_clock::now() - start, seconds(5));
  for (std::uint64_t i = 0; i < transfers->depth(); ++i) {
    transfers->submit(writing(fd, memory[0].data(), kPage, static_cast<std::int64_t>(i * kPage), i));
  }
  EXPECT_EQ(transfers->under_way(), transfers->depth());
  EXPECT_EQ(finish(*transfers).size(), transfers->depth());
}

// --- The ring --------------------------------------------------------------------------------------------------------

/// A ring of two, and a pipe that nobody has written to.
class RingTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(::pipe2(pipe.data(), O_CLOEXEC), 0);
    std::string why;
    const iovec range = memory.range();
    ring = ring_transfers(2, std::span(&range, 1), &why);
    if (!ring) GTEST_SKIP() << why;
  }
  void TearDown() override {
    ring.reset();
    for (const int end : pipe) ::close(end);
  }
  std::vector<Transfer> collect(milliseconds timeout) {
    std::vector<Transfer> ended;
    ring->collect(ended, true, timeout);
    return ended;
  }

  std::array<int, 2> pipe{};
  Pages memory{2};
  std::unique_ptr<Transfers> ring;
};

TEST_F(RingTest, WaitsNoLongerThanTold) {
  ring->submit(reading(pipe[0], memory.data(), 100, -1));
  const auto start = steady_clock::now();
  EXPECT_TRUE(collect(milliseconds(50)).empty());
  const auto waited = steady_clock::now() - start;
  EXPECT_GE(waited, milliseconds(50));
  EXPECT_LT(waited, seconds(2));
  EXPECT_EQ(ring->under_way(), 1U);
  EXPECT_TRUE(collect(milliseconds(-1)).empty());

  ASSERT_EQ(::write(pipe[1], "abc", 3), 3);
  const auto ended = collect(std::chrono::duration_cast<milliseconds>(std::chrono::hours(1)));
  ASSERT_EQ(ended.size(), 1U);
  EXPECT_EQ(ended[0].result, 3);
  EXPECT_EQ(std::memcmp(memory.data(), "abc", 3), 0);
}

TEST_F(RingTest, CancelsWhatNeverEnds) {
  ring->submit(reading(pipe[0], memory.data(), 100, -1, 1));
  ring->submit(reading(pipe[0], memory.data() + 100, 100, -1, 2));
  ring->submit(reading(pipe[0], memory.data() + 200, 100, -1, 3));
  EXPECT_EQ(ring->under_way(), 3U);
  ring->cancel();
  const std::map<std::uint64_t, std::int64_t> expected{{1, -ECANCELED}, {2, -ECANCELED}, {3, -EBUSY}};
  EXPECT_EQ(finish(*ring), expected);
  ring->submit(reading(pipe[0], memory.data(), 100, -1));  // the destructor cancels this one
}

TEST_F(RingTest, TransfersOfAThreadThatEndedCanBeCancelled) {
  const Directory dir;
  const int file = ::open(dir.path("file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  ASSERT_EQ(::pwrite(file, memory.data(), 2 * kPage, 0), 2 * kPage);
  std::unique_ptr<Transfers> other;
  std::thread([&] {
    other = ring_transfers(2, {}, nullptr);
    other->submit(reading(pipe[0], memory.data(), 100, -1, 1));
    other->submit(reading(file, memory.data() + kPage, kPage, 0, 2));
  }).join();
  other->cancel();
  auto results = finish(*other);
  EXPECT_EQ(results[1], -ECANCELED);
  if (results[2] != -ECANCELED) {
    EXPECT_EQ(results[2], kPage);
  }
  ::close(file);
}

TEST_F(RingTest, ForksDoNotDisturbIt) {
  ring->submit(reading(pipe[0], memory.data(), 100, -1));
  EXPECT_EQ(in_child([&] {
              ring->submit(reading(pipe[0], memory.data(), 100, -1, 1));
              std::vector<Transfer> ended;
              ring->collect(ended, true, seconds(10));
              ring->cancel();
              ring.reset();
              return ended.size() == 1 && ended[0].token == 1 && ended[0].result == -EBUSY ? 0 : 1;
            }),
            0);
  EXPECT_TRUE(collect(milliseconds(10)).empty());
  ASSERT_EQ(::write(pipe[1], "abc", 3), 3);
  EXPECT_EQ(finish(*ring)[0], 3);
  std::thread([&] {
    const auto later = ring_transfers(2, {}, nullptr);
    ASSERT_EQ(::write(pipe[1], "defg", 4), 4);
    EXPECT_EQ(run(*later, reading(pipe[0], memory.data(), 100, -1)), 4);
  }).join();
}

TEST_F(RingTest, SandboxesThatRefuseItAreNoticed) {
  const auto reason = [](long call, int error) {
    std::array<int, 2> said{};
    EXPECT_EQ(::pipe(said.data()), 0);
    EXPECT_EQ(in_child([&] {
                refuse(call, error);
                std::string why;
                if (ring_transfers(2, {}, &why)) return 1;
                return ::write(said[1], why.data(), why.size()) > 0 ? 0 : 2;
              }),
              0);
    std::array<char, 200> text{};
    EXPECT_GT(::read(said[0], text.data(), text.size() - 1), 0);
    for (const int end : said) ::close(end);
    return std::string(text.data());
  };
  EXPECT_EQ(reason(SYS_io_uring_setup, EPERM), "io_uring_setup: Operation not permitted");
  EXPECT_EQ(reason(SYS_io_uring_setup, ENOSYS), "io_uring_setup: Function not implemented");
  EXPECT_EQ(reason(SYS_io_uring_enter, EPERM), "io_uring write: Operation not permitted");
}

TEST_F(RingTest, WithoutRegisteredBuffersItWorks) {
  const Directory dir;
  const int fd = ::open(dir.path("file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  EXPECT_EQ(in_child([&] {
              refuse(SYS_io_uring_register, ENOMEM);
              const iovec range = memory.range();
              const auto plain = ring_transfers(2, std::span(&range, 1), nullptr);
              if (!plain || plain->name() != std::string("io_uring, buffers not registered")) return 1;
              std::memset(memory.data(), 0x5a, kPage);
              return run(*plain, writing(fd, memory.data(), kPage, 0)) == kPage ? 0 : 2;
            }),
            0);
  std::array<std::byte, kPage> read{};
  EXPECT_EQ(::pread(fd, read.data(), read.size(), 0), kPage);
  EXPECT_EQ(std::count(read.begin(), read.end(), std::byte{0x5a}), kPage);
  ::close(fd);
}

}  // namespace
}  // namespace kvstride::store
