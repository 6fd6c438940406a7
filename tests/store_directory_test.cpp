// SPDX-License-Identifier: Apache-2.0
// A directory that others damage, empty, count and fill: the limit holds, and it is soon of use again.
#include <fcntl.h>

#include "child.h"
#include "store/ledger.h"
#include "store_faults.h"

namespace kvstride::test {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kLimit = 8 << 20;

std::int64_t size_of(const std::vector<std::string>& files) {
  std::int64_t bytes = 0;
  for (const std::string& file : files) {
    std::error_code gone;
    const auto size = fs::file_size(file, gone);
    if (!gone) bytes += static_cast<std::int64_t>(size);
  }
  return bytes;
}

class StoreDirectory : public testing::Test {
 protected:
  void SetUp() override {
    fs::create_directory(root);
    dir = ::open(root.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  }
  void TearDown() override { ::close(dir); }

  /// The slot of another process, that does nothing of itself.
  std::unique_ptr<store::Ledger> another() const {
    return std::make_unique<store::Ledger>(store::system_io(), dir, store::Ledger::Options{.max_bytes = kLimit});
  }
  void tear_the_ledger() const {
    std::string bytes = read_file(root + "/ledger");
    bytes[200] = static_cast<char>(bytes[200] ^ 1);
    const int fd = ::openat(dir, "ledger", O_WRONLY | O_CLOEXEC);
    EXPECT_EQ(::pwrite(fd, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    ::close(fd);
  }

  Scratch scratch;
  std::string root = scratch.path();
  int dir = -1;
};

/// Whose a draft is cannot be told while a living process has not written its part of the account again.
TEST_F(StoreDirectory, DraftsOfTheDeadAfterATornAccount) {
  { Client({directory_tier(small_tier(root))}).put(range(0, 10)); }
  const auto alive = another();
  const std::string draft = root + "/tmp/" + std::string(32, 'a');
  write_file(draft, std::string(7 << 20, 'x'));
  tear_the_ledger();
  const TierPtr tier = directory_tier(small_tier(root));
  Client client({tier});
  const auto end = SteadyClock::now() + 1500ms;  // some counts
  for (int i = 1; SteadyClock::now() < end; ++i) {
    client.put(range(i * 10, 10));
    const OnDisk disk = look(root);
    ASSERT_LE(disk.bytes + size_of(disk.temporaries), kLimit);
  }
  EXPECT_TRUE(alive->flush());
  EXPECT_TRUE(soon([&] { return client.put({1000}) == all(Outcome::kOk, 1); })) << told(tier);
  EXPECT_FALSE(fs::exists(draft));
  expect_at_rest(root, tier);
}

/// With quarantine/ gone a damaged chunk must not stay for ever.
TEST_F(StoreDirectory, DamageWithoutQuarantine) {
  const TierPtr tier = directory_tier(small_tier(root));
  Client client({tier});
  ASSERT_EQ(client.put(range(0, 4)), all(Outcome::kOk, 4));
  fs::remove_all(root + "/quarantine");
  damage(piece_path(root, 0, 1));
  EXPECT_EQ(client.get({1}), all(Outcome::kCorrupt, 1));
  EXPECT_TRUE(soon([&] { return !fs::exists(piece_path(root, 0, 1)); }));
  EXPECT_EQ(look(root).set_aside.size(), 1U) << "the folder is made again";
  EXPECT_EQ(client.put({1}), all(Outcome::kOk, 1));
  EXPECT_EQ(client.get({1}), all(Outcome::kOk, 1));
  expect_at_rest(root, tier);
}

/// A folder that was removed is made again with all that tells other processes what is in it.
TEST_F(StoreDirectory, OthersFindWhatIsWrittenAfterItsFolderWasRemoved) {
  Client writer({directory_tier(small_tier(root))});
  const std::string space = root + "/" + raw_space(0).hex();
  for (const std::string& removed : {space, fs::path(piece_path(root, 0, 2)).parent_path().string()}) {
    Client reader({directory_tier(small_tier(root))});
    ASSERT_EQ(writer.put({1, 2}), all(Outcome::kOk, 2));
    ASSERT_EQ(reader.put({3}), all(Outcome::kOk, 1)) << "so that it has the folder open";
    ASSERT_EQ(reader.get({2}), all(Outcome::kOk, 1));
    fs::remove_all(removed);
    writer.get({1, 2});
    EXPECT_EQ(writer.put({2}), all(Outcome::kOk, 1));
    reader.get({2});  // that it has gone
    EXPECT_TRUE(soon([&] { return reader.lookup({2}) == std::vector<bool>{true}; })) << removed;
    EXPECT_EQ(reader.get({2}), all(Outcome::kOk, 1));
    writer.remove({1, 2, 3});
  }
}

/// Files that are ready when somebody begins to count: all of them together wait a moment, not one after the other.
TEST_F(StoreDirectory, ALongCountDelaysNobody) {
  store::Counters counters;
  store::Directory directory(store::system_io(), {.path = root, .max_bytes = kLimit, .keep_free = 0}, counters);
  const std::uint32_t space = directory.space(raw_space(0).digest());
  const auto id = [&](int number) { return store::PieceId{space, key_of(number), {}}; };
  const auto other = another();
  std::vector<store::Draft> drafts(40);
  for (int i = 0; i < 40; ++i) {
    store::Draft& draft = drafts[static_cast<std::size_t>(i)];
    ASSERT_FALSE(directory.begin(id(i), 2 * 4096, draft));
    ASSERT_EQ(::ftruncate(draft.fd, 2 * 4096), 0);
  }
  ASSERT_EQ(other->begin_count(true), store::Ledger::Count::kMine);
  const auto begin = SteadyClock::now();
  for (int i = 0; i < 40; ++i)
    EXPECT_EQ(directory.publish(id(i), drafts[static_cast<std::size_t>(i)]), Outcome::kRefused);
  EXPECT_LT(SteadyClock::now() - begin, 20s);
  EXPECT_EQ(counters.get(store::Count::kRefusedBusy), 40U);
  other->end_count(0);
  EXPECT_TRUE(soon([&] { return !directory.begin(id(50), 2 * 4096, drafts[0]); }));
  ASSERT_EQ(::ftruncate(drafts[0].fd, 2 * 4096), 0);
  EXPECT_EQ(directory.publish(id(50), drafts[0]), Outcome::kOk);
}

/// The same where this process counts, and the file system does not answer meanwhile.
TEST_F(StoreDirectory, ACountThatHangsDelaysNobody) {
  const auto io = std::make_shared<FaultIo>();
  const TierPtr tier = store::make_directory_tier(small_tier(root), io);
  StoreOptions options;
  options.deadline = 10s;
  Client client({tier}, 0, 12388, options);
  ASSERT_EQ(client.put(range(0, 20)), all(Outcome::kOk, 20));
  io->set({.calls = kList, .effect = Fault::kHang});
  {
    const auto other = another();
    ASSERT_EQ(other->begin_count(true), store::Ledger::Count::kMine);
    other->cancel_count();
  }
  ASSERT_TRUE(soon([&] { return io->hanging() > 0; }));
  client.remove(range(0, 8));
  EXPECT_EQ(client.get({10, 11, 12}), all(Outcome::kOk, 3));
  io->lift();
  EXPECT_TRUE(soon([&] { return look(root).pieces.size() == 12; }));
  expect_at_rest(root, tier, io.get());
}

/// Files that are nothing but a hole, of sizes that somebody made up: set aside, and the account stays of use.
TEST_F(StoreDirectory, HolesOfAnySize) {
  constexpr std::int64_t kOne = 1;
  for (const std::vector<std::int64_t>& sizes : {std::vector<std::int64_t>{kOne << 57},
                                                 {kOne << 62, kOne << 62},
                                                 {kOne << 44},
                                                 {kOne << 35, kOne << 35},
                                                 {kOne << 24},
                                                 {16 << 20, (16 << 20) + 4096, (kOne << 37) + 1}}) {
    { Client({directory_tier(small_tier(root))}).put(range(0, 300)); }
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const std::string path = piece_path(root, 0, 5000 + static_cast<int>(i));
      fs::create_directories(fs::path(path).parent_path());
      write_file(path, "");
      if (::truncate(path.c_str(), sizes[i]) != 0) GTEST_SKIP() << "no file of " << sizes[i] << " bytes here";
    }
    const TierPtr tier = directory_tier(small_tier(root));
    Client client({tier});
    EXPECT_TRUE(soon([&] { return client.put(range(1000, 100)) == all(Outcome::kOk, 100); }))
        << sizes[0] << ": " << told(tier);
    EXPECT_EQ(client.lookup({5000}), std::vector<bool>{false});
    EXPECT_EQ(client.put({5000}), all(Outcome::kOk, 1));
    EXPECT_EQ(client.get({5000}), all(Outcome::kOk, 1));
    EXPECT_GE(tier->metrics().used_bytes, 0);
    EXPECT_TRUE(soon([&] { return tier->metrics().used_bytes <= kLimit; })) << told(tier);
    client.put(range(2000, 500));  // evicts what was set aside
    EXPECT_TRUE(look(root).set_aside.empty());
    expect_at_rest(root, tier);
    client.remove({5000, 5001});
  }
}

/// One that another process with more memory wrote is no damage, though this one cannot read it.
TEST_F(StoreDirectory, SoundFilesLargerThanTheMemory) {
  auto options = small_tier(root, 64 << 20);
  options.staging_bytes = 16 << 20;
  { Client({directory_tier(options)}, 0, 5 << 20).put({1}); }
  {
    const TierPtr tier = directory_tier(small_tier(root, 64 << 20));
    Client client({tier}, 0, 5 << 20);
    EXPECT_EQ(client.lookup({1}), std::vector<bool>{true});
    EXPECT_EQ(client.get({1}), all(Outcome::kRefused, 1));
    EXPECT_TRUE(look(root).set_aside.empty());
  }
  Client client({directory_tier(options)}, 0, 5 << 20);
  EXPECT_EQ(client.get({1}), all(Outcome::kOk, 1));
}

/// Neither removed folders nor many namespaces take descriptors for ever.
TEST_F(StoreDirectory, DescriptorsAreGivenBack) {
  const auto io = std::make_shared<FaultIo>();
  const TierPtr tier = store::make_directory_tier(small_tier(root, 64 << 20), io);
  Client client({tier});
  const auto write = [&](int first) {
    client.put(range(first, 40));  // finds out that the folder has gone
    EXPECT_EQ(client.put(range(first + 40, 40)), all(Outcome::kOk, 40));
  };
  write(0);
  const int open = io->num_open(kFolder);
  for (int i = 1; i < 6; ++i) {
    fs::remove_all(root + "/" + raw_space(0).hex());
    fs::remove_all(root + "/quarantine");
    write(100 * i);
  }
  EXPECT_TRUE(soon([&] { return io->num_open(kFolder) <= open; })) << io->num_open(kFolder) << " of " << open;
  for (int space = 1; space < 40; ++space) {
    Client other({tier}, space);
    ASSERT_EQ(other.put(range(0, 32)), all(Outcome::kOk, 32));
    EXPECT_EQ(other.get(range(0, 32)), all(Outcome::kOk, 32));
  }
  EXPECT_LE(io->num_open(kFolder), 17 * 20);
  EXPECT_EQ(client.get(range(540, 40)), all(Outcome::kOk, 40));
}

/// Nothing is written without room for it: not to find out what the file system can, and not where it refuses.
TEST_F(StoreDirectory, NoFileWithoutRoom) {
  class Refusing : public FaultIo {
   public:
    int open(int at, const char* name, int flags, mode_t mode) override {
      if (!refuses || std::string_view(name).size() != 32) return FaultIo::open(at, name, flags, mode);
      close(FaultIo::open(at, name, flags, mode));  // as some file systems do with O_DIRECT
      return -EINVAL;
    }
    std::atomic<bool> refuses{false};
  };
  const auto io = std::make_shared<Refusing>();
  io->set({.calls = kOpen, .targets = kDraft});
  const TierPtr tier = store::make_directory_tier(small_tier(root), io);
  EXPECT_EQ(io->hits(), 0) << "a file that nobody has reserved room for";
  io->lift();
  io->refuses = true;
  Client client({tier});
  EXPECT_EQ(client.put(range(0, 4)), all(Outcome::kIoError, 4));
  EXPECT_TRUE(look(root).temporaries.empty());
  io->refuses = false;
  EXPECT_EQ(client.put(range(0, 4)), all(Outcome::kOk, 4));
  expect_at_rest(root, tier, io.get());
}

/// What stays free of the disk stays free with many files under way: none of them has seen the others' bytes.
TEST_F(StoreDirectory, FilesUnderWayAreNoFreeSpace) {
  class Disk : public FaultIo {
   public:
    int statvfs(int, struct statvfs& out) override {
      out = {};
      out.f_frsize = 4096;
      out.f_blocks = 10'000;
      out.f_bavail = 1000;
      return 0;
    }
  };
  store::Counters counters;
  const store::Directory::Options options{.path = root, .max_bytes = std::int64_t{1} << 30, .keep_free = 500 * 4096};
  store::Directory directory(std::make_shared<Disk>(), options, counters);
  store::Directory another(std::make_shared<Disk>(), options, counters);
  const std::uint32_t space = directory.space(raw_space(0).digest());
  another.space(raw_space(0).digest());
  std::vector<store::Draft> drafts(64);
  int begun = 0;
  for (int i = 0; i < 64; ++i) {
    store::Draft& draft = drafts[static_cast<std::size_t>(i)];
    if (!directory.begin({space, key_of(i), {}}, 20 * 4096, draft)) ++begun;
  }
  EXPECT_EQ(begun, 500 / 20);
  EXPECT_GT(counters.get(store::Count::kNoSpace), 0U);
  for (store::Draft& draft : drafts) {
    if (draft.fd >= 0) directory.discard(draft);
  }
  EXPECT_FALSE(directory.begin({space, key_of(0), {}}, 20 * 4096, drafts[0])) << "it is free again";
  directory.discard(drafts[0]);
  EXPECT_FALSE(another.begin({space, key_of(1), {}}, 20 * 4096, drafts[1])) << "a step that others keep is free";
  another.discard(drafts[1]);
}

/// A file that goes while the directory is listed is not known again afterwards.
TEST_F(StoreDirectory, WhatGoesWhileItIsListedIsGone) {
  class Listing : public ForwardIo {
   public:
    int list(int fd, const std::function<bool(const char*, unsigned char)>& use) override {
      bool seen = false;
      const int error = ForwardIo::list(fd, [&](const char* name, unsigned char type) {
        seen = seen || until == name;
        return use(name, type);
      });
      if (seen) std::exchange(then, {})();
      return error;
    }
    std::string until;
    std::function<void()> then;
  };
  constexpr std::int64_t kBytes = 5 * 4096;
  store::Counters counters;
  const auto io = std::make_shared<Listing>();
  const store::Directory::Options options{.path = root, .max_bytes = 10 * kBytes, .keep_free = 0};
  store::Directory directory(io, options, counters);
  const std::uint32_t space = directory.space(raw_space(0).digest());
  const TierPtr writer = directory_tier(small_tier(root, 10 * kBytes));
  ASSERT_EQ(Client({writer}).put(range(0, 10)), all(Outcome::kOk, 10));
  const store::PieceId removed{space, key_of(5), {}};
  const timespec later[2] = {{.tv_sec = 1L << 33, .tv_nsec = 0}, {.tv_sec = 1L << 33, .tv_nsec = 0}};
  ASSERT_EQ(::utimensat(AT_FDCWD, piece_path(root, 0, 5).c_str(), later, 0), 0) << "so that it is not evicted";
  io->until = store::file_name(key_of(5), {});
  io->then = [&] {
    directory.let_go(removed, store::Going::kRemoved);
    EXPECT_TRUE(directory.settle(removed));
  };
  store::Draft draft;
  EXPECT_TRUE(soon([&] { return !directory.begin({space, key_of(100), {}}, kBytes, draft); }));
  EXPECT_FALSE(io->then) << "it was not listed";
  EXPECT_FALSE(directory.holds(removed));
  EXPECT_TRUE(directory.holds({space, key_of(8), {}}) || directory.holds({space, key_of(9), {}}));
  directory.discard(draft);
}

/// A file that cannot be removed at the moment is tried again, and not found meanwhile.
TEST_F(StoreDirectory, WhatCannotBeRemovedNowIsNotFound) {
  const auto io = std::make_shared<FaultIo>();
  const TierPtr tier = store::make_directory_tier(small_tier(root), io);
  Client client({tier});
  for (const Fault& fault : {Fault{.calls = kUnlink, .targets = kPiece, .error = EIO},
                             Fault{.calls = kStat, .targets = kPiece, .error = EMFILE}}) {
    ASSERT_EQ(client.put(range(0, 4)), all(Outcome::kOk, 4));
    const std::int64_t before = io->hits();
    io->set(fault);
    EXPECT_EQ(client.remove({1}), 1);
    EXPECT_TRUE(soon([&] { return io->hits() >= before + 3; })) << "it is not tried again";
    EXPECT_EQ(client.lookup({0, 1}), (std::vector<bool>{true, false}));
    io->lift();
    EXPECT_TRUE(soon([&] { return !fs::exists(piece_path(root, 0, 1)); }));
    EXPECT_EQ(client.lookup({0, 1}), (std::vector<bool>{true, false}));
  }
  EXPECT_EQ(client.put({1}), all(Outcome::kOk, 1));
  EXPECT_EQ(client.get(range(0, 4)), all(Outcome::kOk, 4));
  expect_at_rest(root, tier, io.get());
}

/// A draft that could not be removed is still there when the tier closes: its room is in force until somebody counts.
TEST_F(StoreDirectory, DraftsThatAreLeftBehindCount) {
  const auto io = std::make_shared<FaultIo>();
  const auto other = another();
  {
    const TierPtr tier = store::make_directory_tier(small_tier(root), io);
    Client client({tier});
    EXPECT_TRUE(soon([&] { return client.put({1}) == all(Outcome::kOk, 1); }));
    io->set({.calls = kUnlink, .targets = kDraft, .error = EIO});
    io->set({.calls = kRename, .targets = kDraft, .error = EIO}, 1);
    EXPECT_EQ(client.put({2, 3}), all(Outcome::kIoError, 2));
  }
  const OnDisk disk = look(root);
  ASSERT_EQ(disk.temporaries.size(), 2U);
  const auto account = other->account();
  ASSERT_TRUE(account);
  EXPECT_GE(account->used + account->reserved, disk.bytes + size_of(disk.temporaries));
  ASSERT_EQ(other->begin_count(), store::Ledger::Count::kMine) << "nobody would ever find them";
  other->cancel_count();
  io->lift(0);
  io->lift(1);
  const TierPtr tier = store::make_directory_tier(small_tier(root), io);
  EXPECT_EQ(Client({tier}).put({2, 3}), all(Outcome::kOk, 2));
  expect_at_rest(root, tier, io.get());
}

/// A folder that this process may not enter is not its own: the rest goes on.
TEST_F(StoreDirectory, AFolderWithoutRights) {
  class Closed : public ForwardIo {
   public:
    int open(int at, const char* name, int flags, mode_t mode) override {
      return closed == name ? -EACCES : ForwardIo::open(at, name, flags, mode);
    }
    int stat_at(int at, const char* name, struct stat& out) override {
      return hidden == name ? -EACCES : ForwardIo::stat_at(at, name, out);
    }
    std::string closed;
    std::string hidden;
  };
  { Client({directory_tier(small_tier(root))}).put(range(0, 20)); }
  const auto io = std::make_shared<Closed>();
  io->closed = piece_path(root, 0, 1).substr(root.size() + 66, 1);
  io->hidden = store::file_name(key_of(2), {});
  ASSERT_NE(piece_path(root, 0, 2)[root.size() + 66], io->closed[0]);
  const TierPtr tier = store::make_directory_tier(small_tier(root), io);
  Client client({tier});
  EXPECT_TRUE(soon([&] { return client.put({100}) == all(Outcome::kOk, 1); })) << told(tier);
  EXPECT_EQ(client.lookup({1, 2, 100}), (std::vector<bool>{false, false, true}));
  EXPECT_NE(client.put({1}), all(Outcome::kOk, 1));
}

/// Killed between making a folder and letting the group in: the next one does that.
TEST_F(StoreDirectory, FoldersOfAGroupThatAreClosed) {
  auto options = small_tier(root);
  options.group = true;
  const fs::path shard = fs::path(piece_path(root, 0, 1)).parent_path();
  for (const fs::path& folder : {fs::path(root + "/tmp"), shard.parent_path(), shard}) {
    fs::create_directories(folder);
    fs::permissions(folder, fs::perms::owner_all);
  }
  EXPECT_EQ(Client({directory_tier(options)}).put({1}), all(Outcome::kOk, 1));
  for (const fs::path& folder : {fs::path(root), fs::path(root + "/tmp"), shard.parent_path(), shard}) {
    struct stat stat;
    ASSERT_EQ(::stat(folder.c_str(), &stat), 0);
    EXPECT_EQ(stat.st_mode & 02770U, 02770U) << folder;
  }
}

/// Only the account is removed: it is made again, and the tier goes on.
TEST_F(StoreDirectory, ARemovedAccount) {
  const TierPtr one = directory_tier(small_tier(root));
  const TierPtr two = directory_tier(small_tier(root));
  Client a({one});
  Client b({two}, 1);
  ASSERT_EQ(a.put(range(0, 20)), all(Outcome::kOk, 20));
  ASSERT_EQ(b.put(range(0, 20)), all(Outcome::kOk, 20));
  fs::remove(root + "/ledger");
  EXPECT_TRUE(soon([&] { return a.put({100}) == all(Outcome::kOk, 1); }, 10000ms)) << told(one);
  EXPECT_TRUE(soon([&] { return b.put({100}) == all(Outcome::kOk, 1); }, 10000ms)) << told(two);
  a.put(range(200, 600));
  b.put(range(200, 600));
  expect_at_rest(root, one);
  expect_at_rest(root, two);
}

/// Whatever the file system makes of it: in 4 KiB parts, their list in blocks of 340, and those in blocks of 340.
TEST_F(StoreDirectory, RoomForFilesInManyParts) {
  EXPECT_EQ(store::room_for(2 * 4096), 2 * 4096);
  EXPECT_EQ(store::room_for(2 * 4096 - 1), 2 * 4096);
  for (std::int64_t pages = 257; pages < (1 << 20); pages = pages * 5 / 4) {
    const std::int64_t lists = (pages + 339) / 340;
    const std::int64_t above = lists > 4 ? (lists + 339) / 340 : 0;
    EXPECT_GE(store::room_for(pages * 4096), (pages + lists + above) * 4096) << pages;
    EXPECT_LE(store::room_for(pages * 4096), (pages + lists + above + 2) * 4096) << pages;
  }
}

}  // namespace
}  // namespace kvstride::test
