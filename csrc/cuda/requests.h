// Reads requests of Python (ep_dispatcher/request.py), and the tensors of their results, as arguments of the engine.
// This file knows Python's names of fields; the engine does not.
#pragma once
#include <string>
#include <string_view>

#include "bindings.h"
#include "cuda/engine.h"

namespace ep::cuda {

// Names of attributes and methods of Python. Each is made once: to look one up by a C string makes a new str each time.
// They are never freed, because Python may end before this module does.
struct Names {
  using Name = const pybind11::object;
  static pybind11::object made(const char* name) {
    return pybind11::reinterpret_steal<pybind11::object>(PyUnicode_InternFromString(name));
  }
  static const Names& get() {
    static const Names* const names = new Names;
    return *names;
  }
  // Fields of DispatchRequest and CombineRequest.
  Name rows = made("rows"), scales = made("scales"), topk_idx = made("topk_idx"), topk_weights = made("topk_weights"),
       plan = made("plan"), message_rows = made("message_rows"), layout = made("layout"),
       expert_alignment = made("expert_alignment"), num_rows = made("num_rows"), quantize = made("quantize"),
       label = made("label"), packs_scales = made("packs_scales"), y = made("y"), num_tokens = made("num_tokens"),
       weights = made("weights"), max_tokens_to_node = made("max_tokens_to_node");
  // Fields of Received and Combined that are no fields of requests.
  Name tokens_per_expert = made("tokens_per_expert"), rows_per_expert = made("rows_per_expert"), x = made("x");
  // Methods of tensors.
  Name data_ptr = made("data_ptr"), size = made("size"), element_size = made("element_size");
};

inline pybind11::object checked(PyObject* result) {
  if (result == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(result);
}
inline pybind11::object field(pybind11::handle object, const pybind11::object& name) {
  return checked(PyObject_GetAttr(object.ptr(), name.ptr()));
}
inline int64_t as_int(const pybind11::object& value) {
  const int64_t number = PyLong_AsLongLong(value.ptr());
  if (number == -1 && PyErr_Occurred()) throw pybind11::error_already_set();
  return number;
}
inline int64_t int_field(pybind11::handle object, const pybind11::object& name) { return as_int(field(object, name)); }
inline std::string_view text_field(pybind11::handle object, const pybind11::object& name) {
  const pybind11::object text = field(object, name);  // a string that the request keeps alive
  if (text.is_none()) return {};
  const char* const characters = PyUnicode_AsUTF8(text.ptr());
  if (characters == nullptr) throw pybind11::error_already_set();
  return characters;
}

// One tensor, or None.
class TensorRef {
 public:
  TensorRef(pybind11::handle owner, const pybind11::object& name) : tensor_(field(owner, name)) {}

  explicit operator bool() const { return !tensor_.is_none(); }
  int64_t size(int dimension) const {
    const pybind11::int_ number(dimension);
    return as_int(checked(PyObject_CallMethodOneArg(tensor_.ptr(), Names::get().size.ptr(), number.ptr())));
  }
  int element_size() const { return static_cast<int>(call(Names::get().element_size)); }
  // Return the address: null for None, and never null for a tensor without elements.
  template <class T>
  T* address() const {
    constexpr Address kAny = 64;
    if (!*this) return nullptr;
    const Address address = static_cast<Address>(call(Names::get().data_ptr));
    return pointer<T>(address != 0 ? address : kAny);
  }

 private:
  int64_t call(const pybind11::object& method) const {
    return as_int(checked(PyObject_CallMethodNoArgs(tensor_.ptr(), method.ptr())));
  }
  pybind11::object tensor_;
};

inline Layout layout_of(pybind11::handle request) {
  const std::string_view layout = text_field(request, Names::get().layout);
  if (layout == "rank") return Layout::kRank;
  if (layout == "expert") return Layout::kExpert;
  if (layout == "decode") return Layout::kDecode;
  throw pybind11::value_error("unknown layout " + std::string(layout));
}

// How a dispatch turns bfloat16 rows into float8. arguments.py has the names.
struct Quantize {
  bool on, powers_of_two;
  uint32_t scale_size;  // [bytes] of a scale
};
inline Quantize quantize_of(pybind11::handle request) {
  const std::string_view name = text_field(request, Names::get().quantize);
  if (name.empty()) return {false, false, 4};
  if (name == "e4m3_1x128") return {true, false, 4};
  if (name == "e4m3_1x128_pow2") return {true, true, 4};
  if (name == "mxfp8") return {true, false, 1};
  throw pybind11::value_error("unknown quantize " + std::string(name));
}

// Return the sizes of messages between nodes that a host knows after its wait for the counts.
inline MessageSizes message_sizes_of(pybind11::handle owner) {
  const auto* rows = TensorRef(owner, Names::get().message_rows).address<const MessageRows>();
  return MessageSizes(rows && rows->known ? rows : nullptr);
}

// Return the sizes of messages with a plan whose host did not wait for the counts.
inline MessageSizes limited_sizes(Engine& engine, pybind11::handle request) {
  const auto most = static_cast<int32_t>(int_field(request, Names::get().max_tokens_to_node));
  return MessageSizes(engine.sends_messages() && most > 0 ? &engine.limited_rows(most) : nullptr);
}

// Return the plan of a request: the plan that it gives, or the plan of its result.
inline int32_t* plan_of(pybind11::handle request, pybind11::handle result) {
  int32_t* const given = TensorRef(request, Names::get().plan).address<int32_t>();
  return given ? given : TensorRef(result, Names::get().plan).address<int32_t>();
}

// Read what every dispatch has from a DispatchRequest and its Received. In the first of two launches `received` may
// have no rows yet.
inline void read_rows(Engine& engine, pybind11::handle request, pybind11::handle received, RowArgs& args) {
  const Names& names = Names::get();
  args.layout = layout_of(request);
  args.expert_alignment = static_cast<int32_t>(int_field(request, names.expert_alignment));
  args.label = static_cast<int32_t>(int_field(request, names.label));
  args.num_blocks = engine.blocks(args.layout).num_blocks;
  args.rail_blocks = engine.blocks(args.layout).rail_blocks;
  args.wait_ns = engine.wait_ns(Operation::kDispatch);

  // What this rank sends.
  const TensorRef rows(request, names.rows), scales(request, names.scales);
  const Quantize quantize = quantize_of(request);
  args.rows = rows.address<const char>();
  args.scales = scales.address<const float>();
  args.topk_idx = TensorRef(request, names.topk_idx).address<const int64_t>();
  args.num_tokens = static_cast<int32_t>(rows.size(0));
  const auto hidden = static_cast<uint32_t>(rows.size(1));
  args.quantizes = quantize.on;
  args.powers_of_two = quantize.powers_of_two;
  args.row_bytes = hidden * (args.quantizes ? 1 : rows.element_size());
  if (args.quantizes || scales) {
    args.scale_bytes = (hidden + kScaleBlock - 1) / kScaleBlock * sizeof(float);
    args.scale_size = args.quantizes ? quantize.scale_size : scales.element_size();
  }

  // What it receives.
  const TensorRef out_rows(received, names.rows);
  args.num_rows = static_cast<int32_t>(out_rows ? out_rows.size(0) : int_field(request, names.num_rows));
  args.out_rows = out_rows.address<char>();
  args.out_scales = TensorRef(received, names.scales).address<float>();
  args.messages = message_sizes_of(request);
  if (!args.messages.are_known()) args.messages = message_sizes_of(received);
  const bool waits_for_counts = args.topk_idx && int_field(request, names.num_rows) < 0;
  if (!args.messages.are_known() && !waits_for_counts) args.messages = limited_sizes(engine, request);
  if (args.topk_idx) args.max_tokens_to_node = static_cast<int32_t>(int_field(request, names.max_tokens_to_node));
}

inline DispatchArgs read_dispatch(Engine& engine, pybind11::handle request, pybind11::handle received) {
  const Names& names = Names::get();
  DispatchArgs args;
  read_rows(engine, request, received, args);
  args.topk_weights = TensorRef(request, names.topk_weights).address<const float>();
  args.out_weights = TensorRef(received, names.topk_weights).address<float>();
  args.out_topk_idx = TensorRef(received, names.topk_idx).address<int64_t>();
  args.out_tokens_per_expert = TensorRef(received, names.tokens_per_expert).address<int64_t>();
  args.out_rows_per_expert = TensorRef(received, names.rows_per_expert).address<int64_t>();
  return args;
}

inline DecodeDispatchArgs read_decode_dispatch(Engine& engine, pybind11::handle request, pybind11::handle received) {
  const Names& names = Names::get();
  DecodeDispatchArgs args;
  read_rows(engine, request, received, args);
  args.packs_scales = field(request, names.packs_scales).ptr() == Py_True;
  args.out_counts = TensorRef(received, names.tokens_per_expert).address<int32_t>();
  return args;
}

// Read what every combine has from a CombineRequest and its Combined.
inline void read_sums(Engine& engine, pybind11::handle request, pybind11::handle combined, SumArgs& args) {
  const Names& names = Names::get();
  const Engine::Blocks& blocks = engine.blocks(layout_of(request));
  args.y = TensorRef(request, names.y).address<const char>();
  args.out = TensorRef(combined, names.x).address<char>();
  args.num_tokens = static_cast<int32_t>(int_field(request, names.num_tokens));
  args.wait_ns = engine.wait_ns(Operation::kCombine);
  args.num_blocks = blocks.num_blocks;
  args.rail_blocks = blocks.rail_blocks;
  args.messages = message_sizes_of(request);
  if (!args.messages.are_known()) args.messages = limited_sizes(engine, request);
}

inline CombineArgs read_combine(Engine& engine, pybind11::handle request, pybind11::handle combined) {
  const Names& names = Names::get();
  CombineArgs args;
  read_sums(engine, request, combined, args);
  args.topk_weights = TensorRef(request, names.topk_weights).address<const float>();
  args.out_weights = TensorRef(combined, names.topk_weights).address<float>();
  return args;
}

inline DecodeCombineArgs read_decode_combine(Engine& engine, pybind11::handle request, pybind11::handle combined) {
  DecodeCombineArgs args;
  read_sums(engine, request, combined, args);
  args.combine_weights = TensorRef(request, Names::get().weights).address<const float>();
  return args;
}

}  // namespace ep::cuda
