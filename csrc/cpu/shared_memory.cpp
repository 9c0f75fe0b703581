#include "cpu/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "cpu/huge_pages.h"

namespace ep::cpu {
namespace {

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error("shared memory: " + what + ": " + std::strerror(errno));
}

}  // namespace

SharedMemory::SharedMemory(int fd, size_t bytes) : fd_(fd), pid_(getpid()), bytes_(bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    close_fd();
    errno = error;
    fail("cannot map " + std::to_string(bytes) + " bytes");
  }
  data_ = static_cast<char*>(data);
  prefer_huge_pages(data, bytes);
  madvise(data, bytes, MADV_DONTFORK);  // a forked worker may outlive this process: keep no memory for it
}

SharedMemory SharedMemory::create(size_t bytes) {
  const int fd = memfd_create("ep_dispatcher", MFD_CLOEXEC);
  if (fd < 0) fail("memfd_create");
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    const int error = errno;
    close(fd);
    errno = error;
    fail("cannot reserve " + std::to_string(bytes) + " bytes");
  }
  return SharedMemory(fd, bytes);
}

SharedMemory SharedMemory::attach(int pid, int fd, size_t bytes) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const int opened = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (opened < 0) fail("cannot open " + path);
  SharedMemory memory(opened, bytes);
  memory.close_fd();
  return memory;
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      pid_(other.pid_),
      bytes_(other.bytes_),
      data_(std::exchange(other.data_, nullptr)) {}

SharedMemory::~SharedMemory() {
  unmap();
  close_fd();
}

void SharedMemory::give_back(size_t begin) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  begin = (begin + page - 1) / page * page;
  if (begin < bytes_ && madvise(data_ + begin, bytes_ - begin, MADV_REMOVE) != 0)
    fail("cannot give " + std::to_string(bytes_ - begin) + " bytes back");
}

void SharedMemory::unmap() {
  if (data_ && getpid() == pid_) munmap(data_, bytes_);  // in a forked child other memory may lie there
  data_ = nullptr;
}

void SharedMemory::close_fd() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

}  // namespace ep::cpu
