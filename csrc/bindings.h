// Bindings of both engines' modules. A tensor is passed as its address (int); 0 stands for None.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "common/types.h"
#include "cuda/config.h"

namespace ep {

using Address = uintptr_t;

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

// Call run with a topk_idx as const int32_t* or const int64_t*.
template <class Run>
void with_index(Address topk_idx, int index_bytes, const Run& run) {
  if (index_bytes == sizeof(int32_t)) return run(pointer<const int32_t>(topk_idx));
  run(pointer<const int64_t>(topk_idx));
}

// Bind the common types, local to this module: one process may use both modules, and each has them.
inline void bind_types(pybind11::module_& m) {
  pybind11::enum_<DType>(m, "DType", pybind11::module_local())
      .value("float32", DType::kFloat32)
      .value("bfloat16", DType::kBFloat16)
      .value("float16", DType::kFloat16);
  pybind11::enum_<Layout>(m, "Layout", pybind11::module_local())
      .value("rank", Layout::kRank)
      .value("expert", Layout::kExpert)
      .value("decode", Layout::kDecode);
}

// Bind an engine's Config, with the sizes that all have.
template <class Config>
pybind11::class_<Config> bind_sizes(pybind11::module_& m, const char* name) {
  pybind11::class_<Config> bound(m, name, pybind11::module_local());
  bound.def(pybind11::init<>())
      .def_readwrite("rank", &Config::rank)
      .def_readwrite("num_nodes", &Config::num_nodes)
      .def_readwrite("ranks_per_node", &Config::ranks_per_node)
      .def_readwrite("num_experts", &Config::num_experts)
      .def_readwrite("num_topk", &Config::num_topk)
      .def_readwrite("max_tokens", &Config::max_tokens)
      .def_readwrite("hidden", &Config::hidden)
      .def_readwrite("dtype", &Config::dtype)
      .def_readwrite("masks", &Config::masks);
  return bound;
}

// Bind the function of the CUDA engine. The module of the CPU engine has it too, because it is always built.
inline pybind11::class_<cuda::Config> bind_cuda_config(pybind11::module_& m, const char* name) {
  using cuda::Config;
  auto bound = bind_sizes<Config>(m, name);
  bound.def_readwrite("plans_directly", &Config::plans_directly)
      .def_readwrite("log_token_chunk", &Config::log_token_chunk)
      .def_readwrite("log_sum_chunk", &Config::log_sum_chunk)
      .def_readwrite("window_chunk", &Config::window_chunk)
      .def_readwrite("window_chunks", &Config::window_chunks);
  return bound;
}

}  // namespace ep
