// SPDX-License-Identifier: Apache-2.0
// Directories, child processes and refused system calls for tests.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>

namespace kvstride {

/// A new directory, removed with everything in it.
class Directory {
 public:
  Directory() {
    path_ = testing::TempDir() + "/kvstride.XXXXXX";
    if (::mkdtemp(path_.data()) == nullptr) std::abort();
    fd_ = ::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  }
  ~Directory() {
    ::close(fd_);
    std::filesystem::remove_all(path_);
  }
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;

  int fd() const { return fd_; }
  std::string path(const std::string& name = "") const { return path_ + "/" + name; }

 private:
  std::string path_;
  int fd_ = -1;
};

/// Starts a child that runs `work` and ends with its answer.
inline pid_t start_child(const std::function<int()>& work) {
  std::fflush(nullptr);  // or the child might print it, too
  const pid_t child = ::fork();
  if (child == 0) {
    const int code = work();
    std::fflush(stdout);  // what it found
    ::_exit(code);
  }
  return child;
}

/// The answer of a child, or −1 where a signal ended it.
inline int wait_for_child(pid_t child) {
  int status = 0;
  if (::waitpid(child, &status, 0) != child) return -2;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

inline int in_child(const std::function<int()>& work) { return wait_for_child(start_child(work)); }

/// From now on this system call of this process fails with `error`; with `second`, only where that is its second
/// argument.
inline void refuse(long call, int error, int second = -1) {
  ::sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(call), 0, 4),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[1])),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(second), 1, 0),
      BPF_JUMP(BPF_JMP | BPF_JA, 0, 0, 0),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  // Jumps: another call → allow (index 6); the argument → error (5), or past it where it must be equal and is not.
  filter[4].k = second < 0 ? 0 : 1;
  const ::sock_fprog program{.len = static_cast<unsigned short>(std::size(filter)), .filter = filter};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
    ::_exit(99);
  }
}

}  // namespace kvstride
