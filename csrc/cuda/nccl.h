// The communicator of a rail, in the NCCL library that PyTorch has loaded. This file includes nothing of NCCL: the few
// functions are looked up by name, so one build serves every version from 2.18 on.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <mutex>
#include <string>

namespace ep::cuda {

// A communicator is made in two steps, join and connect. Both wait for other ranks, so the caller makes them in a
// thread and calls `free` when its limit is over. What happens then depends on where that thread is:
//
//   inside NCCL              it cannot be interrupted: NCCL has no safe abort of a blocking communicator that another
//                            thread is using. Nothing of NCCL runs on the GPU yet. The thread aborts the communicator
//                            as soon as NCCL returns.
//   waiting for the message  `free` aborts the communicator, so its kernel ends, and then the wait
//
// With blocking = 0 NCCL could be interrupted, but then each ncclGroupEnd starts a thread and returns before its kernel
// is in the stream (groupLaunchNonBlocking in NCCL's group.cc). The messages of every operation would pay for that.
class NcclComm {
 public:
  // [host] Return an id for a new communicator. One of its ranks makes it.
  static std::string make_id();
  // [host] Return the version of the library, as 22809 for 2.28.9.
  static int version();

  // [host] Make an object without a communicator, so that `free` can be called from the beginning.
  NcclComm() = default;
  // [host] Abort the communicator, if nothing has freed it.
  ~NcclComm();
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  // [host] Join the communicator, once. Wait for all ranks. Throw std::runtime_error after an error, or if `free` was
  // called meanwhile; then no communicator is left. `max_ctas`: the most multiprocessors of a group of sends and
  // receives.
  void join(const std::string& id, int rank, int num_ranks, int max_ctas);
  // [host] Exchange one byte with every other rank, so that no later call connects. Called once, after `join`. Wait for
  // all ranks. Throw as `join`.
  void connect();

  // [host] Send and receive in one group: `run()` calls send and receive. All begin together, in the stream given to
  // them. Those of two ranks match in order. Do nothing after an abort: kernels do nothing then either.
  template <class Run>
  void group(const Run& run) const {
    const std::lock_guard lock(mutex_);
    if (comm_ == nullptr) return;
    begin();
    try {
      run();
    } catch (...) {  // no later call of this thread may belong to this group
      cancel();
      throw;
    }
    end();
  }
  void send(const void* memory, size_t bytes, int rank, cudaStream_t stream) const;
  void receive(void* memory, size_t bytes, int rank, cudaStream_t stream) const;

  // [host] Free the communicator, once: after all sends have left, or with `aborts` at once. May wait for other ranks
  // or for graphs, so call it in a thread. With `aborts`, kernels under way end soon after the call. Wait for a group
  // under way first, but not for ever: its launches may wait for kernels that only an abort ends. While `join` or
  // `connect` is inside NCCL, return, and leave the abort to them.
  void free(bool aborts);

 private:
  void begin() const;
  void end() const;
  void cancel() const;
  // [host] Throw if `free` was called.
  void throw_if_freed() const;
  // [host] Abort the communicator, unless it is freed already. Errors are ignored, because no caller could act on them.
  void abort_if_left() noexcept;

  int rank_ = 0, num_ranks_ = 0;
  std::atomic<void*> comm_{nullptr};  // whoever takes it out frees it, so that happens once
  std::atomic<bool> is_freed_{false};
  std::atomic<bool> connects_{false};  // `connect` is under way
  mutable std::timed_mutex mutex_;     // held in a group
};

}  // namespace ep::cuda
