// SPDX-License-Identifier: Apache-2.0
// Namespaces and keys; `identity.py` checks types and makes the classes that users see.
#include "kvstride/identity.h"

#include "module.h"

using namespace kvstride;

namespace {

using Tokens = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::span<const std::byte> to_span(const nb::bytes& bytes) {
  return {static_cast<const std::byte*>(bytes.data()), bytes.size()};
}

nb::bytes to_bytes(std::span<const std::byte> bytes) { return nb::bytes(bytes.data(), bytes.size()); }

NamespaceFields to_fields(const std::map<std::string, std::string>& texts,
                          const std::map<std::string, std::string>& planes,
                          const std::map<std::string, std::int64_t>& sizes) {
  const auto text = [&](const char* name) -> std::optional<std::string> {
    const auto at = texts.find(name);
    return at == texts.end() ? std::nullopt : std::optional(at->second);
  };
  NamespaceFields out;
  out.model = texts.at("model");
  out.revision = texts.at("revision");
  out.salt_policy = texts.at("salt_policy");
  out.adapter = text("adapter");
  out.raw = text("raw");
  for (const auto& [name, spec] : planes) out.planes[name] = PlaneSpec::parse(spec, name);
  out.num_layers = sizes.at("num_layers");
  out.num_kv_heads = sizes.at("num_kv_heads");
  out.head_size = sizes.at("head_size");
  out.block_size = sizes.at("block_size");
  out.first_layer = sizes.at("first_layer");
  out.group = sizes.at("group");
  if (const auto at = sizes.find("value_head_size"); at != sizes.end()) out.value_head_size = at->second;
  return out;
}

}  // namespace

void bind_identity(nb::module_& m) {
  nb::class_<Namespace>(m, "Namespace", "A canonical text and its SHA-256. Immutable.")
      .def(
          "__init__",
          [](Namespace* self, const std::map<std::string, std::string>& texts,
             const std::map<std::string, std::string>& planes, const std::map<std::string, std::int64_t>& sizes) {
            new (self) Namespace(to_fields(texts, planes, sizes));
          },
          nb::arg("texts"), nb::arg("planes"), nb::arg("sizes"))
      .def_static("parse", &Namespace::parse, nb::arg("text"))
      .def_prop_ro("text", &Namespace::text)
      .def_prop_ro("hex", &Namespace::hex)
      .def_prop_ro("digest", [](const Namespace& self) { return to_bytes(self.digest()); });
  m.attr("max_key_bytes") = Key::kMaxBytes;
  m.def(
      "chain_key",
      [](const std::optional<nb::bytes>& parent, const Tokens& tokens, const std::vector<nb::bytes>& extra) {
        std::optional<Key> before;
        if (parent) before.emplace(to_span(*parent));
        std::vector<std::string_view> views;
        for (const nb::bytes& item : extra) views.emplace_back(static_cast<const char*>(item.data()), item.size());
        return to_bytes(Key::chain(before ? &*before : nullptr, {tokens.data(), tokens.shape(0)}, views).bytes());
      },
      nb::arg("parent").none(), nb::arg("tokens"), nb::arg("extra"), "The 32 bytes of a chained key.");
}
