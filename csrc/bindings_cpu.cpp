// The module _C_cpu. Python gets messages as memoryviews.
#include "bindings.h"
#include "cpu/balance.h"
#include "cpu/engine.h"
#include "cpu/parallel.h"
#include "cpu/sum_rows.h"
#include "cuda/region.h"
#include "cuda/state.h"

namespace py = pybind11;

// Python gets a Span as a memoryview, without a copy.
template <>
struct py::detail::type_caster<ep::cpu::Span> {
  static constexpr auto name = const_name("memoryview");
  static handle cast(const ep::cpu::Span& span, return_value_policy, handle) {
    return memoryview::from_memory(span.data, static_cast<ssize_t>(span.size)).release();
  }
};

namespace {

using namespace ep::cpu;
using ep::Address;
using ep::pointer;

using RowArrays = std::vector<std::pair<Address, size_t>>;  // (address, bytes per row)

DispatchArgs dispatch_args(const RowArrays& rows, Address topk_weights, int num_tokens) {
  DispatchArgs args;
  for (const auto& [address, bytes] : rows) args.rows.push_back({pointer<const char>(address), bytes});
  args.topk_weights = pointer<const float>(topk_weights);
  args.num_tokens = num_tokens;
  return args;
}

PullArgs pull_args(const std::vector<Address>& out, Address out_weights, Address out_topk_idx) {
  PullArgs args;
  for (Address address : out) args.out.push_back(pointer<char>(address));
  args.out_weights = pointer<float>(out_weights);
  args.out_topk_idx = pointer<int64_t>(out_topk_idx);
  return args;
}

template <class Carve>
std::map<std::string, size_t> kinds_of(const Carve& carve) {
  ep::KindCursor c;
  carve(c);
  return c.kinds;
}

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

// Run Python's handlers of pending signals, in the main thread. An exception of a handler ends the wait.
void run_signal_handlers() {
  if (is_finalizing()) return;
  py::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace

PYBIND11_MODULE(_C_cpu, m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;

  static py::exception<PeerLate> peer_late(m, "PeerLate");
  static py::exception<MaskedByPeer> masked_by_peer(m, "MaskedByPeer");
  static py::exception<Refused> refused(m, "Refused");
  static py::exception<BadPeerData> bad_peer_data(m, "BadPeerData");
  py::register_local_exception<Interrupted>(m, "Interrupted");
  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const PeerLate& late) {
      py::object instance = static_cast<py::object&>(peer_late)(late.what());
      instance.attr("phase") = late.phase;
      instance.attr("ranks") = late.ranks;
      instance.attr("gone") = late.gone;
      PyErr_SetObject(peer_late.ptr(), instance.ptr());
    } catch (const MaskedByPeer& masked) {
      py::object instance = static_cast<py::object&>(masked_by_peer)(masked.what());
      instance.attr("phase") = masked.phase;
      PyErr_SetObject(masked_by_peer.ptr(), instance.ptr());
    } catch (const BadPeerData& bad) {
      py::object instance = static_cast<py::object&>(bad_peer_data)(bad.what());
      instance.attr("rank") = bad.rank;
      instance.attr("field") = bad.field;
      instance.attr("found") = bad.found;
      instance.attr("least") = bad.least;
      instance.attr("most") = bad.most;
      PyErr_SetObject(bad_peer_data.ptr(), instance.ptr());
    } catch (const Refused& facts) {
      py::object instance = static_cast<py::object&>(refused)(facts.what());
      instance.attr("kind") = facts.kind;
      instance.attr("field") = facts.field;
      instance.attr("facts") = facts.facts;
      instance.attr("by_all") = facts.by_all;
      PyErr_SetObject(refused.ptr(), instance.ptr());
    }
  });

  ep::bind_types(m);

  ep::bind_sizes<Config>(m, "Config")
      .def_readwrite("rank_at", &Config::rank_at)
      .def_readwrite("node", &Config::node)
      .def_readwrite("local_rank", &Config::local_rank)
      .def_readwrite("spin_us", &Config::spin_us);

  py::enum_<AbortReason>(m, "AbortReason").value("waited", kWaitedInVain).value("left", kLeft);
  m.attr("DISPATCH") = Call::kDispatch;
  m.attr("COMBINE") = Call::kCombine;
  m.attr("WEIGHTED_COMBINE") = Call::kWeightedCombine;
  m.attr("COMPARED") = std::vector<std::string>(std::begin(Call::kNames), std::end(Call::kNames));

  // Return (token, k, expert, repeated) of the first invalid entry of topk_idx (int64 [num_tokens, num_topk]), or None.
  m.def("find_bad_entry", [](Address topk_idx, int num_tokens, int num_topk, int num_experts) -> py::object {
    const auto bad = find_bad_entry(pointer<const int64_t>(topk_idx), num_tokens, num_topk, num_experts);
    if (!bad) return py::none();
    return py::make_tuple(bad->token, bad->k, bad->expert, bad->repeated);
  });
  // Return the number of int32 of the largest plan with `num_tokens` own tokens and `num_rows` received rows.
  m.def("plan_capacity", &plan_capacity);

  // Return the path of the OpenMP library whose threads are used, "" if there is none.
  m.def("openmp_library", &openmp_library);

  // Memory of one rank before it is allocated, also that of the CUDA engine: bytes by kind of array.
  m.def("region_bytes",
        [](const Config& config) { return kinds_of([&](ep::KindCursor& c) { carve_region(c, config); }); });
  m.def("cuda_region_bytes", [](const ep::cuda::Config& config) {
    return kinds_of([&](ep::KindCursor& c) { ep::cuda::carve_region(c, config); });
  });
  m.def("cuda_state_bytes", [](const ep::cuda::Config& config, int num_sms) {
    return kinds_of([&](ep::KindCursor& c) { ep::cuda::carve_state(c, config, num_sms); });
  });
  ep::bind_cuda_config(m, "CudaConfig")
      .def_property_readonly("item_ints", &ep::cuda::Config::item_ints)
      .def_property_readonly("table_ints", &ep::cuda::Config::table_ints)
      .def_property_readonly("least_rail_blocks", &ep::cuda::Config::least_rail_blocks)
      .def_property_readonly("counts_ints", &ep::cuda::Counts::ints);
  m.attr("MAX_NODES") = ep::cuda::kMaxNodes;
  m.attr("MAX_LOCAL") = ep::cuda::kMaxLocal;
  m.attr("MAX_RANKS") = ep::cuda::kMaxRanks;
  m.attr("VECTOR") = ep::cuda::kVector;

  // Return whether this process may write at a tensor's address.
  m.def("is_writable", [](Address address) { return is_writable(pointer<char>(address)); });

  // For tests: is_gone() is true once the process has ended.
  py::class_<Process>(m, "Process", py::module_local()).def(py::init<int>()).def("is_gone", &Process::is_gone);

  py::class_<Engine>(m, "Engine", py::module_local())
      .def(py::init([](const Config& config, int64_t buffer_uid) {
        return std::make_unique<Engine>(config, buffer_uid, run_signal_handlers);
      }))
      .def_property_readonly("epoch", &Engine::epoch)
      .def_readwrite("num_scales", &Engine::num_scales)
      .def_readwrite("max_tokens_to_node", &Engine::max_tokens_to_node)
      .def_property_readonly("bytes_read", [](const Engine& e) { return e.traffic().bytes_read; })
      .def_property_readonly("bytes_written", [](const Engine& e) { return e.traffic().bytes_written; })
      .def_property_readonly("waited_ns", &Engine::waited_ns)
      .def("fd", &Engine::fd)
      .def("attach", &Engine::attach)
      .def("close_fd", &Engine::close_fd)
      .def("close", &Engine::close)
      .def("give_back", &Engine::give_back)
      .def("begin", &Engine::begin)
      .def("abort", &Engine::abort)
      .def("stop", &Engine::stop)
      .def("mask", &Engine::mask)
      .def_property_readonly("masked", &Engine::masked)
      .def("unmask", &Engine::unmask)
      .def("check_plan",
           [](const Engine& e, Address plan, size_t elements, int64_t num_tokens, int64_t num_rows) {
             e.check_plan(pointer<const int32_t>(plan), elements, num_tokens, num_rows);
           })
      .def(
          "route",
          [](Engine& e, Address topk_idx, ep::Layout layout, int expert_alignment, int max_recv_rows,
             const RowArrays& rows, Address topk_weights, int num_tokens) {
            RouteArgs args;
            args.topk_idx = pointer<const int64_t>(topk_idx);
            args.num_tokens = num_tokens;
            args.layout = layout;
            args.expert_alignment = expert_alignment;
            args.max_recv_rows = max_recv_rows;
            e.route(args, dispatch_args(rows, topk_weights, num_tokens));
          },
          Unlocked())
      .def("reuse",
           [](Engine& e, int64_t operation, Address plan, const std::vector<size_t>& bytes_per_row, bool has_weights) {
             e.reuse(operation, pointer<const int32_t>(plan), bytes_per_row, has_weights);
           })
      .def(
          "stage",
          [](Engine& e, const RowArrays& rows, Address topk_weights, int num_tokens) {
            e.stage(dispatch_args(rows, topk_weights, num_tokens));
          },
          Unlocked())
      .def("own_counts", &Engine::own_counts)
      .def("incoming_counts", &Engine::incoming_counts)
      .def("counts_arrived", &Engine::counts_arrived)
      .def(
          "count",
          [](Engine& e) {
            const OutputSizes sizes = e.count();
            return std::make_pair(sizes.num_rows, sizes.plan_elements);
          },
          Unlocked())
      .def(
          "start_plan",
          [](Engine& e, Address plan, size_t elements) { e.start_plan(pointer<int32_t>(plan), elements); }, Unlocked())
      .def("outgoing_lists", &Engine::outgoing_lists)
      .def("incoming_lists", &Engine::incoming_lists)
      .def("lists_arrived", &Engine::lists_arrived)
      .def("finish_plan", &Engine::finish_plan, Unlocked())
      .def("counts_per_expert",
           [](const Engine& e, Address tokens, Address rows) {
             e.counts_per_expert(pointer<int64_t>(tokens), pointer<int64_t>(rows));
           })
      .def(
          "pack_payload",
          [](Engine& e, int node, const RowArrays& rows, Address topk_weights, int num_tokens) {
            return e.pack_payload(node, dispatch_args(rows, topk_weights, num_tokens));
          },
          Unlocked())
      .def("incoming_payload", &Engine::incoming_payload)
      .def("payload_arrived", &Engine::payload_arrived)
      .def(
          "prepare_output",
          [](Engine& e, const std::vector<Address>& out, Address weights, Address topk_idx) {
            e.prepare_output(pull_args(out, weights, topk_idx));
          },
          Unlocked())
      .def(
          "pull",
          [](Engine& e, int node, const std::vector<Address>& out, Address weights, Address topk_idx) {
            e.pull(node, pull_args(out, weights, topk_idx));
          },
          Unlocked())
      .def("agree", &Engine::agree)
      .def("compare_on_node", &Engine::compare_on_node, Unlocked())
      .def(
          "push",
          [](Engine& e, int node, Address y, Address topk_weights) {
            CombineArgs args;
            args.y = pointer<const char>(y);
            args.topk_weights = pointer<const float>(topk_weights);
            e.push(node, args);
          },
          Unlocked())
      .def("reduce", &Engine::reduce, Unlocked())
      .def("incoming_sums", &Engine::incoming_sums)
      .def(
          "sum",
          [](Engine& e, Address topk_weights, Address out, Address out_weights) {
            CombineArgs args;
            args.topk_weights = pointer<const float>(topk_weights);
            args.out = pointer<char>(out);
            args.out_weights = pointer<float>(out_weights);
            e.sum(args);
          },
          Unlocked())
      .def("finish", &Engine::finish);

  // Balanced experts. index_bytes is 4 for topk_idx of int32, and 8 for int64.
  m.attr("BALANCE_MAX_RANKS") = ep::balance::kMaxRanks;
  m.attr("BALANCE_MAX_LOCAL") = ep::balance::kMaxLocal;
  m.attr("BALANCE_MAX_SLOTS") = ep::balance::kMaxSlots;
  m.attr("BALANCE_MAX_EXPERTS") = ep::balance::kMaxExperts;
  m.def(
      "balance_count",
      [](Address topk_idx, int index_bytes, int64_t num_choices, int num_experts, Address counts) {
        ep::with_index(topk_idx, index_bytes, [&](const auto* indices) {
          balance_count(indices, num_choices, num_experts, pointer<int32_t>(counts));
        });
      },
      Unlocked());
  m.def(
      "balance_plan",
      [](int num_ranks, int ranks_per_node, int num_local_experts, int num_slots, int smallest_copy,
         const std::vector<int>& rank_at, Address counts, int64_t row_stride, Address copies, Address rows) {
        balance_plan({num_ranks, ranks_per_node, num_local_experts, num_slots, smallest_copy}, rank_at.data(),
                     pointer<const int32_t>(counts), row_stride, pointer<ep::balance::Copy>(copies),
                     pointer<int32_t>(rows));
      },
      Unlocked());
  m.def(
      "balance_rewrite",
      [](int num_ranks, int ranks_per_node, int num_local_experts, int num_slots, int smallest_copy, int rank,
         Address topk_idx, int index_bytes, int64_t num_tokens, int num_topk, Address counts, int64_t row_stride,
         Address copies, Address physical) {
        ep::with_index(topk_idx, index_bytes, [&](const auto* indices) {
          balance_rewrite({num_ranks, ranks_per_node, num_local_experts, num_slots, smallest_copy}, rank, indices,
                          num_tokens, num_topk, pointer<const int32_t>(counts), row_stride,
                          pointer<const ep::balance::Copy>(copies), pointer<int64_t>(physical));
        });
      },
      Unlocked());

  // For tests of the rounding: out = rows[0] + rows[1] + ..., as in every combine.
  m.def("sum_rows", [](const std::vector<Address>& rows, Address out, size_t n, ep::DType dtype) {
    std::vector<const char*> pointers;
    for (Address row : rows) pointers.push_back(pointer<const char>(row));
    sum_rows(pointers.data(), nullptr, static_cast<int>(pointers.size()), pointer<char>(out), n, dtype);
  });
}
