// The messages of the NCCL wire. The host puts them into a side stream, after each launch of an operation:
//
//   kernel `between`: wait until the first message is ready
//   NCCL: send it to all rail peers, receive theirs
//   kernel `between`: raise the wire flags that it covers, wait until the second message is ready
//   ...
//
// Meanwhile the kernel of the operation runs. It says what is ready (Region::ready), and waits for the wire flags.
// docs/protocol.md has the order of messages, and says why nothing is overwritten too early.
#pragma once
#include <memory>

#include "cuda/device/owned.h"
#include "cuda/engine.h"
#include "cuda/nccl.h"

namespace ep::cuda {

// The parameters of the kernel between two messages. It raises wire flags of one message, then waits for another one.
struct Between {
  const State* state;
  uint64_t* message_epochs;  // as in Region
  int node;                  // of this rank
  int num_raisers = 0, num_flags = 0, num_waits = 0;
  int raisers[kMaxNodes];            // nodes of the message that has arrived
  uint64_t* raises[kMaxNodes];       // of each of them, the first of num_flags to be raised
  const uint64_t* waits[kMaxNodes];  // flags of Region::ready to wait for
};

class Messages {
 public:
  // [host] `context` of the buffer. `comm`: of this rank's rail; its ranks are the nodes. Wait for a small kernel, at
  // most as long as an operation waits for a peer.
  Messages(const Context& context, std::shared_ptr<NcclComm> comm);
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  // [host] Call this before a launch in `stream`: the messages follow what is in this stream by now.
  void follow(cudaStream_t stream) const;
  // [host] Send and receive what a launch needs, after this launch. The arguments are the same as in Engine.
  void dispatch(const DispatchArgs& args, Launch launch, cudaStream_t stream);
  void combine(const CombineArgs& args, cudaStream_t stream);
  void decode_dispatch(const DecodeDispatchArgs& args, DecodeLaunch launch, cudaStream_t stream);
  void decode_combine(const DecodeCombineArgs& args, DecodeLaunch launch, cudaStream_t stream);
  // [host] Return whether messages were captured: NCCL may then keep the memory of the region in its graphs.
  bool has_captured() const { return has_captured_; }
  // [host] Return the bytes of all messages sent, captured ones once.
  uint64_t bytes() const { return bytes_; }

 private:
  // An array in a message. `local`: of this rank; `received`: of the rail peer. Its bytes, or those of each row.
  struct Array {
    const void* local;
    void* received;
    size_t bytes;
  };
  // What one message has for a node, and from it: rows, or 1 for arrays without rows. It waits for `num_ready` chunks.
  // With neither ready chunks nor received rows there is no message. Both ends know both numbers.
  struct Part {
    size_t sent = 1, received = 1;
    int num_ready = 1;
  };
  static Part whole(int) { return {}; }
  // [host] Return the rows of all messages of a dispatch. `rows`: as in MessageSizes.
  MessageRows rows_of(const MessageRows* rows) const;
  // [host] Send a message to each other node, and receive one. It covers chunks [begin, end) of a kind of wire flags:
  // [num_others, max_chunks]. `part_of(node)` returns a Part; `arrays(node, add)` calls add(Array) for each array.
  template <class PartOf, class Arrays>
  void exchange(uint64_t* flags, int max_chunks, int begin, int end, const PartOf& part_of, const Arrays& arrays);
  // [host] Exchange rows in several messages of whole chunks, of about kBytes: so many with each node. Call
  // `behind_first()` behind the first one; `arrays(node, first_row, add)` as above.
  template <class BehindFirst, class Arrays>
  void exchange_rows(uint64_t* flags, int max_chunks, int log_chunk, const int32_t* sent, const int32_t* received,
                     size_t row_bytes, const BehindFirst& behind_first, const Arrays& arrays);
  void exchange_calls();
  // [host] Exchange the rows of a dispatch, with their metadata, and the items of a new plan.
  void exchange_dispatch(const RowArgs& args, size_t bytes_of_metadata);
  // [host] Exchange the sums of a combine, with the given number of weights per token.
  void exchange_sums(const SumArgs& args, size_t weights);
  // [host] Raise the flags of the last message. While a graph is captured, let `stream` wait for the messages, if this
  // launch `joins` them: the first of two does not.
  void finish(cudaStream_t stream, bool joins);
  void launch_between();

  // [host] As in Context (context.h).
  int other_node_idx(int node) const { return node - (node > context_.node); }
  int rail_peer(int node) const { return node * context_.config.ranks_per_node + context_.local; }
  template <class T>
  T* inbox(int node, T* Inbox::* array) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(context_.own.inbox.*array) + node * context_.own.inbox_bytes);
  }
  template <class T>
  T* rail(int node, T* RailArrays::* array) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(context_.own.rail.*array) +
                                other_node_idx(node) * context_.own.rail_bytes);
  }

  const Context context_;
  const std::shared_ptr<NcclComm> comm_;
  OwnedStream stream_;
  OwnedEvent before_, after_;  // the launch; the messages
  Between between_{};          // of the next launch
  bool has_captured_ = false;
  uint64_t bytes_ = 0;
};

}  // namespace ep::cuda
