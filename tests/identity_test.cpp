// SPDX-License-Identifier: Apache-2.0
// Namespaces and keys: golden vectors, random fields, every refusal.
#include "kvstride/identity.h"

#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <tuple>

#include "kvstride/error.h"

namespace kvstride {
namespace {

using nlohmann::json;

json vectors() {
  std::ifstream file(KVSTRIDE_TEST_DATA "/identity.json");
  return json::parse(file);
}

std::vector<std::byte> bytes_of(const std::string& hex) { return from_hex(hex).value(); }

NamespaceFields fields_of(const json& in) {
  NamespaceFields out;
  const auto number = [&](const char* name, std::int64_t absent) { return in.value(name, absent); };
  const auto text = [&](const char* name) {
    return in.contains(name) ? std::optional<std::string>(in.at(name)) : std::nullopt;
  };
  out.model = in.at("model");
  out.revision = in.at("revision");
  out.adapter = text("adapter");
  for (const auto& [name, spec] : in.at("planes").items()) {
    out.planes[name] = PlaneSpec::parse(spec.get<std::string>(), name);
  }
  out.num_layers = in.at("num_layers");
  out.num_kv_heads = in.at("num_kv_heads");
  out.head_size = in.at("head_size");
  out.block_size = in.at("block_size");
  if (in.contains("value_head_size")) out.value_head_size = in.at("value_head_size");
  out.first_layer = number("first_layer", 0);
  out.group = number("group", 0);
  out.salt_policy = text("salt_policy").value_or("none");
  out.raw = text("raw");
  return out;
}

NamespaceFields plain() {
  NamespaceFields out;
  out.model = "acme/chat-8b";
  out.revision = "5f0b02c7";
  out.planes = {{"key", {DType::kBF16, {}}}, {"value", {DType::kBF16, {}}}};
  out.num_layers = 32;
  out.num_kv_heads = 8;
  out.head_size = 128;
  out.block_size = 16;
  return out;
}

using Change = std::function<void(NamespaceFields&)>;
Namespace changed(const Change& change) {
  NamespaceFields fields = plain();
  change(fields);
  return Namespace(std::move(fields));
}

/// Calls and returns the message of the Error(kArgument) that must come.
std::string refusal(const std::function<void()>& call, ErrorCode code = ErrorCode::kArgument) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    return error.what();
  }
  return "no error";
}
std::string refusal(const Change& change) {
  return refusal([&] { changed(change); });
}

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST(Hex, ThereAndBack) {
  std::vector<std::byte> all;
  for (int i = 0; i < 256; ++i) all.push_back(static_cast<std::byte>(i));
  const std::string hex = to_hex(all);
  EXPECT_EQ(hex.substr(0, 6), "000102");
  EXPECT_EQ(hex.substr(506), "fdfeff");
  EXPECT_EQ(from_hex(hex), all);
  EXPECT_EQ(to_hex({}), "");
  EXPECT_EQ(from_hex(""), std::vector<std::byte>{});
  for (const char* wrong : {"0", "0g", "AB", "0x", "ab ", " ab", "a\nb0"}) EXPECT_EQ(from_hex(wrong), std::nullopt);
}

TEST(Namespace, GoldenVectors) {
  const json all = vectors();
  ASSERT_GE(all.at("namespaces").size(), 5U);
  for (const json& vector : all.at("namespaces")) {
    const Namespace space(fields_of(vector.at("fields")));
    EXPECT_EQ(space.text(), vector.at("text").get<std::string>());
    EXPECT_EQ(space.hex(), vector.at("hex").get<std::string>());
    EXPECT_EQ(to_hex(space.digest()), space.hex());
    const Namespace again = Namespace::parse(space.text());
    EXPECT_EQ(again, space);
    EXPECT_EQ(again.fields(), space.fields());
    EXPECT_EQ(again.digest(), space.digest());
  }
}

TEST(Namespace, DefaultsGivenOrNotAreOneText) {
  const Namespace space(plain());
  EXPECT_EQ(changed([](auto& f) { f.value_head_size = 128; }), space);
  EXPECT_EQ(changed([](auto& f) { f.planes["key"].dim = 128; }), space);
  EXPECT_EQ(changed([](auto& f) { f.planes["value"].dim = 128; }), space);
  const Namespace narrow = changed([](auto& f) { f.value_head_size = 64; });
  EXPECT_NE(narrow, space);
  EXPECT_EQ(changed([](auto& f) { f.planes["value"].dim = 64; }), narrow);
  EXPECT_EQ(narrow.fields().value_head_size, 64);
  EXPECT_EQ(narrow.fields().planes.at("key").dim, 128);
  EXPECT_EQ(narrow.fields().planes.at("value").dim, 64);
  EXPECT_EQ(space.fields().value_head_size, std::nullopt);
  // A plane's own number goes before value_head_size, and names that only start alike are values too.
  const Namespace scaled = changed([](auto& f) {
    f.value_head_size = 64;
    f.planes["value"].dim = 32;
    f.planes["value_scale"] = {DType::kF32, {}};
  });
  EXPECT_EQ(scaled.fields().planes.at("value").dim, 32);
  EXPECT_EQ(scaled.fields().planes.at("value_scale").dim, 64);
}

TEST(Namespace, EveryFieldCounts) {
  const std::vector<Change> changes{
      [](auto&) {},
      [](auto& f) { f.model = "acme/chat-8c"; },
      [](auto& f) { f.model = "acme/chat-8b "; },
      [](auto& f) { f.model += '\0'; },
      [](auto& f) { f.model = "acme/chat-8b\nrevision=5f0b02c7"; },
      [](auto& f) { f.model = "acme%2Fchat-8b"; },
      [](auto& f) { f.model = "Acme/chat-8b"; },
      [](auto& f) { f.revision = "5f0b02c8"; },
      [](auto& f) { f.adapter = "a"; },
      [](auto& f) { f.adapter = "b"; },
      [](auto& f) { f.raw = "a"; },
      [](auto& f) { f.salt_policy = "a"; },
      [](auto& f) { f.planes["key"].dtype = DType::kF16; },
      [](auto& f) { f.planes["value"].dtype = DType::kF16; },
      [](auto& f) { f.planes["key"].dim = 64; },
      [](auto& f) { f.planes["value"].dim = 64; },
      [](auto& f) { f.planes.erase("value"); },
      [](auto& f) {
        f.planes["key_scale"] = {DType::kF32, 1};
      },
      [](auto& f) { f.num_layers = 31; },
      [](auto& f) { f.first_layer = 1; },
      [](auto& f) { f.num_kv_heads = 4; },
      [](auto& f) { f.head_size = 64; },
      [](auto& f) { f.block_size = 32; },
      [](auto& f) { f.group = 1; },
  };
  std::set<std::string> texts;
  std::set<std::string> digests;
  for (const Change& change : changes) {
    const Namespace space = changed(change);
    EXPECT_TRUE(texts.insert(space.text()).second) << space.text();
    EXPECT_TRUE(digests.insert(space.hex()).second) << space.text();
  }
}

TEST(Namespace, C18EveryDTypeIsAnother) {
  std::set<std::string> seen;
  for (int i = 0; i <= static_cast<int>(DType::kI32); ++i) {
    const Namespace space = changed([&](auto& f) { f.planes["key"].dtype = static_cast<DType>(i); });
    EXPECT_TRUE(seen.insert(space.hex()).second);
    EXPECT_HAS(space.text(), "plane.key=" + std::string(name_of(static_cast<DType>(i))) + "[128]\n");
  }
}

/// Everything that fields say of bytes, as a tuple: another way to ask whether two are the same.
auto meaning(const NamespaceFields& f) {
  std::vector<std::tuple<std::string, DType, std::int64_t>> planes;
  for (const auto& [name, plane] : f.planes) {
    const bool value = name.substr(0, 5) == "value";
    planes.emplace_back(name, plane.dtype,
                        plane.dim.value_or(value ? f.value_head_size.value_or(f.head_size) : f.head_size));
  }
  return std::make_tuple(f.model, f.revision, f.adapter, planes, f.num_layers, f.first_layer, f.num_kv_heads,
                         f.head_size, f.block_size, f.group, f.salt_policy, f.raw);
}

class Random {
 public:
  explicit Random(std::uint32_t seed) : engine_(seed) {}
  std::int64_t number(std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(engine_);
  }
  /// From few pieces that a careless format would mix up.
  std::string text() {
    static const std::vector<std::string> kPieces{"a", "%", "%41", "=", "\n", "model=", std::string(1, '\0'),
                                                  "é", " ", ".."};
    std::string out = "x";
    for (auto i = number(0, 3); i > 0; --i) out += kPieces[static_cast<std::size_t>(number(0, 9))];
    return out;
  }
  std::optional<std::string> maybe_text() { return number(0, 1) == 0 ? std::nullopt : std::optional(text()); }
  NamespaceFields fields() {
    NamespaceFields out;
    out.model = text();
    if (number(0, 3) != 0) out.model = "x";
    out.revision = number(0, 3) == 0 ? text() : "x";
    if (number(0, 3) == 0) out.adapter = maybe_text();
    if (number(0, 3) == 0) out.raw = maybe_text();
    for (const char* name : {"key", "value", "value_scale", "k"}) {
      if (number(0, 2) == 0) continue;
      PlaneSpec plane{number(0, 5) == 0 ? DType::kF16 : DType::kBF16, {}};
      if (number(0, 2) == 0) plane.dim = number(1, 2);
      out.planes[name] = plane;
    }
    if (out.planes.empty()) out.planes["key"] = {};
    out.num_layers = number(1, 2);
    out.head_size = number(1, 2);
    if (number(0, 1) == 0) out.value_head_size = number(1, 2);
    out.num_kv_heads = 1;
    out.block_size = number(1, 2) == 1 ? 1 : std::int64_t{1} << 48;
    out.first_layer = number(0, 9) == 0 ? 1 : 0;
    out.group = number(0, 9) == 0 ? 1 : 0;
    return out;
  }

 private:
  std::mt19937 engine_;
};

TEST(Namespace, RandomFieldsHaveOneTextEach) {
  Random random(5);
  std::map<std::string, decltype(meaning(plain()))> by_text;
  std::map<decltype(meaning(plain())), std::string> by_meaning;
  int again = 0;
  for (int i = 0; i < 30000; ++i) {
    const NamespaceFields fields = random.fields();
    const Namespace space(fields);
    const auto meant = meaning(fields);
    EXPECT_EQ(meaning(space.fields()), meant);
    const auto [at, fresh] = by_text.emplace(space.text(), meant);
    if (!fresh) {
      ++again;
      ASSERT_EQ(at->second, meant) << space.text();
    }
    ASSERT_EQ(by_meaning.emplace(meant, space.text()).first->second, space.text());
    if (fresh) {
      const Namespace parsed = Namespace::parse(space.text());
      ASSERT_EQ(parsed.text(), space.text());
      ASSERT_EQ(parsed.fields(), space.fields());
    }
  }
  EXPECT_GT(again, 1000);  // the pieces are few, so the same came twice
  EXPECT_GT(by_text.size(), 5000U);
}

TEST(Namespace, C17AutoIsRefused) {
  for (const char* word : {"auto", "AUTO", "Auto", " auto", "auto\n", "aUtO\t "}) {
    EXPECT_HAS(refusal([&](auto& f) { f.model = word; }), "model");
    EXPECT_HAS(refusal([&](auto& f) { f.revision = word; }), "revision");
    EXPECT_HAS(refusal([&](auto& f) { f.adapter = word; }), "adapter");
    EXPECT_HAS(refusal([&](auto& f) { f.salt_policy = word; }), "salt_policy");
    EXPECT_HAS(refusal([&](auto& f) { f.raw = word; }), "raw");
  }
  EXPECT_HAS(refusal([](auto& f) { f.planes["Auto"] = {}; }), "planes: 'Auto'");
  for (const char* raw : {"order=auto,isa=amx", "isa=AUTO", "Auto;x", "a auto b"}) {
    EXPECT_HAS(refusal([&](auto& f) { f.raw = raw; }), "raw is");
  }
  for (const char* spec : {"auto", "AUTO", "Auto[128]", " auto"}) {
    EXPECT_HAS(refusal([&] { PlaneSpec::parse(spec, "key"); }), "'key' is");
  }
  // Words that only hold it are other words.
  for (const char* fine : {"acme/auto-chat", "autos", "xauto"}) {
    EXPECT_NO_THROW(changed([&](auto& f) { f.model = f.revision = *(f.adapter = fine); }));
  }
  EXPECT_NO_THROW(changed([](auto& f) { f.raw = "automatic,autos,x_auto"; }));
}

TEST(Namespace, C67RevisionsThatMoveAreRefused) {
  for (const char* name : {"main", "master", "Main", "HEAD", "latest", "trunk", "tip", "default", "stable", "nightly",
                           "dev", "develop", "None", "null", "unknown", " main "}) {
    const std::string message = refusal([&](auto& f) { f.revision = name; });
    EXPECT_HAS(message, "revision is '");
    EXPECT_HAS(message, "give a commit or a fingerprint");
    EXPECT_HAS(refusal([&](auto& f) { f.adapter = name; }), "adapter is '");
  }
  EXPECT_HAS(refusal([](auto& f) { f.revision = "refs/heads/main"; }), "'refs/heads/main'");
  for (const char* name : {"v1.2", "maintained", "main-5f0b", "refs/pr/12", "5f0b02c7", "x/mainly"}) {
    EXPECT_NO_THROW(changed([&](auto& f) { f.revision = name; })) << name;
  }
  EXPECT_NO_THROW(changed([](auto& f) { f.model = "main"; }));
  EXPECT_NO_THROW(changed([](auto& f) { f.adapter = "weights/main"; }));
}

TEST(Namespace, TextsThatAreNone) {
  for (const std::string text : {"", " ", "\t\r\n", "\x7F", "\x01"}) {
    EXPECT_HAS(refusal([&](auto& f) { f.model = text; }), "model is");
    EXPECT_HAS(refusal([&](auto& f) { f.revision = text; }), "revision is");
    EXPECT_HAS(refusal([&](auto& f) { f.adapter = text; }), "adapter is");
    EXPECT_HAS(refusal([&](auto& f) { f.salt_policy = text; }), "salt_policy is");
    EXPECT_HAS(refusal([&](auto& f) { f.raw = text; }), "raw is");
  }
  EXPECT_HAS(refusal([](auto& f) { f.model = std::string(3, '\0'); }), "nothing but blanks");
  // Of each kind: a lone continuation, a cut sequence, overlong forms, a surrogate, beyond U+10FFFF, bytes never used.
  for (const char* text : {"a\x80", "a\xC3", "a\xC3(", "\xC0\x80", "\xE0\x80\x80", "\xF0\x80\x80\x80", "\xED\xA0\x80",
                           "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF", "\xE2\x82", "\xF0\x9F\x98"}) {
    EXPECT_HAS(refusal([&](auto& f) { f.raw = text; }), "not UTF-8");
  }
  for (const char* text :
       {"é", "€", "\xF0\x9F\x98\x80", "\xED\x9F\xBF", "\xEE\x80\x80", "\xF4\x8F\xBF\xBF", "\xC2\x80"}) {
    EXPECT_NO_THROW(changed([&](auto& f) { f.raw = text; })) << text;
  }
  EXPECT_NO_THROW(changed([](auto& f) { f.model = std::string(4096, 'a'); }));
  const std::string longer = refusal([](auto& f) { f.model = std::string(4097, '\n'); });
  EXPECT_HAS(longer, "model has 4097 bytes, may have 4096");
  // What is shown stays short, and one line.
  EXPECT_LT(refusal([](auto& f) { f.model = std::string(4000, '\n'); }).size(), 300U);
}

TEST(Namespace, SizesAndPlanes) {
  using Size = std::int64_t NamespaceFields::*;
  const std::vector<std::tuple<const char*, Size, std::int64_t>> sizes{
      {"num_layers", &NamespaceFields::num_layers, 1},   {"num_kv_heads", &NamespaceFields::num_kv_heads, 1},
      {"head_size", &NamespaceFields::head_size, 1},     {"block_size", &NamespaceFields::block_size, 1},
      {"first_layer", &NamespaceFields::first_layer, 0}, {"group", &NamespaceFields::group, 0}};
  const std::int64_t most = std::int64_t{1} << 48;
  for (const auto& [name, size, least] : sizes) {
    for (const std::int64_t wrong : {least - 1, most + 1, std::numeric_limits<std::int64_t>::min()}) {
      const std::string message = refusal([&, at = size](auto& f) { f.*at = wrong; });
      EXPECT_HAS(message, std::string(name) + " is " + std::to_string(wrong));
      EXPECT_HAS(message, "from " + std::to_string(least) + " to 281474976710656");
    }
    EXPECT_NO_THROW(changed([&, at = size, l = least](auto& f) { f.*at = l; }));
    EXPECT_NO_THROW(changed([&, at = size](auto& f) { f.*at = most; }));
  }
  EXPECT_HAS(refusal([](auto& f) { f.value_head_size = 0; }), "value_head_size is 0");
  EXPECT_HAS(refusal([](auto& f) { f.planes["key"].dim = 0; }), "dim of key is 0");
  EXPECT_HAS(refusal([](auto& f) { f.planes["key"].dim = most + 1; }), "dim of key is 281474976710657");
  EXPECT_HAS(refusal([](auto& f) { f.planes.clear(); }), "planes are missing");
  EXPECT_HAS(refusal([](auto& f) { f.planes["key"].dtype = static_cast<DType>(99); }), "dtype of key is 99");
  for (const std::string name : {"", "1a", "a b", "a.b", "a=b", "a\nb", "é", "../a", "a-b"}) {
    EXPECT_HAS(refusal([&](auto& f) { f.planes[name] = {}; }), "no plane's name");
  }
  EXPECT_NO_THROW(changed([](auto& f) { f.planes["_A9"] = f.planes[std::string(64, 'a')] = {}; }));
  EXPECT_HAS(refusal([](auto& f) { f.planes[std::string(65, 'a')] = {}; }), "no plane's name");
  const auto many = [](int n) {
    return [n](NamespaceFields& f) {
      f.planes.clear();
      for (int i = 0; i < n; ++i) f.planes["p" + std::to_string(i)] = {};
    };
  };
  EXPECT_NO_THROW(changed(many(64)));
  EXPECT_HAS(refusal(many(65)), "65 planes, may be 64");
}

TEST(Namespace, PlaneSpecs) {
  EXPECT_EQ(PlaneSpec::parse("bf16", "key"), (PlaneSpec{DType::kBF16, {}}));
  EXPECT_EQ(PlaneSpec::parse("f8_e4m3[512]", "key"), (PlaneSpec{DType::kF8E4M3, 512}));
  for (const char* wrong : {"bf16[", "bf16[]", "bf16]", "bf16[1", "bf16[x]", "bf16[1]x", "bf16[-1]", "bf16[+1]",
                            "bf16[ 1]", "bf16[1 ]", "bf16[1.0]", "bf16[99999999999999999999]", "[1]"}) {
    const auto code =
        std::string(wrong) == "bf16]" || std::string(wrong) == "[1]" ? ErrorCode::kDType : ErrorCode::kArgument;
    EXPECT_HAS(refusal([&] { PlaneSpec::parse(wrong, "key"); }, code), "planes: 'key' is '") << wrong;
  }
  for (const char* wrong : {"", "bfloat16", "BF16", "fp8", "f32 ", "bf16\n"}) {
    EXPECT_HAS(refusal([&] { PlaneSpec::parse(wrong, "key"); }, ErrorCode::kDType), "none of f32, f16") << wrong;
  }
}

TEST(Namespace, ParsesCanonicalTextOnly) {
  const std::string text = changed([](auto& f) {
                             f.adapter = "a b";
                             f.raw = "é=1";
                           }).text();
  ASSERT_EQ(Namespace::parse(text).text(), text);
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string out = text;
    EXPECT_HAS(out, from);
    return out.replace(out.find(from), from.size(), to);
  };
  const std::vector<std::pair<std::string, std::string>> wrong{
      {"", "first line"},
      {"kvstride-namespace 1", "first line"},
      {replaced("namespace 1", "namespace 2"), "first line"},
      {replaced("namespace 1\n", "namespace 1\r\n"), "first line"},
      {"\n" + text, "first line"},
      {"\xEF\xBB\xBF" + text, "first line"},
      {text.substr(0, text.size() - 1), "has no end"},
      {text + "x", "has no end"},
      {text + "\n", "no '='"},
      {text + "x=1\n", "no known field"},
      {replaced("model=", "Model="), "no known field"},
      {replaced("group=0\n", ""), "line 12"},  // the default, but the line must be there
      {replaced("group=0\n", "group=0\ngroup=0\n"), "line 13"},
      {replaced("salt_policy=none\n", ""), "line"},
      {replaced("num_layers=32", "num_layers=032"), "line 7 is not in canonical form"},
      {replaced("num_layers=32", "num_layers=+32"), "no number"},
      {replaced("num_layers=32", "num_layers=-32"), "no number"},
      {replaced("num_layers=32", "num_layers=32 "), "no number"},
      {replaced("num_layers=32", "num_layers="), "no number"},
      {replaced("num_layers=32", "num_layers=0"), "num_layers is 0"},
      {replaced("num_layers=32", "num_layers=9223372036854775808"), "no number"},
      {replaced("num_layers=32\n", ""), "num_layers is 0"},
      {replaced("model=acme/chat-8b\n", ""), "model is empty"},
      {replaced("revision=5f0b02c7", "revision=main"), "fingerprint"},
      {replaced("adapter=a%20b", "adapter=auto"), "say what"},
      {replaced("adapter=a%20b", "adapter=a b"), "line 4 is not in canonical form"},
      {replaced("adapter=a%20b", "adapter=a%20%62"), "line 4 is not in canonical form"},
      {replaced("%C3", "%c3"), "hex"},
      {replaced("a%20b", "a%2"), "hex"},
      {replaced("a%20b", "a%"), "hex"},
      {replaced("a%20b", "a%FFb"), "not UTF-8"},
      {replaced("bf16[128]", "bf16"), "line 5 is not in canonical form"},
      {replaced("bf16[128]", "bf16[0128]"), "line 5 is not in canonical form"},
      {replaced("bf16[128]", "float16[128]"), "none of"},
      {replaced("plane.key=", "plane.="), "no plane's name"},
      {replaced("plane.key=bf16[128]\nplane.value=bf16[128]\n", "plane.value=bf16[128]\nplane.key=bf16[128]\n"),
       "line 5"},
      {replaced("revision=5f0b02c7\nadapter=a%20b\n", "adapter=a%20b\nrevision=5f0b02c7\n"), "line 3"},
      {replaced("head_size=128\n", "head_size=128\nvalue_head_size=128\n"), "no known field"},
  };
  for (const auto& [bad, words] : wrong) {
    const std::string message = refusal([&, &b = bad] { Namespace::parse(b); });
    EXPECT_HAS(message, words) << bad;
    EXPECT_HAS(message, "in the text of a namespace");
  }
}

TEST(Namespace, EachByteOfATextCounts) {
  const Namespace space = changed([](auto& f) {
    f.adapter = "a b";
    f.raw = "é=1";
  });
  int other = 0;
  for (std::size_t at = 0; at < space.text().size(); ++at) {
    for (int byte = 0; byte < 256; ++byte) {
      std::string text = space.text();
      if (text[at] == static_cast<char>(byte)) continue;
      text[at] = static_cast<char>(byte);
      try {
        const Namespace parsed = Namespace::parse(text);
        ++other;
        EXPECT_EQ(parsed.text(), text);
        EXPECT_NE(parsed.digest(), space.digest());
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kArgument) << error.what();
      }
    }
  }
  EXPECT_GT(other, 500);  // another letter of a name is another namespace
  for (std::size_t size = 0; size < space.text().size(); ++size) {
    EXPECT_NE(refusal([&] { Namespace::parse(std::string_view(space.text()).substr(0, size)); }), "no error") << size;
  }
}

TEST(Key, GoldenVectors) {
  const json all = vectors();
  ASSERT_GE(all.at("keys").size(), 6U);
  for (const json& vector : all.at("keys")) {
    std::optional<Key> parent;
    if (!vector.at("parent").is_null()) parent.emplace(bytes_of(vector.at("parent")));
    const std::vector<std::uint32_t> tokens = vector.at("tokens");
    std::vector<std::string> extra;
    for (const json& item : vector.at("extra")) {
      if (item.is_string()) {
        extra.push_back(item);
      } else {
        const auto bytes = bytes_of(item.at("hex"));
        extra.emplace_back(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      }
    }
    const std::vector<std::string_view> views(extra.begin(), extra.end());
    const Key key = Key::chain(parent ? &*parent : nullptr, tokens, views);
    EXPECT_EQ(key.hex(), vector.at("hex").get<std::string>()) << vector.at("name");
    EXPECT_EQ(key.bytes().size(), 32U);
  }
}

TEST(Key, BytesOfAnyLengthTo64) {
  std::vector<std::byte> bytes(65, std::byte{7});
  for (std::size_t size = 1; size <= 64; ++size) {
    const Key key{std::span(bytes).first(size)};
    EXPECT_EQ(key.bytes().size(), size);
    EXPECT_EQ(bytes_of(key.hex()), std::vector<std::byte>(size, std::byte{7}));
    EXPECT_EQ(key, Key(key.bytes()));
  }
  EXPECT_HAS(refusal([&] { Key(std::span(bytes).first(0)); }), "0 bytes, must be from 1 to 64");
  EXPECT_HAS(refusal([&] { Key{bytes}; }), "65 bytes, must be from 1 to 64");
  EXPECT_HAS(refusal([&] { Key{std::vector<std::byte>(257)}; }), "257 bytes, must be from 1 to 64");
  // A zero more is another key, though the rest of the array is zeros.
  const std::vector<std::byte> zeros(2);
  EXPECT_NE(Key(std::span(zeros).first(1)), Key(zeros));
}

Key chained(const Key* parent, std::initializer_list<std::uint32_t> tokens,
            std::initializer_list<std::string_view> extra = {}) {
  return Key::chain(parent, std::vector<std::uint32_t>(tokens), std::vector<std::string_view>(extra));
}

TEST(Key, C45OtherInputsHaveOtherKeys) {
  const Key first = chained(nullptr, {1, 2, 3});
  const Key zero{std::vector<std::byte>(1)};
  using namespace std::string_view_literals;
  const std::vector<Key> keys{
      first,
      chained(nullptr, {}),
      chained(nullptr, {0}),
      chained(nullptr, {0, 0}),
      chained(nullptr, {1, 23}),
      chained(nullptr, {12, 3}),
      chained(nullptr, {123}),
      chained(nullptr, {3, 2, 1}),
      chained(nullptr, {1, 2, 3, 0}),
      chained(nullptr, {0xFFFFFFFF}),
      chained(&first, {}),
      chained(&first, {1, 2, 3}),
      chained(&zero, {1, 2, 3}),
      chained(&zero, {}),
      chained(nullptr, {}, {""}),
      chained(nullptr, {}, {"", ""}),
      chained(nullptr, {1}, {"ab"}),
      chained(nullptr, {1}, {"a", "b"}),
      chained(nullptr, {1}, {"b", "a"}),
      chained(nullptr, {1}, {"", "ab"}),
      chained(nullptr, {1}, {"ab", ""}),
      chained(nullptr, {1}, {"ab\0"sv}),
      chained(nullptr, {1}, {"a\0b"sv}),
      chained(nullptr, {}, {"\1\0\0\0"sv}),
  };
  std::set<std::string> seen;
  for (const Key& key : keys) EXPECT_TRUE(seen.insert(key.hex()).second) << key.hex();
  EXPECT_EQ(chained(nullptr, {1, 2, 3}), first);
}

TEST(Key, ChainsDependOnTheWholeBeginning) {
  std::mt19937 random(7);
  std::map<std::string, std::vector<std::uint32_t>> seen;  // key → all tokens so far
  for (int run = 0; run < 500; ++run) {
    std::vector<std::uint32_t> all;
    std::optional<Key> parent;
    for (int block = 0; block < 6; ++block) {
      const auto token = static_cast<std::uint32_t>(random() % 3);
      all.push_back(token);
      parent = Key::chain(parent ? &*parent : nullptr, std::span(&token, 1));
      EXPECT_EQ(seen.emplace(parent->hex(), all).first->second, all);
    }
  }
  EXPECT_GT(seen.size(), 400U);
}

}  // namespace
}  // namespace kvstride
