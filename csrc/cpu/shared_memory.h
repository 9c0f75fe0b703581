// Memory shared by the ranks of one node. It has no name in any file system: nothing is left behind, however a rank
// ends. Its size is sealed: no process can make it smaller under another one, which would then crash.
#pragma once
#include <cstddef>

namespace ep::cpu {

class SharedMemory {
 public:
  // Allocate memory, zero-filled; pages are committed when touched.
  static SharedMemory create(size_t bytes);
  // Map the memory of another process behind `fd`, which the caller closes. Throw std::runtime_error unless it is such
  // memory as `create` makes, of a process of this user, of exactly that size.
  static SharedMemory attach(int fd, size_t bytes);

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&&) = delete;
  ~SharedMemory();

  char* data() const { return data_; }
  size_t size() const { return bytes_; }
  int fd() const { return fd_; }
  void close_fd();  // to be called once every peer has attached
  // Give the whole pages from `begin` on back to the system, for every process that maps them. They read as zeros
  // afterwards, and are committed again when touched.
  void give_back(size_t begin);
  void unmap();  // data() is invalid afterwards

 private:
  SharedMemory(int fd, size_t bytes);
  int fd_;
  int pid_;  // process of the mapping; a forked child has none
  size_t bytes_;
  char* data_;
};

}  // namespace ep::cpu
