// SPDX-License-Identifier: Apache-2.0
// What the fault tests share: chunks that say what they are, clients that check every byte, and a look at the disk.
#pragma once

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "fault_io.h"
#include "kvstride/error.h"
#include "kvstride/store.h"
#include "store/directory.h"
#include "store/directory_tier.h"
#include "store/ledger_record.h"

namespace kvstride::test {

using namespace std::chrono_literals;
using SteadyClock = std::chrono::steady_clock;

// --- How long, and with which dice -----------------------------------------------------------------------------------

/// KVSTRIDE_SOAK_SECONDS; 0 every day.
inline double soak_seconds() {
  const char* text = std::getenv("KVSTRIDE_SOAK_SECONDS");
  return text == nullptr ? 0 : std::atof(text);
}
/// Until when a loop goes on: some time every day, a share of the soak time otherwise.
inline SteadyClock::time_point until(std::chrono::milliseconds everyday, double share) {
  const auto soak = std::chrono::milliseconds(static_cast<std::int64_t>(soak_seconds() * share * 1000));
  return SteadyClock::now() + std::max(everyday, soak);
}
/// A number of things to do: few every day, many while soaking.
inline int many(int everyday, int soaking) { return soak_seconds() > 0 ? soaking : everyday; }

/// KVSTRIDE_SEED; the same every day, another one each time while soaking.
inline std::uint64_t seed() {
  static const std::uint64_t value = [] {
    const char* text = std::getenv("KVSTRIDE_SEED");
    return text != nullptr ? std::strtoull(text, nullptr, 10) : soak_seconds() > 0 ? std::random_device{}() : 1;
  }();
  return value;
}

// --- Places ----------------------------------------------------------------------------------------------------------

/// A new directory in memory where there is such a place (crashes by the thousand), removed with everything in it.
class Scratch {
 public:
  explicit Scratch(std::string parent = ::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : testing::TempDir()) {
    path_ = parent + "/kvtest.XXXXXX";
    if (::mkdtemp(path_.data()) == nullptr) std::abort();
  }
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  std::string path(const std::string& name = "store") const { return path_ + "/" + name; }

 private:
  std::string path_;
};

/// A small directory tier all of whose calls go through Io.
inline DirectoryTierOptions small_tier(const std::string& path, std::int64_t max_bytes = 8 << 20) {
  DirectoryTierOptions out;
  out.path = path;
  out.max_bytes = max_bytes;
  out.keep_free = 0;
  out.engine = DirectoryTierOptions::Engine::kBlocking;
  out.num_threads = 2;
  out.staging_bytes = 2 << 20;
  out.lookup_timeout = std::chrono::seconds(2);  // on a busy machine, too
  return out;
}

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
inline void write_file(const std::string& path, std::string_view bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

/// Flips a bit in the middle; the length stays.
inline void damage(const std::string& path) {
  std::string bytes = read_file(path);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 16);
  const int fd = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
  EXPECT_EQ(::pwrite(fd, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size())) << path;
  ::close(fd);
}

/// What a store's directory holds.
struct OnDisk {
  std::int64_t bytes = 0;  ///< of pieces and what is set aside, as the account counts them
  std::vector<std::string> pieces;
  std::vector<std::string> temporaries;
  std::vector<std::string> set_aside;
};
inline OnDisk look(const std::string& root) {
  namespace fs = std::filesystem;
  OnDisk out;
  std::error_code gone;  // files come and go
  for (fs::recursive_directory_iterator at(root, fs::directory_options::skip_permission_denied, gone), end; at != end;
       at.increment(gone)) {
    struct stat stat;
    if (::lstat(at->path().c_str(), &stat) != 0 || !S_ISREG(stat.st_mode)) continue;
    const std::string folder = at->path().parent_path().filename();
    if (folder == "tmp") {
      out.temporaries.push_back(at->path());
      continue;
    }
    const bool aside = folder == "quarantine";
    if (!aside && (folder.size() != 1 || !store::parse_file_name(at->path().filename().string()))) continue;
    (aside ? out.set_aside : out.pieces).push_back(at->path());
    out.bytes += std::max<std::int64_t>(stat.st_blocks * 512, (stat.st_size + 4095) / 4096 * 4096);
  }
  return out;
}

/// Whether `right` becomes true soon.
template <typename Right>
bool soon(const Right& right, std::chrono::milliseconds patience = 5000ms) {
  const auto end = SteadyClock::now() + patience;
  while (!right()) {
    if (SteadyClock::now() > end) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

/// What a tier has counted, for messages.
inline std::string told(const TierPtr& tier) {
  std::string out;
  const TierMetrics metrics = tier->metrics();
  for (const auto& [name, number] : metrics.counters) {
    if (number > 0) out += name + " " + std::to_string(number) + ", ";
  }
  return out + std::to_string(metrics.used_bytes) + " bytes used of " + std::to_string(metrics.capacity_bytes);
}

/// At rest: the account is the sum of the files, nothing temporary is there, no file is open but the account's, and all
/// staging memory is back.
inline void expect_at_rest(const std::string& root, const TierPtr& tier, const FaultIo* io = nullptr) {
  OnDisk disk;
  const bool same = soon([&] {
    disk = look(root);
    const TierMetrics metrics = tier->metrics();
    return disk.bytes == metrics.used_bytes && disk.bytes <= metrics.capacity_bytes && disk.temporaries.empty();
  });
  EXPECT_TRUE(same) << "on disk " << disk.bytes << " bytes, in the account " << tier->metrics().used_bytes << "; "
                    << disk.temporaries.size() << " temporaries";
  EXPECT_LE(disk.bytes, tier->metrics().capacity_bytes);
  if (io != nullptr) {
    EXPECT_TRUE(soon([&] { return io->num_open(kDraft | kPiece) == 0; }))
        << io->num_open(kDraft | kPiece) << " files are open";
  }
  EXPECT_TRUE(soon([&] { return tier->buffer(tier->largest()) != nullptr; })) << "staging memory is not back";
}

/// Nobody has it open: as above, and the account has no process.
inline void expect_closed(const std::string& root, const FaultIo* io = nullptr) {
  if (io != nullptr) {
    EXPECT_TRUE(soon([&] { return io->num_open() == 0; })) << io->num_open() << " descriptors are open";
  }
  const OnDisk disk = look(root);
  EXPECT_TRUE(disk.temporaries.empty()) << disk.temporaries.size() << " temporaries";
  const std::string bytes = read_file(root + "/ledger");
  store::LedgerRecord record;
  ASSERT_EQ(bytes.size(), sizeof record);
  std::memcpy(&record, bytes.data(), sizeof record);
  ASSERT_TRUE(record.valid());
  EXPECT_EQ(record.known, 1U);
  EXPECT_EQ(record.used, disk.bytes);
  EXPECT_EQ(record.total(), record.used) << "reserved by nobody";
  for (const store::LedgerSlot& slot : record.slots) EXPECT_EQ(slot.in_use, 0U);
}

// --- Chunks ----------------------------------------------------------------------------------------------------------

inline Key key_of(int number) {
  std::array<std::byte, 16> bytes{};
  const auto mixed = static_cast<std::uint32_t>(number) * 0x9e3779b1U;  // over all shards
  std::memcpy(bytes.data() + 4, &number, sizeof number);
  bytes[0] = static_cast<std::byte>(mixed >> 24);
  return Key(bytes);
}
inline std::vector<Key> keys_of(const std::vector<int>& numbers) {
  std::vector<Key> out;
  for (const int number : numbers) out.push_back(key_of(number));
  return out;
}
inline std::vector<int> range(int first, int count) {
  std::vector<int> out;
  for (int i = first; i < first + count; ++i) out.push_back(i);
  return out;
}

/// Each word of a chunk says which namespace, key and place it belongs to.
inline std::uint64_t word_of(int space, int key, std::size_t at) {
  return static_cast<std::uint64_t>(space) << 56 | static_cast<std::uint64_t>(key) << 32 | at;
}
inline std::vector<std::byte> chunk_of(int space, int key, std::size_t bytes) {
  std::vector<std::byte> out(bytes);
  for (std::size_t at = 0; at < bytes; at += 8) {
    const std::uint64_t word = word_of(space, key, at / 8);
    std::memcpy(out.data() + at, &word, std::min<std::size_t>(8, bytes - at));
  }
  return out;
}
constexpr std::byte kPoison{0xA5};

inline Namespace raw_space(int number) {
  NamespaceFields fields;
  fields.model = "fault/model-" + std::to_string(number);
  fields.revision = "0123abcd";
  fields.planes = {{"state", {DType::kU8, {}}}};
  fields.num_layers = fields.num_kv_heads = fields.head_size = fields.block_size = 1;
  fields.raw = "rank=0";
  return Namespace(fields);
}

/// Outcomes of many chunks, as a value that failures print.
struct Outcomes : std::vector<Outcome> {
  using std::vector<Outcome>::vector;
  explicit Outcomes(std::vector<Outcome> given) : std::vector<Outcome>(std::move(given)) {}
};
inline void PrintTo(const Outcomes& outcomes, std::ostream* out) {
  for (const Outcome outcome : outcomes) *out << name_of(outcome) << ' ';
}
inline Outcomes all(Outcome outcome, std::size_t count) { return Outcomes(count, outcome); }
inline int count(const Outcomes& outcomes, Outcome outcome) {
  return static_cast<int>(std::count(outcomes.begin(), outcomes.end(), outcome));
}

/// A store of raw bytes that knows what its chunks hold: every byte that a get delivers is checked.
class Client {
 public:
  explicit Client(std::vector<TierPtr> tiers, int space = 0, std::size_t bytes = 3 * 4096 + 100,
                  const StoreOptions& options = {})
      : store(std::move(tiers), raw_space(space), options), space_(space), bytes_(bytes) {}

  Outcomes put(const std::vector<int>& numbers, const RequestOptions& options = {}) {
    std::vector<std::vector<std::byte>> chunks;
    for (const int number : numbers) chunks.push_back(chunk_of(space_, number, bytes_));
    const std::vector<std::span<const std::byte>> spans(chunks.begin(), chunks.end());
    return Outcomes(store.put_bytes(keys_of(numbers), spans, options).wait());
  }

  /// Fails the test where a chunk that is ok has a wrong byte, or another one was touched.
  Outcomes get(const std::vector<int>& numbers, const RequestOptions& options = {}) {
    std::vector<std::vector<std::byte>> chunks(numbers.size(), std::vector<std::byte>(bytes_, kPoison));
    const std::vector<std::span<std::byte>> spans(chunks.begin(), chunks.end());
    const Outcomes outcomes(store.get_bytes(keys_of(numbers), spans, options).wait());
    for (std::size_t i = 0; i < numbers.size(); ++i) check(numbers[i], outcomes[i], chunks[i]);
    return outcomes;
  }

  std::vector<bool> lookup(const std::vector<int>& numbers) { return store.lookup(keys_of(numbers)); }
  std::int64_t remove(const std::vector<int>& numbers) { return store.remove(keys_of(numbers)); }
  std::uint64_t counter(const std::string& name) const { return store.metrics().counters.at(name); }

  Store store;

 private:
  void check(int number, Outcome outcome, std::span<const std::byte> got) {
    if (outcome != Outcome::kOk) {
      const auto touched = std::find_if(got.begin(), got.end(), [](std::byte byte) { return byte != kPoison; });
      if (touched == got.end()) return;
      ADD_FAILURE() << "chunk " << number << " is " << name_of(outcome) << ", yet byte " << touched - got.begin()
                    << " was written";
      return;
    }
    for (std::size_t at = 0; at < got.size(); at += 8) {
      const std::size_t part = std::min<std::size_t>(8, got.size() - at);
      const std::uint64_t right = word_of(space_, number, at / 8);
      if (std::memcmp(got.data() + at, &right, part) == 0) continue;
      std::uint64_t word = 0;
      std::memcpy(&word, got.data() + at, part);
      ADD_FAILURE() << "WRONG BYTES: namespace " << space_ << " chunk " << number << " word " << at / 8
                    << " holds namespace " << (word >> 56) << " chunk " << (word >> 32 & 0xffffff) << " word "
                    << (word & 0xffffffff);
      return;
    }
  }

  int space_;
  std::size_t bytes_;
};

/// Where a chunk of a raw namespace lies.
inline std::string piece_path(const std::string& root, int space, int number) {
  const std::string name = store::file_name(key_of(number), {});
  return root + "/" + raw_space(space).hex() + "/" + name.substr(0, 1) + "/" + name;
}

}  // namespace kvstride::test
