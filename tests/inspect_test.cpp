// SPDX-License-Identifier: Apache-2.0
// A store's directory from outside: what is listed, which damage is found, and changes beside processes that use it.
#include "store/inspect.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "child.h"
#include "fault_io.h"
#include "kvstride/error.h"
#include "kvstride/store.h"
#include "oracle.h"
#include "store/directory.h"
#include "store/edit.h"
#include "store/reorder.h"

namespace kvstride::store {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using test::Memory;
using State = Check::State;

constexpr std::int64_t kHeads = 4;
constexpr std::int64_t kLayers = 3;
constexpr std::int64_t kBlocks = 12;

NamespaceFields fields(std::int64_t block_size = 8, const char* model = "test/model") {
  NamespaceFields out;
  out.model = model;
  out.revision = "0123abcd";
  out.planes = {{"key", {DType::kBF16, {}}}, {"value", {DType::kBF16, {}}}};
  out.num_layers = kLayers;
  out.num_kv_heads = kHeads;
  out.head_size = 16;
  out.block_size = block_size;
  return out;
}

Geometry geometry(std::int64_t block_size = 8, std::int64_t heads = kHeads) {
  Geometry out;
  out.num_layers = kLayers;
  out.num_blocks = kBlocks;
  out.block_size = block_size;
  out.num_kv_heads = heads;
  out.head_size = 16;
  return out;
}

Key key(int i) { return Key::chain(nullptr, std::array<std::uint32_t, 1>{static_cast<std::uint32_t>(i)}); }
std::vector<Key> keys(int first, int count) {
  std::vector<Key> out;
  for (int i = first; i < first + count; ++i) out.push_back(key(i));
  return out;
}
std::vector<std::int64_t> first_blocks(std::int64_t count) {
  std::vector<std::int64_t> out;
  for (std::int64_t i = 0; i < count; ++i) out.push_back(i);
  return out;
}

/// A store's directory, and a process (this one) that uses it now and then.
class Fixture : public testing::Test {
 protected:
  std::string path() const { return dir_.path("store"); }
  TierPtr tier(std::int64_t max_bytes = 256 << 20) const {
    DirectoryTierOptions options;
    options.path = path();
    options.max_bytes = max_bytes;
    options.keep_free = 0;
    return directory_tier(options);
  }
  /// Chunks `first` … of the memory's blocks 0 …, as another process would.
  void put(Memory& memory, int first, int count, const NamespaceFields& what = fields(),
           std::optional<RequestOptions::Heads> heads = {}) const {
    const TierPtr living = tier();
    {
      kvstride::Store store({living}, Namespace(what));
      RequestOptions options;
      options.heads = heads;
      const auto out = store.put(keys(first, count), memory.cache(), first_blocks(count), options).wait();
      ASSERT_EQ(out, std::vector<Outcome>(static_cast<std::size_t>(count), Outcome::kOk));
    }
    let_go(living);
  }
  /// Waits until nobody else holds the tier, so that it ends with this holder.
  static void let_go(const TierPtr& tier) {
    while (tier.use_count() > 1) std::this_thread::sleep_for(1ms);
  }
  StoreFolder folder(std::shared_ptr<Io> io = system_io()) const { return StoreFolder(std::move(io), path(), false); }
  fs::path file(const std::string& space, const ChunkFile& one) const {
    return fs::path(path()) / space / one.name().substr(0, 1) / one.name();
  }
  /// Everything that the account should have.
  void expect_account_fits() const {
    const StoreFolder store = folder();
    const LedgerState state = store.ledger();
    const Census census = take_census(store);
    EXPECT_TRUE(state.known);
    EXPECT_EQ(state.used, census.bytes());
    EXPECT_EQ(state.reserved, 0);
    EXPECT_EQ(state.processes, 0);
    EXPECT_TRUE(census.temporaries.empty());
  }

  kvstride::Directory dir_;
};

std::vector<ChunkFile> files_of(const SpaceFolder& space) {
  std::vector<ChunkFile> out;
  EXPECT_TRUE(space.list([&](const ChunkFile& file) { out.push_back(file); }));
  return out;
}

std::vector<Check> check_all(const SpaceFolder& space, const std::vector<ChunkFile>& files, int threads = 2) {
  std::map<std::string, Check> found;
  verify(space, files, threads, [&](const ChunkFile& file, const Check& check) {
    EXPECT_TRUE(found.emplace(file.name(), check).second) << "checked twice";
    return true;
  });
  std::vector<Check> out;
  for (const ChunkFile& file : files) out.push_back(found.at(file.name()));
  return out;
}

/// Leaves the access time alone.
std::string read_file(const fs::path& path) {
  std::string out(fs::file_size(path), '\0');
  const int fd = ::open(path.c_str(), O_RDONLY | O_NOATIME | O_CLOEXEC);
  EXPECT_EQ(::read(fd, out.data(), out.size()), static_cast<ssize_t>(out.size()));
  ::close(fd);
  return out;
}
void write_file(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

/// The system, but calls ask `before` first: 0, or −errno instead of the call.
class AskingIo final : public test::ForwardIo {
 public:
  std::function<int(std::string_view call, std::string_view name)> before = [](auto, auto) { return 0; };
  bool can_exchange = true;

  int open(int at, const char* name, int flags, mode_t mode) override {
    const int refused = before("open", name);
    return refused < 0 ? refused : ForwardIo::open(at, name, flags, mode);
  }
  std::int64_t pread(int fd, void* data, std::size_t bytes, std::int64_t offset) override {
    const int refused = before("pread", "");
    return refused < 0 ? refused : ForwardIo::pread(fd, data, bytes, offset);
  }
  std::int64_t pwrite(int fd, const void* data, std::size_t bytes, std::int64_t offset) override {
    const int refused = before("pwrite", "");
    return refused < 0 ? refused : ForwardIo::pwrite(fd, data, bytes, offset);
  }
  int fdatasync(int fd) override {
    const int refused = before("fdatasync", "");
    return refused < 0 ? refused : ForwardIo::fdatasync(fd);
  }
  int chmod_fd(int fd, mode_t mode) override {
    const int refused = before("chmod", "");
    return refused < 0 ? refused : ForwardIo::chmod_fd(fd, mode);
  }
  int stat_fd(int fd, struct stat& out) override {
    const int refused = before("stat_fd", "");
    return refused < 0 ? refused : ForwardIo::stat_fd(fd, out);
  }
  int stat_at(int at, const char* name, struct stat& out) override {
    const int refused = before("stat_at", name);
    return refused < 0 ? refused : ForwardIo::stat_at(at, name, out);
  }
  int unlink(int at, const char* name) override {
    const int refused = before("unlink", name);
    return refused < 0 ? refused : ForwardIo::unlink(at, name);
  }
  int rename_new(int from_at, const char* from, int to_at, const char* to) override {
    const int refused = before("rename_new", from);
    return refused < 0 ? refused : ForwardIo::rename_new(from_at, from, to_at, to);
  }
  int exchange(int one_at, const char* one, int other_at, const char* other) override {
    if (!can_exchange) return -EINVAL;
    const int refused = before("exchange", one);
    return refused < 0 ? refused : ForwardIo::exchange(one_at, one, other_at, other);
  }
  int set_times(int at, const char* name, std::optional<std::int64_t> used,
                std::optional<std::int64_t> changed) override {
    const int refused = before("set_times", name);
    return refused < 0 ? refused : ForwardIo::set_times(at, name, used, changed);
  }
  int list(int fd, const std::function<bool(const char* name, unsigned char type)>& use) override {
    const int refused = before("list", "");
    return refused < 0 ? refused : ForwardIo::list(fd, use);
  }
};

// ------------------------------------------------------------------------------------------------------------- listing

using InspectTest = Fixture;

TEST_F(InspectTest, WhatIsNoStoreIsRefusedAndStaysAsItIs) {
  const auto open = [](const std::string& path, bool group = false) {
    return error_of([&] { StoreFolder(system_io(), path, group); });
  };
  EXPECT_NE(open(dir_.path("nothing")).find("does not exist"), std::string::npos);
  EXPECT_FALSE(fs::exists(dir_.path("nothing")));
  EXPECT_NE(open("").find("empty"), std::string::npos);
  fs::create_directory(dir_.path("folder"));
  EXPECT_NE(open(dir_.path("folder")).find("no ledger"), std::string::npos);
  EXPECT_TRUE(fs::is_empty(dir_.path("folder")));
  write_file(dir_.path("file"), "x");
  EXPECT_NE(open(dir_.path("file")).find("no directory"), std::string::npos);
  tier();
  EXPECT_EQ(open(path()), "");
  EXPECT_EQ(open(path() + "//"), "");
  fs::create_directory_symlink(path(), dir_.path("link"));
  EXPECT_NE(open(dir_.path("link")).find("link"), std::string::npos);
  EXPECT_NE(open(dir_.path("link/")).find("link"), std::string::npos);
  fs::rename(path() + "/ledger", dir_.path("ledger"));
  fs::create_symlink(dir_.path("ledger"), path() + "/ledger");
  EXPECT_NE(open(path()).find("no regular file"), std::string::npos);
  fs::remove(path() + "/ledger");
  fs::rename(dir_.path("ledger"), path() + "/ledger");
  if (::geteuid() != 0) GTEST_SKIP() << "the rest needs root";
  ASSERT_EQ(::chown(path().c_str(), 12345, 12345), 0);
  EXPECT_NE(open(path()).find("belongs to user 12345"), std::string::npos);
  EXPECT_EQ(open(path(), true), "");
  ASSERT_EQ(::chown((path() + "/ledger").c_str(), 12345, 12345), 0);
  StoreFolder store(system_io(), path(), true);
  EXPECT_NE(error_of([&] { StoreEditor editor(store); }).find("run as that user"), std::string::npos);
}

TEST_F(InspectTest, SummariesSayWhatIsThere) {
  Memory memory(Layout("KV B N H D", geometry()), 1);
  tier();
  EXPECT_TRUE(folder().spaces().empty());
  {
    const LedgerState state = folder().ledger();
    EXPECT_TRUE(state.sound && state.known);
    EXPECT_EQ(state.used, 0);
    EXPECT_EQ(state.max_bytes, 256 << 20);
    EXPECT_EQ(state.processes, 0);
  }
  put(memory, 0, 10);
  Memory half(Layout("B H KV N D", geometry(8, 2)), 2);
  put(half, 10, 6, fields(), RequestOptions::Heads{0, 0, 2});
  put(half, 10, 6, fields(), RequestOptions::Heads{0, 2, 2});
  put(memory, 0, 3, fields(8, "other \x1b[31m model"));

  const TierPtr living = tier();
  const StoreFolder store = folder();
  EXPECT_EQ(store.ledger().processes, 1);
  EXPECT_EQ(store.ledger().tokens.size(), 1U);
  const std::string ours = Namespace(fields()).hex();
  ASSERT_EQ(store.spaces().size(), 2U);
  EXPECT_EQ(store.spaces(ours.substr(0, 7)), std::vector{ours});
  EXPECT_EQ(store.space(ours.substr(0, 7)), ours);
  EXPECT_NE(error_of([&] { store.space(""); }).find("empty"), std::string::npos);
  EXPECT_NE(error_of([&] { store.space("A"); }).find("lower-case hex"), std::string::npos);
  EXPECT_NE(error_of([&] { store.space(ours + "0"); }).find("64 digits"), std::string::npos);
  EXPECT_NE(
      error_of([&] { store.space(ours.substr(0, 8) == "00000000" ? "ffffffff" : "00000000"); }).find("no namespace"),
      std::string::npos);

  const std::int64_t before = system_io()->now();
  std::this_thread::sleep_for(20ms);  // the kernel's ticks
  {
    kvstride::Store reader({living}, Namespace(fields()));
    ASSERT_EQ(reader.get(keys(2, 4), memory.cache(), first_blocks(4)).wait(), std::vector<Outcome>(4, Outcome::kOk));
  }
  const SpaceSummary summary = summarize(SpaceFolder(store, ours));
  EXPECT_EQ(summary.chunks, 16);
  EXPECT_EQ(summary.files, 22);
  EXPECT_EQ(summary.read_files, 4);
  EXPECT_GT(summary.last_use, before);
  EXPECT_LT(summary.oldest_use, before);
  ASSERT_TRUE(summary.header);
  EXPECT_EQ(summary.header->space_text, Namespace(fields()).text());
  std::int64_t bytes = 0;
  std::size_t files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(path() + "/" + ours)) {
    struct stat stat;
    if (!entry.is_regular_file() || entry.file_size() == 0) continue;
    ASSERT_EQ(::stat(entry.path().c_str(), &stat), 0);
    bytes += stat.st_blocks * 512;
    ++files;
  }
  EXPECT_EQ(files, 22U);
  EXPECT_EQ(summary.bytes, bytes);
}

TEST_F(InspectTest, OtherThingsAreStrays) {
  Memory memory(Layout("KV B N H D", geometry()), 1);
  put(memory, 0, 4);
  const std::string ours = Namespace(fields()).hex();
  const fs::path root = fs::path(path()) / ours;
  const std::string name = file_name(key(100), {0, 4});
  const std::string digit = name.substr(0, 1);
  fs::create_directories(root / digit);
  fs::create_symlink("/etc/passwd", root / digit / name);
  write_file(root / digit / "README", "x");
  const std::string other = digit == "0" ? "1" : "0";
  fs::create_directories(root / other);
  write_file(root / other / file_name(key(100), {0, 2}), "x");
  write_file(root / "notes", "x");
  fs::create_directory(root / digit / file_name(key(100), {2, 2}));
  const StoreFolder store = folder();
  const SpaceFolder space(store, ours);
  std::vector<Stray> strays;
  int files = 0;
  EXPECT_TRUE(space.list([&](const ChunkFile&) { ++files; }, &strays));
  EXPECT_EQ(files, 4);
  std::set<std::string> what;
  for (const Stray& stray : strays) what.insert(stray.what);
  EXPECT_EQ(what, (std::set<std::string>{"a link", "a folder", "no name of a chunk", "in the folder of another digit",
                                         "no name of the store"}));
  EXPECT_EQ(strays.size(), 5U);
  EXPECT_TRUE(take_census(store).whole);
  fs::remove_all(root / digit);
  fs::create_directory_symlink("/etc", root / digit);
  {
    const SpaceFolder again(store, ours);
    strays.clear();
    EXPECT_TRUE(again.list([](const ChunkFile& file) { EXPECT_EQ(file.heads, (Heads{0, 4})); }, &strays));
    EXPECT_EQ(strays.size(), 3U) << "one is what is not looked into";
  }
  const auto io = std::make_shared<AskingIo>();
  io->before = [](std::string_view call, std::string_view entry) {
    return call == "stat_at" && entry.size() > 64 ? -EIO : 0;
  };
  const StoreFolder failing = folder(io);
  EXPECT_FALSE(summarize(SpaceFolder(failing, ours)).whole);
  EXPECT_FALSE(take_census(failing).whole);
}

// ----------------------------------------------------------------------------------------------------------- verifying

// 100 damages of each kind there is, among 160 files: found are these and no others.
TEST_F(InspectTest, VerifyFindsExactlyTheDamages) {
  Memory memory(Layout("KV B N H D", geometry()), 1);
  for (int i = 0; i < 120; i += 12) put(memory, i, 12);
  NamespaceFields odd = fields(7, "odd");  // a payload with padding behind it
  odd.head_size = 10;
  Geometry sizes = geometry(7);
  sizes.head_size = 10;
  Memory uneven(Layout("B N H KV D", sizes), 2);
  for (int i = 0; i < 36; i += 12) put(uneven, i, 12, odd);
  NamespaceFields large = fields(6400, "large");  // several granules a head, more than a window
  Geometry wide = geometry(6400);
  wide.num_blocks = 4;
  Memory many(Layout("B H L KV N D", wide), 3);
  put(many, 0, 4, large);

  struct One {
    std::string space;
    ChunkFile file;
  };
  const StoreFolder store = folder();
  std::vector<One> all;
  for (const std::string& name : store.spaces()) {
    for (const ChunkFile& file : files_of(SpaceFolder(store, name))) all.push_back({name, file});
  }
  ASSERT_EQ(all.size(), 160U);
  std::mt19937_64 random(77);
  std::shuffle(all.begin(), all.end(), random);
  std::set<std::string> damaged;
  std::map<int, int> kinds;
  for (std::size_t i = 0; i < 100; ++i) {
    const One& one = all[i];
    const fs::path at = file(one.space, one.file);
    std::string bytes = read_file(at);
    ASSERT_EQ(static_cast<std::int64_t>(bytes.size()), one.file.length);
    const std::optional<Header> header = parse_header(std::as_bytes(std::span(bytes)));
    ASSERT_TRUE(header);
    const auto head = static_cast<std::size_t>(header->header_bytes);
    const auto end = head + static_cast<std::size_t>(header->content.payload_bytes());
    const auto flip = [&](std::size_t begin, std::size_t stop) {
      bytes[begin + random() % (stop - begin)] ^= static_cast<char>(1 << random() % 8);
    };
    int kind = static_cast<int>(i % 8);
    if (kind == 2 && end == bytes.size()) kind = 1;  // no padding
    ++kinds[kind];
    const fs::path other = file(all[i + 1].space, all[i + 1].file);
    switch (kind) {
      case 0: flip(0, head); break;
      case 1: flip(head, end); break;
      case 2: flip(end, bytes.size()); break;
      case 3: bytes.resize(random() % bytes.size()); break;
      case 4: bytes.resize((bytes.size() / 4096 - 1 - random() % (bytes.size() / 4096 - 1)) * 4096); break;
      case 5: bytes.append(random() % 2 == 0 ? 4096 : random() % 9000 + 1, '\0'); break;
      case 6: bytes = read_file(file(all[159 - i % 50].space, all[159 - i % 50].file)); break;  // another's
      case 7: {  // its own, under other heads
        ChunkFile renamed = one.file;
        renamed.heads = random() % 2 == 0 ? Heads{1, 3} : Heads{0, 0};
        fs::rename(at, file(one.space, renamed));
        damaged.insert(one.space + renamed.name());
        continue;
      }
      default: FAIL();
    }
    write_file(at, bytes);
    damaged.insert(one.space + one.file.name());
  }
  ASSERT_EQ(damaged.size(), 100U);
  for (int kind = 0; kind < 8; ++kind) EXPECT_GT(kinds[kind], 1) << kind;

  std::set<std::string> found;
  std::set<std::string> reasons;
  for (const std::string& name : store.spaces()) {
    const SpaceFolder space(store, name);
    const std::vector<ChunkFile> files = files_of(space);
    const std::vector<Check> checks = check_all(space, files, 3);
    for (std::size_t i = 0; i < files.size(); ++i) {
      if (checks[i].state == State::kSound) continue;
      EXPECT_EQ(checks[i].state, State::kDamaged);
      found.insert(name + files[i].name());
      reasons.insert(checks[i].why.substr(0, checks[i].why.find_first_of(":0123456789")));
    }
  }
  EXPECT_EQ(found, damaged);
  EXPECT_GE(reasons.size(), 6U);

  // Set aside, with the account as it was; then nothing is wrong any more.
  const std::int64_t bytes = take_census(store).bytes();
  {
    StoreEditor editor(store);
    for (const std::string& name : store.spaces()) {
      const SpaceFolder space(store, name);
      verify(space, files_of(space), 2, [&](const ChunkFile& file, const Check& check) {
        if (check.state == State::kDamaged) {
          EXPECT_EQ(editor.set_aside(space, file, check), 0);
        }
        return true;
      });
    }
  }
  const Census census = take_census(store);
  EXPECT_EQ(census.quarantine.size(), 100U);
  EXPECT_EQ(census.files.size(), 60U);
  EXPECT_EQ(census.bytes(), bytes);
  expect_account_fits();
  for (const std::string& name : store.spaces()) {
    const SpaceFolder space(store, name);
    for (const Check& check : check_all(space, files_of(space))) EXPECT_EQ(check.state, State::kSound) << check.why;
  }
}

TEST_F(InspectTest, VerifyLeavesTimesAlone) {
  Memory memory(Layout("KV B N H D", geometry()), 1);
  put(memory, 0, 4);
  const StoreFolder store = folder();
  const SpaceFolder space(store, Namespace(fields()).hex());
  const std::vector<ChunkFile> files = files_of(space);
  for (const ChunkFile& file : files) {
    // As with relatime, a read would set the access time: it is before the writing.
    const struct timespec times[2] = {{1000, 5}, {2000, 7}};
    ASSERT_EQ(::utimensat(AT_FDCWD, this->file(space.name(), file).c_str(), times, 0), 0);
  }
  for (const Check& check : check_all(space, files)) EXPECT_EQ(check.state, State::kSound);
  for (const ChunkFile& file : files) {
    ASSERT_TRUE(space.header(file));
    struct stat stat;
    ASSERT_EQ(::stat(this->file(space.name(), file).c_str(), &stat), 0);
    EXPECT_EQ(stat.st_atim.tv_sec, 1000);
    EXPECT_EQ(stat.st_atim.tv_nsec, 5);
    EXPECT_EQ(stat.st_mtim.tv_sec, 2000);
  }
}

TEST_F(InspectTest, WhatCannotBeReadIsNoDamageAndWhatVanishesIsNothing) {
  Memory memory(Layout("KV B N H D", geometry()), 1);
  put(memory, 0, 4);
  const auto io = std::make_shared<AskingIo>();
  const StoreFolder store = folder(io);
  const SpaceFolder space(store, Namespace(fields()).hex());
  const std::vector<ChunkFile> files = files_of(space);
  io->before = [&](std::string_view call, std::string_view name) {
    if (call == "pread") return -EIO;
    return call == "open" && name == files[1].name() ? -EACCES : 0;
  };
  fs::remove(file(space.name(), files[2]));
  const std::vector<Check> checks = check_all(space, files, 1);
  EXPECT_EQ(checks[0].state, State::kUnreadable);
  EXPECT_EQ(checks[0].why, std::strerror(EIO));
  EXPECT_EQ(checks[1].state, State::kUnreadable);
  EXPECT_EQ(checks[1].why, std::strerror(EACCES));
  EXPECT_EQ(checks[2].state, State::kGone);
  io->before = [](auto, auto) { return 0; };
  EXPECT_EQ(check_all(space, files)[0].state, State::kSound);

  // Stopped after the first.
  int seen = 0;
  verify(space, files, 2, [&](const ChunkFile&, const Check&) { return ++seen < 1; });
  EXPECT_EQ(seen, 1);
}

TEST_F(InspectTest, AFileThatIsReplacedBeforeItIsSetAsideStays) {
  Memory memory(Layout("KV B N H D", geometry()), 1);
  put(memory, 0, 1);
  const StoreFolder store = folder();
  const SpaceFolder space(store, Namespace(fields()).hex());
  const ChunkFile file = files_of(space).at(0);
  const fs::path at = this->file(space.name(), file);
  const std::string sound = read_file(at);
  std::string bytes = sound;
  bytes[5000] ^= 1;
  write_file(at, bytes);
  const Check check = Verifier().check(space, file);
  ASSERT_EQ(check.state, State::kDamaged);
  fs::rename(at, dir_.path("old"));  // keeps its inode from being used again
  write_file(at, sound);
  ::chmod(at.c_str(), 0600);
  {
    StoreEditor editor(store);
    EXPECT_EQ(editor.set_aside(space, file, check), -ENOENT);
  }
  EXPECT_EQ(read_file(at), sound);
  EXPECT_TRUE(store.quarantine().empty());
  expect_account_fits();
}

// A process that writes, evicts and removes all the time: what is checked is sound or gone.
TEST_F(InspectTest, VerifyBesideAProcessThatWrites) {
  Memory memory(Layout("KV B N H D", geometry()), 1);
  const TierPtr living = tier(1 << 20);  // some 40 chunks
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    kvstride::Store store({living}, Namespace(fields()));
    for (int i = 0; !stop; i += 12) {
      store.put(keys(i, 12), memory.cache(), first_blocks(12)).wait();
      store.remove(keys(i, 1));
    }
  });
  const auto start = std::chrono::steady_clock::now();
  std::int64_t sound = 0;
  std::int64_t gone = 0;
  std::int64_t removed = 0;
  // A second of it, and as much more as a machine needs that has much else to do.
  const auto more = [&] {
    const auto past = std::chrono::steady_clock::now() - start;
    return past < 1s || (past < 30s && (sound <= 20 || removed == 0));
  };
  const StoreFolder store = folder();
  {
    StoreEditor editor(store);
    while (more()) {
      for (const std::string& name : store.spaces()) {
        const SpaceFolder space(store, name);
        std::vector<ChunkFile> files;
        space.list([&](const ChunkFile& file) { files.push_back(file); });
        for (const Check& check : check_all(space, files)) {
          EXPECT_TRUE(check.state == State::kSound || check.state == State::kGone) << check.why;
          (check.state == State::kSound ? sound : gone) += 1;
        }
        std::int64_t bytes = 0;
        if (!files.empty()) removed += editor.remove(space, files[0], false, bytes) == 0 ? 1 : 0;
      }
    }
    stop = true;
    writer.join();
  }
  EXPECT_GT(sound, 20);
  EXPECT_GT(removed, 0);
  EXPECT_EQ(store.ledger().processes, 1);
  EXPECT_LE(store.ledger().used, 1 << 20);
  EXPECT_GE(store.ledger().used + store.ledger().reserved, take_census(store).bytes()) << "never too low";
}

// ------------------------------------------------------------------------------------------------------------- editing

using EditTest = Fixture;

TEST_F(EditTest, RemovingKeepsTheAccount) {
  Memory memory(Layout("KV B N H D", geometry()), 1);
  put(memory, 0, 8);
  const std::string ours = Namespace(fields()).hex();
  {
    const StoreFolder store = folder();
    const SpaceFolder space(store, ours);
    StoreEditor editor(store);
    std::vector<ChunkFile> files = files_of(space);
    std::int64_t bytes = 0;
    EXPECT_EQ(editor.remove(space, files[0], true, bytes), 0);
    EXPECT_EQ(bytes, files[0].bytes);
    EXPECT_EQ(editor.remove(space, files[0], true, bytes), -ENOENT);
    system_io()->set_times(space.shard(files[1].key), files[1].name().c_str(), system_io()->now(), std::nullopt);
    EXPECT_EQ(editor.remove(space, files[1], true, bytes), -ESTALE) << "somebody used it";
    EXPECT_EQ(editor.remove(space, files[1], false, bytes), 0);
    EXPECT_EQ(editor.remove_empty(std::array{ours}), 0);
    EXPECT_EQ(store.ledger().max_bytes, 256 << 20) << "the engines' limit stays";
  }
  expect_account_fits();
  const StoreFolder store = folder();
  EXPECT_EQ(take_census(store).files.size(), 6U);

  // Folders stay while another process may hold their descriptors.
  {
    const TierPtr living = tier();
    StoreEditor editor(store);
    const SpaceFolder space(store, ours);
    std::int64_t bytes = 0;
    for (const ChunkFile& file : files_of(space)) EXPECT_EQ(editor.remove(space, file, false, bytes), 0);
    EXPECT_EQ(editor.remove_empty(std::array{ours}), 0);
    kvstride::Store writer({living}, Namespace(fields()));
    EXPECT_EQ(writer.put(keys(0, 2), memory.cache(), first_blocks(2)).wait(), std::vector<Outcome>(2, Outcome::kOk));
    EXPECT_EQ(writer.remove(keys(0, 2)), 2);
    writer.flush(1s);
    std::this_thread::sleep_for(50ms);
  }
  {
    StoreEditor editor(store);
    EXPECT_EQ(editor.remove_empty(std::array{ours}), 1);
  }
  EXPECT_FALSE(fs::exists(path() + "/" + ours));
  expect_account_fits();
}

TEST_F(EditTest, CountingRemovesWhatTheDeadLeft) {
  Memory memory(Layout("KV B N H D", geometry()), 1);
  put(memory, 0, 3);
  const TierPtr living = tier();
  const StoreFolder store = folder();
  const std::string token = store.ledger().tokens.at(0);
  const auto draft = [&](const std::string& of) { return path() + "/tmp/" + of + "0000000000000001"; };
  write_file(draft(token), std::string(5000, 'x'));
  write_file(draft("0123456789abcdef"), std::string(5000, 'x'));
  write_file(path() + "/tmp/other", "not ours");
  std::vector<LooseFile> all = store.temporaries();
  ASSERT_EQ(all.size(), 2U);
  for (const LooseFile& file : all) {
    EXPECT_EQ(file.dead, file.name.substr(0, 16) != token);
    EXPECT_EQ(file.bytes, 8192);
  }
  {
    StoreEditor editor(store);
    const Census census = editor.count();
    EXPECT_EQ(census.files.size(), 3U);
    EXPECT_EQ(editor.removed_temporaries().size(), 1U);
    ASSERT_EQ(census.temporaries.size(), 1U);
    EXPECT_EQ(census.temporaries[0].name.substr(0, 16), token);
  }
  EXPECT_FALSE(fs::exists(draft("0123456789abcdef")));
  EXPECT_TRUE(fs::exists(draft(token)));
  EXPECT_TRUE(fs::exists(path() + "/tmp/other"));
  EXPECT_EQ(store.ledger().used, take_census(store).bytes());
}

/// A damaged account: whose a temporary file is shows when living processes have written their part of it again.
TEST_F(EditTest, CountingWaitsUntilItIsToldWhoLives) {
  Memory memory(Layout("KV B N H D", geometry()), 1);
  put(memory, 0, 3);
  const TierPtr living = tier();
  const std::string draft = path() + "/tmp/" + std::string(32, 'a');
  write_file(draft, std::string(5000, 'x'));
  std::string bytes = read_file(path() + "/ledger");
  bytes[200] = static_cast<char>(bytes[200] ^ 1);
  const StoreFolder store = folder();
  write_file(path() + "/ledger", bytes);
  {
    StoreEditor editor(store);
    EXPECT_EQ(editor.count().temporaries.size(), 0U);
  }
  EXPECT_FALSE(fs::exists(draft)) << "taken for a living process's, and in no sum";
}

TEST_F(EditTest, ACountThatCannotListEverythingIsNone) {
  Memory memory(Layout("KV B N H D", geometry()), 1);
  put(memory, 0, 20 % 12);
  const std::string ours = Namespace(fields()).hex();
  const auto io = std::make_shared<AskingIo>();
  io->before = [&](std::string_view call, std::string_view name) { return call == "open" && name == ours ? -EIO : 0; };
  const StoreFolder store = folder(io);
  EXPECT_NE(error_of([&] { StoreEditor editor(store); }).find("cannot all be listed"), std::string::npos);
  EXPECT_FALSE(folder().ledger().known);
  { StoreEditor editor(folder()); }
  expect_account_fits();
}

TEST_F(EditTest, LeastRecentlyUsedFirst) {
  std::vector<ChunkFile> files;
  for (int i = 0; i < 6; ++i) {
    ChunkFile file{key(i), {0, 4}};
    file.used = i / 2 == 1 ? 50 : 100 - i;
    files.push_back(file);
  }
  sort_by_use(files);
  std::vector<std::int64_t> used;
  for (const ChunkFile& file : files) used.push_back(file.used);
  EXPECT_EQ(used, (std::vector<std::int64_t>{50, 50, 95, 96, 99, 100}));
}

// ---------------------------------------------------------------------------------------------------------- converting

TEST(ContentTest, OrdersGetExtentsAndDtypes) {
  const Namespace space(fields());
  const Layout like("H L KV N D", geometry());
  const Content standard = stored_form(space, Layout("B H L KV N D", geometry()), {0, 4}).content;
  const auto in = [&](std::string_view order) { return content_in(space, standard, order); };
  EXPECT_EQ(in("H L KV N D"), standard);
  EXPECT_EQ(in("B H L {key: N D, value: N D}"), standard);
  EXPECT_EQ(in("H N L KV D"),
            (Content{"H[4] N[8] L[3] {key: D[16] bf16, value: D[16] bf16}", {0, 4}, 0, standard.head_bytes}));
  EXPECT_EQ(in("N H L KV D"),
            (Content{"N[8] H[4] L[3] {key: D[16] bf16, value: D[16] bf16}", {0, 4}, standard.payload_bytes(), 0}));
  EXPECT_EQ(
      in("key: H L N D | value: L H D N"),
      (Content{
          "key: H[4] L[3] N[8] D[16] bf16 | value: L[3] H[4] D[16] N[8] bf16", {0, 4}, standard.payload_bytes(), 0}));
  EXPECT_EQ(in("L N H KV@64 D"), (Content{"L[3] N[8] H[4] KV@64 D[16] bf16", {0, 4}, 2 * standard.payload_bytes(), 0}));
  EXPECT_EQ(in("L H {key: D/x N D%x, value: D N}").order,
            "L[3] H[4] {key: D/8[16] N[8] D%8 bf16, value: D[16] N[8] bf16}");
}

TEST(ContentTest, OrdersThatDoNotSuitAreRefused) {
  const Namespace space(fields());
  const Content standard = stored_form(space, Layout("B H L KV N D", geometry()), {0, 4}).content;
  const auto refused = [&](std::string_view order) { return error_of([&] { content_in(space, standard, order); }); };
  EXPECT_NE(refused("H KV N D").find("no L"), std::string::npos);
  EXPECT_NE(refused("L KV N D").find("no H"), std::string::npos);
  EXPECT_NE(refused("L H KV D").find("of N"), std::string::npos);
  EXPECT_NE(refused("H L {key: N D, other: N D}").find("'other'"), std::string::npos);
  EXPECT_NE(refused("H L {key: N D}").find("no plane 'value'"), std::string::npos);
  EXPECT_NE(refused("H L {key: N D f16, value: N D}").find("f16"), std::string::npos);
  EXPECT_NE(refused("H/3 L H%3 KV N D"), "");
  EXPECT_NE(refused("nonsense"), "");
  Content raw{"", {}, 100, 0};
  EXPECT_NE(error_of([&] { content_in(space, raw, "H L KV N D"); }).find("raw"), std::string::npos);
}

using ReorderTest = Fixture;

/// Every element of a file is that of the memory's block.
void expect_payload(const std::string& bytes, Memory& memory, std::int64_t block) {
  const std::optional<Header> header = parse_header(std::as_bytes(std::span(bytes)));
  ASSERT_TRUE(header);
  const std::optional<Form> form = form_of(Namespace::parse(header->space_text), header->content);
  ASSERT_TRUE(form);
  std::vector<std::int64_t> parts{header->header_bytes};
  for (std::int64_t p = 0; p + 1 < form->layout.num_parts(); ++p)
    parts.push_back(parts.back() + form->layout.part_bytes(p));
  for (const Plane& plane : form->layout.planes()) {
    const Plane& twin = memory.layout.plane(plane.name);
    bool same = true;
    test::for_each_index(plane, [&](const kvstride::Index& index) {
      kvstride::Index there = index;
      there[1] = block;
      there[3] += header->content.heads.first;
      const Location at = form->layout.offset(plane, index);
      same &= std::memcmp(bytes.data() + parts[static_cast<std::size_t>(at.tensor)] + at.byte, memory.at(twin, there),
                          static_cast<std::size_t>(item_size(plane.dtype))) == 0;
    });
    EXPECT_TRUE(same) << plane.name << " of " << header->content.order;
  }
}

// Each order, one after the other: the files have the right elements, stores of any layout and head range read them,
// times and account stay; and back in the first order they are what they were, bit for bit.
TEST_F(ReorderTest, AnyOrderAndBack) {
  Memory memory(Layout("KV B N H D", geometry()), 1);
  put(memory, 0, 4);
  Memory half(Layout("B H KV N D", geometry(8, 2)), 2);
  put(half, 4, 2, fields(), RequestOptions::Heads{0, 2, 2});
  const std::string ours = Namespace(fields()).hex();
  const StoreFolder store = folder();
  const SpaceFolder space(store, ours);
  std::map<std::string, std::string> before;
  std::map<std::string, std::int64_t> times;
  std::int64_t time = 1'600'000'000'000'000'001;
  for (const ChunkFile& file : files_of(space)) {
    before[file.name()] = read_file(this->file(ours, file));
    times[file.name()] = time;
    system_io()->set_times(space.shard(file.key), file.name().c_str(), time, time - 1000);
    time += 1'000'000'000;
  }
  std::vector<std::string> orders{"H N L KV D", "N H L KV D", "key: H L N D | value: L H D N", "L N H KV@64 D"};
  std::mt19937 random(3);
  while (orders.size() < 14) {
    std::string order = test::random_order(random);
    if (order.find('L') != std::string::npos) orders.push_back(std::move(order));
  }
  orders.push_back("H L KV N D");
  for (const std::string& order : orders) {
    {
      StoreEditor editor(store);
      Reorderer dry(space, order, nullptr);
      Reorderer reorderer(space, order, &editor);
      for (const ChunkFile& file : files_of(space)) {
        const std::string bytes = read_file(this->file(ours, file));
        ASSERT_EQ(dry.reorder(file).state, Reorderer::State::kDone) << order;
        ASSERT_EQ(read_file(this->file(ours, file)), bytes);
        const Reorderer::Result result = reorderer.reorder(file);
        ASSERT_EQ(result.state, Reorderer::State::kDone) << order << ": " << result.why;
        ASSERT_EQ(reorderer.reorder(file).state, Reorderer::State::kAlready) << order;
      }
    }
    const std::vector<ChunkFile> files = files_of(space);
    ASSERT_EQ(files.size(), 6U);
    for (const Check& check : check_all(space, files))
      ASSERT_EQ(check.state, State::kSound) << order << ": " << check.why;
    for (const ChunkFile& file : files) {
      EXPECT_EQ(file.used, times[file.name()]);
      EXPECT_TRUE(file.read);
      for (int i = 0; i < 4; ++i) {
        if (file.key == key(i)) expect_payload(read_file(this->file(ours, file)), memory, i);
      }
    }
    expect_account_fits();
    // Readers: all heads, and two in the middle.
    const TierPtr living = tier();
    auto reader = std::make_unique<kvstride::Store>(std::vector{living}, Namespace(fields()));
    Memory whole(Layout("L B H N KV D", geometry()), 5);
    Memory expected = whole;
    ASSERT_EQ(reader->get(keys(0, 4), whole.cache(), first_blocks(4)).wait(), std::vector<Outcome>(4, Outcome::kOk))
        << order;
    test::convert(memory, expected, {{0, 0}, {1, 1}, {2, 2}, {3, 3}});
    EXPECT_EQ(whole.buffers, expected.buffers) << order;
    Memory part(Layout("B N H KV D", geometry(8, 2)), 6);
    RequestOptions middle;
    middle.heads = {0, 1, 2};
    ASSERT_EQ(reader->get(keys(0, 4), part.cache(), first_blocks(4), middle).wait(),
              std::vector<Outcome>(4, Outcome::kOk))
        << order;
    for (const Plane& plane : part.layout.planes()) {
      test::for_each_index(plane, [&](const kvstride::Index& index) {
        if (index[1] >= 4) return;
        kvstride::Index there = index;
        there[3] += 1;
        EXPECT_EQ(std::memcmp(part.at(plane, index), memory.at(memory.layout.plane(plane.name), there), 2), 0);
      });
    }
    reader.reset();
    let_go(living);
    for (const auto& [name, used] : times) {  // the reader has set them
      const auto parsed = parse_file_name(name);
      system_io()->set_times(space.shard(parsed->first), name.c_str(), used, used - 1000);
    }
  }
  for (const ChunkFile& file : files_of(space)) EXPECT_EQ(read_file(this->file(ours, file)), before[file.name()]);
}

TEST_F(ReorderTest, PlanesOfSeveralKindsAndWithoutHeads) {
  NamespaceFields mla = fields();
  mla.planes = {{"latent", {DType::kF8E4M3, 64}}, {"latent_scale", {DType::kF32, 4}}, {"rope", {DType::kBF16, 16}}};
  mla.num_kv_heads = 1;
  const char* order = "L N {latent: {data: D[64] f8_e4m3, scale: D[4] f32}, rope: D[16] bf16}";
  Memory memory(Layout("B N {latent: {data: D[64] f8_e4m3, scale: D[4] f32}, rope: D[16] bf16}", geometry(8, 1)), 4);
  put(memory, 0, 2, mla);
  const StoreFolder store = folder();
  const SpaceFolder space(store, Namespace(mla).hex());
  {
    StoreEditor editor(store);
    Reorderer reorderer(space, order, &editor);
    for (const ChunkFile& file : files_of(space)) {
      const Reorderer::Result result = reorderer.reorder(file);
      ASSERT_EQ(result.state, Reorderer::State::kDone) << result.why;
    }
  }
  for (const ChunkFile& file : files_of(space)) {
    expect_payload(read_file(this->file(space.name(), file)), memory, file.key == key(0) ? 0 : 1);
  }
  kvstride::Store reader({tier()}, Namespace(mla));
  Memory back(memory.layout, 9);
  ASSERT_EQ(reader.get(keys(0, 2), back.cache(), first_blocks(2)).wait(), std::vector<Outcome>(2, Outcome::kOk));
  Memory expected(memory.layout, 9);
  test::convert(memory, expected, {{0, 0}, {1, 1}});
  EXPECT_EQ(back.buffers, expected.buffers);
}

TEST_F(ReorderTest, RawDamagedAndVanishedFilesStayAsTheyAre) {
  NamespaceFields raw = fields(8, "raw");
  raw.raw = "layout=x,tp=1,rank=0";
  {
    kvstride::Store store({tier()}, Namespace(raw));
    const std::vector<std::byte> bytes(5000, std::byte{7});
    const std::vector<std::span<const std::byte>> from{bytes};
    ASSERT_EQ(store.put_bytes(keys(0, 1), from).wait(), std::vector<Outcome>(1, Outcome::kOk));
  }
  Memory memory(Layout("KV B N H D", geometry()), 1);
  put(memory, 0, 3);
  const StoreFolder store = folder();
  StoreEditor editor(store);
  {
    const SpaceFolder space(store, Namespace(raw).hex());
    EXPECT_EQ(Reorderer(space, "H N L KV D", &editor).reorder(files_of(space).at(0)).state, Reorderer::State::kRaw);
  }
  const SpaceFolder space(store, Namespace(fields()).hex());
  const std::vector<ChunkFile> files = files_of(space);
  const fs::path damaged = file(space.name(), files[0]);
  std::string bytes = read_file(damaged);
  bytes[4096 + 77] ^= 4;
  write_file(damaged, bytes);
  fs::remove(file(space.name(), files[1]));
  Reorderer reorderer(space, "H N L KV D", &editor);
  const Reorderer::Result result = reorderer.reorder(files[0]);
  EXPECT_EQ(result.state, Reorderer::State::kDamaged);
  EXPECT_NE(result.why.find("checksums"), std::string::npos);
  EXPECT_EQ(read_file(damaged), bytes);
  EXPECT_EQ(reorderer.reorder(files[1]).state, Reorderer::State::kGone);
  EXPECT_EQ(reorderer.reorder(files[2]).state, Reorderer::State::kDone);
}

TEST_F(ReorderTest, NoRoomIsSaid) {
  Memory memory(Layout("KV B N H D", geometry()), 1);
  put(memory, 0, 3);
  const std::int64_t used = folder().ledger().used;
  tier(used + 4096);  // opened with that limit
  const StoreFolder store = folder();
  const SpaceFolder space(store, Namespace(fields()).hex());
  const std::vector<ChunkFile> files = files_of(space);
  {
    StoreEditor editor(store);
    const Reorderer::Result result = Reorderer(space, "H N L KV D", &editor).reorder(files[0]);
    EXPECT_EQ(result.state, Reorderer::State::kFailed);
    EXPECT_NE(result.why.find("no room"), std::string::npos);
  }
  expect_account_fits();
}

// A process that knows the old files' lengths reads the new ones, longer or shorter, and takes none for damaged.
TEST_F(ReorderTest, BesideAProcessThatKnowsTheOldFiles) {
  NamespaceFields many = fields(2, "many heads");  // their checksums fill more than a page
  many.num_layers = 1;
  many.num_kv_heads = 600;
  Geometry sizes = geometry(2, 600);
  sizes.num_layers = 1;
  Memory memory(Layout("KV B N H D", sizes), 1);
  const TierPtr living = tier();
  kvstride::Store store({living}, Namespace(many));
  ASSERT_EQ(store.put(keys(0, 6), memory.cache(), first_blocks(6)).wait(), std::vector<Outcome>(6, Outcome::kOk));
  const auto expect_all = [&](const char* what) {
    for (const std::int64_t first : {0, 595}) {
      const std::int64_t count = first == 0 ? 600 : 5;
      Geometry part = sizes;
      part.num_kv_heads = count;
      Memory read(Layout("B H N KV D", part), 5);
      RequestOptions heads;
      heads.heads = {0, first, count};
      // Half of the chunks are first asked for as a whole, the others in part.
      const int from = first == 0 ? 0 : 3;
      ASSERT_EQ(store.get(keys(from, 3), read.cache(), first_blocks(3), heads).wait(),
                std::vector<Outcome>(3, Outcome::kOk))
          << what << " from head " << first;
      bool same = true;
      for (const Plane& plane : read.layout.planes()) {
        test::for_each_index(plane, [&](const kvstride::Index& index) {
          if (index[1] >= 3) return;
          kvstride::Index there = index;
          there[1] += from;
          there[3] += first;
          same &= std::memcmp(read.at(plane, index), memory.at(memory.layout.plane(plane.name), there), 2) == 0;
        });
      }
      EXPECT_TRUE(same) << what;
    }
  };
  const StoreFolder outside = folder();
  const SpaceFolder space(outside, Namespace(many).hex());
  std::set<std::int64_t> lengths;
  for (const char* order : {"H L KV N D", "N H L KV D", "L N H KV@64 D", "N H L KV D", "H L KV N D"}) {
    {
      StoreEditor editor(outside);
      Reorderer reorderer(space, order, &editor);
      for (const ChunkFile& file : files_of(space)) reorderer.reorder(file);
    }
    lengths.insert(files_of(space).at(0).length);
    expect_all(order);
    EXPECT_TRUE(outside.quarantine().empty()) << order;
    ASSERT_EQ(files_of(space).size(), 6U) << order;
  }
  EXPECT_EQ(lengths.size(), 3U);
  EXPECT_EQ(store.metrics().counters.at("get_corrupt"), 0U);
}

// Files are replaced by longer and shorter ones all the time: nobody misses one, or takes it for gone.
TEST_F(ReorderTest, NobodyMissesWhatIsReplaced) {
  constexpr int kChunks = 4;
  Memory memory(Layout("KV B N H D", geometry()), 1);
  const TierPtr living = tier();
  kvstride::Store store({living}, Namespace(fields()));
  const std::vector<Key> all = keys(0, kChunks);
  ASSERT_EQ(store.put(all, memory.cache(), first_blocks(kChunks)).wait(), std::vector<Outcome>(kChunks, Outcome::kOk));
  store.take_gone();
  const StoreFolder outside = folder();
  const SpaceFolder space(outside, Namespace(fields()).hex());
  std::atomic<bool> stop{false};
  std::vector<std::thread> readers;
  for (int reader = 0; reader < 3; ++reader) {
    readers.emplace_back([&, reader] {
      Memory read(Layout("B H N KV D", geometry()), 5);
      while (!stop) {
        if (reader == 0) {
          EXPECT_EQ(store.lookup(all, {}, false), std::vector<bool>(kChunks, true));
          EXPECT_EQ(store.lookup_prefix(all), kChunks);
        } else {
          EXPECT_EQ(store.get(all, read.cache(), first_blocks(kChunks)).wait(),
                    std::vector<Outcome>(kChunks, Outcome::kOk));
        }
      }
      if (reader == 0) return;
      Memory expected = read;
      test::convert(memory, expected, {{0, 0}, {1, 1}, {2, 2}, {3, 3}});
      EXPECT_EQ(read.buffers, expected.buffers);
    });
  }
  StoreEditor editor(outside);
  for (int round = 0; round < 100; ++round) {
    Reorderer reorderer(space, round % 2 == 0 ? "L N H KV@64 D" : "H L KV N D", &editor);
    for (const ChunkFile& file : files_of(space)) EXPECT_EQ(reorderer.reorder(file).state, Reorderer::State::kDone);
  }
  stop = true;
  for (std::thread& reader : readers) reader.join();
  EXPECT_TRUE(store.take_gone().empty());
  EXPECT_TRUE(outside.quarantine().empty());
}

// A child does it and ends, as if killed, at one call after the other. Each file is the old or the new one; the next
// process settles the rest.
class KilledReorder : public ReorderTest, public testing::WithParamInterface<bool> {};

TEST_P(KilledReorder, FilesAreOldOrNew) {
  Memory memory(Layout("KV B N H D", geometry()), 1);
  put(memory, 0, 2);
  const std::string ours = Namespace(fields()).hex();
  std::map<std::string, std::set<std::string>> known;  // old and new bytes of each file
  const auto note = [&] {
    const StoreFolder store = folder();
    for (const ChunkFile& file : files_of(SpaceFolder(store, ours))) {
      known[file.name()].insert(read_file(this->file(ours, file)));
    }
  };
  const auto reorder = [&](const std::shared_ptr<Io>& io, const char* order) {
    const StoreFolder store = folder(io);
    const SpaceFolder space(store, ours);
    StoreEditor editor(store);
    Reorderer reorderer(space, order, &editor);
    for (const ChunkFile& file : files_of(space)) {
      if (reorderer.reorder(file).state == Reorderer::State::kFailed) return 1;
    }
    return 0;
  };
  constexpr const char* kOld = "H L KV N D";
  constexpr const char* kNew = "N H L KV D";
  note();
  ASSERT_EQ(in_child([&] { return reorder(system_io(), kNew); }), 0);
  note();
  for (const auto& [name, versions] : known) ASSERT_EQ(versions.size(), 2U);
  int lost = 0;
  int point = 0;
  for (int answer = 42; answer == 42; ++point) {
    ASSERT_LT(point, 2000);
    ASSERT_EQ(in_child([&] { return reorder(system_io(), kOld); }), 0);
    answer = in_child([&] {
      const auto io = std::make_shared<AskingIo>();
      io->can_exchange = GetParam();
      int calls = 0;
      io->before = [&](std::string_view, std::string_view) {
        if (calls++ == point) ::_exit(42);
        return 0;
      };
      return reorder(io, kNew);
    });
    ASSERT_TRUE(answer == 42 || answer == 0) << answer;
    std::size_t seen = 0;
    {
      const StoreFolder store = folder();
      for (const ChunkFile& file : files_of(SpaceFolder(store, ours))) {
        ASSERT_TRUE(known.at(file.name()).count(read_file(this->file(ours, file)))) << "at call " << point;
        ++seen;
      }
    }
    if (seen < known.size()) {
      ++lost;
      put(memory, 0, 2);
    }
    const StoreFolder store = folder();
    { StoreEditor editor(store); }
    expect_account_fits();
  }
  EXPECT_GT(point, 100);
  // Without an exchange a file has no name for a moment.
  EXPECT_EQ(lost > 0, !GetParam()) << lost;
}
INSTANTIATE_TEST_SUITE_P(Exchange, KilledReorder, testing::Bool(),
                         [](const auto& one) { return one.param ? "AtOnce" : "InTwoSteps"; });

// Each call fails in turn: nothing is lost, the account is right, and the result says that it failed.
TEST_F(ReorderTest, CallsThatFail) {
  Memory memory(Layout("KV B N H D", geometry()), 1);
  put(memory, 0, 1);
  const std::string ours = Namespace(fields()).hex();
  const auto io = std::make_shared<AskingIo>();
  const StoreFolder store = folder(io);
  const SpaceFolder space(store, ours);
  int failed = 0;
  bool reached = true;
  for (int point = 0; reached; ++point) {
    ASSERT_LT(point, 300);
    const int error = point % 2 == 0 ? -EIO : -ENOSPC;
    reached = false;
    {
      StoreEditor editor(store);
      const ChunkFile file = files_of(space).at(0);
      const std::string before = read_file(this->file(ours, file));
      const bool standard = space.header(file)->content.head_bytes > 0;
      int calls = 0;
      io->before = [&](std::string_view call, std::string_view) {
        // Times that cannot be set are no reason to give up.
        if (call == "set_times" || calls++ != point) return 0;
        reached = true;
        return error;
      };
      const Reorderer::Result result = Reorderer(space, standard ? "N H L KV D" : "H L KV N D", &editor).reorder(file);
      io->before = [](auto, auto) { return 0; };
      if (result.state != Reorderer::State::kDone) {
        EXPECT_EQ(result.state, Reorderer::State::kFailed) << point;
        EXPECT_NE(result.why, "");
        EXPECT_EQ(read_file(this->file(ours, file)), before) << point;
        ++failed;
      }
      const Check check = Verifier().check(space, files_of(space).at(0));
      EXPECT_EQ(check.state, State::kSound) << check.why;
    }
    StoreEditor editor(store);
    const Census census = editor.count();
    EXPECT_TRUE(census.temporaries.empty()) << point;
    EXPECT_EQ(store.ledger().used, census.bytes()) << point;
  }
  EXPECT_GT(failed, 8);
}

}  // namespace
}  // namespace kvstride::store
