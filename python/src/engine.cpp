// SPDX-License-Identifier: Apache-2.0
// Engines of the remote tier: those of the library, and those that are written in Python (kvstride.remote.Engine).
#include "store/remote/engine.h"

#include <condition_variable>
#include <mutex>

#include "held.h"
#include "module.h"

using namespace kvstride;
using namespace kvstride::store;

namespace {

/// Which threads of ours are in Python or wait for its lock, in one process. Never freed: such threads may be the last.
struct Calls {
  const pid_t pid = getpid();
  std::mutex mutex;
  std::condition_variable left;
  int inside = 0;
  bool ended = false;

  /// Of this process. The interpreter's lock is held.
  static Calls& current() {
    static Calls* calls = nullptr;
    if (calls == nullptr || calls->pid != getpid()) calls = new Calls;
    return *calls;
  }

  /// From now on nobody asks for the interpreter's lock any more: to be called before it ends, with the lock. Waits for
  /// those who have it, or want it, but not for ever.
  void end() {
    const GilReleased release;
    std::unique_lock lock(mutex);
    ended = true;
    left.wait_for(lock, std::chrono::seconds(60), [&] { return inside == 0; });
  }
};

/// Has the interpreter's lock while it lives, on any thread, if it is true: not where the interpreter ends, and not in
/// a forked child of the process that `calls` are of.
class InPython {
 public:
  explicit InPython(Calls& calls) : calls_(calls) {
    if (calls.pid != getpid()) return;
    {
      const std::lock_guard lock(calls.mutex);
      if (calls.ended) return;
      ++calls.inside;
    }
    try {
      state_ = PyGILState_Ensure();
    } catch (...) {  // the interpreter ended after all: see gil.h
      while (true) ::pause();
    }
    in_ = true;
  }
  InPython(const InPython&) = delete;
  InPython& operator=(const InPython&) = delete;
  ~InPython() {
    if (!in_) return;
    PyGILState_Release(state_);
    const std::lock_guard lock(calls_.mutex);
    --calls_.inside;
    calls_.left.notify_all();
  }
  explicit operator bool() const { return in_; }

 private:
  Calls& calls_;
  PyGILState_STATE state_{};
  bool in_ = false;
};

constexpr Answer kAnswers[] = {Answer::kLate, Answer::kOk,       Answer::kThere,  Answer::kAbsent,
                               Answer::kFull, Answer::kTooLarge, Answer::kDenied, Answer::kBroken};

Answer to_answer(nb::handle given) {
  std::string_view name;
  if (nb::try_cast(given, name)) {
    for (const Answer one : kAnswers) {
      if (name == name_of(one)) return one;
    }
  }
  throw nb::value_error(("no answer: " + std::string(nb::repr(given).c_str()).substr(0, 60)).c_str());
}

std::string in_one_line(std::string text) {
  constexpr std::size_t kMost = 200;
  for (char& c : text) c = static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  std::size_t end = std::min(text.size(), kMost);
  while (end < text.size() && end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;  // in UTF-8
  return text.substr(0, end);
}

/// Of an exception that came out of Python: its class and what it says.
std::string text_of(const nb::python_error& error) {
  std::string out = "an exception";
  try {
    out = nb::cast<std::string>(error.type().attr("__name__"));
    out += ": " + nb::cast<std::string>(nb::str(error.value()));
  } catch (...) {  // of its __str__
    PyErr_Clear();
  }
  return in_one_line(out);
}

double to_seconds(Clock::time_point time) { return std::chrono::duration<double>(time.time_since_epoch()).count(); }
Clock::time_point to_clock(double seconds) {
  constexpr double kMost = 1.0e9;
  const std::chrono::duration<double> since(std::clamp(seconds, 0.0, kMost));
  return Clock::time_point(std::chrono::duration_cast<Clock::duration>(since));
}
std::uintptr_t address_of(const void* memory) { return reinterpret_cast<std::uintptr_t>(memory); }

/// One that is written in Python. What it is like is asked once, here; its methods are called with the interpreter's
/// lock, which is taken for nothing else.
class PythonEngine final : public Engine {
 public:
  /// The interpreter's lock is held. Throws Error(kArgument), or what a property raises.
  explicit PythonEngine(nb::object engine)
      : calls_(Calls::current()),
        kind_(property<std::string>(engine, "kind", "a str")),
        detail_(property<std::string>(engine, "detail", "a str")),
        largest_(count(engine, "largest", std::int64_t{1} << 43)),
        reads_ranges_(property<bool>(engine, "reads_ranges", "True or False")),
        num_threads_(static_cast<int>(count(engine, "num_threads", 256))),
        batch_(static_cast<std::size_t>(count(engine, "batch", 1 << 20))),
        names_a_trip_(static_cast<std::size_t>(count(engine, "names_a_trip", 1 << 20))),
        engine_(engine.release().ptr()) {}

  ~PythonEngine() override {
    const InPython python(calls_);
    if (!python) return;  // the interpreter's memory goes with the process
    run("close", [&] { nb::handle(engine_).attr("close")(); });
    nb::handle(engine_).dec_ref();
  }

  const char* kind() const override { return kind_.c_str(); }
  std::string detail() const override { return detail_; }
  std::string trouble() const override {
    const std::lock_guard lock(mutex_);
    return error_;
  }
  std::int64_t largest() const override { return largest_; }
  bool reads_ranges() const override { return reads_ranges_; }
  int num_threads() const override { return num_threads_; }
  std::size_t batch() const override { return batch_; }
  std::size_t names_a_trip() const override { return names_a_trip_; }

  bool memory(std::span<std::byte> region) override {
    const InPython python(calls_);
    bool done = false;
    if (python) {
      run("memory", [&] {
        nb::handle(engine_).attr("memory")(address_of(region.data()), region.size());
        done = true;
      });
    }
    return done;
  }

  void find(std::span<FindItem> items, Clock::time_point deadline) override {
    const auto call = [&](nb::handle method) { return method(names_of(items), to_seconds(deadline)); };
    ask("find", items, deadline, call, [](FindItem& item, nb::handle given) {
      item.answer = to_answer(given[0]);
      item.bytes = nb::cast<std::int64_t>(given[1]);
    });
  }

  void read(std::span<ReadItem> items, Clock::time_point deadline, const Done& done) override {
    const auto call = [&](nb::handle method) {
      nb::list addresses;
      nb::list sizes;
      nb::list ranges;
      for (const ReadItem& item : items) {
        addresses.append(address_of(item.into));
        sizes.append(item.bytes);
        nb::list wanted;
        for (const Bytes& range : item.ranges) wanted.append(nb::make_tuple(range.begin, range.end));
        ranges.append(wanted);
      }
      return method(names_of(items), addresses, sizes, ranges, to_seconds(deadline));
    };
    ask("read", items, deadline, call, [](ReadItem& item, nb::handle given) {
      item.answer = to_answer(given[0]);
      item.found = nb::cast<std::int64_t>(given[1]);
    });
    for (std::size_t i = 0; i < items.size(); ++i) done(i);
  }

  void write(std::span<WriteItem> items, Clock::time_point deadline, const Done& done) override {
    const auto call = [&](nb::handle method) {
      nb::list addresses;
      nb::list sizes;
      nb::list replace;
      for (const WriteItem& item : items) {
        addresses.append(address_of(item.data.data()));
        sizes.append(item.data.size());
        replace.append(item.replace);
      }
      return method(names_of(items), addresses, sizes, replace, to_seconds(deadline));
    };
    ask("write", items, deadline, call, [](WriteItem& item, nb::handle given) { item.answer = to_answer(given); });
    for (std::size_t i = 0; i < items.size(); ++i) done(i);
  }

  void remove(std::span<RemoveItem> items, Clock::time_point deadline) override {
    const auto call = [&](nb::handle method) { return method(names_of(items), to_seconds(deadline)); };
    ask("remove", items, deadline, call, [](RemoveItem& item, nb::handle given) { item.answer = to_answer(given); });
  }

  Answer list(const std::string& folder, Clock::time_point deadline,
              const std::function<bool(const ListedObject&)>& use) override {
    if (Clock::now() >= deadline) return Answer::kLate;
    std::vector<ListedObject> found;
    Answer answer = Answer::kBroken;
    {
      const InPython python(calls_);
      if (!python) return answer;
      run("list", [&] {
        const nb::object listed = nb::handle(engine_).attr("list")(folder, to_seconds(deadline));
        if (!listed.is_none()) {
          for (const nb::handle one : nb::iter(listed)) {
            found.push_back(
                {nb::cast<std::string>(one[0]), nb::cast<std::int64_t>(one[1]), nb::cast<std::int64_t>(one[2])});
          }
        }
        answer = listed.is_none() ? Answer::kAbsent : Answer::kOk;
      });
    }
    if (answer != Answer::kOk) return answer;
    for (const ListedObject& one : found) {
      if (!use(one)) break;
    }
    return answer;
  }

 private:
  template <typename T>
  static T property(nb::handle engine, const char* name, const char* expected) {
    const nb::object value = engine.attr(name);
    T out;
    if (!nb::try_cast(value, out, false)) {
      throw Error(ErrorCode::kArgument,
                  "an engine's " + std::string(name) + " is " + nb::repr(value).c_str() + ", expected " + expected);
    }
    return out;
  }
  static std::int64_t count(nb::handle engine, const char* name, std::int64_t most) {
    const auto value = property<std::int64_t>(engine, name, "a whole number");
    if (value >= 1 && value <= most) return value;
    throw Error(ErrorCode::kArgument, "an engine's " + std::string(name) + " is " + std::to_string(value) +
                                          ", of 1 to " + std::to_string(most));
  }

  template <typename Item>
  static nb::list names_of(std::span<Item> items) {
    nb::list out;
    for (const Item& item : items) out.append(item.name);
    return out;
  }

  /// With the interpreter's lock. Keeps what goes wrong for detail().
  template <typename F>
  void run(const char* method, const F& body) {
    std::string error;
    try {
      body();
    } catch (const nb::python_error& raised) {
      error = text_of(raised);
    } catch (const nb::cast_error&) {
      error = "not what it should return";
    } catch (const std::exception& thrown) {
      error = in_one_line(thrown.what());
    }
    const std::lock_guard lock(mutex_);
    error_ = error.empty() ? "" : std::string(method) + "(): " + error;
  }

  /// Calls a method that answers each item; those that it does not answer are broken. Nothing is asked too late.
  template <typename Item, typename Call, typename Use>
  void ask(const char* method, std::span<Item> items, Clock::time_point deadline, const Call& call, const Use& use) {
    if (items.empty() || Clock::now() >= deadline) return;
    std::size_t answered = 0;
    {
      const InPython python(calls_);
      if (python) {
        run(method, [&] {
          const nb::object returned = call(nb::handle(engine_).attr(method));
          const nb::list answers(returned);
          if (answers.size() != items.size()) {
            throw nb::value_error(
                (std::to_string(answers.size()) + " answers for " + std::to_string(items.size()) + " items").c_str());
          }
          for (const nb::handle answer : answers) {
            use(items[answered], answer);
            ++answered;
          }
        });
      }
    }
    for (; answered < items.size(); ++answered) items[answered].answer = Answer::kBroken;
  }

  Calls& calls_;
  const std::string kind_;
  const std::string detail_;
  const std::int64_t largest_;
  const bool reads_ranges_;
  const int num_threads_;
  const std::size_t batch_;
  const std::size_t names_a_trip_;
  PyObject* const engine_;  ///< a reference of ours
  mutable std::mutex mutex_;
  std::string error_;
};

template <typename Item>
nb::list answers_of(const std::vector<Item>& items) {
  nb::list out;
  for (const Item& item : items) out.append(nb::str(name_of(item.answer)));
  return out;
}

template <typename Item>
nb::list answers_of(const std::vector<Item>& items, std::int64_t Item::*bytes) {
  nb::list out;
  for (const Item& item : items) out.append(nb::make_tuple(nb::str(name_of(item.answer)), item.*bytes));
  return out;
}

void check_lengths(const char* verb, std::size_t names, std::initializer_list<std::size_t> others) {
  for (const std::size_t other : others) {
    if (other != names) throw Error(ErrorCode::kArgument, std::string(verb) + ": lists of different lengths");
  }
}

/// A share of its own for each call, taken with the interpreter's lock: another thread may close it meanwhile.
std::shared_ptr<Engine> open(const EngineHandle& handle) {
  if (!handle.share()) throw Error(ErrorCode::kStore, "the engine is closed");
  return handle.share();
}

/// What `use` makes of the engine, without the interpreter's lock.
template <typename Use>
auto without_lock(const EngineHandle& handle, const Use& use) {
  std::shared_ptr<Engine> share = open(handle);
  const GilReleased release;
  const std::shared_ptr<Engine> engine = std::move(share);  // goes before the lock is taken again
  return use(*engine);
}

using Names = std::vector<std::string>;
using Numbers = std::vector<std::int64_t>;

}  // namespace

void bind_engine(nb::module_& m) {
  nb::class_<EngineHandle>(m, "Engine")
      .def(
          "__init__",
          [](EngineHandle* self, nb::object engine) {
            new (self) EngineHandle(std::make_shared<PythonEngine>(std::move(engine)));
          },
          nb::arg("engine"))
      .def_prop_ro("kind", [](const EngineHandle& self) { return std::string(open(self)->kind()); })
      .def_prop_ro("detail", [](const EngineHandle& self) { return open(self)->detail(); })
      .def_prop_ro("trouble", [](const EngineHandle& self) { return open(self)->trouble(); })
      .def_prop_ro("largest", [](const EngineHandle& self) { return open(self)->largest(); })
      .def_prop_ro("reads_ranges", [](const EngineHandle& self) { return open(self)->reads_ranges(); })
      .def_prop_ro("num_threads", [](const EngineHandle& self) { return open(self)->num_threads(); })
      .def_prop_ro("batch", [](const EngineHandle& self) { return open(self)->batch(); })
      .def_prop_ro("names_a_trip", [](const EngineHandle& self) { return open(self)->names_a_trip(); })
      .def(
          "memory",
          [](const EngineHandle& self, std::uintptr_t address, std::size_t size) {
            return without_lock(self, [&](Engine& engine) {
              return engine.memory({reinterpret_cast<std::byte*>(address), size});
            });
          },
          nb::arg("address"), nb::arg("size"))
      .def(
          "find",
          [](const EngineHandle& self, const Names& names, double deadline) {
            std::vector<FindItem> items;
            for (const std::string& name : names) items.push_back({name});
            without_lock(self, [&](Engine& engine) { engine.find(items, to_clock(deadline)); });
            return answers_of(items, &FindItem::bytes);
          },
          nb::arg("names"), nb::arg("deadline"))
      .def(
          "read",
          [](const EngineHandle& self, const Names& names, const std::vector<std::uintptr_t>& addresses,
             const Numbers& sizes, const std::vector<std::vector<std::pair<std::int64_t, std::int64_t>>>& ranges,
             double deadline) {
            check_lengths("read", names.size(), {addresses.size(), sizes.size(), ranges.size()});
            std::vector<ReadItem> items;
            for (std::size_t i = 0; i < names.size(); ++i) {
              items.push_back({names[i], {}, reinterpret_cast<std::byte*>(addresses[i]), sizes[i]});
              for (const auto& [begin, end] : ranges[i]) items.back().ranges.push_back({begin, end});
            }
            without_lock(self, [&](Engine& engine) { engine.read(items, to_clock(deadline), [](std::size_t) {}); });
            return answers_of(items, &ReadItem::found);
          },
          nb::arg("names"), nb::arg("addresses"), nb::arg("sizes"), nb::arg("ranges"), nb::arg("deadline"))
      .def(
          "write",
          [](const EngineHandle& self, const Names& names, const std::vector<std::uintptr_t>& addresses,
             const Numbers& sizes, const std::vector<bool>& replace, double deadline) {
            check_lengths("write", names.size(), {addresses.size(), sizes.size(), replace.size()});
            std::vector<WriteItem> items;
            for (std::size_t i = 0; i < names.size(); ++i) {
              const auto* data = reinterpret_cast<const std::byte*>(addresses[i]);
              items.push_back({names[i], {data, static_cast<std::size_t>(sizes[i])}, replace[i]});
            }
            without_lock(self, [&](Engine& engine) { engine.write(items, to_clock(deadline), [](std::size_t) {}); });
            return answers_of(items);
          },
          nb::arg("names"), nb::arg("addresses"), nb::arg("sizes"), nb::arg("replace"), nb::arg("deadline"))
      .def(
          "remove",
          [](const EngineHandle& self, const Names& names, double deadline) {
            std::vector<RemoveItem> items;
            for (const std::string& name : names) items.push_back({name});
            without_lock(self, [&](Engine& engine) { engine.remove(items, to_clock(deadline)); });
            return answers_of(items);
          },
          nb::arg("names"), nb::arg("deadline"))
      .def(
          "list",
          [](const EngineHandle& self, const std::string& folder, double deadline) {
            std::vector<ListedObject> found;
            const Answer answer = without_lock(self, [&](Engine& engine) {
              return engine.list(folder, to_clock(deadline), [&](const ListedObject& one) {
                found.push_back(one);
                return true;
              });
            });
            nb::list out;
            for (const ListedObject& one : found) out.append(nb::make_tuple(one.name, one.bytes, one.modified));
            return nb::make_tuple(nb::str(name_of(answer)), out);
          },
          nb::arg("folder"), nb::arg("deadline"))
      .def("close", &EngineHandle::drop);

  m.def(
      "open_engine", [](const std::string& url) { return EngineHandle(engine_of(url)); }, nb::arg("url"),
      "The engine of the library that a URL names.");
  m.def(
      "end_engines", [] { Calls::current().end(); }, "Before the interpreter ends: no thread calls Python any more.");
  m.def(
      "parse_url",
      [](const std::string& url) {
        const Url parts = Url::parse(url);
        nb::dict options;
        for (const auto& [name, value] : parts.options) options[name.c_str()] = value;
        return nb::make_tuple(parts.scheme, parts.user, parts.password, parts.host, parts.port, parts.path, options);
      },
      nb::arg("url"), "Scheme, user, password, host, port, path and options.");
}
