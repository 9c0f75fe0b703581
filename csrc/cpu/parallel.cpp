// Finds the OpenMP library of this process. The module is not linked with one: PyTorch's wheels bring a copy whose name
// differs between versions, and a second library would start a second pool of threads.
#include "cpu/parallel.h"

#include <dlfcn.h>

#include <cstdint>
#include <type_traits>

namespace ep::cpu {
namespace {

// What GCC's compiled code calls for a parallel region. The OpenMP libraries of LLVM and Intel have it too.
struct OpenMp {
  void (*parallel)(void (*region)(void*), void* data, unsigned num_threads, unsigned flags);
  int (*get_thread_num)();
  int (*get_num_threads)();

  // Take the library that PyTorch's own library needs, then any that everybody sees, then the system's.
  OpenMp() {
    if (void* const torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD); torch && look_up(torch)) return;
    if (look_up(RTLD_DEFAULT)) return;
    if (void* const library = dlopen("libgomp.so.1", RTLD_LAZY); library && look_up(library)) return;
    parallel = nullptr;
  }

 private:
  // [thread] Find the functions in a library or in those that it needs. Return whether all are there.
  bool look_up(void* library) {
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      return function != nullptr;
    };
    return find(parallel, "GOMP_parallel") && find(get_thread_num, "omp_get_thread_num") &&
           find(get_num_threads, "omp_get_num_threads");
  }
};

const OpenMp& openmp() {
  static const OpenMp openmp;
  return openmp;
}

struct Loop {
  int begin, end;
  LoopPart part;
  void* loop;
};

// [thread] Do this thread's part of a loop: the parts differ by at most one in length.
void run_own_part(void* data) {
  const Loop& loop = *static_cast<const Loop*>(data);
  const int64_t count = loop.end - loop.begin, threads = openmp().get_num_threads(), thread = openmp().get_thread_num();
  loop.part(loop.loop, loop.begin + static_cast<int>(count * thread / threads),
            loop.begin + static_cast<int>(count * (thread + 1) / threads));
}

}  // namespace

void run_parts(int num_threads, int begin, int end, LoopPart part, void* loop) {
  if (!openmp().parallel) return part(loop, begin, end);
  Loop data{begin, end, part, loop};
  openmp().parallel(run_own_part, &data, static_cast<unsigned>(num_threads), 0);
}

std::string openmp_library() {
  Dl_info info;
  if (!openmp().parallel || !dladdr(reinterpret_cast<void*>(openmp().parallel), &info)) return "";
  return info.dli_fname;
}

}  // namespace ep::cpu
