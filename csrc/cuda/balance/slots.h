// Copies between the experts of a rank and the expert slots of the other ranks of its node: weights into the slots,
// gradients out of them. Plain copies in a stream: neither kernel waits for another rank
// (ep_dispatcher/balance/slots.py says what orders them).
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "common/types.h"
#include "cuda/config.h"

namespace ep::cuda {

// Parameters of an expert in one launch, whose arguments they are. A pass of ep.moe_mlp has at most 6: values and
// scales of two matrices, and two biases. DeepEP's programs may have more, which take several launches.
constexpr int kMaxSlotParameters = 16;

// The slots of a node, as one rank sees them. Written by the host.
struct NodeSlots {
  char* regions[kMaxLocal];   // [num_local] memory of each rank's slots, as mapped here
  int32_t ranks[kMaxLocal];   // [num_local] the ranks of the node, in ascending order
  int32_t num_local;          // ranks of the node
  int32_t local_rank;         // this one, among them
  int32_t num_local_experts;  // experts whose home is one rank
  int32_t num_slots;          // of each rank
};

// One parameter of the experts of this rank, or its gradient, and where the slots have it. Written by the host.
struct ExpertParameter {
  const int64_t* table;  // [num_local_experts] addresses of the experts' matrices, or null
  char* first;           // without a table: the address of expert 0's matrix
  int64_t step;          // [bytes] without a table: from one expert's matrix to the next
  int64_t size;          // of one expert: bytes in a push, elements in a pull
  int64_t slot_begin;    // [bytes] from the start of a region to slot 0, a multiple of 16
  int64_t slot_step;     // [bytes] from one slot to the next, a multiple of 16
  DType dtype;           // of the gradients of a pull
};

// [host] Launch a kernel that copies the parameters of this rank's experts into all slots of the node's other ranks
// that hold copies of them.
//   copies [num_ranks, num_slots, 3]: (logical expert or -1, begin, end) by rank and slot
void push_to_slots(const NodeSlots& node, const int32_t* copies, const std::vector<ExpertParameter>& parameters,
                   int num_blocks, cudaStream_t stream);

// [host] Launch a kernel for each dtype of gradients. It adds the float32 gradients in those slots to the gradients of
// this rank's experts: in float32, in ascending order of (rank, slot), and rounded once.
void pull_from_slots(const NodeSlots& node, const int32_t* copies, const std::vector<ExpertParameter>& gradients,
                     int num_blocks, cudaStream_t stream);

}  // namespace ep::cuda
