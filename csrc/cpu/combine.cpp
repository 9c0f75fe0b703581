// A combine's rows: summed over a rank's experts, then over a node's ranks, then over the nodes. The order of every sum
// and its one rounding are those of ep_dispatcher/reference.py.
#include <algorithm>
#include <cstring>

#include "cpu/engine.h"
#include "cpu/huge_pages.h"
#include "cpu/parallel.h"
#include "cpu/sum_rows.h"

namespace ep::cpu {
namespace {

// Merge the weights of two partial sums of one token, [num_topk]: `from` into `to`. In each column at most one of all
// partial sums has a weight, and the others have 0, whose bits are all 0. So OR keeps every bit of the weight, also the
// sign of -0.0, which an addition to 0 would lose.
void merge_weights(float* to, const float* from, int num_topk) {
  for (int k = 0; k < num_topk; ++k) {
    uint32_t kept, more;
    std::memcpy(&kept, to + k, sizeof(kept));
    std::memcpy(&more, from + k, sizeof(more));
    kept |= more;
    std::memcpy(to + k, &kept, sizeof(kept));
  }
}

}  // namespace

void Engine::push(int node, const CombineArgs& args) {
  if (pushed_epoch_ != epoch_) wait_for(&Region::consumed, 0, "free slots", pushed_epoch_);
  pushed_epoch_ = epoch_;
  const int num_topk = config_.num_topk;
  const size_t row_bytes = config_.row_bytes();
  const bool expert_rows = has_expert_rows(*plan_.head);
  const bool has_weights = args.topk_weights != nullptr;
  if (weighted_) {
    wait_for(&Region::staged, node, "weights");
    compare_payloads(node);
  }
  for (int i = 0; i < config_.ranks_per_node; ++i) {  // every rank begins with a different rail
    const int local = (config_.local_rank + i) % config_.ranks_per_node;
    if (is_masked(local)) continue;
    const int source = config_.rank_at[node * config_.ranks_per_node + local];
    const Slots& slots = inbox_holding(source).slots;
    const Payload payload = weighted_ ? payload_of(source) : Payload{};
    const int begin = plan_.item_begin[source], end = plan_.item_begin[source + 1];
    parallel_for(num_threads_, begin, end, [&](int first, int last) {
      std::vector<const char*> rows(num_topk);
      std::vector<float> row_weights(num_topk);
      for (int item = first; item < last; ++item) {
        const size_t slot = plan_.item_slot[item];
        const int first_copy = plan_.copy_begin[item], end_copy = plan_.copy_begin[item + 1];
        const int num_rows = expert_rows ? end_copy - first_copy : 1;
        for (int j = 0; j < num_rows; ++j) rows[j] = args.y + plan_.output_row[first_copy + j] * row_bytes;
        if (weighted_) {
          const float* weights = payload.weights + static_cast<size_t>(plan_.payload_row[item]) * num_topk;
          for (int j = 0; j < num_rows; ++j) row_weights[j] = weights[plan_.copy_k[first_copy + j]];
        }
        sum_rows(rows.data(), weighted_ ? row_weights.data() : nullptr, num_rows, slots.rows + slot * row_bytes,
                 config_.hidden, config_.dtype);
        if (!has_weights) continue;
        float* weights = slots.weights + slot * num_topk;
        std::fill_n(weights, num_topk, 0.0f);
        for (int copy = first_copy; copy < end_copy; ++copy) {
          const size_t row = plan_.output_row[copy], k = plan_.copy_k[copy];
          weights[k] = args.topk_weights[expert_rows ? row : row * num_topk + k];
        }
      }
    });
    const int inbox_rank = config_.rank_at[this->node() * config_.ranks_per_node + local];
    traffic_.bytes_written[inbox_rank] += (end - begin) * (row_bytes + (has_weights ? config_.weights_bytes() : 0));
    if (weighted_) traffic_.bytes_read[inbox_rank] += (end - begin) * config_.weights_bytes();
  }
  raise_flag(own().pushed[node], epoch_);
}

Span Engine::reduce(int node, bool has_weights) {
  compare_on_node("partial sums of another node's tokens");
  wait_for(&Region::pushed, node, "partial sums of another node's tokens");
  const int num_topk = config_.num_topk, num_rows = plan_.num_reduced_from(node);
  const size_t row_bytes = config_.row_bytes();
  const Slots& slots = own().inbox[node].slots;
  const int32_t* slot_begin = plan_.slot_begin_of(node);
  Cursor c(message_memory(payload_out_, node, max_payload_bytes(config_)));
  char* const data = payload_out_[node].get();
  Payload sums = carve_payload(c, config_, {row_bytes}, has_weights, num_rows);
  *sums.calls = {own_call_, other_call_};  // the receiver gets no Call of other ranks of this node
  if (disagrees_) return {data, sizeof(SenderCalls)};

  // Sum the slots of each of the rail peer's tokens.
  parallel_for(num_threads_, 0, num_rows, [&](int first, int last) {
    std::vector<const char*> rows(config_.max_partials());
    for (int row = first; row < last; ++row) {
      const size_t begin = slot_begin[row], num_slots = slot_begin[row + 1] - begin;
      for (size_t j = 0; j < num_slots; ++j) rows[j] = slots.rows + (begin + j) * row_bytes;
      sum_rows(rows.data(), nullptr, static_cast<int>(num_slots), sums.rows[0] + row * row_bytes, config_.hidden,
               config_.dtype);
      if (!has_weights) continue;
      float* weights = sums.weights + static_cast<size_t>(row) * num_topk;
      std::fill_n(weights, num_topk, 0.0f);
      for (size_t j = 0; j < num_slots; ++j) merge_weights(weights, slots.weights + (begin + j) * num_topk, num_topk);
    }
  });
  return {data, c.size()};
}

Span Engine::incoming_sums(int node) {
  const size_t bytes = max_payload_bytes(config_);
  return {message_memory(sums_in_, node, bytes), bytes};
}

void Engine::sum(const CombineArgs& args) {
  compare_on_node("partial sums");
  wait_for(&Region::pushed, node(), "partial sums");
  const bool has_weights = args.topk_weights != nullptr;
  const int num_topk = config_.num_topk, num_tokens = plan_.head->num_tokens;
  const size_t row_bytes = config_.row_bytes();
  const Slots& slots = own().inbox[node()].slots;
  const int32_t* slot_begin = plan_.slot_begin_of(node());
  prefer_huge_pages(args.out, num_tokens * row_bytes);

  // Compare the Calls in front of the other nodes' sums.
  std::vector<Payload> sums_of_node;
  for (int m = 0; m < config_.num_nodes; ++m) {
    Cursor c(sums_in_[m].get());
    sums_of_node.push_back(carve_payload(c, config_, {row_bytes}, has_weights, plan_.num_sent_rows[m]));
    if (m == node()) continue;
    const SenderCalls calls = *sums_of_node[m].calls;
    const int sender = rank_at(m, config_.local_rank);
    check_number(sender, "the rank of the other call", calls.other.rank, 0, config_.num_ranks() - 1);
    compare(calls.sender, sender);
    compare(calls.other, static_cast<int>(calls.other.rank));
  }
  agree();

  const std::vector<int> masked = this->masked();
  // Sum the slots and the other nodes' sums of each token, in the order of nodes.
  parallel_for(num_threads_, 0, num_tokens, [&](int first, int last) {
    std::vector<const char*> rows(config_.max_partials() + config_.num_nodes);
    for (int t = first; t < last; ++t) {
      float* weights = has_weights ? args.out_weights + static_cast<size_t>(t) * num_topk : nullptr;
      if (weights) std::fill_n(weights, num_topk, 0.0f);
      int n = 0;
      const auto add = [&](const char* row, const float* row_weights) {
        rows[n++] = row;
        if (weights) merge_weights(weights, row_weights, num_topk);
      };
      for (int m = 0; m < config_.num_nodes; ++m) {
        if (config_.masks) {
          const auto ranks = static_cast<uint32_t>(slot_begin[t]);
          for (int local = 0; local < config_.ranks_per_node; ++local) {
            const size_t slot = size_t(local) * config_.max_tokens + t;
            if (ranks >> local & 1 && !masked[config_.rank_at[local]])
              add(slots.rows + slot * row_bytes, slots.weights + slot * num_topk);
          }
        } else if (m == node()) {
          for (size_t slot = slot_begin[t]; slot < static_cast<size_t>(slot_begin[t + 1]); ++slot)
            add(slots.rows + slot * row_bytes, slots.weights + slot * num_topk);
        } else if (const int row = plan_.sent_row[static_cast<size_t>(m) * num_tokens + t]; row >= 0) {
          const Payload& sums = sums_of_node[m];
          add(sums.rows[0] + row * row_bytes, has_weights ? sums.weights + size_t(row) * num_topk : nullptr);
        }
      }
      sum_rows(rows.data(), nullptr, n, args.out + t * row_bytes, config_.hidden, config_.dtype);
    }
  });
}

}  // namespace ep::cpu
