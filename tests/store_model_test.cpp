// SPDX-License-Identifier: Apache-2.0
// Random operations, faults, damage and crashes against a dictionary that outlives the processes doing them.
#include <sys/mman.h>

#include "child.h"
#include "store_blocks.h"

namespace kvstride::test {
namespace {

namespace fs = std::filesystem;

constexpr int kSpaces = 2;
constexpr int kKeys = 24;
constexpr std::int64_t kImage = 5 * 4096;

/// What is known of a chunk. Its bytes follow from its name; clients check them whenever they are delivered.
enum State : std::uint8_t {
  kAbsent,   ///< never put, or removed: nobody may find it
  kMaybe,    ///< evicted, half put, half removed …
  kSpoiled,  ///< somebody touched its files: a put may find it there all the same
  kHere,     ///< put, but it may be in memory only: sure as long as this process lives
  kSure      ///< put, on the disk, and nothing happened to it since
};

/// In memory that a killed process leaves behind.
struct Book {
  State raw[kSpaces][kKeys];
  State heads[kSpaces][kKeys][kModelHeads];
  int operations;
  int checked;  ///< outcomes that were certain beforehand

  /// A new process: memory is gone, and, where it is not `roomy`, chunks are evicted.
  void doubt(bool roomy) {
    const auto one = [&](State& state) { state = state == kHere || (state == kSure && !roomy) ? kMaybe : state; };
    for (auto& space : raw) std::for_each(std::begin(space), std::end(space), one);
    for (auto& space : heads) {
      for (auto& key : space) std::for_each(std::begin(key), std::end(key), one);
    }
  }
};

/// One process: opens the tiers, does something, ends or is killed.
class Life {
 public:
  /// `roomy`: nothing is ever evicted, so what was put must be found.
  Life(Book& book, std::string root, std::uint64_t dice, bool roomy, bool with_host)
      : book_(book), root_(std::move(root)), random_(dice), roomy_(roomy), with_host_(with_host) {}

  void run(int operations) {
    if (with_host_) tiers_.push_back(host_tier({.num_bytes = (roomy_ ? 400 : 20) * kImage}));
    auto options = small_tier(root_, roomy_ ? 16 << 20 : 40 * kImage);
    if (random_() % 4 == 0) options.engine = DirectoryTierOptions::Engine::kAuto;
    options.eviction = random_() % 2 == 0 ? Eviction::kLru : Eviction::kS3Fifo;
    options.sync = random_() % 4 == 0;
    tiers_.push_back(disk_ = store::make_directory_tier(options, io));
    book_.doubt(roomy_);
    expect_files("opened");
    StoreOptions store;
    store.deadline = 5s;
    store.promote = random_() % 3 != 0;
    for (int space = 0; space < kSpaces; ++space) {
      raw_.push_back(std::make_unique<Client>(tiers_, space, 3 * 4096 + 100, store));
      const std::vector<const char*> orders{"KV B N H D", "B H N KV D", "L B H N KV D",
                                            "key: B N H D | value: B H D N"};
      for (const auto& [first, num] : {std::pair{0, 8}, {0, 4}, {4, 4}, {3, 2}}) {
        const std::int64_t size = random_() % 2 == 0 ? kChunkTokens : kChunkTokens / 2;
        parts_[static_cast<std::size_t>(space)].push_back(
            std::make_unique<BlockClient>(tiers_, space, orders[random_() % orders.size()], first, num, size));
      }
    }
    for (int i = 0; i < operations && !testing::Test::HasFailure(); ++i) step();
    io->lift();
    doubt_evicted();
    expect_files("at work");
    pins_.clear();
    check_counters();
    if (!spoiled_) expect_at_rest(root_, disk_, io.get());  // else the account is counted again by the next life
    // Not for long: the end must come with everything still in the tiers, and with what is going on its way.
    if (random_() % 2 == 0) {
      for (int i = 0; i < 4; ++i) step();
    }
  }

  std::shared_ptr<FaultIo> io = std::make_shared<FaultIo>();
  bool faulty() const { return window_ > 0; }

 private:
  void step() {
    ++book_.operations;
    doubt_evicted();
    if (window_ > 0 && --window_ == 0) {
      io->lift();
      full_ = false;
    }
    switch (random_() % 20) {
      case 0: return remove();
      case 1: return window_ == 0 && random_() % 3 == 0 ? fault() : pin();
      case 2: return random_() % 6 == 0 ? spoil() : lookup();
      case 3: return lookup();
      case 4: return lookup_prefix();
      case 5:
      case 6:
      case 7: return random_() % 2 == 0 ? put_raw() : put_heads();
      default: return random_() % 2 == 0 ? get_raw() : get_heads();
    }
  }

  int space() { return static_cast<int>(random_() % kSpaces); }
  std::vector<int> some() {
    const int first = static_cast<int>(random_() % kKeys);
    return range(first, std::min(kKeys - first, 1 + static_cast<int>(random_() % 4)));
  }
  BlockClient& part(int space) {
    auto& all = parts_[static_cast<std::size_t>(space)];
    return *all[random_() % all.size()];
  }
  /// The weakest state of the heads that a client reads.
  State state_of(int space, int key, const BlockClient& client) const {
    const State* first = book_.heads[space][key] + client.first_head();
    return *std::min_element(first, first + client.num_heads());
  }
  static bool is_sure(State state) { return state >= kHere; }

  void put_raw() {
    const int at = space();
    const std::vector<int> numbers = some();
    for (const int number : numbers) begin(book_.raw[at][number]);
    const Outcomes put = raw_[static_cast<std::size_t>(at)]->put(numbers);
    asked_put_ += numbers.size();
    for (std::size_t i = 0; i < put.size(); ++i) {
      if (put[i] == Outcome::kOk)
        done(book_.raw[at][numbers[i]], on_disk(raw_space(at), numbers[i], {}), raw_going_[at][numbers[i]]);
      expect_allowed(put[i]);
    }
  }
  void put_heads() {
    const int at = space();
    BlockClient& client = part(at);
    const std::vector<int> numbers = some();
    const auto each = [&](int number, const auto& use) {
      for (std::int64_t head = 0; head < client.num_heads(); ++head)
        use(book_.heads[at][number][client.first_head() + head]);
    };
    for (const int number : numbers) each(number, [&](State& state) { begin(state); });
    const Outcomes put = client.put(numbers);
    const store::Heads heads{static_cast<std::uint16_t>(client.first_head()),
                             static_cast<std::uint16_t>(client.num_heads())};
    for (std::size_t i = 0; i < put.size(); ++i) {
      const bool there = on_disk(block_space(at), numbers[i], heads);
      if (put[i] == Outcome::kOk)
        each(numbers[i], [&](State& state) { done(state, there, heads_going_[at][numbers[i]]); });
      expect_allowed(put[i]);
    }
  }
  static void begin(State& state) { state = state == kAbsent ? kMaybe : state; }
  /// Where an old file is `going` the new one may be in memory only, now or when it is written.
  void done(State& state, bool on_disk, bool going) const {
    if (state == kSpoiled) return;
    const State now = !roomy_ || full_ ? kMaybe : on_disk && !going ? kSure : with_host_ ? kHere : kMaybe;
    EXPECT_TRUE(on_disk || with_host_ || !roomy_) << "put is ok, and there is no file";
    state = std::max(state, now);
  }

  void get_raw() {
    const int at = space();
    const std::vector<int> numbers = some();
    const Outcomes got = raw_[static_cast<std::size_t>(at)]->get(numbers);
    asked_get_ += numbers.size();
    for (std::size_t i = 0; i < got.size(); ++i)
      expect_outcome(got[i], book_.raw[at][numbers[i]], "raw", at, numbers[i]);
  }
  void get_heads() {
    const int at = space();
    BlockClient& client = part(at);
    const std::vector<int> numbers = some();
    const Outcomes got = client.get(numbers);
    for (std::size_t i = 0; i < got.size(); ++i) {
      expect_outcome(got[i], state_of(at, numbers[i], client), "heads", at, numbers[i]);
    }
  }
  void expect_allowed(Outcome put) const {
    EXPECT_TRUE(put == Outcome::kOk || put == Outcome::kRefused || (window_ > 0 && put == Outcome::kIoError))
        << name_of(put);
  }
  void expect_outcome(Outcome got, State state, const char* kind, int at, int number) {
    const auto what = [&] {
      return std::string(kind) + " space " + std::to_string(at) + " chunk " + std::to_string(number);
    };
    if (state == kAbsent) {
      EXPECT_TRUE(got == Outcome::kMiss || window_ > 0)
          << what() << " is " << name_of(got) << ", and was never put or was removed";
      EXPECT_NE(got, Outcome::kOk) << what() << " was never put, or removed";
      ++book_.checked;
    } else if (is_sure(state) && window_ == 0) {
      EXPECT_EQ(name_of(got), "ok") << what() << " was put, and nothing happened to it: " << told(disk_) << " "
                                    << (on_disk(std::string(kind) == "raw" ? raw_space(at) : block_space(at), number)
                                            ? "there is a file"
                                            : "there is no file");
      ++book_.checked;
    }
  }

  void lookup() {
    const int at = space();
    const std::vector<int> numbers = some();
    BlockClient& client = part(at);
    const std::vector<bool> raw = raw_[static_cast<std::size_t>(at)]->lookup(numbers);
    const std::vector<bool> heads = client.lookup(numbers);
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      expect_found(raw[i], book_.raw[at][numbers[i]], numbers[i]);
      expect_found(heads[i], state_of(at, numbers[i], client), numbers[i]);
    }
  }
  void expect_found(bool found, State state, int number) {
    if (state == kMaybe || state == kSpoiled || (is_sure(state) && window_ > 0)) return;
    EXPECT_EQ(found, is_sure(state)) << "chunk " << number;
    ++book_.checked;
  }
  void lookup_prefix() {
    const int at = space();
    const std::int64_t prefix = raw_[static_cast<std::size_t>(at)]->store.lookup_prefix(keys_of(range(0, kKeys)));
    for (int key = 0; key < kKeys; ++key) {
      EXPECT_TRUE(key >= prefix || book_.raw[at][key] != kAbsent) << key;
      EXPECT_TRUE(key != prefix || window_ > 0 || !is_sure(book_.raw[at][key])) << key;
    }
  }

  void remove() {
    const int at = space();
    const std::vector<int> numbers = range(static_cast<int>(random_() % kKeys), 1);
    const bool raw = random_() % 2 == 0;
    const auto each = [&](const auto& use) {
      for (const int number : numbers) {
        if (raw) use(book_.raw[at][number]);
        if (raw) continue;
        for (State& state : book_.heads[at][number]) use(state);
      }
    };
    each([](State& state) { state = is_sure(state) ? kMaybe : state; });
    raw ? raw_[static_cast<std::size_t>(at)]->remove(numbers) : part(at).store.remove(keys_of(numbers));
    // A fault may keep the file, and so may a crash before it is gone.
    const Namespace space = raw ? raw_space(at) : block_space(at);
    bool& going = (raw ? raw_going_ : heads_going_)[at][numbers[0]];
    going = window_ > 0 || !soon([&] { return !on_disk(space, numbers[0]); }, 1000ms);
    if (!going) each([](State& state) { state = kAbsent; });
  }
  /// Whether there is a file of a chunk, or of some heads of it.
  bool on_disk(const Namespace& space, int number, std::optional<store::Heads> heads = std::nullopt) const {
    const std::string name = heads ? store::file_name(key_of(number), *heads) : key_of(number).hex();
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(root_ + "/" + space.hex() + "/" + name.substr(0, 1), none)) {
      if (entry.path().filename().string().rfind(name, 0) == 0) return true;
    }
    return false;
  }

  /// A full disk, which a fault may be, is a reason to evict also where there is room.
  void doubt_evicted() {
    const std::uint64_t evictions = disk_->metrics().counters.at("evictions");
    if (evictions != evictions_) book_.doubt(false);
    evictions_ = evictions;
  }
  /// What is sure has a file.
  void expect_files(const char* when) const {
    for (int at = 0; at < kSpaces; ++at) {
      for (int key = 0; key < kKeys; ++key) {
        if (book_.raw[at][key] != kSure) continue;
        EXPECT_TRUE(on_disk(raw_space(at), key))
            << when << ": the file of space " << at << " chunk " << key << " went; " << told(disk_);
      }
    }
  }

  void pin() {
    const int at = space();
    if (pins_.size() > 3) pins_.erase(pins_.begin());
    pins_.push_back(raw_[static_cast<std::size_t>(at)]->store.pin(keys_of(some())));
  }

  /// From the next operation on some calls fail.
  void fault() {
    constexpr std::array<int, 8> kErrors{EIO, ENOSPC, EMFILE, EACCES, EINTR, ESTALE, ENOMEM, EROFS};
    Fault fault;
    fault.error = kErrors[random_() % kErrors.size()];
    fault.share = 0.02 * static_cast<double>(1 + random_() % 40);
    if (random_() % 4 == 0) fault = {.calls = kRead | kWrite, .effect = Fault::kShort, .share = 0.3};
    if (random_() % 8 == 0) io->jump(std::chrono::hours(static_cast<int>(random_() % 20'000) - 10'000));
    // A full disk is a reason to evict what is there. Doubted now: the process may be killed before it counts them.
    full_ = fault.error == ENOSPC;
    if (full_) book_.doubt(false);
    io->set(fault);
    window_ = 1 + static_cast<int>(random_() % 12);
  }

  /// Somebody damages, cuts, exchanges or removes a file.
  void spoil() {
    const std::vector<std::string> pieces = look(root_).pieces;
    if (pieces.empty()) return;
    const std::string path = pieces[random_() % pieces.size()];
    const auto parsed = store::parse_file_name(fs::path(path).filename().string());
    const std::string folder = fs::path(path).parent_path().parent_path().filename();
    for (int at = 0; at < kSpaces; ++at) {
      for (int key = 0; key < kKeys; ++key) {
        if (!(parsed->first == key_of(key))) continue;
        if (folder == raw_space(at).hex()) begin_spoil(book_.raw[at][key]);
        if (folder != block_space(at).hex()) continue;
        for (State& state : book_.heads[at][key]) begin_spoil(state);
      }
    }
    std::string bytes = read_file(path);
    if (bytes.empty()) return;
    spoiled_ = true;
    switch (random_() % 4) {
      case 0: fs::remove(path); break;
      case 1: write_file(path, bytes.substr(0, random_() % bytes.size())); break;
      case 2: write_file(path, read_file(pieces[random_() % pieces.size()])); break;
      default: bytes[random_() % bytes.size()] ^= static_cast<char>(1 << random_() % 8); write_file(path, bytes);
    }
  }
  static void begin_spoil(State& state) { state = state == kAbsent ? kAbsent : kSpoiled; }

  void check_counters() {
    std::uint64_t puts = 0;
    std::uint64_t gets = 0;
    for (const auto& client : raw_) {
      for (const auto& [name, number] : client->store.metrics().counters) {
        if (name.rfind("put_", 0) == 0) puts += number;
        if (name.rfind("get_", 0) == 0) gets += number;
      }
    }
    EXPECT_EQ(puts, asked_put_);
    EXPECT_EQ(gets, asked_get_);
  }

  Book& book_;
  std::string root_;
  std::mt19937_64 random_;
  bool roomy_;
  bool with_host_;
  std::vector<TierPtr> tiers_;
  TierPtr disk_;
  std::vector<std::unique_ptr<Client>> raw_;
  std::array<std::vector<std::unique_ptr<BlockClient>>, kSpaces> parts_;
  std::vector<Pins> pins_;
  int window_ = 0;                       ///< operations until the fault is over
  bool raw_going_[kSpaces][kKeys] = {};  ///< removed, and perhaps still there: this process removes it when it can
  bool heads_going_[kSpaces][kKeys] = {};
  bool full_ = false;  ///< the fault is a full disk
  std::uint64_t asked_put_ = 0;
  std::uint64_t asked_get_ = 0;
  std::uint64_t evictions_ = 0;
  bool spoiled_ = false;
};

TEST(StoreModel, RandomLives) {
  void* memory = ::mmap(nullptr, sizeof(Book), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  Book& book = *static_cast<Book*>(memory);
  Scratch scratch;
  std::mt19937_64 random(seed());
  int killed = 0;
  int lives = 0;
  const auto end = until(6000ms, 0.5);
  while (SteadyClock::now() < end && !testing::Test::HasFailure()) {
    const std::uint64_t dice = random();
    const bool roomy = random() % 3 != 0;
    const bool with_host = random() % 2 == 0;
    const bool kill = random() % 3 == 0;
    const int after = static_cast<int>(random() % 3000);
    const int code = in_child([&] {
      bool faulty = false;
      {
        Life life(book, scratch.path(), dice, roomy, with_host);
        if (kill) life.io->set({.effect = Fault::kKill, .after = after}, 1);
        life.run(200);
        faulty = life.faulty();
      }
      EXPECT_TRUE(faulty || soon([&] { return look(scratch.path()).temporaries.empty(); }));
      return testing::Test::HasFailure() ? 7 : 0;
    });
    ++lives;
    killed += code == -1 ? 1 : 0;
    ASSERT_TRUE(code == 0 || (kill && code == -1)) << "life " << lives << " of KVSTRIDE_SEED=" << seed() << " ("
                                                   << (roomy ? "roomy" : "small") << (with_host ? ", host" : "") << ")";
  }
  RecordProperty("lives", lives);
  RecordProperty("killed", killed);
  RecordProperty("operations", book.operations);
  EXPECT_GT(book.checked, book.operations / 10) << "the dictionary knew too little";
  ::munmap(memory, sizeof(Book));
}

}  // namespace
}  // namespace kvstride::test
