// SPDX-License-Identifier: Apache-2.0
// Memory of exact size, files in /dev/shm whatever becomes of their processes, extents against a naive bitmap.
#include "store/arena.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "child.h"
#include "kvstride/error.h"

namespace kvstride::store {
namespace {

constexpr std::int64_t kHuge = 2 << 20;

// --- Memory ---------------------------------------------------------------------------------------------------------

/// Pages of address space of this process.
std::int64_t address_pages() {
  std::ifstream file("/proc/self/statm");
  std::int64_t pages = 0;
  file >> pages;
  return pages;
}

TEST(Memory, C87ExactlyTheBytes) {
  address_pages();
  for (const std::int64_t bytes : {std::int64_t{1}, kPage, kPage + 1, kHuge - 1, kHuge, kHuge + 1, 5 * kHuge - kPage,
                                   std::int64_t{2'236'817'408}}) {
    const std::int64_t before = address_pages();
    const Memory memory(bytes);
    EXPECT_EQ(memory.size(), bytes);
    EXPECT_EQ(memory.mapped(), (bytes + 4095) / 4096 * 4096);
    EXPECT_LE(memory.mapped(), bytes + 4096);
    EXPECT_EQ(address_pages() - before, memory.mapped() / kPage) << "what alignment needs is given back";
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    EXPECT_EQ(address % static_cast<std::uintptr_t>(bytes >= kHuge ? kHuge : kPage), 0U);
    EXPECT_EQ(memory.data()[0], std::byte{0});
    memory.data()[bytes - 1] = std::byte{7};
    EXPECT_TRUE(memory.path().empty());
  }
}

TEST(Memory, AChildThatDidNotGetItMayDropIt) {
  constexpr std::int64_t kBytes = 4 << 20;
  auto memory = std::make_unique<Memory>(kBytes);
  memory->keep_from_children();
  std::memset(memory->data(), 7, kBytes);
  EXPECT_EQ(in_child([&] {
              void* other = mmap(memory->data(), kBytes, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
              if (other != memory->data()) return 1;  // it was given to the child
              std::memset(other, 3, kBytes);
              memory.reset();
              return *static_cast<char*>(other) == 3 ? 0 : 2;
            }),
            0);
  EXPECT_EQ(memory->data()[kBytes - 1], std::byte{7});
}

TEST(Memory, TooMuchIsAnErrorWithNumbers) {
  for (const std::int64_t bytes : {std::int64_t{1} << 50, std::numeric_limits<std::int64_t>::max()}) {
    try {
      const Memory memory(bytes);
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kStore);
      const std::string what = error.what();
      EXPECT_NE(what.find(std::to_string(bytes) + " bytes of memory wanted, "), std::string::npos) << what;
      EXPECT_NE(what.find(" free"), std::string::npos) << what;
    }
  }
  for (const std::int64_t bytes : {0, -1}) {
    EXPECT_THROW(Memory memory(bytes), Error);
    EXPECT_THROW(Memory memory(bytes, "x"), Error);
  }
}

// --- Shared memory --------------------------------------------------------------------------------------------------

constexpr std::int64_t kSize = 3 * kHuge + 5;

std::string path_of(const std::string& name) { return "/dev/shm/kvstride-" + name; }
/// Inode at a path; 0: nothing there.
ino_t inode(const std::string& path) {
  struct stat status {};
  return lstat(path.c_str(), &status) == 0 ? status.st_ino : 0;
}
std::string error_of(const std::function<void()>& call, ErrorCode code = ErrorCode::kStore) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    return error.what();
  }
  return "no error";
}

/// A child that runs `work`, says so, and waits to be killed.
class Child {
 public:
  explicit Child(const std::function<void()>& work) {
    std::array<int, 2> ends{};
    if (pipe(ends.data()) != 0) throw std::runtime_error("pipe");
    id_ = fork();
    if (id_ == 0) {
      close(ends[0]);
      char answer = 'y';
      try {
        work();
      } catch (const std::exception&) {
        answer = 'n';
      }
      if (write(ends[1], &answer, 1) != 1) _exit(1);
      while (true) pause();
    }
    close(ends[1]);
    answer_ = ends[0];
  }
  ~Child() { kill_it(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  /// Whether `work` ended without an exception.
  bool worked() {
    char answer = 'n';
    return read(answer_, &answer, 1) == 1 && answer == 'y';
  }
  void kill_it() {
    if (id_ == 0) return;
    kill(id_, SIGKILL);
    waitpid(id_, nullptr, 0);
    close(answer_);
    id_ = 0;
  }

 private:
  pid_t id_ = 0;
  int answer_ = -1;
};

/// Names of this test's files, which it finds and leaves absent.
class SharedMemory : public testing::Test {
 protected:
  std::string name(const std::string& end = "") const {
    const std::string test = testing::UnitTest::GetInstance()->current_test_info()->name();
    std::string out = "test-" + std::to_string(process_) + "-" + test;
    for (char& c : out) c = static_cast<char>(std::tolower(c));
    return out + end;
  }
  void TearDown() override {
    // What a killed child left another test may be removing just now.
    for (int i = 0; i < 1000 && inode(path_of(name())) != 0; ++i) usleep(1000);
    EXPECT_EQ(inode(path_of(name())), 0U) << "a file is left";
  }

 private:
  pid_t process_ = getpid();  // in a child too
};

TEST_F(SharedMemory, C84AFileOfItsOwnThatGoesWithIt) {
  {
    const Memory memory(kSize, name());
    EXPECT_EQ(memory.path(), path_of(name()));
    EXPECT_EQ(memory.size(), kSize);
    EXPECT_EQ(memory.mapped(), whole_pages(kSize));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.data()) % static_cast<std::uintptr_t>(kHuge), 0U);
    struct stat status {};
    ASSERT_EQ(stat(memory.path().c_str(), &status), 0);
    EXPECT_EQ(status.st_size, memory.mapped());
    EXPECT_GE(status.st_blocks * 512, memory.mapped()) << "room is taken at once";
    // Another process sees the bytes.
    memory.data()[kSize - 1] = std::byte{42};
    std::ifstream file(memory.path());
    file.seekg(kSize - 1);
    EXPECT_EQ(file.get(), 42);
  }
  EXPECT_EQ(inode(path_of(name())), 0U);
}

TEST_F(SharedMemory, ModesUnderAnyUmask) {
  for (const mode_t mask : {0U, 022U, 0777U}) {
    const mode_t before = umask(mask);
    {
      const Memory memory(kSize, name());
      struct stat status {};
      EXPECT_EQ(stat(memory.path().c_str(), &status), 0);
      EXPECT_EQ(status.st_mode & 07777U, 0600U) << mask;
    }
    umask(before);
  }
}

TEST_F(SharedMemory, NamesAreRestricted) {
  for (const std::string& bad : {std::string(), std::string("a/b"), std::string("../x"), std::string("A"),
                                 std::string("a b"), std::string("a\0b", 3), std::string("é"), std::string(101, 'a')}) {
    const std::string what = error_of([&] { Memory(kSize, bad); }, ErrorCode::kArgument);
    EXPECT_NE(what.find("shared name of " + std::to_string(bad.size()) + " characters"), std::string::npos) << what;
  }
  const std::string longest = name() + std::string(100 - name().size(), '.');
  EXPECT_EQ(Memory(kSize, longest).path(), path_of(longest));
  EXPECT_EQ(inode(path_of(longest)), 0U);
}

TEST_F(SharedMemory, C84TheNextStartAfterAKill) {
  for (int run = 0; run < 3; ++run) {
    Child owner([&] { new Memory(kSize, name()); });
    ASSERT_TRUE(owner.worked());
    const std::string what = error_of([&] { Memory(kSize, name()); });
    EXPECT_EQ(what, "HostTier: '" + path_of(name()) + "' is in use by a live process");
    ASSERT_NE(inode(path_of(name())), 0U);
    owner.kill_it();
    if (run == 2) {
      remove_stale_shared();
    } else {
      const Memory next(2 * kSize, name());  // another size, as after a change of settings
      next.data()[2 * kSize - 1] = std::byte{1};
    }
    EXPECT_EQ(inode(path_of(name())), 0U);
  }
}

TEST_F(SharedMemory, C84ALateShutdownLeavesTheNextRunsFile) {
  auto first = std::make_unique<Memory>(kSize, name());
  const ino_t old = inode(first->path());
  ASSERT_EQ(unlink(first->path().c_str()), 0);  // somebody cleans up by hand
  auto second = std::make_unique<Memory>(kSize, name());
  const ino_t now = inode(second->path());
  EXPECT_NE(now, old);
  first.reset();
  EXPECT_EQ(inode(second->path()), now);
  second.reset();
}

TEST_F(SharedMemory, C84AForkedChildDoesNotRemoveItsParentsFile) {
  auto memory = std::make_unique<Memory>(kSize, name());
  memory->data()[0] = std::byte{5};
  Child child([&] {
    if (memory->data()[0] != std::byte{5}) throw std::runtime_error("not the same memory");
    memory.reset();
  });
  EXPECT_TRUE(child.worked());
  EXPECT_NE(inode(memory->path()), 0U);
}

TEST_F(SharedMemory, C84TooLargeNamesWantedFreeAndPathAndLeavesNoFile) {
  struct statvfs room {};
  ASSERT_EQ(statvfs("/dev/shm", &room), 0);
  const auto free = static_cast<std::int64_t>(room.f_bavail * room.f_frsize);
  for (const std::int64_t bytes : {free + kPage, 16 * free, std::int64_t{1} << 60}) {
    const std::string what = error_of([&] { Memory(bytes, name()); });
    EXPECT_NE(what.find(path_of(name())), std::string::npos) << what;
    EXPECT_NE(what.find(std::to_string(bytes) + " bytes wanted"), std::string::npos) << what;
    EXPECT_TRUE(what.find(" free") != std::string::npos) << what;
    EXPECT_EQ(inode(path_of(name())), 0U);
  }
}

TEST_F(SharedMemory, StaleFilesGoAndNothingElse) {
  const std::string stale = path_of(name("-stale"));
  const std::string foreign = path_of(name("-foreign"));
  const std::string link = path_of(name("-link"));
  const std::string folder = path_of(name("-folder"));
  const std::string upper = path_of(name("-UPPER"));
  const std::string target = "/dev/shm/" + name("-target");
  for (const std::string& path : {stale, foreign, upper, target}) std::ofstream(path) << "left";
  ASSERT_EQ(symlink(target.c_str(), link.c_str()), 0);
  ASSERT_EQ(mkdir(folder.c_str(), 0700), 0);
  const bool is_foreign = chown(foreign.c_str(), 65534, 65534) == 0;  // where the tests run as root
  {
    const Memory live(kSize, name());
    EXPECT_EQ(inode(stale), 0U) << "removed by the start of another";
    int removed = 0;
    for (int i = 0; i < 20 && removed == 0; ++i) {  // another test may be quicker
      std::ofstream(stale) << "left";
      removed = remove_stale_shared();
      EXPECT_EQ(inode(stale), 0U);
    }
    EXPECT_GT(removed, 0);
    EXPECT_NE(inode(live.path()), 0U);
  }
  EXPECT_EQ(inode(foreign) != 0, is_foreign);
  for (const std::string& path : {link, folder, upper, target}) EXPECT_NE(inode(path), 0U) << path;
  for (const char* end : {"-link", "-folder", is_foreign ? "-foreign" : "-link"}) {
    const std::string what = error_of([&] { Memory(kSize, name(end)); });
    EXPECT_NE(what.find("no file of this user"), std::string::npos) << what;
    EXPECT_NE(what.find(path_of(name(end))), std::string::npos) << what;
  }
  std::string text;
  std::ifstream(target) >> text;
  EXPECT_EQ(text, "left");
  rmdir(folder.c_str());
  for (const std::string& path : {foreign, link, upper, target}) unlink(path.c_str());
}

TEST_F(SharedMemory, OfSeveralStartersOneGetsTheName) {
  for (int round = 0; round < 4; ++round) {
    Child dead([&] { new Memory(kSize, name()); });
    EXPECT_TRUE(dead.worked());
    dead.kill_it();
    std::array<std::unique_ptr<Child>, 4> starters;
    for (auto& one : starters) one = std::make_unique<Child>([&] { new Memory(kPage, name()); });
    int winners = 0;
    for (auto& one : starters) winners += one->worked() ? 1 : 0;
    EXPECT_EQ(winners, 1);
  }
  remove_stale_shared();
}

/// As another start has it while it removes a dead process's file.
TEST_F(SharedMemory, ALockThatPassesIsWaitedFor) {
  const int fd = open(path_of(name()).c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
  ASSERT_EQ(flock(fd, LOCK_EX | LOCK_NB), 0);
  std::thread remover([&] {
    usleep(10'000);
    unlink(path_of(name()).c_str());
    close(fd);
  });
  EXPECT_EQ(error_of([&] { Memory(kSize, name()); }), "no error");
  remover.join();
}

TEST_F(SharedMemory, StartersOfOtherNamesDoNotDisturb) {
  std::array<std::unique_ptr<Child>, 4> starters;
  for (std::size_t i = 0; i < starters.size(); ++i) {
    starters[i] = std::make_unique<Child>([&, i] {
      for (int round = 0; round < 300; ++round) {
        const Memory memory(kPage, name(std::to_string(i)));
        if (inode(memory.path()) == 0) throw std::runtime_error("removed while in use");
      }
    });
  }
  for (auto& one : starters) EXPECT_TRUE(one->worked());
}

// --- Extents --------------------------------------------------------------------------------------------------------

/// A flag a page, and the rules of take() by looking at all of them.
class Bitmap {
 public:
  explicit Bitmap(std::int64_t num_pages) : taken_(static_cast<std::size_t>(num_pages)) {}

  struct Run {
    std::int64_t from;
    std::int64_t length;
  };
  std::vector<Run> free_runs() const {
    std::vector<Run> out;
    const auto size = static_cast<std::int64_t>(taken_.size());
    for (std::int64_t i = 0; i < size; ++i) {
      if (taken_[static_cast<std::size_t>(i)]) continue;
      if (out.empty() || out.back().from + out.back().length != i) out.push_back({i, 0});
      ++out.back().length;
    }
    return out;
  }
  void set(std::int64_t from, std::int64_t length, bool taken) {
    ASSERT_GE(from, 0);
    ASSERT_LE(from + length, static_cast<std::int64_t>(taken_.size()));
    for (std::int64_t i = from; i < from + length; ++i) {
      ASSERT_NE(taken_[static_cast<std::size_t>(i)], taken) << "page " << i;
      taken_[static_cast<std::size_t>(i)] = taken;
    }
  }

 private:
  std::vector<bool> taken_;
};

/// Random calls; each answer is checked against the bitmap, and a second Extents must give the same.
void check_random_calls(std::int64_t num_pages, std::int64_t largest, std::uint32_t seed, int num_calls) {
  std::mt19937 random(seed);
  Extents extents(num_pages * kPage);
  Extents again(num_pages * kPage);
  Bitmap bitmap(num_pages);
  std::vector<std::pair<std::int64_t, std::int64_t>> held;  // offset, bytes
  bool filling = true;
  for (int call = 0; call < num_calls; ++call) {
    SCOPED_TRACE(testing::Message() << num_pages << " pages, seed " << seed << ", call " << call);
    const std::vector<Bitmap::Run> runs = bitmap.free_runs();
    std::int64_t free = 0;
    std::int64_t longest = 0;
    for (const auto& run : runs) {
      free += run.length;
      longest = std::max(longest, run.length);
    }
    ASSERT_EQ(extents.free_bytes(), free * kPage);
    ASSERT_EQ(extents.largest_free(), longest * kPage);
    if (random() % 64 == 0) filling = !filling;
    if (random() % 4 == 0 ? !filling : filling) {
      const std::int64_t pages = 1 + static_cast<std::int64_t>(random()) % largest;
      const std::int64_t bytes = pages * kPage - static_cast<std::int64_t>(random() % kPage);
      const auto offset = extents.take(bytes);
      ASSERT_EQ(again.take(bytes), offset);
      ASSERT_EQ(offset.has_value(), pages <= longest);
      if (!offset) continue;
      ASSERT_EQ(*offset % kPage, 0);
      const std::int64_t from = *offset / kPage;
      std::int64_t best = longest;
      for (const auto& run : runs) {
        if (run.length >= pages) best = std::min(best, run.length);
      }
      const auto run = std::find_if(runs.begin(), runs.end(),
                                    [&](const auto& r) { return r.from <= from && from < r.from + r.length; });
      ASSERT_NE(run, runs.end());
      ASSERT_EQ(run->length, best);
      ASSERT_TRUE(from == run->from || from + pages == run->from + run->length) << "cut out of the middle";
      const bool can_align = run->from % 512 == 0 || (run->from + run->length - pages) % 512 == 0;
      if (pages >= 512) {
        ASSERT_EQ(from % 512 == 0, can_align);
      }
      ASSERT_NO_FATAL_FAILURE(bitmap.set(from, pages, true));
      held.emplace_back(*offset, bytes);
    } else if (!held.empty()) {
      std::swap(held[random() % held.size()], held.back());
      const auto [offset, bytes] = held.back();
      held.pop_back();
      extents.give(offset, bytes);
      again.give(offset, bytes);
      ASSERT_NO_FATAL_FAILURE(bitmap.set(offset / kPage, whole_pages(bytes) / kPage, false));
    }
  }
  std::shuffle(held.begin(), held.end(), random);
  for (const auto& [offset, bytes] : held) extents.give(offset, bytes);
  EXPECT_EQ(extents.largest_free(), num_pages * kPage);
  EXPECT_EQ(extents.take(num_pages * kPage), 0);
}

TEST(Extents, RandomCallsAgainstABitmap) {
  for (std::uint32_t seed = 1; seed <= 10; ++seed) {
    for (const std::int64_t num_pages : {1, 2, 7, 64, 65, 300}) {
      ASSERT_NO_FATAL_FAILURE(check_random_calls(num_pages, std::max<std::int64_t>(1, num_pages / 3), seed, 600));
      ASSERT_NO_FATAL_FAILURE(check_random_calls(num_pages, 2, seed, 600));
    }
    ASSERT_NO_FATAL_FAILURE(check_random_calls(5000, 1200, seed, 300));
  }
  ASSERT_NO_FATAL_FAILURE(check_random_calls(40'000, 700, 1, 1000));  // bitmaps of three levels
  ASSERT_NO_FATAL_FAILURE(check_random_calls(40'000, 9000, 2, 1000));
}

TEST(Extents, EqualSizesUseTheWholeRange) {
  std::mt19937 random(1);
  for (const std::int64_t pages : {1, 3, 17, 511, 512, 513, 8200}) {
    const std::int64_t count = pages > 1000 ? 50 : 300;
    Extents extents(count * pages * kPage);
    std::vector<std::int64_t> offsets;
    for (std::int64_t i = 0; i < count; ++i) {
      const auto offset = extents.take(pages * kPage);
      ASSERT_TRUE(offset) << i << " of " << count << " extents of " << pages;
      offsets.push_back(*offset);
    }
    EXPECT_FALSE(extents.take(1));
    EXPECT_EQ(extents.free_bytes(), 0);
    // Nor are there holes after any of them came and went.
    for (int round = 0; round < 50; ++round) {
      std::shuffle(offsets.begin(), offsets.end(), random);
      const std::size_t gone = random() % offsets.size();
      for (std::size_t i = 0; i < gone; ++i) extents.give(offsets[i], pages * kPage);
      for (std::size_t i = 0; i < gone; ++i) {
        const auto offset = extents.take(pages * kPage);
        ASSERT_TRUE(offset);
        offsets[i] = *offset;
      }
      std::sort(offsets.begin(), offsets.end());
      for (std::int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(offsets[static_cast<std::size_t>(i)], i * pages * kPage);
      }
    }
    for (const std::int64_t offset : offsets) extents.give(offset, pages * kPage);
    EXPECT_EQ(extents.largest_free(), count * pages * kPage);
  }
}

TEST(Extents, LargeOnesAreAlignedBesideSmallOnes) {
  Extents extents(100 * kHuge + 37 * kPage);
  std::vector<std::int64_t> small;
  for (int i = 0; i < 50; ++i) {
    for (int k = 0; k < 3; ++k) {
      const auto offset = extents.take((1 + (i + k) % 5) * kPage);
      ASSERT_TRUE(offset);
      small.push_back(*offset);
    }
    const auto large = extents.take(kHuge);
    ASSERT_TRUE(large);
    EXPECT_EQ(*large % kHuge, 0) << i;
  }
  EXPECT_GT(*std::min_element(small.begin(), small.end()), 50 * kHuge);
}

TEST(Extents, SizesAndBookkeeping) {
  for (const std::int64_t bytes : {std::int64_t{0}, kPage - 1, std::int64_t{-5}, std::int64_t{1} << 44}) {
    EXPECT_THROW(Extents extents(bytes), Error) << bytes;
  }
  Extents odd(3 * kPage + 100);  // what is no whole page is not handed out
  EXPECT_EQ(odd.free_bytes(), 3 * kPage);
  EXPECT_FALSE(odd.take(3 * kPage + 1));
  EXPECT_FALSE(odd.take(0));
  EXPECT_FALSE(odd.take(-kPage));
  EXPECT_FALSE(odd.take(std::numeric_limits<std::int64_t>::max()));
  EXPECT_TRUE(odd.take(2 * kPage + 1));
  for (const std::int64_t bytes : {std::int64_t{1} << 24, std::int64_t{1} << 30, std::int64_t{1} << 38}) {
    EXPECT_LE(static_cast<std::int64_t>(Extents(bytes).memory()), 16 * bytes / kPage);
  }
}

}  // namespace
}  // namespace kvstride::store
