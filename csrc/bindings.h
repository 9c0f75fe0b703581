// What the modules of both engines bind alike. Tensors come as addresses (int), 0 for "none".
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "common/types.h"

namespace ep {

using Address = uintptr_t;

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

// Local to the module, because the other one has them too, and one process may use both.
inline void bind_types(pybind11::module_& m) {
  pybind11::enum_<DType>(m, "DType", pybind11::module_local())
      .value("float32", DType::kFloat32)
      .value("bfloat16", DType::kBFloat16)
      .value("float16", DType::kFloat16);
  pybind11::enum_<Layout>(m, "Layout", pybind11::module_local())
      .value("rank", Layout::kRank)
      .value("expert", Layout::kExpert);
}

}  // namespace ep
