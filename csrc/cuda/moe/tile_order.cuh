// Which tiles of a result a block computes.
#pragma once
#include <cstdint>

namespace ep::cuda {

__host__ __device__ constexpr int div_up(int a, int b) { return (a + b - 1) / b; }

// Blocks start in rounds of num_sms. The first round computes 3/5 of all tiles, the second one 3/5 of the rest, and the
// last ones a tile a block. So few blocks have to begin anew, and blocks that start late, because another kernel holds
// their multiprocessor, delay nobody: with 24 of 132 held, those take 3/5 of the time once the others are through 3/5.
__host__ __device__ inline int tiles_each(int rest, int num_sms) {
  const int each = static_cast<int>(3 * static_cast<int64_t>(rest) / (5 * num_sms));
  return each > 0 ? each : 1;
}

// The numbers of a block's tiles: first, first + num_sms, ... below end. Blocks that run at the same time have tiles
// beside one another.
struct TileNumbers {
  int first, end;
};

__device__ inline TileNumbers own_tiles(int total, int num_sms, int num_rounds) {
  const int round = blockIdx.x / num_sms;
  int begin = 0, each = 0;
  for (int r = 0; r <= round; ++r) {
    begin += each * num_sms;
    each = tiles_each(total - begin, num_sms);
  }
  const int end = round == num_rounds - 1 ? total : min(total, begin + each * num_sms);
  return {begin + static_cast<int>(blockIdx.x) % num_sms, end};
}

// [host] Return how many rounds compute up to so many tiles.
inline int rounds_of(int tiles, int num_sms) {
  int rounds = 1;
  for (; tiles > num_sms; ++rounds) tiles -= tiles_each(tiles, num_sms) * num_sms;
  return rounds;
}

}  // namespace ep::cuda
