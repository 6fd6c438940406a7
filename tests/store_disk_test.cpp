// SPDX-License-Identifier: Apache-2.0
// The real thing: a file system that runs full, that is frozen, that is read-only; no more descriptors; many files.
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>

#include <regex>

#include "child.h"
#include "store_faults.h"

namespace kvstride::test {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kImage = 5 * 4096;
constexpr int kNoRights = 77;

class StoreDisk : public testing::Test {
 protected:
  /// In a child with mounts of its own, which go with it; 77 where this process may not mount.
  void with_mounts(const std::function<int()>& work) {
    const int code = in_child([&] {
      if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0)
        return kNoRights;
      const int answer = work();
      return testing::Test::HasFailure() ? 7 : answer;
    });
    if (code == kNoRights) GTEST_SKIP() << "nothing can be mounted here (needs CAP_SYS_ADMIN)";
    EXPECT_EQ(code, 0);
  }
  void as_nobody(const std::function<void()>& work) {
    constexpr uid_t kNobody = 65534;
    if (::geteuid() == 0 && ::chown(scratch.path("").c_str(), kNobody, kNobody) != 0)
      GTEST_SKIP() << "chown is refused";
    const int code = in_child([&] {
      if (::geteuid() == 0 && (::setgid(kNobody) != 0 || ::setuid(kNobody) != 0)) return kNoRights;
      work();
      return testing::Test::HasFailure() ? 7 : 0;
    });
    if (code == kNoRights) GTEST_SKIP() << "this process may not become another user";
    EXPECT_EQ(code, 0);
  }
  static std::int64_t free_bytes(const std::string& path) {
    struct statvfs disk;
    return ::statvfs(path.c_str(), &disk) == 0 ? static_cast<std::int64_t>(disk.f_bavail * disk.f_frsize) : -1;
  }
  /// Somebody else's file, as large as it gets.
  static void fill_up(const std::string& path) {
    std::ofstream file(path, std::ios::binary | std::ios::app);
    const std::string block(64 << 10, 'x');
    while (file.write(block.data(), static_cast<std::streamsize>(block.size())).flush()) {
    }
  }

  Scratch scratch;
  std::string root = scratch.path();
};

TEST_F(StoreDisk, ARealDiskRunsFull) {
  with_mounts([&] {
    const std::string disk = scratch.path("disk");
    fs::create_directory(disk);
    if (::mount("none", disk.c_str(), "tmpfs", 0, "size=64m,mode=700") != 0) return kNoRights;
    auto options = small_tier(disk + "/store", std::int64_t{1} << 30);
    const TierPtr tier = directory_tier(options);
    Client client({tier}, 0, 250'000);
    // 100 MB into 64: evicting makes room, or it is refused; what is there is right.
    int ok = 0;
    for (int i = 0; i < 100; ++i) ok += count(client.put(range(i * 4, 4)), Outcome::kOk);
    EXPECT_GT(ok, 350);
    EXPECT_GT(tier->metrics().counters.at("evictions"), 100U);
    EXPECT_GT(count(client.get(range(200, 200)), Outcome::kOk), 100);
    expect_at_rest(disk + "/store", tier);
    // Somebody else takes what comes free; there is always something to evict.
    for (int i = 0; i < 50; ++i) {
      fill_up(disk + "/other");
      const Outcome put = client.put({1000 + i})[0];
      EXPECT_TRUE(put == Outcome::kOk || put == Outcome::kRefused) << name_of(put);
    }
    // Nothing is left to evict.
    client.remove(range(0, 1100));
    EXPECT_TRUE(soon([&] { return look(disk + "/store").pieces.empty(); }));
    fill_up(disk + "/other");
    const auto begin = SteadyClock::now();
    EXPECT_EQ(count(client.put(range(2000, 50)), Outcome::kOk), 0);
    EXPECT_LT(SteadyClock::now() - begin, 5s) << "no endless loop";
    EXPECT_EQ(count(client.get(range(2000, 50)), Outcome::kMiss), 50);
    EXPECT_TRUE(look(disk + "/store").temporaries.empty());
    fs::remove(disk + "/other");
    EXPECT_TRUE(soon([&] { return client.put({3000}) == all(Outcome::kOk, 1); })) << "no recovery";
    EXPECT_EQ(client.get({3000}), all(Outcome::kOk, 1));
    expect_at_rest(disk + "/store", tier);
    return 0;
  });
}

/// What is there is read, whatever else is missing; where nothing is there, a store would never be of use.
TEST_F(StoreDisk, OpenedOnAFullDisk) {
  with_mounts([&] {
    const std::string disk = scratch.path("disk");
    fs::create_directory(disk);
    if (::mount("none", disk.c_str(), "tmpfs", 0, "size=16m,mode=700") != 0) return kNoRights;
    const std::string store = disk + "/store";
    const auto options = small_tier(store);
    { Client({directory_tier(options)}).put(range(0, 20)); }
    fill_up(disk + "/other");
    {
      const TierPtr tier = directory_tier(options);
      Client client({tier});
      EXPECT_EQ(client.get(range(0, 20)), all(Outcome::kOk, 20));
      EXPECT_EQ(tier->metrics().detail.find("read-only"), std::string::npos);
      // Eviction makes room, or somebody else does.
      fs::remove(disk + "/other");
      EXPECT_TRUE(soon([&] { return client.put({100}) == all(Outcome::kOk, 1); })) << told(tier);
      expect_at_rest(store, tier);
    }
    fs::remove(store + "/ledger");
    fill_up(disk + "/other");
    {
      const TierPtr tier = directory_tier(options);
      Client client({tier});
      EXPECT_EQ(client.get(range(0, 20)), all(Outcome::kOk, 20));
      EXPECT_EQ(client.put({200}), all(Outcome::kRefused, 1));
      EXPECT_NE(tier->metrics().detail.find("read-only: the disk was full"), std::string::npos) << told(tier);
    }
    const auto error_of = [](const DirectoryTierOptions& tried) -> std::string {
      try {
        directory_tier(tried);
      } catch (const Error& error) {
        return error.what();
      }
      return "";
    };
    const std::string error = error_of(small_tier(disk + "/new"));
    EXPECT_NE(error.find(disk + "/new"), std::string::npos) << error;
    EXPECT_NE(error.find("no room"), std::string::npos) << error;
    fs::remove(disk + "/other");
    for (const std::string& path : {store, disk + "/new"}) {
      const TierPtr tier = directory_tier(small_tier(path));
      EXPECT_EQ(Client({tier}).put({300}), all(Outcome::kOk, 1));
      expect_at_rest(path, tier);
    }
    return 0;
  });
}

/// The folder for files on their way was removed, and there is no room for another one.
TEST_F(StoreDisk, NoRoomForAFolder) {
  { Client({directory_tier(small_tier(root))}).put(range(0, 20)); }
  for (const char* folder : {"/tmp", "/quarantine"}) {
    for (const int error : {ENOSPC, EDQUOT}) {
      fs::remove(root + folder);
      const auto io = std::make_shared<FaultIo>();
      io->set({.calls = kMkdir, .error = error});
      const TierPtr tier = store::make_directory_tier(small_tier(root), io);
      Client client({tier});
      EXPECT_EQ(client.get(range(0, 20)), all(Outcome::kOk, 20));
      EXPECT_EQ(client.put({100}), all(Outcome::kRefused, 1));
      EXPECT_NE(tier->metrics().detail.find("read-only: the disk was full"), std::string::npos) << told(tier);
    }
    fs::create_directory(root + folder);
  }
  fs::remove(root + "/tmp");
  const TierPtr tier = directory_tier(small_tier(root));
  EXPECT_EQ(Client({tier}).put({100}), all(Outcome::kOk, 1));
  expect_at_rest(root, tier);
}

TEST_F(StoreDisk, AReserveStaysFree) {
  with_mounts([&] {
    const std::string disk = scratch.path("disk");
    fs::create_directory(disk);
    if (::mount("none", disk.c_str(), "tmpfs", 0, "size=16m,mode=700") != 0) return kNoRights;
    auto options = small_tier(disk + "/store", std::int64_t{1} << 30);
    options.keep_free = 6 << 20;
    Client client({directory_tier(options)});
    for (int i = 0; i < 200; ++i) {
      EXPECT_EQ(client.put(range(i * 4, 4)), all(Outcome::kOk, 4));
      // Both threads may have looked before either wrote.
      EXPECT_GE(free_bytes(disk), (6 << 20) - kImage) << i;
    }
    return 0;
  });
}

/// Writes to a frozen file system wait in the kernel, with io_uring too: time-outs, and no harm done.
TEST_F(StoreDisk, AFrozenFileSystem) {
  with_mounts([&] {
    const std::string disk = scratch.path("disk");
    fs::create_directory(disk);
    const std::string image = scratch.path("image");
    const std::string make =
        "truncate -s 64M " + image + " && mkfs.ext4 -q " + image + " && mount -o loop " + image + " " + disk;
    if (std::system(("(" + make + ") 2>/dev/null").c_str()) != 0) return kNoRights;
    const int handle = ::open(disk.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    // Whatever becomes of this process, the file system thaws.
    const pid_t guard = start_child([&] {
      std::this_thread::sleep_for(30s);
      return ::ioctl(handle, FITHAW, 0);
    });
    int first = 0;
    for (const auto engine : {DirectoryTierOptions::Engine::kAuto, DirectoryTierOptions::Engine::kBlocking}) {
      auto options = small_tier(disk + "/store", 32 << 20);
      options.engine = engine;
      const TierPtr tier = directory_tier(options);
      StoreOptions quick;
      quick.deadline = 300ms;
      Client client({tier}, 0, 3 * 4096 + 100, quick);
      EXPECT_EQ(client.put(range(first, 20)), all(Outcome::kOk, 20));
      if (::ioctl(handle, FIFREEZE, 0) != 0) return kNoRights;
      const auto begin = SteadyClock::now();
      EXPECT_EQ(count(client.put(range(first + 100, 20)), Outcome::kOk), 0);
      EXPECT_EQ(count(client.put(range(first + 200, 20)), Outcome::kOk), 0);
      client.get(range(first, 20));
      client.lookup(range(first + 300, 4));
      client.store.metrics();
      EXPECT_LT(SteadyClock::now() - begin, 3s);
      EXPECT_EQ(::ioctl(handle, FITHAW, 0), 0);
      EXPECT_TRUE(soon([&] { return client.put(range(first + 400, 10)) == all(Outcome::kOk, 10); })) << "no recovery";
      EXPECT_TRUE(soon([&] { return client.get(range(first, 20)) == all(Outcome::kOk, 20); })) << "no recovery";
      expect_at_rest(disk + "/store", tier);
      first += 1000;
    }
    ::kill(guard, SIGKILL);
    wait_for_child(guard);
    ::close(handle);
    return 0;
  });
}

TEST_F(StoreDisk, ReadOnlyMounts) {
  with_mounts([&] {
    { Client({directory_tier(small_tier(root))}).put(range(0, 20)); }
    if (::mount(root.c_str(), root.c_str(), nullptr, MS_BIND, nullptr) != 0 ||
        ::mount(nullptr, root.c_str(), nullptr, MS_REMOUNT | MS_BIND | MS_RDONLY, nullptr) != 0) {
      return kNoRights;
    }
    const TierPtr tier = directory_tier(small_tier(root));
    Client client({tier});
    EXPECT_NE(tier->metrics().detail.find("read-only"), std::string::npos);
    EXPECT_EQ(client.get(range(0, 20)), all(Outcome::kOk, 20));
    EXPECT_EQ(client.put({100}), all(Outcome::kRefused, 1));
    EXPECT_EQ(client.lookup(range(19, 2)), (std::vector<bool>{true, false}));
    client.remove({3});
    return 0;
  });
}

/// Rights that are taken away while it is open, and when it is opened; all come back.
TEST_F(StoreDisk, RightsTakenAway) {
  as_nobody([&] {
    const TierPtr tier = directory_tier(small_tier(root, 40 * kImage));
    Client client({tier});
    ASSERT_EQ(client.put(range(0, 20)), all(Outcome::kOk, 20));
    const auto chmod_all = [&](fs::perms folders) {
      for (const auto& entry : fs::recursive_directory_iterator(root)) {
        if (entry.is_directory()) fs::permissions(entry.path(), folders);
      }
      fs::permissions(root, folders);
    };
    chmod_all(fs::perms::owner_read | fs::perms::owner_exec);
    EXPECT_EQ(client.get(range(0, 20)), all(Outcome::kOk, 20)) << "reading goes on";
    const auto begin = SteadyClock::now();
    EXPECT_EQ(count(client.put(range(100, 40)), Outcome::kOk), 0);
    client.remove({5});
    damage(piece_path(root, 0, 6));
    EXPECT_EQ(client.get({6}), all(Outcome::kCorrupt, 1));
    EXPECT_LT(SteadyClock::now() - begin, 5s);
    chmod_all(fs::perms::owner_all);
    EXPECT_TRUE(soon([&] { return client.put({200}) == all(Outcome::kOk, 1); }));
    // Quarantine alone: evicting must not spin on what it cannot remove.
    damage(piece_path(root, 0, 7));
    client.get({7});
    EXPECT_TRUE(soon([&] { return !look(root).set_aside.empty(); }));
    fs::permissions(root + "/quarantine", fs::perms::owner_read | fs::perms::owner_exec);
    EXPECT_EQ(count(client.put(range(300, 100)), Outcome::kOk), 100);
    fs::permissions(root + "/quarantine", fs::perms::owner_all);
    expect_at_rest(root, tier);
    // A piece that may not be read is no answer, and does no harm.
    ASSERT_EQ(client.put({500}), all(Outcome::kOk, 1));
    fs::permissions(piece_path(root, 0, 500), fs::perms::none);
    EXPECT_NE(client.get({500}), all(Outcome::kOk, 1));
  });
}

TEST_F(StoreDisk, NoMoreDescriptors) {
#if defined(__has_feature)
#if __has_feature(undefined_behavior_sanitizer)
  GTEST_SKIP() << "the sanitizer needs descriptors itself";
#endif
#endif
  const int code = in_child([&] {
    const auto io = std::make_shared<FaultIo>();
    const TierPtr tier = store::make_directory_tier(small_tier(root), io);
    Client client({tier});
    EXPECT_EQ(client.put(range(0, 20)), all(Outcome::kOk, 20));
    rlimit before{};
    ::getrlimit(RLIMIT_NOFILE, &before);
    const int next = ::dup(0);
    ::close(next);
    rlimit none = before;
    none.rlim_cur = static_cast<rlim_t>(next);
    for (int round = 0; round < 3; ++round) {
      ::setrlimit(RLIMIT_NOFILE, &none);
      EXPECT_EQ(count(client.put(range(100, 20)), Outcome::kOk), 0);
      for (const Outcome got : client.get(range(0, 20))) EXPECT_EQ(got, Outcome::kIoError);
      EXPECT_EQ(client.lookup(range(0, 20)), std::vector<bool>(20, true)) << "it is still there";
      EXPECT_THROW(directory_tier(small_tier(scratch.path("other"))), Error);
      std::this_thread::sleep_for(400ms);  // the house keeper meets it, too
      ::setrlimit(RLIMIT_NOFILE, &before);
      EXPECT_EQ(client.get(range(0, 20)), all(Outcome::kOk, 20));
      EXPECT_TRUE(soon([&] { return client.put({200 + round}) == all(Outcome::kOk, 1); }));
      expect_at_rest(root, tier, io.get());
    }
    return testing::Test::HasFailure() ? 7 : 0;
  });
  EXPECT_EQ(code, 0);
}

/// A directory that many models share, and a process with few descriptors.
TEST_F(StoreDisk, ManyNamespacesFewDescriptors) {
  const int code = in_child([&] {
    for (int space = 0; space < 60; ++space) {
      Client client({directory_tier(small_tier(root))}, space);
      EXPECT_EQ(client.put(range(0, 20)), all(Outcome::kOk, 20));
    }
    rlimit few{};
    ::getrlimit(RLIMIT_NOFILE, &few);
    few.rlim_cur = 100;
    ::setrlimit(RLIMIT_NOFILE, &few);
    const TierPtr tier = directory_tier(small_tier(root));
    Client client({tier}, 59);
    EXPECT_EQ(client.get(range(0, 20)), all(Outcome::kOk, 20));
    // Evictions in all the other namespaces.
    EXPECT_EQ(client.put(range(100, 300)), all(Outcome::kOk, 300));
    expect_at_rest(root, tier);
    return testing::Test::HasFailure() ? 7 : 0;
  });
  EXPECT_EQ(code, 0);
}

TEST_F(StoreDisk, LimitsSmallerThanAChunk) {
  for (const std::int64_t limit : {2 * 4096, 3 * 4096, static_cast<int>(kImage) - 1, static_cast<int>(kImage)}) {
    const TierPtr tier = directory_tier(small_tier(root, limit));
    Client client({tier});
    const bool fits = limit >= kImage;
    for (int i = 0; i < 5; ++i) {
      EXPECT_EQ(client.put({i}), all(fits ? Outcome::kOk : Outcome::kRefused, 1)) << limit;
      EXPECT_EQ(client.get({i}), all(fits ? Outcome::kOk : Outcome::kMiss, 1)) << limit;
      EXPECT_LE(look(root).bytes, limit);
    }
    expect_at_rest(root, tier);
  }
  // Memory for chunks on their way smaller than one: refused, not waited for.
  auto options = small_tier(scratch.path("small"));
  options.staging_bytes = 3 * 4096;
  Client client({directory_tier(options)});
  const auto begin = SteadyClock::now();
  EXPECT_EQ(client.put({1}), all(Outcome::kRefused, 1));
  EXPECT_LT(SteadyClock::now() - begin, 2s);
  Client tiny({host_tier({.num_bytes = 4 * 4096})});
  EXPECT_EQ(tiny.put({1}), all(Outcome::kRefused, 1));
}

TEST_F(StoreDisk, ALowerLimitAfterARestart) {
  { Client({directory_tier(small_tier(root))}).put(range(0, 100)); }
  ASSERT_GE(look(root).bytes, 100 * kImage);
  const TierPtr tier = directory_tier(small_tier(root, 30 * kImage));
  Client client({tier});
  EXPECT_TRUE(soon([&] { return look(root).bytes <= 30 * kImage; }, 3000ms))
      << look(root).bytes / kImage << " of 30 chunks";
  EXPECT_EQ(client.put(range(200, 10)), all(Outcome::kOk, 10));
  EXPECT_LE(look(root).bytes, 30 * kImage);
  expect_at_rest(root, tier);
}

TEST_F(StoreDisk, NamesOfModels) {
  const TierPtr tier = directory_tier(small_tier(root));
  NamespaceFields fields = raw_space(0).fields();
  std::vector<std::string> seen;
  for (const std::string& model :
       {std::string("../../etc/passwd"), std::string("a/b@c"), std::string(".."), std::string("a\0b", 3),
        std::string("a\nb=c"), std::string("%2e%2e"), std::string(4000, 'x'), std::string("/")}) {
    fields.model = model;
    Store store({tier}, Namespace(fields));
    const std::vector<std::byte> chunk = chunk_of(0, 1, 5000);
    const std::vector<std::span<const std::byte>> from{chunk};
    ASSERT_EQ(store.lookup_prefix(keys_of({1})), 0) << model;
    ASSERT_EQ(Outcomes(store.put_bytes(keys_of({1}), from).wait()), all(Outcome::kOk, 1)) << model;
    std::vector<std::byte> back(5000);
    const std::vector<std::span<std::byte>> to{back};
    ASSERT_EQ(Outcomes(store.get_bytes(keys_of({1}), to).wait()), all(Outcome::kOk, 1)) << model;
    EXPECT_EQ(back, chunk);
    seen.push_back(store.space().hex());
  }
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(std::unique(seen.begin(), seen.end()), seen.end());
  EXPECT_EQ(look(root).pieces.size(), seen.size());
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    const std::string leaf = entry.path().filename();
    EXPECT_TRUE(leaf == "ledger" || leaf == "tmp" || leaf == "quarantine" ||
                std::regex_match(leaf, std::regex("[0-9a-f]+")))
        << leaf;
  }
}

/// Opened by names and sizes alone: no payload is read.
TEST_F(StoreDisk, ManyChunks) {
  const int num = many(100'000, 1'000'000);
  const std::string space = root + "/" + raw_space(0).hex();
  { Client({directory_tier(small_tier(root))}).put({0}); }
  for (const char shard : std::string("0123456789abcdef")) fs::create_directory(space + "/" + shard);
  for (int i = 1; i < num; ++i) {
    const int fd = ::open(piece_path(root, 0, i).c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    ASSERT_GE(fd, 0);
    ASSERT_EQ(::ftruncate(fd, 8192), 0);  // takes nothing, counts as 8 KiB
    ::close(fd);
  }
  const std::int64_t limit = std::int64_t{num} * 8192 + (1 << 20);
  const auto io = std::make_shared<FaultIo>();
  const TierPtr tier = store::make_directory_tier(small_tier(root, limit), io);
  Client client({tier});
  EXPECT_EQ(tier->metrics().chunks, num);
  EXPECT_EQ(tier->metrics().used_bytes, kImage + std::int64_t{num - 1} * 8192);
  std::vector<bool> found = client.lookup(range(0, num));
  EXPECT_EQ(std::count(found.begin(), found.end(), true), num);
  EXPECT_EQ(client.get({0}), all(Outcome::kOk, 1));
  EXPECT_EQ(client.get({1}), all(Outcome::kCorrupt, 1)) << "a file of zeros";
  // Eviction in a large directory.
  EXPECT_EQ(client.put(range(num, 200)), all(Outcome::kOk, 200));
  EXPECT_LE(tier->metrics().used_bytes, limit);
}

/// No thread can be made: an error or a refusal, never the end of the process.
TEST_F(StoreDisk, NoMoreThreads) {
  const int code = in_child([&] {
    const TierPtr host = host_tier({.num_bytes = 1 << 20});
    refuse(SYS_clone3, EAGAIN);
    refuse(SYS_clone, EAGAIN);
    const auto io = std::make_shared<FaultIo>();
    for (int i = 0; i < 3; ++i) {
      EXPECT_THROW(Store({host}, raw_space(0)), Error);
      EXPECT_THROW(store::make_directory_tier(small_tier(root), io), Error);
      EXPECT_TRUE(soon([&] { return io->num_open() == 0; })) << io->num_open();
    }
    return testing::Test::HasFailure() ? 7 : 0;
  });
  EXPECT_EQ(code, 0);
}

}  // namespace
}  // namespace kvstride::test
