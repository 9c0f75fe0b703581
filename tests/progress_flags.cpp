// Print the order of csrc/cuda/combine/progress_flags.h for the given sizes, as four lines of numbers: what each
// progress flag stands for; the progress flags of all chunks of pushes, then their end; of all sums, then the end; the
// chunks that need slots.
#include "cuda/combine/progress_flags.h"

#include <cstdio>
#include <cstdlib>

int main(int, char** sizes) {
  const auto size = [&](int i) { return std::atoi(sizes[i]); };
  const ep::cuda::ProgressFlags progress_flags{size(1), size(2), size(3), size(4)};
  const int chunks = progress_flags.far + progress_flags.own;
  for (int i = 0; i < chunks + progress_flags.num_sums(); ++i) std::printf("%d ", progress_flags.at(i));
  std::puts("");
  for (int chunk = 0; chunk <= chunks; ++chunk) std::printf("%d ", progress_flags.pushed(chunk));
  std::puts("");
  for (int n = 0; n <= progress_flags.num_sums(); ++n) std::printf("%d ", progress_flags.summed(n));
  std::puts("");
  for (int chunk = 0; chunk < chunks; ++chunk) std::printf("%d ", progress_flags.needs_slots(chunk));
  std::puts("");
}
