// SPDX-License-Identifier: Apache-2.0
// Faults that other stores had in the field (tests/data/cases.txt), as far as they are about what is stored.
#include <sys/stat.h>

#include <regex>

#include "child.h"
#include "store/chunk.h"
#include "store_blocks.h"

namespace kvstride::test {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kBytes = 3 * 4096 + 100;
constexpr std::int64_t kImage = 5 * 4096;

class StoreCases : public testing::Test {
 protected:
  TierPtr directory(std::int64_t max_bytes = 8 << 20) {
    return store::make_directory_tier(small_tier(root, max_bytes), io);
  }
  Scratch scratch;
  std::string root = scratch.path();
  std::shared_ptr<FaultIo> io = std::make_shared<FaultIo>();
};

NamespaceFields fields_like(const Namespace& space) { return space.fields(); }

/// Pages of one layout, read after a restart in another one: a hit, with the bytes where the reader has them. (Where
/// the layout is neither known nor in the key, equal sizes made such hits wrong.)
TEST_F(StoreCases, C16AnotherLayoutAfterARestart) {
  const std::vector<const char*> orders{"KV B N H D", "KV B H N D", "B N H KV D", "B H N KV D", "L B H N KV D"};
  for (std::size_t i = 0; i < orders.size(); ++i) {
    const std::vector<int> numbers = range(static_cast<int>(i) * 10, 2);
    ASSERT_EQ(BlockClient({directory()}, 0, orders[i]).put(numbers), all(Outcome::kOk, 2));
    for (const char* order : orders) {
      EXPECT_EQ(BlockClient({directory()}, 0, order).get(numbers), all(Outcome::kOk, 2)) << orders[i] << " → " << order;
    }
  }
}

TEST_F(StoreCases, C17TwoKindsOf16BitsInOneFolder) {
  const TierPtr tier = directory();
  NamespaceFields fields = fields_like(block_space(0));
  const auto with = [&](DType dtype) {
    fields.planes = {{"key", {dtype, {}}}, {"value", {dtype, {}}}};
    return Namespace(fields);
  };
  Store half({tier}, with(DType::kF16));
  Store brain({tier}, with(DType::kBF16));
  Geometry sizes{
      .num_layers = 2, .num_blocks = 4, .block_size = kChunkTokens, .num_kv_heads = kModelHeads, .head_size = 8};
  sizes.dtype = DType::kF16;
  Memory halves(Layout("KV B N H D", sizes), 1);
  sizes.dtype = DType::kBF16;
  Memory brains(Layout("KV B N H D", sizes), 2);
  const Memory before = brains;
  const std::vector<Key> keys = keys_of({1, 2});
  const std::vector<std::int64_t> blocks{0, 1};
  ASSERT_EQ(Outcomes(half.put(keys, halves.cache(), blocks).wait()), all(Outcome::kOk, 2));
  EXPECT_EQ(brain.lookup_prefix(keys), 0);
  EXPECT_EQ(Outcomes(brain.get(keys, brains.cache(), blocks).wait()), all(Outcome::kMiss, 2));
  EXPECT_EQ(brains.buffers, before.buffers);
  EXPECT_THROW(half.get(keys, brains.cache(), blocks), Error);
}

TEST_F(StoreCases, C18DtypesAreApartInEveryTier) {
  for (const TierPtr& tier : {directory(), host_tier({.num_bytes = 1 << 20})}) {
    std::vector<std::unique_ptr<Store>> stores;
    for (const DType dtype : {DType::kBF16, DType::kF8E4M3, DType::kF8E5M2, DType::kI8}) {
      NamespaceFields fields = fields_like(raw_space(0));
      fields.planes = {{"state", {dtype, {}}}};
      stores.push_back(std::make_unique<Store>(std::vector<TierPtr>{tier}, Namespace(fields)));
    }
    const std::vector<Key> keys = keys_of({7});
    const std::vector<std::byte> chunk = chunk_of(0, 7, kBytes);
    const std::vector<std::span<const std::byte>> from{chunk};
    for (std::size_t i = 0; i < stores.size(); ++i) {
      for (std::size_t j = i; j < stores.size(); ++j) EXPECT_EQ(stores[j]->lookup_prefix(keys), 0);
      ASSERT_EQ(Outcomes(stores[i]->put_bytes(keys, from).wait()), all(Outcome::kOk, 1));
      EXPECT_EQ(stores[i]->lookup_prefix(keys), 1);
    }
  }
}

/// Attention is alike on both ranks and stored once; the state is each rank's own.
TEST_F(StoreCases, C32StateOfEachRank) {
  const TierPtr tier = directory();
  BlockClient attention0({tier}, 0, "KV B N H D");
  BlockClient attention1({tier}, 0, "KV B N H D");
  Client state0({tier}, 1);
  Client state1({tier}, 2);  // another rank= in raw: another namespace
  ASSERT_EQ(attention0.put({1}), all(Outcome::kOk, 1));
  ASSERT_EQ(attention1.put({1}), all(Outcome::kOk, 1));
  ASSERT_EQ(state0.put({1}), all(Outcome::kOk, 1));
  EXPECT_EQ(state1.get({1}), all(Outcome::kMiss, 1)) << "rank 1 has its own";
  ASSERT_EQ(state1.put({1}), all(Outcome::kOk, 1));
  EXPECT_EQ(state1.get({1}), all(Outcome::kOk, 1));
  EXPECT_EQ(state0.get({1}), all(Outcome::kOk, 1));
  EXPECT_EQ(look(root).pieces.size(), 3U);
  NamespaceFields fields = fields_like(raw_space(0));
  fields.raw = "rank=1";
  EXPECT_NE(Namespace(fields).hex(), raw_space(0).hex());
}

/// Memory for 3 chunks on their way, full of 0xAA: 5 gets are 5 right answers, or fewer and misses; never 0xAA.
TEST_F(StoreCases, C65BuffersThatWereNeverRead) {
  ASSERT_EQ(Client({directory()}).put(range(0, 5)), all(Outcome::kOk, 5));
  auto options = small_tier(root);
  options.staging_bytes = 3 * kImage;
  const TierPtr tier = store::make_directory_tier(options, io);
  {
    std::vector<store::BufferPtr> all_memory;
    while (auto buffer = tier->buffer(kImage)) all_memory.push_back(buffer);
    ASSERT_EQ(all_memory.size(), 3U);
    for (const auto& buffer : all_memory) std::memset(buffer->data(), 0xAA, static_cast<std::size_t>(buffer->bytes()));
  }
  Client client({tier});
  EXPECT_EQ(client.get(range(0, 5)), all(Outcome::kOk, 5)) << "they take turns";
  // Somebody keeps it all: refused or timed out, untouched, and fine afterwards.
  std::vector<store::BufferPtr> kept;
  // A worker may still be putting its memory back when the client has its answer.
  ASSERT_TRUE(soon([&] {
    while (auto buffer = tier->buffer(kImage)) kept.push_back(buffer);
    return kept.size() == 3;
  }));
  RequestOptions quick;
  quick.deadline = 400ms;
  EXPECT_EQ(count(client.get(range(0, 5), quick), Outcome::kOk), 0);
  kept.clear();
  EXPECT_EQ(client.get(range(0, 5)), all(Outcome::kOk, 5));
}

TEST_F(StoreCases, C68NoBytesAreEverRun) {
  const std::string owned = scratch.path("owned");
  const TierPtr tier = directory();
  Client client({tier});
  ASSERT_EQ(client.put({1}), all(Outcome::kOk, 1));
  // What `pickle.loads` would run: os.system("touch owned").
  std::string pickle = "cos\nsystem\n(S'touch " + owned + "'\ntR.";
  for (const std::size_t size : {pickle.size(), static_cast<std::size_t>(kImage)}) {
    pickle.resize(size);
    write_file(piece_path(root, 0, 1), pickle);
    EXPECT_EQ(client.get({1}), all(Outcome::kCorrupt, 1));
    EXPECT_TRUE(soon([&] { return look(root).pieces.empty(); }));
    client.put({1});
  }
  EXPECT_FALSE(fs::exists(owned));
  std::string why;
  EXPECT_FALSE(store::parse_header(std::as_bytes(std::span(pickle)), &why));
  EXPECT_EQ(why, "not a chunk file");
  const std::regex runs(
      R"(\b(pickle|cPickle|dill|joblib|marshal|shelve)\.(load|loads|Unpickler)\b|\btorch\.load\b|\beval\(|\bexec\()");
  int files = 0;
  for (const auto& entry :
       fs::recursive_directory_iterator(std::string(KVSTRIDE_TEST_DATA) + "/../../python/kvstride")) {
    if (entry.path().extension() != ".py") continue;
    ++files;
    const std::string text = read_file(entry.path());
    EXPECT_FALSE(std::regex_search(text, runs)) << entry.path();
  }
  EXPECT_GT(files, 5);
}

/// A reader in this process and one beside it meet a chunk that is half written.
TEST_F(StoreCases, C70HalfWritten) {
  const TierPtr tier = directory();
  Client writer({tier});
  Client reader({directory()});  // as another process has it
  io->set({.calls = kWrite, .targets = kDraft, .effect = Fault::kShort, .times = 1}, 1);
  io->set({.calls = kWrite, .targets = kDraft, .effect = Fault::kHang, .after = 1, .times = 1}, 0);
  std::thread put([&] { EXPECT_EQ(writer.put({1}), all(Outcome::kOk, 1)); });
  ASSERT_TRUE(soon([&] { return io->hanging() == 1; }));
  ASSERT_EQ(look(root).temporaries.size(), 1U);
  EXPECT_GT(fs::file_size(look(root).temporaries[0]), 0U) << "half of it is there";
  for (Client* client : {&writer, &reader}) {
    EXPECT_EQ(client->lookup({1}), std::vector<bool>{false});
    EXPECT_EQ(client->get({1}), all(Outcome::kMiss, 1));
  }
  io->lift();
  put.join();
  EXPECT_EQ(writer.get({1}), all(Outcome::kOk, 1));
  EXPECT_TRUE(soon([&]() -> bool { return reader.lookup({1})[0]; }));
  EXPECT_EQ(reader.get({1}), all(Outcome::kOk, 1));
}

/// Each group says how much it has; who asks for the prefix that all have takes the shortest.
TEST_F(StoreCases, C72EachGroupHasItsOwnPrefix) {
  const TierPtr tier = directory();
  NamespaceFields fields = fields_like(raw_space(0));
  std::vector<std::unique_ptr<Store>> groups;
  const std::vector<int> stored{4, 2};  // chunks of 16 tokens: 64 tokens of attention, 32 of state
  const std::vector<std::byte> chunk(kBytes);
  std::int64_t usable = 100;
  for (std::size_t group = 0; group < stored.size(); ++group) {
    fields.group = static_cast<std::int64_t>(group);
    groups.push_back(std::make_unique<Store>(std::vector<TierPtr>{tier}, Namespace(fields)));
    const auto count = static_cast<std::size_t>(stored[group]);
    const std::vector<std::span<const std::byte>> from(count, chunk);
    ASSERT_EQ(Outcomes(groups[group]->put_bytes(keys_of(range(0, stored[group])), from).wait()),
              all(Outcome::kOk, count));
  }
  for (std::size_t group = 0; group < stored.size(); ++group) {
    const std::int64_t prefix = groups[group]->lookup_prefix(keys_of(range(0, 8)));
    EXPECT_EQ(prefix, stored[group]);
    usable = std::min(usable, prefix * 16);
  }
  EXPECT_EQ(usable, 32);
}

/// Rows of equal length in two formats; and a file whose order this version does not know.
TEST_F(StoreCases, C73EqualSizesAreNotEqualFormats) {
  const TierPtr tier = directory();
  NamespaceFields fields = fields_like(raw_space(0));
  const auto with = [&](const std::string& format) {
    fields.raw = "format=" + format;
    return std::make_unique<Store>(std::vector<TierPtr>{tier}, Namespace(fields));
  };
  const auto q4_0 = with("q4_0");
  const auto iq4_nl = with("iq4_nl");
  std::vector<std::byte> row(18, std::byte{1});
  const std::vector<std::span<const std::byte>> from{row};
  ASSERT_EQ(Outcomes(q4_0->put_bytes(keys_of({1}), from).wait()), all(Outcome::kOk, 1));
  std::vector<std::byte> back(18, kPoison);
  const std::vector<std::span<std::byte>> to{back};
  EXPECT_EQ(Outcomes(iq4_nl->get_bytes(keys_of({1}), to).wait()), all(Outcome::kMiss, 1));
  EXPECT_EQ(back, std::vector<std::byte>(18, kPoison));

  // Sealed with the right key and namespace, sound checksums, but "rotated" elements: never an answer.
  BlockClient client({tier}, 0, "KV B N H D");
  ASSERT_EQ(client.put({1}), all(Outcome::kOk, 1));
  const std::string path = root + "/" + block_space(0).hex() + "/" + store::file_name(key_of(1), {0, 8}).substr(0, 1) +
                           "/" + store::file_name(key_of(1), {0, 8});
  const std::string sound = read_file(path);
  const auto header = store::parse_header(std::as_bytes(std::span(sound)));
  ASSERT_TRUE(header);
  for (const std::string& order : {"rotated(" + header->content.order + ")", header->content.order + " hadamard",
                                   std::string("H[8] L[2] {key: N[4] D[8] i32, value: N[4] D[8] f32}"),
                                   std::string("H[8] L[2] {key: N[4] D[8] i32, worth: N[4] D[8] i32}"),
                                   std::string("H[8] L[2] {key: N[2] D[16] i32, value: N[2] D[16] i32}"),
                                   std::string("H[4] L[4] {key: N[4] D[8] i32, value: N[4] D[8] i32}")}) {
    store::Content content = header->content;
    content.order = order;
    const store::Frame frame(block_space(0), content);
    std::string image = sound;
    image.resize(static_cast<std::size_t>(frame.image_bytes()));
    frame.seal(reinterpret_cast<std::byte*>(image.data()), key_of(1));
    write_file(path, image);
    EXPECT_NE(client.get({1}), all(Outcome::kOk, 1)) << order;
    client.store.remove(keys_of({1}));
    ASSERT_EQ(client.put({1}), all(Outcome::kOk, 1)) << order;
  }
  EXPECT_EQ(client.get({1}), all(Outcome::kOk, 1));
}

TEST_F(StoreCases, C75NobodyElseCanRead) {
  const mode_t before = ::umask(0);
  fs::create_directory(scratch.path("given"));
  fs::permissions(scratch.path("given"), static_cast<fs::perms>(0755));
  for (const std::string& name : {std::string("given"), std::string("made"), std::string("made/deeper")}) {
    const std::string at = scratch.path(name);
    {
      BlockClient client({directory_tier(small_tier(at))}, 0, "KV B N H D");
      ASSERT_EQ(client.put(range(0, 6)), all(Outcome::kOk, 6));
      for (const std::string& piece : look(at).pieces) write_file(piece, "damaged");
      client.get(range(0, 6));
      EXPECT_TRUE(soon([&] { return look(at).set_aside.size() == 6; }));
      ASSERT_EQ(client.put(range(0, 6)), all(Outcome::kOk, 6));
    }
    struct stat stat;
    ASSERT_EQ(::stat(at.c_str(), &stat), 0);
    EXPECT_EQ(stat.st_mode & 07777, name == "given" ? 0755U : 0700U) << name;
    for (const auto& entry : fs::recursive_directory_iterator(at)) {
      ASSERT_EQ(::lstat(entry.path().c_str(), &stat), 0);
      EXPECT_EQ(stat.st_mode & 07777, S_ISDIR(stat.st_mode) ? 0700U : 0600U) << entry.path();
      const std::string leaf = entry.path().filename();
      EXPECT_TRUE(leaf == "ledger" || leaf == "tmp" || leaf == "quarantine" ||
                  std::regex_match(leaf, std::regex("[0-9a-f]+")))
          << leaf;
      EXPECT_EQ(leaf.find("fault"), std::string::npos) << "a model's name can be read";
    }
    fs::remove_all(scratch.path("made"));
  }
  ::umask(before);
}

TEST_F(StoreCases, C78PinnedChunksStay) {
  const TierPtr host = host_tier({.num_bytes = 2 * kImage});
  Client client({host});
  ASSERT_EQ(client.put({0, 1}), all(Outcome::kOk, 2));
  {
    const Pins pins = client.store.pin(keys_of({0, 1, 2}));
    EXPECT_EQ(pins.found(), (std::vector<bool>{true, true, false}));
    const auto begin = SteadyClock::now();
    EXPECT_EQ(client.put({2}), all(Outcome::kRefused, 1));
    EXPECT_LT(SteadyClock::now() - begin, 3s) << "refused, not waited for until the deadline";
    EXPECT_EQ(client.get({0, 1}), all(Outcome::kOk, 2));
    EXPECT_EQ(client.get({2}), all(Outcome::kMiss, 1));
  }
  ASSERT_EQ(client.put({2, 3}), all(Outcome::kOk, 2)) << "pins were released";
  EXPECT_EQ(client.get({2, 3}), all(Outcome::kOk, 2));

  // The directory: what was looked up and pinned is there when it is loaded, whatever others write meanwhile.
  const TierPtr tier = directory(10 * kImage);
  Client disk({tier});
  ASSERT_EQ(disk.put(range(0, 8)), all(Outcome::kOk, 8));
  {
    const Pins pins = disk.store.pin(keys_of(range(0, 4)));
    EXPECT_EQ(pins.found(), std::vector<bool>(4, true));
    disk.put(range(100, 50));
    EXPECT_EQ(disk.get(range(0, 4)), all(Outcome::kOk, 4));
    // Removed, put and pinned by another: the first one's release is not the second one's.
    disk.remove({0});
    ASSERT_EQ(disk.put({0}), all(Outcome::kOk, 1));
  }
  const Pins second = disk.store.pin(keys_of({0}));
  disk.put(range(200, 50));
  EXPECT_EQ(disk.get({0}), all(Outcome::kOk, 1));

  // An abort: a get that runs into its deadline leaves nothing pinned.
  io->set({.calls = kRead, .targets = kPiece, .effect = Fault::kHang});
  RequestOptions quick;
  quick.deadline = 50ms;
  disk.get({200, 0}, quick);
  io->lift();
  disk.remove(range(0, 400));
  // Until the threads are back from what hung, the disk counts as sick.
  EXPECT_TRUE(soon([&] { return disk.put(range(500, 9)) == all(Outcome::kOk, 9); })) << "all of it can be evicted";
  expect_at_rest(root, tier, io.get());
}

TEST_F(StoreCases, C80TheFirstPagesAreMissing) {
  const TierPtr tier = directory();
  Client client({tier});
  ASSERT_EQ(client.put(range(2, 126)), all(Outcome::kOk, 126));
  EXPECT_EQ(client.store.lookup_prefix(keys_of(range(0, 128))), 0);
  EXPECT_GE(client.counter("unreachable_prefix"), 1U) << "somebody should know";
  // One put of all pages: whenever it is looked at, what is there begins with page 0.
  auto one = small_tier(scratch.path("other"));
  one.num_threads = 1;
  StoreOptions options;
  options.num_threads = 1;
  Client fresh({directory_tier(one)}, 0, kBytes, options);
  std::thread put([&] { fresh.put(range(0, 128)); });
  std::int64_t before = 0;
  do {
    const std::int64_t prefix = fresh.store.lookup_prefix(keys_of(range(0, 128)));
    EXPECT_GE(prefix, before);
    before = prefix;
    const std::vector<bool> found = fresh.lookup(range(0, 128));
    const auto gap = std::find(found.begin(), found.end(), false);
    EXPECT_LE(std::count(gap, found.end(), true), 1) << "page " << gap - found.begin() << " came after later ones";
  } while (before < 128);
  put.join();
}

TEST_F(StoreCases, C82ScatteredBlocksAndSplitRows) {
  const TierPtr tier = directory();
  Store store({tier}, block_space(0));
  Geometry sizes{
      .num_layers = 2, .num_blocks = 6, .block_size = kChunkTokens, .num_kv_heads = kModelHeads, .head_size = 8};
  sizes.dtype = DType::kI32;
  Memory src(Layout("KV B N H D", sizes), 1);
  Memory dst(Layout("B H N KV D", sizes), 2);
  Memory expected = dst;
  const std::vector<Key> keys = keys_of({1, 4});
  ASSERT_EQ(Outcomes(store.put(keys, src.cache(), std::vector<std::int64_t>{1, 4}).wait()), all(Outcome::kOk, 2));
  ASSERT_EQ(Outcomes(store.get(keys, dst.cache(), std::vector<std::int64_t>{5, 2}).wait()), all(Outcome::kOk, 2));
  convert(src, expected, {{1, 5}, {4, 2}});
  EXPECT_EQ(dst.buffers, expected.buffers);
  sizes.head_size = 80;  // a row of 80 in groups of 32
  EXPECT_THROW(Layout("B {key: {data: N H D i8, scale: N H D[D/32] f32}, value: N H D i8}", sizes), Error);
}

/// Rows that one set of ranks pads to 128 bytes and another to 192: 100 bytes are stored, and both read them.
TEST_F(StoreCases, C83PaddingIsNotStored) {
  const TierPtr tier = directory();
  NamespaceFields fields = fields_like(block_space(0));
  fields.planes = {{"latent", {DType::kU8, 100}}};
  fields.num_kv_heads = 1;
  const Geometry sizes{.num_layers = 2, .num_blocks = 4, .block_size = kChunkTokens, .num_kv_heads = 1, .head_size = 8};
  Memory narrow(Layout("B N@128 {latent: D[100] u8}", sizes), 1);
  Memory wide(Layout("B N@192 {latent: D[100] u8}", sizes), 2);
  Store store({tier}, Namespace(fields));
  const std::vector<std::int64_t> first{0};
  const std::vector<std::int64_t> second{2};
  ASSERT_EQ(Outcomes(store.put(keys_of({1}), narrow.cache(), first).wait()), all(Outcome::kOk, 1));
  ASSERT_EQ(Outcomes(store.put(keys_of({2}), wide.cache(), first).wait()), all(Outcome::kOk, 1));
  Memory expected = wide;
  convert(narrow, expected, {{0, 2}});
  ASSERT_EQ(Outcomes(store.get(keys_of({1}), wide.cache(), second).wait()), all(Outcome::kOk, 1));
  EXPECT_EQ(wide.buffers, expected.buffers) << "and no padding is touched";
  for (const std::string& piece : look(root).pieces) {
    const std::string bytes = read_file(piece);
    const auto header = store::parse_header(std::as_bytes(std::span(bytes)));
    ASSERT_TRUE(header);
    EXPECT_EQ(header->content.payload_bytes(), 2 * kChunkTokens * 100);
  }
}

TEST_F(StoreCases, C86AFileIsHeaderAndPayload) {
  const TierPtr tier = directory();
  const auto size_of_only = [&] {
    const std::vector<std::string> pieces = look(root).pieces;
    EXPECT_EQ(pieces.size(), 1U);
    return static_cast<std::int64_t>(fs::file_size(pieces.at(0)));
  };
  // MLA, on two ranks: one copy.
  NamespaceFields fields = fields_like(block_space(0));
  fields.planes = {{"latent", {DType::kBF16, 512}}, {"rope", {DType::kBF16, 64}}};
  fields.num_kv_heads = 1;
  Store store({tier}, Namespace(fields));
  const Geometry sizes{.num_layers = 2, .num_blocks = 1, .block_size = kChunkTokens, .num_kv_heads = 1, .head_size = 8};
  Memory latent(Layout("B N {latent: D[512], rope: D[64]}", sizes), 1);
  const std::vector<std::int64_t> block{0};
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_EQ(Outcomes(store.put(keys_of({1}), latent.cache(), block).wait()), all(Outcome::kOk, 1));
  }
  constexpr std::int64_t kLatent = 2 * kChunkTokens * (512 + 64) * 2;
  EXPECT_EQ(size_of_only(), 4096 + store::whole_pages(kLatent));
  store.remove(keys_of({1}));
  ASSERT_TRUE(soon([&] { return look(root).pieces.empty(); }));
  // Grouped-query attention: keys and values of all heads once, no padding per head.
  BlockClient gqa({tier}, 1, "KV B N H D");
  ASSERT_EQ(gqa.put({1}), all(Outcome::kOk, 1));
  EXPECT_EQ(size_of_only(), 4096 + store::whole_pages(2 * 2 * kChunkTokens * kModelHeads * 8 * 4));
}

/// A producer that says when it is done: what is stored is what it wrote last.
TEST_F(StoreCases, C89StoredAfterItWasWritten) {
  const TierPtr host = host_tier({.num_bytes = 300 * kImage});
  Client client({host});
  for (int run = 0; run < 200; ++run) {
    std::vector<std::byte> block(kBytes, kPoison);
    std::atomic<bool> written{false};
    std::thread producer([&] {
      if (run % 10 == 0) std::this_thread::sleep_for(1ms);
      const std::vector<std::byte> now = chunk_of(0, run, kBytes);
      std::copy(now.begin(), now.end(), block.begin());
      written = true;
    });
    RequestOptions options;
    options.after = [&] { return written.load(); };
    const std::vector<std::span<const std::byte>> from{block};
    const Job job = client.store.put_bytes(keys_of({run}), from, options);
    ASSERT_EQ(Outcomes(job.wait()), all(Outcome::kOk, 1));
    producer.join();
    ASSERT_EQ(client.get({run}), all(Outcome::kOk, 1)) << "run " << run;
  }
}

TEST_F(StoreCases, C90LoadedAfterTheReaderIsDone) {
  const TierPtr host = host_tier({.num_bytes = 8 * kImage});
  Client client({host});
  ASSERT_EQ(client.put({1}), all(Outcome::kOk, 1));
  std::vector<std::byte> block(kBytes, std::byte{7});
  std::atomic<bool> read_done{false};
  RequestOptions options;
  options.after = [&] { return read_done.load(); };
  const std::vector<std::span<std::byte>> to{block};
  const Job job = client.store.get_bytes(keys_of({1}), to, options);
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(std::count(block.begin(), block.end(), std::byte{7}), static_cast<std::ptrdiff_t>(kBytes))
        << "overwritten";
    EXPECT_FALSE(job.done());
    std::this_thread::sleep_for(1ms);
  }
  read_done = true;
  EXPECT_EQ(Outcomes(job.wait()), all(Outcome::kOk, 1));
  EXPECT_EQ(block, chunk_of(0, 1, kBytes));
}

TEST_F(StoreCases, C91ListsAndBuffersOfTheCaller) {
  const TierPtr tier = directory();
  BlockClient other({tier}, 0, "KV B N H D");
  ASSERT_EQ(other.put({1, 2, 3}), all(Outcome::kOk, 3));
  Store store({tier}, block_space(0));
  Geometry sizes{
      .num_layers = 2, .num_blocks = 6, .block_size = kChunkTokens, .num_kv_heads = kModelHeads, .head_size = 8};
  sizes.dtype = DType::kI32;
  Memory straight(Layout("KV B N H D", sizes));
  Memory changed(Layout("KV B N H D", sizes));
  ASSERT_EQ(Outcomes(store.get(keys_of({1, 2}), straight.cache(), std::vector<std::int64_t>{1, 2}).wait()),
            all(Outcome::kOk, 2));
  std::atomic<bool> go{false};
  RequestOptions options;
  options.after = [&] { return go.load(); };
  std::vector<Key> keys = keys_of({1, 2});
  std::vector<std::int64_t> blocks{1, 2};
  std::optional<Job> job;
  {
    const Cache cache = changed.cache();
    job = store.get(keys, cache, blocks, options);
  }
  keys = keys_of({3, 3});
  blocks = {5, 0};
  go = true;
  ASSERT_EQ(Outcomes(job->wait()), all(Outcome::kOk, 2));
  EXPECT_EQ(changed.buffers, straight.buffers) << "the result follows the lists that were given";
  // The image is made when the put begins; then the caller's memory may change although the disk has nothing yet.
  io->set({.calls = kWrite, .targets = kDraft, .effect = Fault::kHang});
  std::vector<std::byte> chunk = chunk_of(5, 9, kBytes);
  Client raw({tier}, 5);
  const std::vector<std::span<const std::byte>> from{chunk};
  const Job put = raw.store.put_bytes(keys_of({9}), from);
  ASSERT_TRUE(soon([&] { return io->hanging() == 1; }));
  std::fill(chunk.begin(), chunk.end(), std::byte{0});
  io->lift();
  ASSERT_EQ(Outcomes(put.wait()), all(Outcome::kOk, 1));
  EXPECT_EQ(raw.get({9}), all(Outcome::kOk, 1));
}

TEST_F(StoreCases, C93AFullQueueRefusesAtOnce) {
  StoreOptions options;
  options.queue_chunks = 4;
  options.num_threads = 1;
  const TierPtr tier = directory();
  Client client({tier}, 0, kBytes, options);
  std::atomic<bool> go{false};
  RequestOptions gate;
  gate.after = [&] { return go.load(); };
  std::vector<std::byte> chunk = chunk_of(0, 1, kBytes);
  std::vector<Job> jobs;
  std::chrono::nanoseconds slowest{0};
  for (int i = 0; i < 100; ++i) {
    const std::vector<std::span<const std::byte>> from{chunk};
    const auto begin = SteadyClock::now();
    jobs.push_back(client.store.put_bytes(keys_of({1}), from, gate));
    slowest = std::max<std::chrono::nanoseconds>(slowest, SteadyClock::now() - begin);
  }
  EXPECT_LT(slowest, 100ms) << "10 ms on a machine that does nothing else";
  const auto refused = std::count_if(jobs.begin(), jobs.end(),
                                     [](const Job& job) { return job.done() && job.wait()[0] == Outcome::kRefused; });
  EXPECT_GE(refused, 90) << "more than the queue takes";
  go = true;
  int ok = 0;
  for (const Job& job : jobs) ok += job.wait()[0] == Outcome::kOk ? 1 : 0;
  EXPECT_EQ(ok, 100 - refused);
  EXPECT_EQ(client.counter("put_refused"), static_cast<std::uint64_t>(refused));

  // A tier's own queue, with a disk that does not answer.
  auto slow = small_tier(scratch.path("slow"));
  slow.queue_chunks = 4;
  const auto hung = std::make_shared<FaultIo>();
  Client other({store::make_directory_tier(slow, hung)});
  hung->set({.calls = kWrite, .targets = kDraft, .effect = Fault::kHang});
  RequestOptions quick;
  quick.deadline = 300ms;
  const Outcomes got = other.put(range(0, 100), quick);
  EXPECT_EQ(count(got, Outcome::kOk), 0);
  EXPECT_GE(count(got, Outcome::kRefused), 80);
  hung->lift();
}

}  // namespace
}  // namespace kvstride::test
