#include "cpu/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "cpu/huge_pages.h"

namespace ep::cpu {
namespace {

// Seals of the size. Pages can still be given back.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

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
  const int fd = memfd_create("ep_dispatcher", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) fail("memfd_create");
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0 || fcntl(fd, F_ADD_SEALS, kSeals) != 0) {
    const int error = errno;
    close(fd);
    errno = error;
    fail("cannot reserve " + std::to_string(bytes) + " bytes");
  }
  return SharedMemory(fd, bytes);
}

SharedMemory SharedMemory::attach(int fd, size_t bytes) {
  const int seals = fcntl(fd, F_GET_SEALS);  // fails where the system knows no seals: on ordinary files
  if (seals < 0 || (seals & kSeals) != kSeals)
    throw std::runtime_error("shared memory: what it has passed on is no memory of a sealed size");
  struct stat status;
  if (fstat(fd, &status) != 0) fail("fstat");
  if (status.st_uid != geteuid())
    throw std::runtime_error("shared memory: what it has passed on belongs to user " + std::to_string(status.st_uid) +
                             ", but this rank runs as user " + std::to_string(geteuid()));
  if (static_cast<size_t>(status.st_size) != bytes)
    throw std::runtime_error("shared memory: what it has passed on has " + std::to_string(status.st_size) +
                             " bytes, but a rank of this buffer has " + std::to_string(bytes));
  const int duplicate = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (duplicate < 0) fail("cannot duplicate a descriptor");
  SharedMemory memory(duplicate, bytes);
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
