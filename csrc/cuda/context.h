// What every kernel of one buffer is given.
#pragma once
#include "cuda/config.h"
#include "cuda/region.h"
#include "cuda/state.h"

namespace ep::cuda {

// The memory of the ranks of one node. All regions are carved alike, so a peer's array is one's own array at a fixed
// distance.
struct Peers {
  ptrdiff_t distance[kMaxLocal];  // [bytes] from this rank's region to that of each rank of its node

#ifdef __CUDACC__
  template <class T>
  __device__ T* at(T* own, int local) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(own) + distance[local]);
  }
#endif
};

struct Context {
  Config config;
  int item_ints, sent_ints, head_ints, max_token_chunks, max_item_chunks;  // of config, computed once
  uint32_t row_bytes, slot_stride;
  uint64_t timeout_ns;
  Peers peers;
  Region own;
  StateArrays arrays;
  State* state;
  Report* report;

#ifdef __CUDACC__
  // Find an array of `source`'s inbox on this rank's node: inbox_of(source, &Inbox::staging).
  template <class T>
  __device__ T* inbox_of(int source, T* Inbox::* array) const {
    return peers.at(own.inbox[config.node_of(source)].*array, config.local_of(source));
  }
#endif
};

}  // namespace ep::cuda
