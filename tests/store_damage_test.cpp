// SPDX-License-Identifier: Apache-2.0
// Files that were damaged, exchanged, cut, or are no files: never an answer, set aside once, then a miss.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <set>

#include "store_blocks.h"

namespace kvstride::test {
namespace {

namespace fs = std::filesystem;

class StoreDamage : public testing::Test {
 protected:
  /// Opens the directory anew, as after a restart.
  Client& reopen() {
    client.reset();
    tier.reset();
    tier = store::make_directory_tier(small_tier(root), io);
    client = std::make_unique<Client>(std::vector<TierPtr>{tier});
    return *client;
  }
  std::string piece(int number) const { return piece_path(root, 0, number); }
  /// A damaged chunk is told once, set aside, then a miss; and can be put again.
  void expect_set_aside(int number, const std::string& what) {
    const auto first = client->get({number});
    EXPECT_NE(first[0], Outcome::kOk) << what;
    EXPECT_TRUE(soon([&] { return !fs::is_regular_file(fs::symlink_status(piece(number))); }))
        << what << ": still in place";
    EXPECT_EQ(client->get({number}), all(Outcome::kMiss, 1)) << what;
    EXPECT_EQ(client->lookup({number}), std::vector<bool>{false}) << what;
    EXPECT_EQ(client->put({number}), all(Outcome::kOk, 1)) << what;
    EXPECT_EQ(client->get({number}), all(Outcome::kOk, 1)) << what;
  }

  Scratch scratch;
  std::string root = scratch.path();
  std::shared_ptr<FaultIo> io = std::make_shared<FaultIo>();
  TierPtr tier;
  std::unique_ptr<Client> client;
};

TEST_F(StoreDamage, EachByteOfTheHeaderFlipped) {
  reopen();
  constexpr int kBatch = 64;
  const std::vector<int> numbers = range(0, kBatch);
  ASSERT_EQ(client->put(numbers), all(Outcome::kOk, kBatch));
  std::vector<std::string> sound;
  for (const int number : numbers) sound.push_back(read_file(piece(number)));
  ASSERT_EQ(sound[0].size(), 4096U + 4 * 4096) << "one page of header";
  for (std::size_t first = 0; first < 4096; first += kBatch) {
    for (std::size_t i = 0; i < kBatch; ++i) {
      std::string bytes = sound[i];
      bytes[first + i] = static_cast<char>(bytes[first + i] ^ (1 << (first + i) % 8));
      write_file(piece(numbers[i]), bytes);
    }
    ASSERT_EQ(client->get(numbers), all(Outcome::kCorrupt, kBatch)) << "bytes from " << first;
    ASSERT_TRUE(soon([&] { return look(root).pieces.empty(); })) << "bytes from " << first;
    ASSERT_EQ(client->get(numbers), all(Outcome::kMiss, kBatch));
  }
  reopen();  // files that the test made are in no account
  expect_at_rest(root, tier, io.get());
}

TEST_F(StoreDamage, RandomFlipsAnywhere) {
  reopen();
  std::mt19937_64 random(seed());
  const std::vector<int> numbers = range(0, 40);
  for (int round = 0; round < many(10, 300); ++round) {
    ASSERT_EQ(client->put(numbers), all(Outcome::kOk, numbers.size()));
    std::set<int> hit;
    for (int i = 0; i < 15; ++i) hit.insert(static_cast<int>(random() % numbers.size()));
    for (const int number : hit) {
      std::string bytes = read_file(piece(number));
      ASSERT_EQ(bytes.size(), 5U * 4096) << "round " << round << ", chunk " << number << " was put, and is not there";
      const std::size_t at = random() % bytes.size();
      bytes[at] = static_cast<char>(bytes[at] ^ (1 << random() % 8));
      write_file(piece(number), bytes);
    }
    const Outcomes got = client->get(numbers);
    for (const int number : numbers) {
      ASSERT_EQ(got[static_cast<std::size_t>(number)], hit.count(number) != 0 ? Outcome::kCorrupt : Outcome::kOk)
          << "round " << round << " chunk " << number << ": " << told(tier);
    }
    ASSERT_TRUE(soon([&] { return look(root).pieces.size() == numbers.size() - hit.size(); }));
  }
  expect_at_rest(root, tier, io.get());
}

TEST_F(StoreDamage, CutAndExtended) {
  const std::int64_t whole = 5 * 4096;
  for (const std::int64_t size :
       {std::int64_t{0}, std::int64_t{1}, std::int64_t{4095}, std::int64_t{4096}, std::int64_t{4097},
        std::int64_t{8192}, whole - 4096, whole - 1, whole + 1, whole + 4096, whole * 100}) {
    for (const bool restarted : {false, true}) {
      reopen();
      ASSERT_EQ(client->put({1}), all(Outcome::kOk, 1));
      ASSERT_EQ(::truncate(piece(1).c_str(), size), 0);
      if (restarted) reopen();
      expect_set_aside(1, std::to_string(size) + (restarted ? " bytes, restarted" : " bytes"));
      client->remove({1});
    }
  }
  expect_at_rest(root, tier, io.get());
}

/// A cut file must not keep others waiting (an image of 0 bytes needs a buffer of 0 bytes).
TEST_F(StoreDamage, AnEmptyFileDelaysNobody) {
  reopen().put({1, 2});
  ASSERT_EQ(::truncate(piece(1).c_str(), 0), 0);
  reopen();
  const auto begin = SteadyClock::now();
  EXPECT_NE(client->get({1})[0], Outcome::kOk);
  EXPECT_EQ(client->get({2}), all(Outcome::kOk, 1));
  EXPECT_LT(SteadyClock::now() - begin, 2s);
}

TEST_F(StoreDamage, AnothersFileInItsPlace) {
  reopen();
  Client other({tier}, 1);
  Client larger({tier}, 0, 9 * 4096);
  ASSERT_EQ(client->put({1, 2}), all(Outcome::kOk, 2));
  ASSERT_EQ(other.put({1}), all(Outcome::kOk, 1));
  ASSERT_EQ(larger.put({3}), all(Outcome::kOk, 1));
  for (const std::string& from : {piece(2), piece_path(root, 1, 1), piece(3)}) {
    fs::copy_file(from, piece(1), fs::copy_options::overwrite_existing);
    expect_set_aside(1, from);
  }
  EXPECT_EQ(other.get({1}), all(Outcome::kOk, 1));
  EXPECT_EQ(client->get({2}), all(Outcome::kOk, 1));
  // The same bytes under a name that is not theirs are no other chunk.
  fs::create_directories(fs::path(piece(4)).parent_path());
  fs::copy_file(piece(2), piece(4));
  reopen();
  expect_set_aside(4, "a copy");
}

TEST_F(StoreDamage, LinksPipesAndFolders) {
  const std::string elsewhere = scratch.path("elsewhere");
  for (const bool restarted : {false, true}) {
    for (const char* what : {"link", "dangling link", "hard link of a link's target", "pipe", "folder", "socket"}) {
      reopen();
      ASSERT_EQ(client->put({1, 2}), all(Outcome::kOk, 2)) << what;
      fs::copy_file(piece(1), elsewhere, fs::copy_options::overwrite_existing);
      ASSERT_TRUE(fs::remove(piece(1)));
      const std::string text = what;
      if (text == "link") fs::create_symlink(elsewhere, piece(1));
      if (text == "dangling link") fs::create_symlink(scratch.path("nowhere"), piece(1));
      if (text == "hard link of a link's target") fs::create_hard_link(elsewhere, piece(1));
      if (text == "pipe") ::mkfifo(piece(1).c_str(), 0600);
      if (text == "folder") fs::create_directory(piece(1));
      if (text == "socket") {
        const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
        const std::string deep = "/proc/self/fd";  // the path is longer than a socket's name may be
        const int dir = ::open(fs::path(piece(1)).parent_path().c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);
        sockaddr_un name{.sun_family = AF_UNIX, .sun_path = {}};
        const std::string path = deep + "/" + std::to_string(dir) + "/" + fs::path(piece(1)).filename().string();
        ASSERT_LT(path.size(), sizeof name.sun_path);
        std::copy(path.begin(), path.end(), name.sun_path);
        ASSERT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&name), sizeof name), 0);
        ::close(dir);
        ::close(fd);
      }
      if (restarted) reopen();
      const bool regular = text == "hard link of a link's target";
      const auto begin = SteadyClock::now();
      EXPECT_EQ(client->get({1}), all(regular ? Outcome::kOk : Outcome::kMiss, 1)) << what;
      EXPECT_EQ(client->lookup({1}), std::vector<bool>{regular}) << what << ": found for ever";
      EXPECT_EQ(client->put({1}) == all(Outcome::kOk, 1), regular) << what << ": nothing was stored";
      EXPECT_EQ(client->get({2}), all(Outcome::kOk, 1)) << what;
      EXPECT_LT(SteadyClock::now() - begin, 3s) << what;
      EXPECT_EQ(read_file(elsewhere).size(), 5U * 4096) << "nothing is written through a link";
      client.reset();
      tier.reset();
      fs::remove_all(root);
    }
  }
}

TEST_F(StoreDamage, C79VanishedFilesAreMissesFromThenOn) {
  reopen();
  const std::vector<int> numbers = range(0, 20);
  ASSERT_EQ(client->put(numbers), all(Outcome::kOk, 20));
  ASSERT_TRUE(fs::remove(piece(3)));
  EXPECT_EQ(client->lookup({3}), std::vector<bool>{true}) << "nobody has looked yet";
  EXPECT_EQ(client->get({3}), all(Outcome::kMiss, 1));
  EXPECT_EQ(client->lookup({3}), std::vector<bool>{false});
  EXPECT_GE(tier->metrics().counters.at("vanished"), 1U);
  ASSERT_EQ(client->put({3}), all(Outcome::kOk, 1));
  EXPECT_EQ(client->get({3}), all(Outcome::kOk, 1));
}

TEST_F(StoreDamage, VanishedFoldersComeBack) {
  for (const std::string& folder : {"/" + raw_space(0).hex(), std::string("/tmp"), std::string("/quarantine")}) {
    reopen();
    ASSERT_EQ(client->put(range(0, 20)), all(Outcome::kOk, 20));
    fs::remove_all(root + folder);
    for (const Outcome outcome : client->get(range(0, 20))) {
      EXPECT_EQ(outcome, folder.size() > 60 ? Outcome::kMiss : Outcome::kOk) << folder;
    }
    client->put(range(20, 20));  // the first ones may find out
    EXPECT_EQ(client->put(range(40, 20)), all(Outcome::kOk, 20)) << folder << " is not made again";
    EXPECT_EQ(client->get(range(40, 20)), all(Outcome::kOk, 20)) << folder;
    client.reset();
    tier.reset();
    fs::remove_all(root);
  }
}

TEST_F(StoreDamage, ForeignFilesAreLeftAlone) {
  reopen().put(range(0, 10));
  client.reset();
  tier.reset();
  const std::string space = root + "/" + raw_space(0).hex();
  const std::string hex(64, 'a');
  write_file(root + "/notes.txt", "mine");
  write_file(root + "/" + std::string(64, 'b'), "a file called like a namespace");
  fs::create_symlink("/etc", root + "/" + std::string(64, 'c'));
  fs::create_directories(root + "/" + hex + "/0");
  write_file(root + "/" + hex + "/0/00ff", "no piece");
  fs::create_symlink("/etc", root + "/" + hex + "/1");
  write_file(root + "/" + hex + "/2", "no shard");
  fs::create_directory(root + "/lost+found");
  write_file(space + "/README", "mine");
  fs::create_directories(root + "/quarantine/ab");
  write_file(root + "/quarantine/ab/keep", "mine");
  write_file(root + "/tmp/keep.txt", "mine");
  write_file(fs::path(piece(1)).parent_path().string() + "/.hidden", "mine");
  const std::string wrong_shard = space + "/" + (fs::path(piece(1)).filename().string()[0] == 'f' ? "0" : "f") + "/" +
                                  fs::path(piece(1)).filename().string();
  fs::create_directories(fs::path(wrong_shard).parent_path());
  fs::copy_file(piece(1), wrong_shard);
  reopen();
  EXPECT_EQ(client->get(range(0, 10)), all(Outcome::kOk, 10));
  EXPECT_EQ(client->put(range(10, 10)), all(Outcome::kOk, 10)) << "the account is never known";
  // Damage and eviction meet what lies in quarantine/.
  write_file(piece(1), "damaged");
  client->get({1});
  EXPECT_EQ(count(client->put(range(100, 600)), Outcome::kOk), 600) << "eviction";
  for (const char* kept : {"/notes.txt", "/quarantine/ab/keep", "/tmp/keep.txt"})
    EXPECT_EQ(read_file(root + kept), "mine");
  EXPECT_EQ(read_file(space + "/README"), "mine");
  EXPECT_TRUE(fs::is_symlink(root + "/" + std::string(64, 'c')));
}

TEST_F(StoreDamage, AboveLinksAreRefusedAtTheRoot) {
  fs::create_directory(scratch.path("real"));
  fs::create_directory_symlink(scratch.path("real"), scratch.path("link"));
  EXPECT_THROW(directory_tier(small_tier(scratch.path("link"))), Error);
  EXPECT_THROW(directory_tier(small_tier(scratch.path("link/"))), Error);
  write_file(scratch.path("file"), "x");
  EXPECT_THROW(directory_tier(small_tier(scratch.path("file"))), Error);
  for (const char* part : {"tmp", "quarantine", "ledger"}) {
    fs::create_directory(scratch.path("store"));
    fs::create_symlink(scratch.path("real"), root + "/" + part);
    EXPECT_THROW(directory_tier(small_tier(root)), Error) << part;
    fs::remove_all(root);
  }
  EXPECT_TRUE(fs::is_empty(scratch.path("real")));
}

/// Readers of some heads read a part of a file: what they read is verified, what they do not read is none of theirs.
TEST_F(StoreDamage, PartsOfAFile) {
  reopen();
  BlockClient all_heads({tier}, 0, "KV B N H D");
  BlockClient some({tier}, 0, "B H N KV D", 2, 2);
  const store::Heads heads{0, 8};
  const std::string folder = root + "/" + block_space(0).hex() + "/";
  const auto path_of = [&](int number, store::Heads range) {
    const std::string name = store::file_name(key_of(number), range);
    return folder + name.substr(0, 1) + "/" + name;
  };
  ASSERT_EQ(all_heads.put({1}), all(Outcome::kOk, 1));
  const std::string sound = read_file(path_of(1, heads));
  constexpr std::size_t kHead = 2 * 2 * kChunkTokens * 8 * 4;
  ASSERT_EQ(sound.size(), 4096 + 8 * kHead);
  std::mt19937_64 random(seed());
  for (int i = 0; i < many(300, 5000); ++i) {
    const std::size_t at = i % 2 == 0 ? random() % 4096 : 4096 + random() % (8 * kHead);
    std::string bytes = sound;
    bytes[at] = static_cast<char>(bytes[at] ^ (1 << random() % 8));
    write_file(path_of(1, heads), bytes);
    const bool mine = at < 4096 || (at >= 4096 + 2 * kHead && at < 4096 + 4 * kHead);
    // The thread that set the last file aside may still be about to say so: until then the new one is a miss.
    Outcomes got;
    EXPECT_TRUE(soon([&] { return (got = some.get({1})) != all(Outcome::kMiss, 1); }));
    ASSERT_EQ(got, all(mine ? Outcome::kCorrupt : Outcome::kOk, 1)) << "byte " << at;
    ASSERT_EQ(all_heads.get({1}), all(mine ? Outcome::kMiss : Outcome::kCorrupt, 1)) << "byte " << at;
    ASSERT_TRUE(soon([&] { return look(root).pieces.empty(); }));
  }
  // Heads 0 to 3 in the place of heads 4 to 7, and the reverse; and a whole file under the name of a part.
  BlockClient low({tier}, 0, "KV B N H D", 0, 4);
  BlockClient high({tier}, 0, "KV B N H D", 4, 4);
  ASSERT_EQ(low.put({2}), all(Outcome::kOk, 1));
  ASSERT_EQ(high.put({2}), all(Outcome::kOk, 1));
  ASSERT_EQ(all_heads.get({2}), all(Outcome::kOk, 1)) << "from two files";
  const std::string part = read_file(path_of(2, {0, 4}));
  for (const std::string& wrong : {part, sound}) {
    write_file(path_of(2, {4, 4}), wrong);
    reopen();
    BlockClient reader({tier}, 0, "KV B N H D", 4, 4);
    BlockClient lower({tier}, 0, "KV B N H D", 0, 4);
    BlockClient whole({tier}, 0, "B N H KV D");
    EXPECT_EQ(whole.get({2}), all(Outcome::kCorrupt, 1));
    EXPECT_EQ(reader.get({2}), all(Outcome::kMiss, 1));
    EXPECT_EQ(lower.get({2}), all(Outcome::kOk, 1)) << "its file is sound";
    EXPECT_EQ(reader.put({2}), all(Outcome::kOk, 1));
    EXPECT_EQ(whole.get({2}), all(Outcome::kOk, 1));
  }
}

/// Damage in the directory while memory has a sound copy, and the reverse: the sound one answers.
TEST_F(StoreDamage, TheOtherTierAnswers) {
  tier = store::make_directory_tier(small_tier(root), io);
  const TierPtr host = host_tier({.num_bytes = 1 << 20, .shared_name = "other-" + std::to_string(::getpid())});
  Client both({host, tier});
  ASSERT_EQ(both.put({1, 2}), all(Outcome::kOk, 2));
  damage(piece(1));
  EXPECT_EQ(both.get({1}), all(Outcome::kOk, 1)) << "from memory";
  std::string memory(1 << 20, '\0');
  const int fd = ::open(host->metrics().detail.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(::pread(fd, memory.data(), memory.size(), 0), 1 << 20);
  for (char& byte : memory) byte = static_cast<char>(byte ^ 1);
  ASSERT_EQ(::pwrite(fd, memory.data(), memory.size(), 0), 1 << 20);
  ::close(fd);
  EXPECT_EQ(both.get({2}), all(Outcome::kOk, 1)) << "from the directory";
  EXPECT_EQ(both.get({2}), all(Outcome::kOk, 1));
  EXPECT_EQ(both.get({1}), all(Outcome::kCorrupt, 1)) << "both are damaged";
  EXPECT_EQ(both.get({1}), all(Outcome::kMiss, 1));
  EXPECT_EQ(both.put({1}), all(Outcome::kOk, 1));
  EXPECT_EQ(both.get({1}), all(Outcome::kOk, 1));
}

/// Memory that other processes can map may change under the store.
TEST_F(StoreDamage, FlippedInSharedHostMemory) {
  const TierPtr host = host_tier({.num_bytes = 1 << 20, .shared_name = "damage-" + std::to_string(::getpid())});
  Client mine({host});
  const std::vector<int> numbers = range(0, 30);
  std::mt19937_64 random(seed());
  ASSERT_EQ(mine.put(numbers), all(Outcome::kOk, 30));
  const int fd = ::open(host->metrics().detail.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  // Images lie anywhere: they are found by their first words.
  std::string memory(1 << 20, '\0');
  ASSERT_EQ(::pread(fd, memory.data(), memory.size(), 0), 1 << 20);
  std::set<int> hit;
  for (int i = 0; i < 10; ++i) {
    const int number = static_cast<int>(random() % numbers.size());
    const std::uint64_t word = word_of(0, number, 9);
    std::size_t page = 0;
    while (page < memory.size() && std::memcmp(memory.data() + page + 9 * 8, &word, 8) != 0) page += 4096;
    ASSERT_LT(page, memory.size());
    if (!hit.insert(number).second) continue;
    const auto at = static_cast<std::int64_t>(page - 4096 + random() % (5 * 4096));  // header and padding too
    const char byte = static_cast<char>(memory[static_cast<std::size_t>(at)] ^ 4);
    ASSERT_EQ(::pwrite(fd, &byte, 1, at), 1);
  }
  ::close(fd);
  const Outcomes got = mine.get(numbers);
  EXPECT_EQ(count(got, Outcome::kCorrupt), static_cast<int>(hit.size()));
  EXPECT_EQ(count(got, Outcome::kOk), 30 - static_cast<int>(hit.size()));
  EXPECT_EQ(count(mine.get(numbers), Outcome::kMiss), static_cast<int>(hit.size()));
  EXPECT_EQ(mine.put(numbers), all(Outcome::kOk, 30));
  mine.remove(numbers);
  EXPECT_EQ(host->metrics().used_bytes, 0) << "memory of damaged images is back";
}

}  // namespace
}  // namespace kvstride::test
