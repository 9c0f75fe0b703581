// Whether a peer's process still runs. The start time tells a process from a later one with the same number.
#pragma once

namespace ep::cpu {

class Process {
 public:
  explicit Process(int pid);

  // True once the process has ended, also while its parent has not asked for its exit code (a zombie).
  bool is_gone() const;

 private:
  int pid_;
  unsigned long long start_time_ = 0;  // in clock ticks since boot; 0: not known
};

}  // namespace ep::cpu
