// NVSHMEM in this process: start or join its world, and allocate from its symmetric heap. All ranks of the world call
// start and allocate together; both wait for the other ranks without a limit.
#pragma once
#include <cstddef>
#include <string>

namespace ep::nvshmem {

// Return true once NVSHMEM runs in this process, no matter who started it.
bool is_running();
// Return the id of a new world. One rank calls this and passes the id to all.
std::string make_id();
// Start a world with the current GPU, or (empty id) join the running one. Throw std::runtime_error when no transport
// reaches all ranks.
void start(const std::string& id, int rank, int num_ranks);
int own_pe();
int num_pes();
// Allocate from the heap. Throw std::runtime_error when the heap is exhausted.
void* allocate(size_t bytes);
// Return the address of the same memory on another rank, or null where NVLink does not reach it.
void* address_at(void* memory, int pe);
// Wait until all puts of this rank are complete at their targets.
void quiet();

}  // namespace ep::nvshmem
