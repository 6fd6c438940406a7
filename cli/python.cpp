// SPDX-License-Identifier: Apache-2.0
// Handing over to the Python package: `kvstride doctor`, and engines that are written in Python.
#include "python.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "commands.h"
#include "kvstride/error.h"

extern char** environ;

namespace kvstride::cli {
namespace {

/// -P below: what lies in the working directory is none of it.
constexpr const char* kLook = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('kvstride') else 1)";
/// Of argv: a module whose main() goes on, and what to call this in the one line where the package does not import.
constexpr const char* kStart =
    "import sys\n"
    "module, verb = sys.argv[1:3]\n"
    "del sys.argv[1:3]\n"
    "try:\n"
    "    import importlib\n"
    "    main = importlib.import_module(module).main\n"
    "except KeyboardInterrupt:\n"
    "    sys.exit(130)\n"
    "except Exception as error:\n"
    "    what = f'{type(error).__name__}: {error}'.split('\\n')[0]\n"
    "    sys.stderr.write(f'kvstride: {verb}: kvstride of {sys.executable} does not import: {what}\\n')\n"
    "    sys.exit(2)\n"
    "sys.exit(main())\n";

/// A file's path with links resolved; empty where there is none.
std::string resolved(const char* path) {
  std::array<char, PATH_MAX> out{};
  return ::realpath(path, out.data()) != nullptr ? std::string(out.data()) : std::string();
}

std::vector<char*> to_argv(std::vector<std::string>& words) {
  std::vector<char*> out;
  for (std::string& word : words) out.push_back(word.data());
  out.push_back(nullptr);
  return out;
}

/// Whether there is such an interpreter and it finds the package.
bool has_package(const std::string& python) {
  std::vector<std::string> words{python, "-P", "-c", kLook};
  posix_spawn_file_actions_t silent;
  ::posix_spawn_file_actions_init(&silent);
  ::posix_spawn_file_actions_addopen(&silent, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  pid_t child = 0;
  const int error = ::posix_spawnp(&child, python.c_str(), &silent, nullptr, to_argv(words).data(), environ);
  ::posix_spawn_file_actions_destroy(&silent);
  if (error != 0) return false;
  int status = 0;
  while (::waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) return false;
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

void run_python(const std::string& verb, const std::string& module, const std::string& called,
                const std::vector<std::string>& arguments) {
  const std::string program = resolved("/proc/self/exe");
  std::vector<std::string> tried;
  // A wheel may have a script beside Python that calls the program, which lies elsewhere.
  for (const std::string& file : {called.find('/') == std::string::npos ? "" : resolved(called.c_str()), program}) {
    const std::string beside = file.substr(0, file.rfind('/') + 1) + "python3";
    if (beside[0] == '/' && beside != (tried.empty() ? "" : tried[0]) && ::access(beside.c_str(), X_OK) == 0) {
      tried.push_back(beside);
    }
  }
  tried.emplace_back("python3");
  std::string names;
  for (const std::string& python : tried) {
    if (has_package(python)) {
      std::vector<std::string> words{python, "-P", "-c", kStart, module, verb};
      words.insert(words.end(), arguments.begin(), arguments.end());
      ::execvp(python.c_str(), to_argv(words).data());
      throw Error(ErrorCode::kArgument, fmt::format("{}: {}: {}", verb, python, std::strerror(errno)));
    }
    names += (names.empty() ? "" : " and ") + python;
  }
  throw Error(ErrorCode::kArgument, fmt::format("{} needs the Python package kvstride: {} {} not have it (pip "
                                                "install it into vLLM's environment and run its kvstride)",
                                                verb, names, tried.size() == 1 ? "does" : "do"));
}

Outcome run_doctor(const std::string& called, const std::vector<std::string>& arguments) {
  std::vector<std::string> words{"--program", resolved("/proc/self/exe")};
  words.insert(words.end(), arguments.begin(), arguments.end());
  run_python("doctor", "kvstride.vllm.doctor.__main__", called, words);
}

}  // namespace kvstride::cli
