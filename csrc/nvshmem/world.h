// NVSHMEM in this process: start it or join it, and take memory from its symmetric heap. All ranks of its world call
// start and allocate together; both wait for the others without a limit.
#pragma once
#include <cstddef>
#include <string>

namespace ep::nvshmem {

bool is_running();      // also when somebody else in this process has started it
std::string make_id();  // of a new world, from one rank for all
// Start a world, with the GPU that is current, or (an empty id) join the one that is running. Throw std::runtime_error
// when no transport reaches all ranks.
void start(const std::string& id, int rank, int num_ranks);
int own_pe();
int num_pes();
void* allocate(size_t bytes);            // throws std::runtime_error when the heap is exhausted
void* address_at(void* memory, int pe);  // of the same memory on another rank; null where NVLink does not reach it
// Wait until all that this rank has put is where it belongs.
void quiet();

}  // namespace ep::nvshmem
