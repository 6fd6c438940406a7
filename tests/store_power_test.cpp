// SPDX-License-Identifier: Apache-2.0
// Power cuts: what was not synced is lost, zeroed, torn or reordered in any way; no wrong byte ever comes of it.
#include <map>
#include <mutex>
#include <set>

#include "store_faults.h"

namespace kvstride::test {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kSector = 512;

/// Notes all that changes a directory.
class RecordingIo final : public ForwardIo {
 public:
  struct Step {
    enum Kind { kCreate, kWrite, kSync, kName, kUnlink } kind;
    int file = -1;
    std::string path;  ///< below the root
    std::string to;    ///< of kName
    std::string data;  ///< of kWrite
    std::int64_t offset = 0;
  };

  int open(int at, const char* name, int flags, mode_t mode) override {
    const std::lock_guard lock(mutex_);
    const int fd = ForwardIo::open(at, name, flags, mode);
    if (fd < 0) return fd;
    const std::string path = path_of(at, name);
    paths_[fd] = path;
    if ((flags & O_CREAT) != 0 && files_.count(path) == 0) {
      files_[path] = num_files_++;
      steps.push_back({.kind = Step::kCreate, .file = files_[path], .path = path});
    }
    if (files_.count(path) != 0) open_[fd] = files_[path];
    return fd;
  }
  int close(int fd) override {
    const std::lock_guard lock(mutex_);
    paths_.erase(fd);
    open_.erase(fd);
    return ForwardIo::close(fd);
  }
  std::int64_t pwrite(int fd, const void* data, std::size_t bytes, std::int64_t offset) override {
    const std::lock_guard lock(mutex_);
    const std::int64_t done = ForwardIo::pwrite(fd, data, bytes, offset);
    if (done > 0) {
      steps.push_back({.kind = Step::kWrite,
                       .file = open_.at(fd),
                       .data = {static_cast<const char*>(data), static_cast<std::size_t>(done)},
                       .offset = offset});
    }
    return done;
  }
  int fdatasync(int fd) override {
    const std::lock_guard lock(mutex_);
    steps.push_back({.kind = Step::kSync, .file = open_.at(fd)});
    return 0;  // in memory there is nothing to do
  }
  int unlink(int at, const char* name) override {
    const std::lock_guard lock(mutex_);
    const int done = ForwardIo::unlink(at, name);
    const std::string path = path_of(at, name);
    if (done == 0 && files_.count(path) != 0) {
      steps.push_back({.kind = Step::kUnlink, .file = files_[path], .path = path});
      files_.erase(path);
    }
    return done;
  }
  int rename_new(int from_at, const char* from, int to_at, const char* to) override {
    const std::lock_guard lock(mutex_);
    const int done = ForwardIo::rename_new(from_at, from, to_at, to);
    if (done != 0) return done;
    const std::string source = path_of(from_at, from);
    const std::string target = path_of(to_at, to);
    steps.push_back({.kind = Step::kName, .file = files_.at(source), .path = source, .to = target});
    files_[target] = files_.at(source);
    files_.erase(source);
    return 0;
  }

  std::vector<Step> steps;

 private:
  std::string path_of(int at, const std::string& name) const {
    const auto folder = paths_.find(at);
    if (folder == paths_.end()) return "";  // the root, from a folder that is none of ours
    return name == "." ? folder->second : folder->second.empty() ? name : folder->second + "/" + name;
  }

  std::mutex mutex_;
  std::map<int, std::string> paths_;
  std::map<int, int> open_;
  std::map<std::string, int> files_;
  int num_files_ = 0;
};

using Step = RecordingIo::Step;

/// How bad the disk is.
enum class Disk {
  kJournal,  ///< names change in order, and a sync brings all names before it to the disk
  kAnything  ///< each change that is not synced may be there or not, in any order
};

/// The directory after a power cut behind the first `steps` steps.
void materialise(const std::vector<Step>& steps, std::size_t cut, Disk disk, std::mt19937_64& random,
                 const std::string& root) {
  const auto chance = [&](int percent) { return static_cast<int>(random() % 100) < percent; };
  std::map<int, std::size_t> synced;  // file → step
  std::size_t last_sync = 0;
  for (std::size_t i = 0; i < cut; ++i) {
    if (steps[i].kind == Step::kSync) synced[steps[i].file] = last_sync = i;
  }
  const std::size_t names_until = last_sync + random() % (cut - last_sync + 1);
  std::map<std::string, int> names;
  std::map<int, std::string> contents;
  const int keeps = static_cast<int>(random() % 101);
  for (std::size_t i = 0; i < cut; ++i) {
    const Step& step = steps[i];
    if (step.kind == Step::kWrite) {
      std::string& bytes = contents[step.file];
      const bool sure = synced.count(step.file) != 0 && synced[step.file] > i;
      const auto at = static_cast<std::size_t>(step.offset);
      for (std::size_t done = 0; done < step.data.size(); done += kSector) {
        if (!sure && !chance(keeps)) continue;
        const std::string_view part = std::string_view(step.data).substr(done, kSector);
        if (bytes.size() < at + done + part.size()) bytes.resize(at + done + part.size());
        bytes.replace(at + done, part.size(), part);
      }
      // The length may be right where the data is not.
      if (chance(70) && bytes.size() < at + step.data.size()) bytes.resize(at + step.data.size());
      continue;
    }
    if (step.kind == Step::kSync) continue;
    const bool sure = disk == Disk::kJournal ? i < names_until : i < last_sync && synced.count(step.file) != 0;
    if (!sure && (disk == Disk::kJournal || !chance(keeps))) continue;
    if (step.kind == Step::kCreate) names[step.path] = step.file;
    if (step.kind == Step::kUnlink) names.erase(step.path);
    if (step.kind == Step::kName) {
      names[step.to] = step.file;
      if (disk == Disk::kJournal || chance(80)) names.erase(step.path);
    }
  }
  fs::remove_all(root);
  fs::create_directories(root);
  fs::permissions(root, fs::perms::owner_all);
  for (const auto& [name, file] : names) {
    const std::string path = root + "/" + name;
    fs::create_directories(fs::path(path).parent_path());
    write_file(path, contents[file]);
    fs::permissions(path, fs::perms::owner_read | fs::perms::owner_write);
  }
}

class StorePower : public testing::TestWithParam<bool> {
 protected:
  /// A life with puts, evictions, removals, restarts. Returns how many keys there were.
  int live(const std::string& path, const std::shared_ptr<RecordingIo>& io, bool sync) {
    int number = 0;
    for (int life = 0; life < 2; ++life) {
      auto options = small_tier(path, 14 * 5 * 4096);
      options.sync = sync;
      Client client({store::make_directory_tier(options, io)});
      for (int i = 0; i < 5; ++i) {
        EXPECT_EQ(client.put(range(number, 3)), all(Outcome::kOk, 3));
        client.get(range(number, 1));
        if (i % 2 == 1) client.remove({number - 1});
        number += 3;
      }
    }
    return number;
  }
};

TEST_P(StorePower, NothingWrongComesOfACut) {
  const bool sync = GetParam();
  Scratch scratch;
  const auto recorder = std::make_shared<RecordingIo>();
  const int num_keys = live(scratch.path("first"), recorder, sync);
  ASSERT_GT(recorder->steps.size(), 100U);
  std::mt19937_64 random(seed());
  int damaged = 0;
  int sound = 0;
  const auto end = until(2500ms, 0.05);
  while (SteadyClock::now() < end && !HasFailure()) {
    const Disk disk = random() % 2 == 0 ? Disk::kJournal : Disk::kAnything;
    const std::string root = scratch.path("after");
    const std::size_t cut = 1 + random() % recorder->steps.size();
    materialise(recorder->steps, cut, disk, random, root);
    const auto io = std::make_shared<FaultIo>();
    {
      const TierPtr tier = store::make_directory_tier(small_tier(root, 14 * 5 * 4096), io);
      Client client({tier});
      const Outcomes first = client.get(range(0, num_keys));
      damaged += count(first, Outcome::kCorrupt);
      sound += count(first, Outcome::kOk);
      EXPECT_EQ(count(first, Outcome::kIoError) + count(first, Outcome::kTimeout) + count(first, Outcome::kRefused), 0);
      if (sync && disk == Disk::kJournal) {
        EXPECT_EQ(count(first, Outcome::kCorrupt), 0) << "synced before it got its name, cut at " << cut;
      }
      const Outcomes again = client.get(range(0, num_keys));
      EXPECT_EQ(count(again, Outcome::kCorrupt), 0) << "damage is told once";
      for (std::size_t i = 0; i < first.size(); ++i) EXPECT_EQ(again[i] == Outcome::kOk, first[i] == Outcome::kOk) << i;
      EXPECT_EQ(client.put({num_keys}), all(Outcome::kOk, 1));
      EXPECT_EQ(client.get({num_keys}), all(Outcome::kOk, 1));
      expect_at_rest(root, tier, io.get());
    }
    expect_closed(root, io.get());
  }
  EXPECT_GT(sound, 0);
  EXPECT_EQ(damaged > 0, !sync) << "the model is too kind to show anything";
}

INSTANTIATE_TEST_SUITE_P(Sync, StorePower, testing::Bool(),
                         [](const auto& which) { return which.param ? "Synced" : "Unsynced"; });

}  // namespace
}  // namespace kvstride::test
