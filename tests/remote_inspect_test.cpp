// SPDX-License-Identifier: Apache-2.0
// What an engine's objects look like from outside: listing, headers, checking, removing; over an engine in memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "kvstride/error.h"
#include "memory_engine.h"
#include "store/folders.h"
#include "store/remote/inspect.h"
#include "store/remote/remote_tier.h"
#include "store_blocks.h"

namespace kvstride::test {
namespace {

using store::Answer;
using store::Check;
using store::ChunkFile;
using store::RemoteSpace;
using store::RemoteStore;
using State = Check::State;

constexpr store::Patience kQuick{500ms, 500ms, 500ms, 1ms};

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

class RemoteInspect : public testing::Test {
 protected:
  RemoteInspect() : engine_(std::make_shared<MemoryEngine>()), store_(engine_, kQuick) {}

  /// Chunks of namespace `space`, as a tier writes them.
  void put(int space, const std::vector<int>& numbers, std::int64_t first = 0, std::int64_t count = kModelHeads) {
    RemoteTierOptions options;
    options.staging_bytes = 16 << 20;
    BlockClient client({store::make_remote_tier(options, engine_)}, space, "B N KV H D", first, count);
    ASSERT_EQ(client.put(numbers), Outcomes(std::vector<Outcome>(numbers.size(), Outcome::kOk)));
  }
  void write(const std::string& name, std::size_t bytes) { engine_->objects[name].assign(bytes, std::byte{7}); }

  std::vector<ChunkFile> files(int space, std::vector<store::Stray>* strays = nullptr) const {
    std::vector<ChunkFile> out;
    EXPECT_TRUE(RemoteSpace(store_, hex(space)).list([&](const ChunkFile& one) { out.push_back(one); }, strays));
    return out;
  }
  std::map<std::string, Check> verified(int space, int threads = 3) const {
    const RemoteSpace of(store_, hex(space));
    std::map<std::string, Check> out;
    store::verify(of, files(space), threads, [&](const ChunkFile& file, const Check& check) {
      EXPECT_TRUE(out.emplace(of.path_of(file), check).second) << "told twice";
      return true;
    });
    return out;
  }
  static std::string hex(int space) { return block_space(space).hex(); }

  std::shared_ptr<MemoryEngine> engine_;
  RemoteStore store_;
};

TEST_F(RemoteInspect, ListsWhatTiersWroteAndNothingElse) {
  put(1, {1, 2, 3});
  put(1, {3, 4}, 0, 4);
  put(2, {9});
  write("README", 3);
  write("a/b/c", 3);
  write(std::string(64, 'A') + "/0/x", 3);

  std::vector<std::string> spaces{hex(1), hex(2)};
  std::sort(spaces.begin(), spaces.end());
  EXPECT_EQ(store_.spaces(), spaces);
  EXPECT_EQ(store_.space(hex(2).substr(0, 8)), hex(2));
  EXPECT_NE(error_of([&] { store_.space(std::string(64, '0')); }).find("no namespace starts with"), std::string::npos);
  EXPECT_NE(error_of([&] { store_.spaces("XY"); }).find("lower-case hex"), std::string::npos);

  const std::vector<ChunkFile> found = files(1);
  ASSERT_EQ(found.size(), 5U);
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const std::string name = RemoteSpace(store_, hex(1)).path_of(found[i]);
    ASSERT_EQ(engine_->objects.count(name), 1U) << name;
    EXPECT_EQ(found[i].bytes, static_cast<std::int64_t>(engine_->objects[name].size()));
    EXPECT_EQ(found[i].used, 0) << "this engine does not tell";
    bytes += found[i].bytes;
    if (i > 0) {
      EXPECT_TRUE(store::by_name(found[i - 1], found[i]));
    }
  }
  const store::SpaceSummary sum = store::summarize(RemoteSpace(store_, hex(1)));
  EXPECT_EQ(sum.chunks, 4);
  EXPECT_EQ(sum.files, 5);
  EXPECT_EQ(sum.bytes, bytes);
  EXPECT_TRUE(sum.whole);
  ASSERT_TRUE(sum.header.has_value()) << sum.why;
  EXPECT_EQ(sum.header->space_text, block_space(1).text());
}

TEST_F(RemoteInspect, StraysAreToldMarkersAreNone) {
  put(1, {1});
  const ChunkFile one = files(1).at(0);
  const std::string name = one.name();
  const char other = name[0] == '0' ? '1' : '0';
  write(hex(1) + "/" + other + "/" + name, 8192);
  write(hex(1) + "/" + name[0] + std::string("/no-chunk"), 1);
  write(hex(1) + "/note", 1);
  std::vector<store::Stray> strays;
  EXPECT_EQ(files(1, &strays).size(), 1U);
  std::map<std::string, std::string> told;
  for (const store::Stray& stray : strays) told[stray.path] = stray.what;
  const std::map<std::string, std::string> right{{hex(1) + "/" + other + "/" + name, "in the folder of another digit"},
                                                 {hex(1) + "/" + name[0] + "/no-chunk", "no name of a chunk"},
                                                 {hex(1) + "/note", "no name of the store"}};
  EXPECT_EQ(told, right);

  std::vector<store::Marker> markers;
  RemoteSpace(store_, hex(1)).list([](const ChunkFile&) {}, nullptr, &markers);
  ASSERT_EQ(markers.size(), 1U);
  EXPECT_EQ(markers[0].name, hex(1) + "/" + store::heads_name({0, kModelHeads}));
}

TEST_F(RemoteInspect, LengthsThatAListingDoesNotTellAreAskedFor) {
  put(1, {1, 2, 3});
  /// As an engine that lists names alone, some of them twice.
  class Namer final : public store::Engine {
   public:
    explicit Namer(std::shared_ptr<MemoryEngine> of) : of_(std::move(of)) {}
    const char* kind() const override { return "namer"; }
    std::string detail() const override { return "names"; }
    std::int64_t largest() const override { return of_->largest(); }
    bool reads_ranges() const override { return false; }
    int num_threads() const override { return 1; }
    std::size_t batch() const override { return 2; }
    std::size_t names_a_trip() const override { return 2; }
    void find(std::span<store::FindItem> items, store::Clock::time_point deadline) override {
      EXPECT_LE(items.size(), 2U);
      of_->find(items, deadline);
    }
    void read(std::span<store::ReadItem> items, store::Clock::time_point deadline, const Done& done) override {
      EXPECT_LE(items.size(), 2U);
      for (const store::ReadItem& item : items) EXPECT_EQ(item.ranges.at(0).end, item.bytes) << "a part";
      of_->read(items, deadline, done);
    }
    void write(std::span<store::WriteItem>, store::Clock::time_point, const Done&) override { FAIL(); }
    void remove(std::span<store::RemoveItem>, store::Clock::time_point) override { FAIL(); }
    Answer list(const std::string& folder, store::Clock::time_point deadline,
                const std::function<bool(const store::ListedObject&)>& use) override {
      return of_->list(folder, deadline, [&](const store::ListedObject& one) {
        return use({one.name, -1, 0}) && use({one.name, -1, 0});
      });
    }

   private:
    std::shared_ptr<MemoryEngine> of_;
  };
  const RemoteStore store(std::make_shared<Namer>(engine_), kQuick);
  const RemoteSpace space(store, hex(1));
  const store::SpaceSummary sum = store::summarize(space);
  EXPECT_EQ(sum.files, 3);
  EXPECT_EQ(sum.bytes, 3 * 8192);
  EXPECT_TRUE(sum.header.has_value()) << sum.why;
  std::vector<ChunkFile> all;
  space.list([&](const ChunkFile& one) { all.push_back(one); });
  int sound = 0;
  store::verify(space, all, 2,
                [&](const ChunkFile&, const Check& check) { return sound += check.state == State::kSound, true; });
  EXPECT_EQ(sound, 3);
}

TEST_F(RemoteInspect, EveryFlippedByteIsFoundAndNoOther) {
  put(1, {1, 2, 3, 4});
  std::vector<std::string> names;
  for (const auto& [name, check] : verified(1)) {
    EXPECT_EQ(check.state, State::kSound) << check.why;
    names.push_back(name);
  }
  ASSERT_EQ(names.size(), 4U);
  std::mt19937 dice(7);
  for (int i = 0; i < 60; ++i) {
    const std::string& name = names[dice() % names.size()];
    std::vector<std::byte>& object = engine_->objects[name];
    const std::size_t at = dice() % object.size();
    const std::byte right = object[at];
    object[at] ^= std::byte{1} << (dice() % 8);
    for (const auto& [other, check] : verified(1)) {
      EXPECT_EQ(check.state, other == name ? State::kDamaged : State::kSound) << "byte " << at << ": " << check.why;
    }
    object[at] = right;
  }
}

TEST_F(RemoteInspect, CutLongAndMisnamedObjectsAreDamaged) {
  put(1, {1, 2});
  put(2, {3});
  const std::string name = verified(1).begin()->first;
  const std::vector<std::byte> right = engine_->objects[name];
  const auto why = [&] {
    const Check check = verified(1).at(name);
    EXPECT_EQ(check.state, State::kDamaged);
    return check.why;
  };
  for (const std::size_t bytes : {0U, 1U, 191U, 4095U, 4096U, 8191U, 12288U}) {
    engine_->objects[name].resize(bytes);
    const std::string text = why();
    EXPECT_TRUE(text.find("cut off") == 0 || text.find("more than it should have") != std::string::npos ||
                text == "the header is cut off")
        << bytes << ": " << text;
    engine_->objects[name] = right;
  }
  engine_->objects[name] = engine_->objects[verified(1).rbegin()->first];
  EXPECT_NE(why().find("another chunk's"), std::string::npos);
  engine_->objects[name] = engine_->objects[verified(2).begin()->first];
  EXPECT_NE(why().find("another namespace's"), std::string::npos);
  engine_->objects[name].assign(8192, std::byte{0});
  EXPECT_EQ(why(), "not a chunk file");
}

TEST_F(RemoteInspect, OfAnObjectThatIsTooLongOnlyTheStartIsRead) {
  put(1, {1});
  const std::string name = verified(1).begin()->first;
  engine_->objects[name].resize(40 << 20);
  std::vector<ChunkFile> all = files(1);
  ASSERT_EQ(all.at(0).bytes, 40 << 20);
  const int reads = engine_->reads;
  const Check check = verified(1).at(name);
  EXPECT_EQ(check.state, State::kDamaged);
  EXPECT_NE(check.why.find("more than it should have"), std::string::npos) << check.why;
  EXPECT_EQ(engine_->reads - reads, 1);
}

TEST_F(RemoteInspect, ChunksLongerThanABatchAreReadPartAfterPart) {
  NamespaceFields fields;
  fields.model = "long";
  fields.revision = "1a";
  fields.planes = {{"state", {DType::kU8, {}}}};
  fields.num_layers = fields.num_kv_heads = fields.head_size = fields.block_size = 1;
  fields.raw = "r";
  const Namespace space(fields);
  const store::Frame frame(space, {"", {}, 37 << 20, 0});
  std::vector<std::byte> image(static_cast<std::size_t>(frame.image_bytes()));
  std::mt19937 dice(3);
  for (std::size_t i = 0; i < image.size(); i += 509) image[i] = static_cast<std::byte>(dice());
  const Key key = Key::chain(nullptr, std::vector<std::uint32_t>{1});
  frame.seal(image.data(), key);
  const std::string file = store::file_name(key, {});
  const std::string name = space.hex() + "/" + file[0] + "/" + file;
  engine_->objects[name] = image;
  const auto check = [&] {
    const RemoteSpace of(store_, space.hex());
    const ChunkFile one{key, {}, 0, frame.image_bytes(), frame.image_bytes(), 0, false};
    return of.verifier()->check({&one, 1}).at(0);
  };
  EXPECT_EQ(check().state, State::kSound) << check().why;
  const int reads = engine_->reads;
  check();
  EXPECT_EQ(engine_->reads - reads, 1 + 3) << "1 MiB, then 16 at a time";
  engine_->objects[name][image.size() - 1] ^= std::byte{1};
  EXPECT_EQ(check().state, State::kDamaged);
  engine_->ranges = false;
  EXPECT_EQ(check().state, State::kDamaged);
}

TEST_F(RemoteInspect, BrokenCallsAreRepeatedOthersNot) {
  put(1, {1, 2, 3});
  std::map<std::string, int> calls;
  int broken = 2;
  engine_->set_fault([&](const std::string& what, const std::string& name) -> std::optional<Answer> {
    if (++calls[what + name] <= broken) return Answer::kBroken;
    return {};
  });
  store_.ask();
  for (const auto& [name, check] : verified(1)) EXPECT_EQ(check.state, State::kSound) << check.why;
  broken = 3;
  calls.clear();
  for (const auto& [name, check] : verified(1)) {
    EXPECT_EQ(check.state, State::kUnreadable);
    EXPECT_EQ(check.why, "the connection or the server failed");
    EXPECT_EQ(calls["read" + name], 3);
  }
  EXPECT_NE(error_of([&] { store_.ask(); }).find("in memory: the connection"), std::string::npos);
  calls.clear();
  engine_->set_fault([&](const std::string& what, const std::string& name) -> std::optional<Answer> {
    ++calls[what + name];
    return Answer::kDenied;
  });
  EXPECT_NE(error_of([&] { store_.ask(); }).find("denied"), std::string::npos);
  for (const auto& [name, check] : verified(1)) {
    EXPECT_EQ(check.state, State::kUnreadable);
    EXPECT_EQ(calls["read" + name], 1);
  }
  EXPECT_EQ(store::summarize(RemoteSpace(store_, hex(1))).why, store_.why(Answer::kDenied));
}

TEST_F(RemoteInspect, LateAnswersEndInTime) {
  put(1, {1});
  const std::vector<ChunkFile> one = files(1);
  engine_->latency_us = 5'000'000;
  const auto begin = store::Clock::now();
  EXPECT_NE(error_of([&] { store_.ask(); }).find("no answer in time"), std::string::npos);
  EXPECT_NE(error_of([&] { store_.spaces(); }).find("cannot be listed: no answer in time"), std::string::npos);
  const RemoteSpace space(store_, hex(1));
  EXPECT_EQ(space.verifier()->check(one).at(0).state, State::kUnreadable);
  std::vector<store::Stray> strays;
  EXPECT_FALSE(space.list([](const ChunkFile&) {}, &strays));
  EXPECT_EQ(strays.at(0).what, "not readable: no answer in time");
  EXPECT_LT(store::Clock::now() - begin, 4s);
}

TEST_F(RemoteInspect, EnginesThatDoNotListSaySo) {
  engine_->lists = false;
  EXPECT_NE(error_of([&] { store_.spaces(); }).find("in memory: this engine does not list its objects"),
            std::string::npos);
}

TEST_F(RemoteInspect, WhatGoesMeanwhileIsNoDamage) {
  put(1, {1, 2});
  const RemoteSpace space(store_, hex(1));
  const std::vector<ChunkFile> all = files(1);
  engine_->objects.erase(space.path_of(all[0]));
  engine_->objects[space.path_of(all[1])].resize(4096);  // replaced by something of another length
  const std::vector<Check> checks = space.verifier()->check(all);
  EXPECT_EQ(checks.at(0).state, State::kGone);
  EXPECT_EQ(checks.at(1).state, State::kGone);
}

TEST_F(RemoteInspect, RemovesByNameInBatchesAndStops) {
  std::vector<std::string> names;
  for (int i = 0; i < 2500; ++i) {
    names.push_back("x/" + std::to_string(i));
    write(names.back(), 1);
  }
  std::size_t told = 0;
  store_.remove(names, [&](std::size_t i, Answer answer) {
    EXPECT_EQ(i, told++);
    EXPECT_EQ(answer, Answer::kOk);
    return told < 1200;
  });
  EXPECT_EQ(told, 1200U);
  EXPECT_EQ(engine_->objects.size(), 500U) << "whole batches of 1,000";
}

}  // namespace
}  // namespace kvstride::test
