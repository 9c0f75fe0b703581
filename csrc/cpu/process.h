#pragma once

namespace ep::cpu {

// Return whether this process may write at an address that it may read. True if the system does not say.
bool is_writable(void* address);

// A peer's process. The start time distinguishes it from a later process with the same number.
class Process {
 public:
  explicit Process(int pid);

  // Return true once the process has ended, even while its parent has not fetched the exit code (a zombie).
  bool is_gone() const;

 private:
  int pid_;
  unsigned long long start_time_ = 0;  // in clock ticks since boot; 0: unknown
};

}  // namespace ep::cpu
