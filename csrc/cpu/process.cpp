#include "cpu/process.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace ep::cpu {
namespace {

struct Status {
  enum { kUnknown, kGone, kRunning } state = kUnknown;
  unsigned long long start_time = 0;
};

// Read /proc/PID/stat: "pid (name) state ppid ... start_time", and the name may hold any characters.
Status read_status(int pid) {
  Status status;
  char path[32];
  std::snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    if (errno == ENOENT || errno == ESRCH) status.state = Status::kGone;
    return status;  // no free descriptor, or no /proc: nothing is known
  }
  char text[1024];
  const ssize_t size = read(fd, text, sizeof(text) - 1);
  const int error = errno;
  close(fd);
  if (size <= 0) {
    if (size < 0 && error == ESRCH) status.state = Status::kGone;
    return status;
  }
  text[size] = 0;
  const char* field = std::strrchr(text, ')');
  if (!field || field[1] != ' ') return status;
  field += 2;  // the third field, the state
  const char state = *field;
  for (int i = 3; i < 22; ++i) {
    field = std::strchr(field, ' ');
    if (!field) return status;
    ++field;
  }
  if (std::sscanf(field, "%llu", &status.start_time) != 1) return status;
  status.state = state == 'Z' || state == 'X' || state == 'x' ? Status::kGone : Status::kRunning;
  return status;
}

}  // namespace

bool is_writable(void* address) {
  char byte = *static_cast<volatile char*>(address);
  const iovec from{&byte, 1}, to{address, 1};
  // Write the byte that is there: unlike a store, a system call reports memory that may only be read.
  return process_vm_writev(getpid(), &from, 1, &to, 1, 0) == 1 || errno != EFAULT;
}

Process::Process(int pid) : pid_(pid), start_time_(read_status(pid).start_time) {}

bool Process::is_gone() const {
  const Status status = read_status(pid_);
  if (status.state == Status::kUnknown) return false;
  return status.state == Status::kGone || (start_time_ != 0 && status.start_time != start_time_);
}

}  // namespace ep::cpu
