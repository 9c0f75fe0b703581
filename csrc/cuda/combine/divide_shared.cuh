// The host describes a combine, and divides the shared memory of its blocks: into smem stages for rows, and the queue
// of tasks beside them.
#pragma once
#include <algorithm>

#include "cuda/combine/combine.cuh"
#include "cuda/device/launch.h"

namespace ep::cuda {

// [host] Return whether a row is long: a team of four warps takes it, or one of two takes half of it.
inline bool has_long_rows(const Context& context) { return context.row_bytes > 8192; }

// [host] Describe what every launch of a combine has. `batch`: own tokens that a block takes at once, at most.
inline void describe_sums(SumParams& params, const Context& context, const SumArgs& args, int32_t* plan, int batch) {
  const Config& config = context.config;
  const bool one_node = config.num_nodes == 1, is_long = has_long_rows(context);
  params.plan = read_plan(config, plan);
  // Direct sums cross without rail blocks, which only signal then.
  params.rail_blocks = context.maps_all() ? std::min(args.rail_blocks, config.least_rail_blocks()) : args.rail_blocks;
  // Share the tokens evenly: with few tokens every block takes one batch.
  const int blocks = args.num_blocks - params.rail_blocks;
  const auto share = [&](int shares) { return std::max(1, (args.num_tokens + shares - 1) / shares); };
  params.own_batch = share(blocks * share(blocks * batch));
  // Tuned with 24 blocks: `saturating` on 4 H200, the rest on 2 (combine of 4096 x 7168: half rows by teams of two
  // warps 387 us, whole rows by four 418 us). A low reduce_weight makes more blocks push first, so that reducing blocks
  // wait less for peers; with 0.28 hidden 2048 took 245 us, without own rows and with 0.45 it took 283 us. To measure
  // again, change one value and run `python -m ep_dispatcher.bench --engine cuda`. Between nodes all this takes
  // longer: 2 nodes of 2, 4096 x 7168 755 us instead of 720.
  params.reduce_weight = one_node ? 0.28f : is_long ? 1.2f : 0.45f;
  params.saturating = !is_long ? 1000.0f : one_node ? 3.9f : 5.2f;
}

// [host] Lay out the memory of a block. Return its bytes. An smem stage has a row, or a piece of it: as few pieces as
// leave room for some tasks at once. An addend stands for one expert of a token or more.
template <class Params>
size_t divide_shared(Params& params, const Context& context, bool halves_rows) {
  const Config& config = context.config;
  const int copies = config.max_copies(), sums = config.ranks_per_node + config.num_others();
  const int max_addends = std::min(config.num_topk, config.num_nodes == 1 ? copies + sums - 1 : std::max(copies, sums));
  int num_smem_stages = 0;
  uint32_t smem_stage_bytes = 0;
  const auto carve = [&] {
    Cursor c;
    params.memory = Params::Memory::carve(c, context, num_smem_stages, smem_stage_bytes, max_addends);
    return c.size();
  };
  const size_t room = kUsableShared - carve();
  const uint32_t row = context.row_bytes;
  for (uint32_t pieces = halves_rows ? 2 : 1;; ++pieces) {
    smem_stage_bytes = static_cast<uint32_t>(row_stride((row + pieces - 1) / pieces));
    if (room / smem_stage_bytes >= max_addends + size_t{4}) break;
  }
  const int most_smem_stages = std::max<int>(Pipeline::kMaxSmemStages, max_addends);
  num_smem_stages = static_cast<int>(std::min<size_t>(room / smem_stage_bytes, most_smem_stages));
  return carve();
}

// [host] Call `run(element)` with the dtype of the buffer.
template <class Run>
void with_element(const Context& context, const Run& run) {
  if (context.config.dtype == DType::kFloat32) return run(Float32{});
  if (context.config.dtype == DType::kBFloat16) return run(BFloat16{});
  run(Float16{});
}

// [host] Call `run(summing)` with the way to sum rows of the buffer: kHalves and kWhole say which ways long rows may
// go.
template <bool kHalves, bool kWhole, class Run>
void with_summing(const Context& context, [[maybe_unused]] bool halves_rows, const Run& run) {
  with_element(context, [&](auto element) {
    using T = decltype(element);
    if constexpr (kHalves)
      if (halves_rows) return run(Summing<T, 2, 7>{});  // a team takes 7168 bytes at once: half of 7168 elements
    if constexpr (kWhole)
      if (has_long_rows(context)) return run(Summing<T, 4, 7>{});  // 14336 bytes
    run(Summing<T, 2, 4>{});                                       // 4096 bytes: 2048 elements
  });
}

}  // namespace ep::cuda
