// The communicator of a rail, in the NCCL library that PyTorch has loaded. This file includes nothing of NCCL: the few
// functions are looked up by name, so one build serves every version from 2.18 on.
#pragma once
#include <cuda_runtime.h>

#include <mutex>
#include <string>

namespace ep::cuda {

class NcclComm {
 public:
  // [host] Return an id for a new communicator. One of its ranks makes it.
  static std::string make_id();
  // [host] Return the version of the library, as 22809 for 2.28.9.
  static int version();

  // [host] Join the communicator, and exchange one byte with every other rank, so that no later call connects. Wait for
  // all ranks, without a limit. `max_ctas`: the most multiprocessors of a group of sends and receives.
  NcclComm(const std::string& id, int rank, int num_ranks, int max_ctas);
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  // [host] Send and receive in one group: `run()` calls send and receive. All begin together, in the stream given to
  // them. Those of two ranks match in order. Do nothing after an abort: kernels do nothing then either.
  template <class Run>
  void group(const Run& run) const {
    const std::lock_guard lock(mutex_);
    if (!comm_) return;
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
  // under way first, but not for ever: its launches may wait for kernels that only an abort ends.
  void free(bool aborts);

 private:
  void begin() const;
  void end() const;
  void cancel() const;

  void* comm_ = nullptr;
  mutable std::timed_mutex mutex_;  // held in a group
};

}  // namespace ep::cuda
