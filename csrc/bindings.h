// Bindings of both engines' modules. A tensor is passed as its address (int); 0 stands for None.
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

}  // namespace ep
