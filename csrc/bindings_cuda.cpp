// The modules of the CUDA engine: _C_cuda with the peer wire, _C_nvshmem with the NVSHMEM wire. One process may use
// both, so all types are local to their module. A stream is passed as an integer, PyTorch's cuda_stream.
#include <atomic>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <tuple>

#include "bindings.h"
#include "cuda/balance/balance.h"
#include "cuda/balance/slots.h"
#include "cuda/device/check.h"
#include "cuda/engine.h"
#include "cuda/moe/routing.h"
#include "cuda/moe/row_gemm.h"
#include "cuda/moe/weight_grad.h"
#include "cuda/nccl.h"
#include "cuda/requests.h"
#include "cuda/stream_order.h"
#ifdef EP_WIRE_NVSHMEM
#include "nvshmem/world.h"
#define EP_MODULE _C_nvshmem
#else
#define EP_MODULE _C_cuda
#endif

namespace py = pybind11;

namespace {

using ep::Address;
using ep::pointer;

std::vector<char*> pointers(const std::vector<Address>& addresses) {
  std::vector<char*> result;
  for (Address address : addresses) result.push_back(pointer<char>(address));
  return result;
}

// Let other threads run while messages are launched: a full queue makes the host wait until one of them aborts NCCL.
struct OthersRun {
  std::optional<py::gil_scoped_release> release;
  explicit OthersRun(const ep::cuda::Engine& engine) {
    if (engine.sends_messages()) release.emplace();
  }
};

// One parameter of an expert: table, first, step, size, slot_begin, slot_step (csrc/cuda/balance/slots.h).
using SlotMove = std::tuple<Address, Address, int64_t, int64_t, int64_t, int64_t>;

ep::cuda::ExpertParameter expert_parameter(const SlotMove& move, ep::DType dtype = ep::DType::kFloat32) {
  const auto& [table, first, step, size, slot_begin, slot_step] = move;
  return {pointer<const int64_t>(table), pointer<char>(first), step, size, slot_begin, slot_step, dtype};
}

#ifndef EP_WIRE_NVSHMEM
// at, shifts, num_shifts, first, step (csrc/cuda/moe/row_gemm.h).
using WeightsOfExperts = std::tuple<Address, Address, int64_t, int64_t, int64_t>;
// rows, num_rows, length, weights, ends, experts, out, columns, bias, bias_dtype, row_weights.
using GemmOfRows =
    std::tuple<Address, int, int, WeightsOfExperts, Address, int, Address, int, Address, ep::DType, Address>;

ep::cuda::ExpertWeights expert_weights(const WeightsOfExperts& weights) {
  const auto& [at, shifts, num_shifts, first, step] = weights;
  return {pointer<const void>(at), pointer<const int32_t>(shifts), num_shifts, first, step};
}

ep::cuda::RowGemm row_gemm(const GemmOfRows& gemm) {
  const auto& [rows, num_rows, length, weights, ends, experts, out, columns, bias, bias_dtype, row_weights] = gemm;
  return {pointer<const void>(rows),
          num_rows,
          length,
          expert_weights(weights),
          pointer<const int32_t>(ends),
          experts,
          pointer<void>(out),
          columns,
          pointer<const void>(bias),
          bias_dtype,
          pointer<const float>(row_weights)};
}
#endif

using ep::cuda::DecodeLaunch, ep::cuda::Launch;

// Launch an operation, or a part of it, with the tensors of a request and of its result.
template <Launch kPart>
void launch_dispatch(ep::cuda::Engine& engine, py::handle request, py::handle received, Address stream) {
  ep::cuda::DispatchArgs args = ep::cuda::read_dispatch(engine, request, received);
  if (kPart == Launch::kPlanAndStage) args.ticket = engine.next_ticket();
  if (kPart == Launch::kPull) args.ticket = engine.ticket();
  int32_t* const plan = ep::cuda::plan_of(request, received);
  const OthersRun others_run(engine);
  engine.dispatch(args, plan, kPart, pointer<CUstream_st>(stream));
}

void launch_combine(ep::cuda::Engine& engine, py::handle request, py::handle combined, Address stream) {
  const ep::cuda::CombineArgs args = ep::cuda::read_combine(engine, request, combined);
  int32_t* const plan = ep::cuda::plan_of(request, combined);
  const OthersRun others_run(engine);
  engine.combine(args, plan, pointer<CUstream_st>(stream));
}

template <DecodeLaunch kPart>
void launch_decode_dispatch(ep::cuda::Engine& engine, py::handle request, py::handle received, Address stream) {
  const ep::cuda::DecodeDispatchArgs args = ep::cuda::read_decode_dispatch(engine, request, received);
  int32_t* const plan = ep::cuda::plan_of(request, received);
  const OthersRun others_run(engine);
  engine.decode_dispatch(args, plan, kPart, pointer<CUstream_st>(stream));
}

template <DecodeLaunch kPart>
void launch_decode_combine(ep::cuda::Engine& engine, py::handle request, py::handle combined, Address stream) {
  const ep::cuda::DecodeCombineArgs args = ep::cuda::read_decode_combine(engine, request, combined);
  int32_t* const plan = ep::cuda::plan_of(request, combined);
  const OthersRun others_run(engine);
  engine.decode_combine(args, plan, kPart, pointer<CUstream_st>(stream));
}

}  // namespace

PYBIND11_MODULE(EP_MODULE, m) {
  using namespace ep::cuda;

  ep::bind_types(m);

  ep::bind_cuda_config(m, "Config");

  m.attr("COMPARED") = std::vector<std::string>(std::begin(kComparedNames), std::end(kComparedNames));
  // Phases that are no waits: a rank has sent numbers that are out of range.
  constexpr int kFirstWrong = static_cast<int>(Phase::kWrongCall);
  m.attr("WRONG_NUMBERS") = std::vector<std::string>(std::begin(kPhaseNames) + kFirstWrong, std::end(kPhaseNames));
  m.attr("message_rows_bytes") = sizeof(MessageRows);
  m.def("region_bytes", &region_bytes);
  m.def("flag_bytes", &flag_bytes);            // at the start of a region; to be zeroed before the first kernel
  m.def("excluded_offset", &excluded_offset);  // in a region: uint64 [num_ranks], 1: the rank has masked this one
  // In a region: uint64 [num_ranks, rank_words], after a rank's abort 1 and 2 << r for each late rank r.
  m.def("aborted_offset", &aborted_offset);
  // Where a region has the numbers that peers write and kernels check, for tests: bytes from its start, and the int32
  // of one rank's counts and of one item.
  m.def("region_offsets", [](const Config& config) {
    ep::Cursor c;
    const Region region = carve_region(c, config);
    const auto at = [](auto* array) { return reinterpret_cast<size_t>(array); };
    return std::map<std::string, size_t>{{"called", at(region.called)},         {"choices", at(region.choices)},
                                         {"counts", at(region.counts)},         {"items", at(region.inbox.items)},
                                         {"counts_ints", Counts::ints(config)}, {"item_ints", config.item_ints()}};
  });
  m.def("rank_words", [](const Config& config) { return config.rank_words(); });
  m.def("state_bytes", &state_bytes);
  m.def("report_bytes", &report_bytes);
  // In the report: int64 [num_local_experts], and int32, MessageRows.
  m.def("counted_rows_offset", [](const Config& config) {
    ep::Cursor c;
    return reinterpret_cast<size_t>(carve_report(c, config).counted_rows);
  });
  m.def("reported_message_rows_offset", [](const Config& config) {
    ep::Cursor c;
    return reinterpret_cast<size_t>(carve_report(c, config).message_rows);
  });
  // Return the number of int32 of the largest plan with `num_rows` received rows.
  m.def("plan_capacity", &plan_capacity);
  // In the state: uint32, 1 after this rank's abort; uint64 epoch of the last operation.
  m.attr("state_aborted_offset") = offsetof(State, aborted);
  m.attr("epoch_offset") = offsetof(State, epoch);
  // In the state, in this order: counters of bytes, uint64, by rank, by rank, by node, by node; then int32 [num_ranks].
  m.def("state_offsets", [](const Config& config) {
    ep::Cursor c;
    const StateArrays arrays = carve_state(c, config, 1);
    const auto at = [](auto* array) { return reinterpret_cast<size_t>(array); };
    return std::map<std::string, size_t>{{"bytes_read", at(arrays.bytes_read)},
                                         {"bytes_written", at(arrays.bytes_written)},
                                         {"bytes_sent", at(arrays.bytes_sent)},
                                         {"lists_sent", at(arrays.lists_sent)},
                                         {"masked", at(arrays.masked)}};
  });

  // Stamps are int64 [stamped_launches, stamped_operations, blocks, stamped_warps, steps]: nanoseconds, 0 where there
  // is none. The order of steps is that of their names. Only builds with stamps write them.
  m.attr("has_stamps") = kStamps;
  m.attr("stamped_launches") = kStampedLaunches;
  m.attr("stamped_operations") = kStampedOperations;
  m.attr("stamped_warps") = kStampedWarps;
  m.attr("steps") = std::vector<std::string>(std::begin(kStepNames), std::end(kStepNames));

  // Streams of one device (stream_order.h).
  m.def("order_streams", [](int device, Address earlier, Address later) {
    order_streams(device, pointer<CUstream_st>(earlier), pointer<CUstream_st>(later));
  });
  m.def("is_captured", [](Address stream) { return is_captured(pointer<CUstream_st>(stream)); });
  // Copy between any two addresses, in a stream: a copy needs no multiprocessor, so it can pass a running kernel.
  m.def("copy", [](Address to, Address from, size_t bytes, Address stream) {
    check(
        cudaMemcpyAsync(pointer<char>(to), pointer<char>(from), bytes, cudaMemcpyDefault, pointer<CUstream_st>(stream)),
        "copy");
  });
  m.def("map_to_columns",
        [](int num_tokens, int num_experts, int topk, int slices, int experts_per_rank, bool skips_zeros,
           ep::DType dtype, Address map, Address probs, Address topk_idx, Address weights, Address stream) {
          map_to_columns({num_tokens, num_experts, topk, slices, experts_per_rank, skips_zeros, dtype},
                         pointer<const bool>(map), pointer<const void>(probs), pointer<int64_t>(topk_idx),
                         pointer<float>(weights), pointer<CUstream_st>(stream));
        });
  m.def("columns_to_map",
        [](int num_tokens, int num_experts, int topk, int slices, int experts_per_rank, bool skips_zeros,
           ep::DType dtype, Address topk_idx, Address grad_weights, Address grad_probs, Address stream) {
          columns_to_map({num_tokens, num_experts, topk, slices, experts_per_rank, skips_zeros, dtype},
                         pointer<const int64_t>(topk_idx), pointer<const float>(grad_weights),
                         pointer<void>(grad_probs), pointer<CUstream_st>(stream));
        });
#ifndef EP_WIRE_NVSHMEM  // a module with code of another library has none for a particular GPU
  // scales: of the rows; then those of the weights: weight_scales, scale_addresses, scale_step, scale_stride.
  using Scales = std::tuple<Address, Address, Address, int64_t, int64_t>;
  m.def("float8_gemm", [](const GemmOfRows& gemm, const Scales& scales, int num_sms, Address stream) {
    const auto& [of_rows, of_weights, addresses, step, stride] = scales;
    float8_gemm({row_gemm(gemm), pointer<const float>(of_rows), pointer<const float>(of_weights),
                 pointer<const int64_t>(addresses), step, stride},
                num_sms, pointer<CUstream_st>(stream));
  });
  m.def("bfloat16_gemm", [](const GemmOfRows& gemm, bool transposed, const std::optional<WeightsOfExperts>& copies,
                            int num_own, int num_sms, Address stream) {
    const ExpertWeights of_copies = copies ? expert_weights(*copies) : ExpertWeights{};
    bfloat16_gemm({row_gemm(gemm), transposed, of_copies, num_own}, num_sms, pointer<CUstream_st>(stream));
  });
  // Of each of one or two sets: grad, rows, the bytes from row to row of both, num_rows, ends.
  using GradSet = std::tuple<Address, Address, int64_t, int64_t, int32_t, Address>;
  m.def("weight_grad", [](const std::vector<GradSet>& sets, Address out, ep::DType dtype, bool accumulate, int n, int k,
                          int experts, int num_sms, Address stream) {
    WeightGrad grad{{}, 0, pointer<const int64_t>(out), dtype, accumulate, n, k, experts};
    if (sets.size() > std::size(grad.sets))
      throw py::value_error("sets has " + std::to_string(sets.size()) + " sets of rows, but at most two are allowed");
    for (const auto& [grads, rows, grad_stride, rows_stride, num_rows, ends] : sets)
      grad.sets[grad.num_sets++] = {
          pointer<const void>(grads),  pointer<const void>(rows), grad_stride, rows_stride, num_rows,
          pointer<const int32_t>(ends)};
    weight_grad(grad, num_sms, pointer<CUstream_st>(stream));
  });
#endif
  // Balanced experts. index_bytes is 4 for topk_idx of int32, and 8 for int64.
  m.def("balance_count",
        [](Address topk_idx, int index_bytes, int64_t num_choices, int num_experts, Address counts, Address stream) {
          ep::with_index(topk_idx, index_bytes, [&](const auto* indices) {
            balance_count(indices, num_choices, num_experts, pointer<int32_t>(counts), pointer<CUstream_st>(stream));
          });
        });
  m.def("balance_plan", [](int num_ranks, int ranks_per_node, int num_local_experts, int num_slots, int smallest_copy,
                           const std::vector<int>& rank_at, Address counts, int64_t row_stride, Address copies,
                           Address rows, Address stream) {
    balance_plan({num_ranks, ranks_per_node, num_local_experts, num_slots, smallest_copy}, rank_at,
                 pointer<const int32_t>(counts), row_stride, pointer<ep::balance::Copy>(copies), pointer<int32_t>(rows),
                 pointer<CUstream_st>(stream));
  });
  m.def("balance_rewrite",
        [](int num_ranks, int ranks_per_node, int num_local_experts, int num_slots, int smallest_copy, int rank,
           Address topk_idx, int index_bytes, int64_t num_tokens, int num_topk, Address counts, int64_t row_stride,
           Address copies, Address physical, Address stream) {
          ep::with_index(topk_idx, index_bytes, [&](const auto* indices) {
            balance_rewrite({num_ranks, ranks_per_node, num_local_experts, num_slots, smallest_copy}, rank, indices,
                            num_tokens, num_topk, pointer<const int32_t>(counts), row_stride,
                            pointer<const ep::balance::Copy>(copies), pointer<int64_t>(physical),
                            pointer<CUstream_st>(stream));
          });
        });

  // Expert slots: both take the addresses of copies and of each parameter, the number of blocks, and a stream.
  m.attr("max_slot_parameters") = kMaxSlotParameters;
  py::class_<NodeSlots>(m, "NodeSlots", py::module_local())
      .def(py::init([](const std::vector<Address>& regions, const std::vector<int32_t>& ranks, int local_rank,
                       int num_local_experts, int num_slots) {
             if (regions.empty() || regions.size() > kMaxLocal) throw py::value_error("regions");
             if (ranks.size() != regions.size()) throw py::value_error("ranks");
             NodeSlots node{{}, {}, static_cast<int32_t>(regions.size()), local_rank, num_local_experts, num_slots};
             for (size_t i = 0; i < regions.size(); ++i) {
               node.regions[i] = pointer<char>(regions[i]);
               node.ranks[i] = ranks[i];
             }
             return node;
           }),
           py::kw_only(), py::arg("regions"), py::arg("ranks"), py::arg("local_rank"), py::arg("num_local_experts"),
           py::arg("num_slots"));
  m.def("slots_push",
        [](const NodeSlots& node, Address copies, const std::vector<SlotMove>& moves, int num_blocks, Address stream) {
          std::vector<ExpertParameter> parameters;
          for (const SlotMove& move : moves) parameters.push_back(expert_parameter(move));
          push_to_slots(node, pointer<const int32_t>(copies), parameters, num_blocks, pointer<CUstream_st>(stream));
        });
  m.def("slots_pull", [](const NodeSlots& node, Address copies, const std::vector<SlotMove>& moves,
                         const std::vector<ep::DType>& dtypes, int num_blocks, Address stream) {
    std::vector<ExpertParameter> gradients;
    for (size_t p = 0; p < moves.size(); ++p) gradients.push_back(expert_parameter(moves[p], dtypes.at(p)));
    pull_from_slots(node, pointer<const int32_t>(copies), gradients, num_blocks, pointer<CUstream_st>(stream));
  });

  const py::call_guard<py::gil_scoped_release> others_run;
#ifdef EP_WIRE_NVSHMEM
  m.def("is_running", &ep::nvshmem::is_running);
  m.def("make_id", [] { return py::bytes(ep::nvshmem::make_id()); });
  m.def("start", &ep::nvshmem::start, others_run);
  m.def("own_pe", &ep::nvshmem::own_pe);
  m.def("num_pes", &ep::nvshmem::num_pes);
  m.def("allocate", [](size_t bytes) { return reinterpret_cast<Address>(ep::nvshmem::allocate(bytes)); }, others_run);
  m.def("address_at", [](Address memory, int pe) {
    return reinterpret_cast<Address>(ep::nvshmem::address_at(pointer<char>(memory), pe));
  });
  m.def("quiet", &ep::nvshmem::quiet, others_run);
#endif

  py::class_<NcclComm, std::shared_ptr<NcclComm>>(m, "NcclComm", py::module_local())
      .def(py::init<>())
      .def_static("make_id", [] { return py::bytes(NcclComm::make_id()); })
      .def_static("version", &NcclComm::version)
      .def("join", &NcclComm::join, others_run)
      .def("connect", &NcclComm::connect, others_run)
      .def("free", &NcclComm::free, others_run);

  // Return the CUDA that the GPU driver knows, 0 without a driver, and the one that built this module: 12080 is 12.8.
  m.def("cuda_versions", [] {
    int driver = 0;
    cudaDriverGetVersion(&driver);
    return std::make_pair(driver, CUDART_VERSION);
  });

  py::class_<Engine>(m, "Engine", py::module_local())
      .def(py::init([](const Config& config, const std::vector<Address>& regions, const std::vector<Address>& rail,
                       const std::vector<int>& rail_pes, Address state, Address report, double timeout_s, int num_sms) {
             return Engine(config, pointers(regions), pointers(rail), rail_pes, pointer<char>(state),
                           pointer<char>(report), timeout_s, num_sms);
           }),
           py::kw_only(), py::arg("config"), py::arg("regions"), py::arg("rail"), py::arg("rail_pes"), py::arg("state"),
           py::arg("report"), py::arg("timeout_s"), py::arg("num_sms"))
      // All of these take a request, its result and a stream, and trust that tensors lie on the engine's device. If the
      // host waits for the counts a dispatch is two launches: `plan_and_stage`, and `pull` once its outputs are there.
      .def("dispatch", launch_dispatch<Launch::kWhole>)
      .def("plan_and_stage", launch_dispatch<Launch::kPlanAndStage>)
      .def("pull", launch_dispatch<Launch::kPull>)
      .def("combine", launch_combine)
      // In decode layout. With a hook an operation is two launches: the hook receives.
      .def("decode_dispatch", launch_decode_dispatch<DecodeLaunch::kWhole>)
      .def("decode_dispatch_send", launch_decode_dispatch<DecodeLaunch::kSend>)
      .def("decode_dispatch_receive", launch_decode_dispatch<DecodeLaunch::kReceive>)
      .def("decode_combine", launch_decode_combine<DecodeLaunch::kWhole>)
      .def("decode_combine_send", launch_decode_combine<DecodeLaunch::kSend>)
      .def("decode_combine_receive", launch_decode_combine<DecodeLaunch::kReceive>)
      // Gather counts: topk_idx of num_choices, of 4 or 8 bytes each -> int32 [num_ranks, num_experts]. With no experts
      // it is a barrier.
      .def("gather_counts",
           [](const Engine& e, Address topk_idx, int index_bytes, int64_t num_choices, int num_experts, Address counts,
              Address stream) {
             GatherArgs args{pointer<const void>(topk_idx), index_bytes, num_choices, num_experts,
                             pointer<int32_t>(counts)};
             args.wait_ns = e.wait_ns(Operation::kDispatch);
             args.num_blocks = e.blocks(ep::Layout::kExpert).num_blocks;
             e.gather_counts(args, pointer<CUstream_st>(stream));
           })
      .def("compare_routing",
           [](const Engine& e, Address planned, Address given, int num_tokens, std::pair<int, int> where,
              Address stream) {
             e.compare_routing({pointer<const int64_t>(planned),
                                pointer<const int64_t>(given),
                                num_tokens,
                                {where.first, where.second}},
                               pointer<CUstream_st>(stream));
           })
      .def("send_by", &Engine::send_by, others_run)
      .def("has_captured_messages", &Engine::has_captured_messages)
      .def("message_bytes", &Engine::message_bytes)
      .def("stamp_into",
           [](Engine& e, Address stamps, int num_blocks) { e.stamp_into(pointer<uint64_t>(stamps), num_blocks); })
      // Return the rows of the last `plan_and_stage`, -1 after an abort by a kernel, -2 after slice_s.
      .def("wait_for_counts", &Engine::wait_for_counts, py::call_guard<py::gil_scoped_release>())
      // Choose the blocks of operations in one layout: all of them, and those that serve the wire between nodes.
      .def("share_blocks", [](Engine& e, ep::Layout layout, int num_blocks,
                              int rail_blocks) { e.share_blocks(layout, {num_blocks, rail_blocks}); })
      // Let later dispatches, or combines, add their waits to int64 [num_ranks]; 0: to nothing.
      .def("measure_waits",
           [](Engine& e, bool of_dispatches, Address wait_ns) {
             e.measure_waits(of_dispatches ? Operation::kDispatch : Operation::kCombine, pointer<int64_t>(wait_ns));
           })
      // Return whether ranks that differ may have different messages under way. Then no later operation runs.
      .def("out_of_step",
           [](const Engine& e) { return *static_cast<const volatile uint32_t*>(&e.report().out_of_step) != 0; })
      // Return whether `late`, `out_of_step` or `take_error` returns anything.
      .def("has_report",
           [](const Engine& e) {
             const Report& report = e.report();
             return *static_cast<const volatile uint32_t*>(&report.aborted) != 0 ||
                    *static_cast<const volatile uint32_t*>(&report.out_of_step) != 0 ||
                    *static_cast<const volatile int32_t*>(&report.error) != 0;
           })
      // Return None, or after an abort (operation, phase, epoch, [ranks waited for], seconds waited).
      .def("late",
           [](const Engine& e) -> py::object {
             const Report& report = e.report();
             if (*static_cast<const volatile uint32_t*>(&report.aborted) == 0) return py::none();
             std::atomic_thread_fence(std::memory_order_acquire);  // `aborted` was written last: read it first
             std::vector<int> ranks;
             for (int rank = 0; rank < e.config().num_ranks(); ++rank)
               if (e.reports().late[(rank + 1) / 64] >> (rank + 1) % 64 & 1) ranks.push_back(rank);
             return py::make_tuple(kOperationNames[report.operation], kPhaseNames[report.phase], report.epoch, ranks,
                                   report.waited_ms / 1e3);
           })
      // Return None, or an error found by a kernel: (its name, detail, value, [(needed, given) by rank]). Clear it.
      .def("take_error", [](const Engine& e) -> py::object {
        const Report& report = e.report();
        const int32_t kind = *static_cast<const volatile int32_t*>(&report.error);
        if (kind == 0) return py::none();
        std::atomic_thread_fence(std::memory_order_acquire);
        const ErrorFacts facts = report.facts;
        std::vector<std::pair<int64_t, int64_t>> rows;
        for (int rank = 0; rank < e.config().num_ranks(); ++rank)
          rows.emplace_back(e.reports().error_rows[rank][0], e.reports().error_rows[rank][1]);
        std::atomic_thread_fence(std::memory_order_release);  // once cleared, kernels may write the facts again
        e.clear_error();
        const std::vector<int32_t> detail(facts.detail, facts.detail + 4);
        return py::make_tuple(kErrorNames[kind], detail, facts.value, rows);
      });
}
