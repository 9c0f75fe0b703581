// Memory that the ranks of one node share. It has no name in any file system, so nothing is left behind,
// however a rank ends.
#pragma once
#include <cstddef>

namespace ep::cpu {

class SharedMemory {
 public:
  static SharedMemory create(size_t bytes);                   // zero-filled; pages are committed when touched
  static SharedMemory attach(int pid, int fd, size_t bytes);  // what process `pid` created and holds as `fd`

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&&) = delete;
  ~SharedMemory();

  char* data() const { return data_; }
  size_t size() const { return bytes_; }
  int fd() const { return fd_; }
  void close_fd();  // once every peer has attached
  void unmap();     // nothing may look at data() any more

 private:
  SharedMemory(int fd, size_t bytes);
  int fd_;
  int pid_;  // of the process that has the mapping: a forked child has not
  size_t bytes_;
  char* data_;
};

}  // namespace ep::cpu
