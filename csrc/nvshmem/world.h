// NVSHMEM in this process: start or join its world, and allocate from its symmetric heap. All ranks of the world call
// start and allocate together; both wait for the other ranks without a limit.
#pragma once
#include <cstddef>
#include <string>

namespace ep::nvshmem {

// [host] Return true once NVSHMEM runs in this process, no matter who started it.
bool is_running();
// [host] Return the id of a new world. One rank calls this and passes the id to all. Throw std::runtime_error without
// one.
std::string make_id();
// [host] Start a world with the current GPU, or (empty id) join the running one. Throw std::runtime_error if the id is
// of another version, if NVSHMEM does not start, or if no transport reaches all ranks.
void start(const std::string& id, int rank, int num_ranks);
// [host] Return this rank's number in the world, and the number of its ranks. After start.
int own_pe();
int num_pes();
// [host] Allocate from the heap, at a multiple of kLine. Throw std::runtime_error when the heap is exhausted.
void* allocate(size_t bytes);
// [host] Return the address of the same memory on another rank, or null where NVLink does not reach it.
void* address_at(void* memory, int pe);
// [host] Wait until all puts of this rank are complete at their targets. Blocks the host, on the default stream.
void quiet();

}  // namespace ep::nvshmem
