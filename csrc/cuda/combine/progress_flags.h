// The order of a combine in every block's queue of tasks. A progress flag is a chunk of pushes, or a chunk of sums for
// another node.
#pragma once
#include "common/cursor.h"

namespace ep::cuda {

// Far chunks have tokens of other nodes, own chunks have items from the own node; both are pushed. A sum progress flag
// is a far chunk for one other node. With a window of W chunks, sums of a far chunk come just before the pushes that
// need its slots:
//
//   pushes 0 to W - 1, sums 0, pushes W, sums 1, pushes W + 1, ..., own pushes, sums of the last W chunks
//
// So every block meets its progress flags in ascending order, whether it pushes, reduces or does both. Sums before the
// own pushes are early ones, the others are late. The first of two launches ends before the late ones.
struct ProgressFlags {
  int far, own;  // chunks in all
  int window;    // far chunks pushed before the first sums; at most `far`
  int others;    // other nodes: sums of each far chunk

  // [thread] Return the number of sum progress flags: chunk by chunk, in a chunk node by node.
  EP_HOST_DEVICE int num_sums() const { return far * others; }
  // [thread] Return the number of early sum progress flags.
  EP_HOST_DEVICE int num_early_sums() const { return (far - window) * others; }
  // [thread] Return whether a chunk is pushed only when slots of an earlier chunk are free.
  EP_HOST_DEVICE bool needs_slots(int chunk) const { return chunk >= window && chunk < far; }

  // [thread] Return the progress flag of a chunk of pushes, numbered as in Region::pushed: own chunks follow far ones.
  EP_HOST_DEVICE int pushed(int chunk) const {
    const int behind = chunk < window ? 0
                       : chunk < far  ? chunk - window + 1
                                      : far - window;  // far chunks summed before
    return chunk + behind * others;
  }
  // [thread] Return the n-th sum progress flag.
  EP_HOST_DEVICE int summed(int n) const { return n < num_early_sums() ? n + window + n / others : n + far + own; }

  // [thread] Return the chunk of pushes of a progress flag, or for the n-th sum progress flag ~n.
  EP_HOST_DEVICE int at(int progress_flag) const {
    if (progress_flag < window) return progress_flag;
    const int n = progress_flag - window, mixed = (far - window) * (others + 1);
    if (n < mixed) {
      const int group = n / (others + 1), i = n - group * (others + 1);
      return i < others ? ~(group * others + i) : window + group;
    }
    const int chunk = progress_flag - num_early_sums();
    return chunk < far + own ? chunk : ~(progress_flag - far - own);
  }
};

}  // namespace ep::cuda
