// Messages without streams: std::ostream's number formatting crashes in processes that have loaded another libstdc++.
#pragma once
#include <string>
#include <type_traits>

namespace ep {

// text("rank ", 3, " is late") -> "rank 3 is late"
template <class... Parts>
std::string text(const Parts&... parts) {
  const auto part = [](const auto& value) -> std::string {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(value)>>)
      return std::to_string(value);
    else
      return value;
  };
  std::string all;
  (all.append(part(parts)), ...);
  return all;
}

}  // namespace ep
