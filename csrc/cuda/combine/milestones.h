// The order of a combine in every block's queue of works. A milestone is a chunk of pushes, or a chunk of sums for
// another node.
#pragma once
#include "common/cursor.h"

namespace ep::cuda {

// Far chunks have tokens of other nodes, own chunks have items from the own node; both are pushed. A sum milestone is a
// far chunk for one other node. With a window of W chunks, sums of a far chunk come just before the pushes that need
// its slots:
//
//   pushes 0 to W - 1, sums 0, pushes W, sums 1, pushes W + 1, ..., own pushes, sums of the last W chunks
//
// So every block meets its milestones in ascending order, whether it pushes, reduces or does both. Sums before the own
// pushes are early ones, the others are late. The first of two launches ends before the late ones.
struct Milestones {
  int far, own;  // chunks in all
  int window;    // far chunks pushed before the first sums; at most `far`
  int others;    // other nodes: sums of each far chunk

  // [thread] Return the number of sum milestones: chunk by chunk, in a chunk node by node.
  EP_HOST_DEVICE int num_sums() const { return far * others; }
  // [thread] Return the number of early sum milestones.
  EP_HOST_DEVICE int num_early_sums() const { return (far - window) * others; }
  // [thread] Return whether a chunk is pushed only when slots of an earlier chunk are free.
  EP_HOST_DEVICE bool needs_slots(int chunk) const { return chunk >= window && chunk < far; }

  // [thread] Return the milestone of a chunk of pushes, numbered as in Region::pushed: own chunks follow far ones.
  EP_HOST_DEVICE int pushed(int chunk) const {
    const int behind = chunk < window ? 0
                       : chunk < far  ? chunk - window + 1
                                      : far - window;  // far chunks summed before
    return chunk + behind * others;
  }
  // [thread] Return the n-th sum milestone.
  EP_HOST_DEVICE int summed(int n) const { return n < num_early_sums() ? n + window + n / others : n + far + own; }

  // [thread] Return the chunk of pushes of a milestone, or for the n-th sum milestone ~n.
  EP_HOST_DEVICE int at(int milestone) const {
    if (milestone < window) return milestone;
    const int n = milestone - window, mixed = (far - window) * (others + 1);
    if (n < mixed) {
      const int group = n / (others + 1), i = n - group * (others + 1);
      return i < others ? ~(group * others + i) : window + group;
    }
    const int chunk = milestone - num_early_sums();
    return chunk < far + own ? chunk : ~(milestone - far - own);
  }
};

}  // namespace ep::cuda
