// A dispatch's rows: staged by their source, sent once per node over the rail, pulled into their final place.
#include <algorithm>
#include <cstring>

#include "cpu/engine.h"
#include "cpu/huge_pages.h"
#include "cpu/parallel.h"

namespace ep::cpu {

Payload Engine::payload_of(int source) const {
  Cursor c(inbox_holding(source).payload);
  return carve_payload(c, config_, bytes_per_row_, has_weights_, plan_.num_payload_rows[source]);
}

void Engine::stage(const DispatchArgs& args) {
  if (staged_epoch_ != epoch_) wait_for(&Region::consumed, 0, "free staging", staged_epoch_);
  staged_epoch_ = epoch_;
  Cursor c(own().inbox[node()].payload);
  const Payload payload = carve_payload(c, config_, bytes_per_row_, has_weights_, args.num_tokens);
  for (size_t i = 0; i < args.rows.size(); ++i) {
    const size_t bytes = args.rows[i].bytes_per_row;
    parallel_for(num_threads_, 0, args.num_tokens, [&](int begin, int end) {
      for (int t = begin; t < end; ++t) std::memcpy(payload.rows[i] + t * bytes, args.rows[i].data + t * bytes, bytes);
    });
  }
  if (has_weights_) std::memcpy(payload.weights, args.topk_weights, args.num_tokens * config_.weights_bytes());
  raise_flag(own().staged[node()], epoch_);
}

Span Engine::pack_payload(int node, const DispatchArgs& args) {
  // A weighted combine sends its sums from payload_out_ while the weights may still be on their way.
  auto& memory = weighted_ ? weights_out_ : payload_out_;
  Cursor c(message_memory(memory, node, max_payload_bytes(config_)));
  char* const data = memory[node].get();
  const Payload payload = carve_payload(c, config_, bytes_per_row_, has_weights_, plan_.num_sent_rows[node]);
  *payload.calls = {own_call_, own_call_};  // receivers get a payload from every rank of this node
  const int32_t* sent_row = plan_.sent_row + static_cast<size_t>(node) * args.num_tokens;
  parallel_for(num_threads_, 0, args.num_tokens, [&](int begin, int end) {
    for (int t = begin; t < end; ++t) {
      const size_t to = sent_row[t], from = t;
      if (sent_row[t] < 0) continue;
      for (size_t i = 0; i < args.rows.size(); ++i) {
        const size_t bytes = args.rows[i].bytes_per_row;
        std::memcpy(payload.rows[i] + to * bytes, args.rows[i].data + from * bytes, bytes);
      }
      if (has_weights_)
        std::memcpy(payload.weights + to * config_.num_topk, args.topk_weights + from * config_.num_topk,
                    config_.weights_bytes());
    }
  });
  return {data, c.size()};
}

Span Engine::incoming_payload(int node) const { return {own().inbox[node].payload, max_payload_bytes(config_)}; }

void Engine::payload_arrived(int node) { raise_flag(own().staged[node], epoch_); }

void Engine::prepare_output(const PullArgs& args) {
  const PlanHead& head = *plan_.head;
  if (decodes(head)) return;
  const bool expert_layout = has_expert_rows(head);
  for (size_t i = 0; i < args.out.size(); ++i) prefer_huge_pages(args.out[i], head.num_rows * bytes_per_row_[i]);
  const auto clear = [&](size_t begin, size_t end) {
    for (size_t i = 0; i < args.out.size(); ++i)
      std::memset(args.out[i] + begin * bytes_per_row_[i], 0, (end - begin) * bytes_per_row_[i]);
    if (expert_layout && args.out_weights) std::fill(args.out_weights + begin, args.out_weights + end, 0.0f);
  };
  // Clear the padding of each group (expert layout) or all entries (rank layout), then the rows behind the last.
  size_t row = 0;
  if (expert_layout) {
    for (int e = 0; e < num_experts_local(); ++e) {
      clear(row + plan_.tokens_per_expert[e], row + plan_.rows_per_expert[e]);
      row += plan_.rows_per_expert[e];
    }
  } else {
    const size_t entries = static_cast<size_t>(head.num_rows) * config_.num_topk;
    if (args.out_weights) std::fill_n(args.out_weights, entries, 0.0f);
    if (args.out_topk_idx) std::fill_n(args.out_topk_idx, entries, int64_t{-1});
    row = head.num_items;
  }
  clear(row, head.num_rows);
}

void Engine::pull(int node, const PullArgs& args) {
  compare_on_node("rows");
  wait_for(&Region::staged, node, "rows");
  compare_payloads(node);
  if (disagrees_) return;

  // Copy the rows, weights and experts of each source's items.
  const int num_topk = config_.num_topk;
  const bool expert_rows = has_expert_rows(*plan_.head);
  size_t item_bytes = has_weights_ ? config_.weights_bytes() : 0;
  for (size_t bytes : bytes_per_row_) item_bytes += bytes;
  for (int i = 0; i < config_.ranks_per_node; ++i) {  // every rank begins with a different source
    const int local = (config_.local_rank + i) % config_.ranks_per_node;
    const int source = config_.rank_at[node * config_.ranks_per_node + local];
    const Payload payload = payload_of(source);
    const int begin = plan_.item_begin[source], end = plan_.item_begin[source + 1];
    const bool masked = is_masked(local);  // masked since the plan was made: write zeros
    parallel_for(num_threads_, begin, end, [&](int first, int last) {
      for (int item = first; item < last; ++item) {
        const size_t from = plan_.payload_row[item];
        const int first_copy = plan_.copy_begin[item], end_copy = plan_.copy_begin[item + 1];
        const int end_row = expert_rows ? end_copy : first_copy + 1;  // rank layout: one row for all copies
        for (size_t r = 0; r < args.out.size(); ++r) {
          const size_t bytes = bytes_per_row_[r];
          for (int copy = first_copy; copy < end_row; ++copy) {
            char* const to = args.out[r] + plan_.output_row[copy] * bytes;
            if (masked)
              std::memset(to, 0, bytes);
            else
              std::memcpy(to, payload.rows[r] + from * bytes, bytes);
          }
        }
        for (int copy = first_copy; copy < end_copy; ++copy) {
          const size_t row = plan_.output_row[copy], entry = row * num_topk + plan_.copy_k[copy];
          if (args.out_weights)
            args.out_weights[expert_rows ? row : entry] = payload.weights[from * num_topk + plan_.copy_k[copy]];
          if (args.out_topk_idx) args.out_topk_idx[entry] = plan_.copy_expert[copy];
        }
      }
    });
    traffic_.bytes_read[config_.rank_at[this->node() * config_.ranks_per_node + local]] += (end - begin) * item_bytes;
  }
}

void Engine::finish() {
  check_not_masked("finish");  // after all reads of memory that peers may have overwritten
  raise_flag(own().consumed[0], epoch_);
}

}  // namespace ep::cpu
