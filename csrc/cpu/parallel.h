// Loops on several threads: those of the OpenMP library that PyTorch uses, so that one pool of threads serves both.
#pragma once
#include <string>
#include <type_traits>

namespace ep::cpu {

// Part of a loop: [begin, end), with what the loop needs besides.
using LoopPart = void (*)(void* loop, int begin, int end);

// [thread] Call `part` for all of [begin, end), divided among at most `num_threads` threads. Return when all are done.
// `part` must not throw.
void run_parts(int num_threads, int begin, int end, LoopPart part, void* loop);

// [thread] As run_parts: call `body(begin, end)` with parts of [begin, end). One thread gets all of it.
template <typename Body>
void parallel_for(int num_threads, int begin, int end, Body&& body) {
  if (num_threads <= 1) return body(begin, end);
  const auto part = [](void* loop, int begin, int end) {
    (*static_cast<std::remove_reference_t<Body>*>(loop))(begin, end);
  };
  run_parts(num_threads, begin, end, part, &body);
}

// [thread] Return the path of the OpenMP library in use, or "" if there is none: then every loop runs on one thread.
std::string openmp_library();

}  // namespace ep::cpu
