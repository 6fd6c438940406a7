// SPDX-License-Identifier: Apache-2.0
// The process around the commands: standard streams, exit codes, one line for every error.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <string_view>

#include "commands.h"
#include "kvstride/error.h"

namespace {

using kvstride::cli::Outcome;

/// A file that is opened later must not become a standard stream that the caller closed: a stand-in that cannot
/// be used takes its number, so that reads and writes fail as they would have.
void fill_closed_streams() {
  for (int fd = 0; fd <= 2; ++fd) {
    if (fcntl(fd, F_GETFD) == -1 && errno == EBADF) {
      if (open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY) == -1) return;
    }
  }
}

/// Text of the user may hold line ends and control bytes; a message is one line.
std::string one_line(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    out += byte < 0x20 || byte == 0x7F ? ' ' : c;
  }
  return out;
}

/// All of `text`, or the error number.
int write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(fd, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return written < 0 ? errno : EIO;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  return 0;
}

Outcome run(int argc, const char* const* argv) {
  try {
    return kvstride::cli::run_program(argc, argv);
  } catch (const std::bad_alloc&) {
    return {"", "not enough memory", kvstride::cli::kBadInput};
  } catch (const std::exception& error) {
    return {"", error.what(), kvstride::cli::kBadInput};
  }
}

}  // namespace

int main(int argc, char** argv) {
  fill_closed_streams();
  std::signal(SIGPIPE, SIG_IGN);  // a closed pipe is an error of write()
  Outcome outcome = run(argc, argv);
  if (const int error = write_all(STDOUT_FILENO, outcome.out); error != 0) {
    outcome.message = std::string("cannot write to standard output: ") + std::strerror(error);
    outcome.code = kvstride::cli::kBadInput;
  }
  if (!outcome.message.empty()) write_all(STDERR_FILENO, "kvstride: " + one_line(outcome.message) + "\n");
  return outcome.code;
}
