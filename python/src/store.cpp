// SPDX-License-Identifier: Apache-2.0
// The store; `store.py` checks types, keeps memory alive and makes the classes that users see.
#include "kvstride/store.h"

#include <atomic>

#include "held.h"
#include "module.h"
#include "store/remote/remote_tier.h"

using namespace kvstride;

namespace {

std::chrono::nanoseconds to_time(double seconds) {
  // Longer than a year is for ever.
  constexpr double kMost = 3.0e7;
  return std::chrono::nanoseconds(static_cast<std::int64_t>(std::clamp(seconds, 0.0, kMost) * 1e9));
}

/// `bytes` objects, whose lengths Python has checked.
std::vector<Key> to_keys(const nb::list& keys) {
  std::vector<Key> out;
  out.reserve(keys.size());
  for (const nb::handle key : keys) {
    char* data = nullptr;
    Py_ssize_t size = 0;
    if (PyBytes_AsStringAndSize(key.ptr(), &data, &size) != 0) throw nb::python_error();
    out.emplace_back(std::as_bytes(std::span(data, static_cast<std::size_t>(size))));
  }
  return out;
}

/// Says that a request may begin. Set by Python, read by the store's threads, which never need the interpreter.
struct Gate {
  std::shared_ptr<std::atomic<bool>> open = std::make_shared<std::atomic<bool>>(false);
};

using Heads = std::optional<std::tuple<std::int64_t, std::int64_t, std::int64_t>>;

RequestOptions to_options(const Heads& heads, const Gate* after, std::optional<double> deadline, std::string tenant) {
  RequestOptions out;
  if (heads) out.heads = {std::get<0>(*heads), std::get<1>(*heads), std::get<2>(*heads)};
  if (after != nullptr) out.after = [open = after->open] { return open->load(); };
  if (deadline) out.deadline = to_time(*deadline);
  out.tenant = std::move(tenant);
  return out;
}

nb::list names_of(const std::vector<Outcome>& outcomes) {
  nb::list out;
  for (const Outcome outcome : outcomes) out.append(nb::str(name_of(outcome).data()));
  return out;
}

nb::dict to_dict(const std::map<std::string, std::uint64_t>& counters) {
  nb::dict out;
  for (const auto& [name, value] : counters) out[name.c_str()] = value;
  return out;
}

nb::dict to_dict(const std::map<std::string, HistogramSnapshot>& seconds) {
  nb::dict out;
  for (const auto& [name, histogram] : seconds) {
    nb::dict one;
    one["count"] = histogram.count;
    one["sum"] = histogram.sum_seconds;
    nb::list buckets;
    for (const std::uint64_t count : histogram.counts) buckets.append(count);
    one["buckets"] = buckets;
    out[name.c_str()] = one;
  }
  return out;
}

nb::dict to_dict(const TierMetrics& tier) {
  nb::dict out;
  out["tier"] = tier.tier;
  out["detail"] = tier.detail;
  out["capacity_bytes"] = tier.capacity_bytes;
  out["used_bytes"] = tier.used_bytes;
  out["chunks"] = tier.chunks;
  out["counters"] = to_dict(tier.counters);
  out["seconds"] = to_dict(tier.seconds);
  return out;
}

Eviction to_eviction(std::string_view name) { return name == "lru" ? Eviction::kLru : Eviction::kS3Fifo; }

std::vector<std::span<std::byte>> to_spans(const std::vector<std::pair<std::uintptr_t, std::size_t>>& buffers) {
  std::vector<std::span<std::byte>> out;
  out.reserve(buffers.size());
  for (const auto& [address, size] : buffers) out.emplace_back(reinterpret_cast<std::byte*>(address), size);
  return out;
}

std::optional<Range> to_range(const std::optional<std::pair<std::int64_t, std::int64_t>>& heads) {
  if (!heads) return std::nullopt;
  return Range{heads->first, heads->second};
}

using TierHandle = Held<store::Tier>;
using PinsHandle = Held<Pins>;
using StoreHandle = Held<Store>;

TierPtr tier_of(const TierHandle& handle, const char* what) {
  if (!handle.share()) throw Error(ErrorCode::kStore, std::string(what) + ": the tier is closed");
  return handle.share();
}

}  // namespace

void bind_store(nb::module_& m) {
  nb::class_<TierHandle>(m, "Tier")
      .def("metrics",
           [](const TierHandle& self) {
             TierMetrics metrics;
             TierPtr tier = tier_of(self, "metrics");
             {
               const GilReleased release;
               metrics = tier_metrics(*tier);
               tier.reset();  // may be the last by now
             }
             return to_dict(metrics);
           })
      .def("close", &TierHandle::drop);

  nb::class_<AdmissionOptions>(m, "Admission")
      .def(
          "__init__",
          [](AdmissionOptions* self, int min_reuse, std::int64_t reuse_window, std::int64_t write_bytes_a_day,
             std::int64_t write_burst_bytes, std::int64_t nanoseconds_to_live, std::int64_t tenant_bytes,
             std::map<std::string, std::int64_t> bytes_of_tenant) {
            new (self) AdmissionOptions{min_reuse,
                                        reuse_window,
                                        write_bytes_a_day,
                                        write_burst_bytes,
                                        std::chrono::nanoseconds(nanoseconds_to_live),
                                        tenant_bytes,
                                        std::move(bytes_of_tenant)};
          },
          nb::arg("min_reuse"), nb::arg("reuse_window"), nb::arg("write_bytes_a_day"), nb::arg("write_burst_bytes"),
          nb::arg("nanoseconds_to_live"), nb::arg("tenant_bytes"), nb::arg("bytes_of_tenant"));

  m.def(
      "host_tier",
      [](std::int64_t num_bytes, std::string_view eviction, const std::string& shared_name,
         const AdmissionOptions& admission) {
        return TierHandle(host_tier({num_bytes, to_eviction(eviction), shared_name, admission}));
      },
      nb::arg("num_bytes"), nb::arg("eviction"), nb::arg("shared_name"), nb::arg("admission"),
      nb::call_guard<GilReleased>());
  m.def(
      "directory_tier",
      [](const std::string& path, std::int64_t max_bytes, std::optional<std::int64_t> keep_free,
         std::string_view eviction, bool sync, bool group, std::string_view engine, int num_threads,
         std::int64_t staging_bytes, std::int64_t queue_chunks, double lookup_timeout, bool prepare,
         const AdmissionOptions& admission) {
        DirectoryTierOptions options;
        options.path = path;
        options.max_bytes = max_bytes;
        options.keep_free = keep_free;
        options.eviction = to_eviction(eviction);
        options.sync = sync;
        options.group = group;
        options.engine = engine == "io_uring"   ? DirectoryTierOptions::Engine::kRing
                         : engine == "blocking" ? DirectoryTierOptions::Engine::kBlocking
                                                : DirectoryTierOptions::Engine::kAuto;
        options.num_threads = num_threads;
        options.staging_bytes = staging_bytes;
        options.queue_chunks = static_cast<std::size_t>(queue_chunks);
        options.lookup_timeout = to_time(lookup_timeout);
        options.prepare = prepare;
        options.admission = admission;
        return TierHandle(directory_tier(options));
      },
      nb::arg("path"), nb::arg("max_bytes"), nb::arg("keep_free").none(), nb::arg("eviction"), nb::arg("sync"),
      nb::arg("group"), nb::arg("engine"), nb::arg("num_threads"), nb::arg("staging_bytes"), nb::arg("queue_chunks"),
      nb::arg("lookup_timeout"), nb::arg("prepare"), nb::arg("admission"), nb::call_guard<GilReleased>());

  m.def(
      "remote_tier",
      [](const EngineHandle& engine, std::int64_t staging_bytes, std::int64_t queue_chunks, std::int64_t queue_bytes,
         int num_threads, std::int64_t known_chunks, double known_for, double timeout, int retries,
         double lookup_timeout, const AdmissionOptions& admission) {
        RemoteTierOptions options;
        options.staging_bytes = staging_bytes;
        options.queue_chunks = static_cast<std::size_t>(queue_chunks);
        options.queue_bytes = queue_bytes;
        options.num_threads = num_threads;
        options.known_chunks = static_cast<std::size_t>(known_chunks);
        options.known_for = to_time(known_for);
        options.timeout = to_time(timeout);
        options.retries = retries;
        options.lookup_timeout = to_time(lookup_timeout);
        options.admission = admission;
        if (!engine.share()) throw Error(ErrorCode::kStore, "RemoteTier: the engine is closed");
        return TierHandle(store::make_remote_tier(options, engine.share()));
      },
      nb::arg("engine"), nb::arg("staging_bytes"), nb::arg("queue_chunks"), nb::arg("queue_bytes"),
      nb::arg("num_threads"), nb::arg("known_chunks"), nb::arg("known_for"), nb::arg("timeout"), nb::arg("retries"),
      nb::arg("lookup_timeout"), nb::arg("admission"), nb::call_guard<GilReleased>());

  nb::class_<Gate>(m, "Gate").def(nb::init<>()).def("open", [](Gate& self) { self.open->store(true); });

  nb::class_<Job>(m, "Job")
      .def_prop_ro("done", &Job::done)
      .def_prop_ro("ok", &Job::ok)
      .def("wait",
           [](const Job& self) {
             std::vector<Outcome> outcomes;
             {
               const GilReleased release;
               outcomes = self.wait();
             }
             return names_of(outcomes);
           })
      .def(
          "wait_for", [](const Job& self, double seconds) { return self.wait_for(to_time(seconds)); },
          nb::arg("seconds"), nb::call_guard<GilReleased>())
      .def("poll",
           [](const Job& self) {
             nb::list out;
             for (const std::optional<Outcome>& outcome : self.poll()) {
               out.append(outcome ? nb::object(nb::str(name_of(*outcome).data())) : nb::none());
             }
             return out;
           })
      .def("cancel", &Job::cancel);

  nb::class_<PinsHandle>(m, "Pins").def_prop_ro("found", [](const PinsHandle& self) {
    nb::list out;
    for (const bool found : self->found()) out.append(nb::bool_(found));
    return out;
  });

  nb::class_<StoreHandle>(m, "Store")
      .def(
          "__init__",
          [](StoreHandle* self, const std::vector<TierHandle*>& tiers, const Namespace& space, int num_threads,
             std::int64_t queue_chunks, double deadline, bool write_behind, bool promote, bool prefetch) {
            std::vector<TierPtr> all;
            for (const TierHandle* tier : tiers) all.push_back(tier_of(*tier, "Store"));
            StoreOptions options;
            options.num_threads = num_threads;
            options.queue_chunks = static_cast<std::size_t>(queue_chunks);
            options.deadline = to_time(deadline);
            options.write_behind = write_behind;
            options.promote = promote;
            options.prefetch = prefetch;
            const GilReleased release;
            new (self) StoreHandle(std::make_shared<Store>(std::move(all), space, options));
          },
          nb::arg("tiers"), nb::arg("namespace"), nb::arg("num_threads"), nb::arg("queue_chunks"), nb::arg("deadline"),
          nb::arg("write_behind"), nb::arg("promote"), nb::arg("prefetch"))
      .def(
          "put",
          [](const StoreHandle& self, const nb::list& keys, const Cache& cache, const Ids& blocks, const Heads& heads,
             const Gate* after, std::optional<double> deadline, std::string tenant, Handle stream) {
            const std::vector<Key> all = to_keys(keys);
            const RequestOptions options = to_options(heads, after, deadline, std::move(tenant));
            const GilReleased release;
            return self->put(all, cache, to_span(blocks), options, to_stream(stream));
          },
          nb::arg("keys"), nb::arg("cache"), nb::arg("blocks"), nb::arg("heads").none(), nb::arg("after").none(),
          nb::arg("deadline").none(), nb::arg("tenant"), nb::arg("stream").none())
      .def(
          "get",
          [](const StoreHandle& self, const nb::list& keys, const Cache& cache, const Ids& blocks, const Heads& heads,
             const Gate* after, std::optional<double> deadline, std::string tenant, Handle stream) {
            const std::vector<Key> all = to_keys(keys);
            const RequestOptions options = to_options(heads, after, deadline, std::move(tenant));
            const GilReleased release;
            return self->get(all, cache, to_span(blocks), options, to_stream(stream));
          },
          nb::arg("keys"), nb::arg("cache"), nb::arg("blocks"), nb::arg("heads").none(), nb::arg("after").none(),
          nb::arg("deadline").none(), nb::arg("tenant"), nb::arg("stream").none())
      .def(
          "put_bytes",
          [](const StoreHandle& self, const nb::list& keys,
             const std::vector<std::pair<std::uintptr_t, std::size_t>>& buffers, const Gate* after,
             std::optional<double> deadline, std::string tenant) {
            const std::vector<Key> all = to_keys(keys);
            const std::vector<std::span<std::byte>> spans = to_spans(buffers);
            const std::vector<std::span<const std::byte>> from(spans.begin(), spans.end());
            const RequestOptions options = to_options({}, after, deadline, std::move(tenant));
            const GilReleased release;
            return self->put_bytes(all, from, options);
          },
          nb::arg("keys"), nb::arg("buffers"), nb::arg("after").none(), nb::arg("deadline").none(), nb::arg("tenant"))
      .def(
          "get_bytes",
          [](const StoreHandle& self, const nb::list& keys,
             const std::vector<std::pair<std::uintptr_t, std::size_t>>& buffers, const Gate* after,
             std::optional<double> deadline, std::string tenant) {
            const std::vector<Key> all = to_keys(keys);
            const std::vector<std::span<std::byte>> spans = to_spans(buffers);
            const RequestOptions options = to_options({}, after, deadline, std::move(tenant));
            const GilReleased release;
            return self->get_bytes(all, spans, options);
          },
          nb::arg("keys"), nb::arg("buffers"), nb::arg("after").none(), nb::arg("deadline").none(), nb::arg("tenant"))
      .def(
          "lookup",
          [](const StoreHandle& self, const nb::list& keys,
             const std::optional<std::pair<std::int64_t, std::int64_t>>& heads, bool ask) {
            const std::vector<Key> all = to_keys(keys);
            std::vector<bool> found;
            {
              const GilReleased release;
              found = self->lookup(all, to_range(heads), ask);
            }
            nb::list out;
            for (const bool one : found) out.append(nb::bool_(one));
            return out;
          },
          nb::arg("keys"), nb::arg("heads").none(), nb::arg("ask"))
      .def(
          "holds",
          [](const StoreHandle& self, const nb::bytes& key) {
            // The GIL is kept: what is asked is in memory, and letting go of it costs more.
            const Key one(std::as_bytes(std::span(key.c_str(), key.size())));
            return static_cast<bool>(self->lookup({&one, 1}, {}, false)[0]);
          },
          nb::arg("key"))
      .def(
          "lookup_prefix",
          [](const StoreHandle& self, const nb::list& keys,
             const std::optional<std::pair<std::int64_t, std::int64_t>>& heads, bool ask) {
            const std::vector<Key> all = to_keys(keys);
            const GilReleased release;
            return self->lookup_prefix(all, to_range(heads), ask);
          },
          nb::arg("keys"), nb::arg("heads").none(), nb::arg("ask"))
      .def(
          "prefetch",
          [](const StoreHandle& self, const nb::list& keys,
             const std::optional<std::pair<std::int64_t, std::int64_t>>& heads, const Gate*,
             std::optional<double> deadline, std::string tenant) {
            const std::vector<Key> all = to_keys(keys);
            const RequestOptions options = to_options({}, nullptr, deadline, std::move(tenant));
            const GilReleased release;
            return self->prefetch(all, to_range(heads), options);
          },
          nb::arg("keys"), nb::arg("heads").none(), nb::arg("after").none(), nb::arg("deadline").none(),
          nb::arg("tenant"))
      .def(
          "pin",
          [](const StoreHandle& self, const nb::list& keys) {
            const std::vector<Key> all = to_keys(keys);
            const GilReleased release;
            return PinsHandle(std::make_shared<Pins>(self->pin(all)));
          },
          nb::arg("keys"))
      .def(
          "remove",
          [](const StoreHandle& self, const nb::list& keys) {
            const std::vector<Key> all = to_keys(keys);
            const GilReleased release;
            return self->remove(all);
          },
          nb::arg("keys"))
      .def("take_gone",
           [](const StoreHandle& self) {
             nb::list out;
             for (const Key& key : self->take_gone()) {
               out.append(nb::bytes(reinterpret_cast<const char*>(key.bytes().data()), key.bytes().size()));
             }
             return out;
           })
      .def("metrics",
           [](const StoreHandle& self) {
             StoreMetrics metrics;
             {
               const GilReleased release;
               metrics = self->metrics();
             }
             nb::dict out;
             out["counters"] = to_dict(metrics.counters);
             out["seconds"] = to_dict(metrics.seconds);
             nb::list tiers;
             for (const TierMetrics& tier : metrics.tiers) tiers.append(to_dict(tier));
             out["tiers"] = tiers;
             return out;
           })
      .def(
          "flush", [](const StoreHandle& self, double seconds) { return self->flush(to_time(seconds)); },
          nb::arg("seconds"), nb::call_guard<GilReleased>())
      .def(
          "close", [](const StoreHandle& self) { self->close(); }, nb::call_guard<GilReleased>());
}
