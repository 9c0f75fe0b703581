// Print the order of csrc/cuda/combine/milestones.h for the given sizes, as four lines of numbers: what each milestone
// stands for; the milestones of all chunks of pushes, then their end; of all sums, then the end; the chunks that need
// slots.
#include "cuda/combine/milestones.h"

#include <cstdio>
#include <cstdlib>

int main(int, char** sizes) {
  const auto size = [&](int i) { return std::atoi(sizes[i]); };
  const ep::cuda::Milestones milestones{size(1), size(2), size(3), size(4)};
  const int chunks = milestones.far + milestones.own;
  for (int i = 0; i < chunks + milestones.num_sums(); ++i) std::printf("%d ", milestones.at(i));
  std::puts("");
  for (int chunk = 0; chunk <= chunks; ++chunk) std::printf("%d ", milestones.pushed(chunk));
  std::puts("");
  for (int n = 0; n <= milestones.num_sums(); ++n) std::printf("%d ", milestones.summed(n));
  std::puts("");
  for (int chunk = 0; chunk < chunks; ++chunk) std::printf("%d ", milestones.needs_slots(chunk));
  std::puts("");
}
