// PTX instructions without a name in CUDA C++: bulk asynchronous copies, their mbarriers, ordered loads and stores.
#pragma once
#include <cstdint>

namespace ep::ptx {

// [thread] Return the shared-memory address of a pointer, as PTX takes it.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Barriers in shared memory (mbarrier). A round ends after all arrivals and all announced bytes; then the next round
// begins. PTX calls a round a phase. Rounds alternate between parity 0 (the first) and 1.

// [thread] Create a barrier for `arrivals` arrivals a round.
__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// [thread] Make new barriers visible to bulk copies and to other threads. Call it after barrier_init.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// [thread] Arrive once, without waiting.
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// [thread] Arrive once, and announce `bytes` of bulk loads: the round also waits for them.
__device__ __forceinline__ void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// [thread] Return whether the round of this parity has ended. The hardware may sleep shortly for its end.
__device__ __forceinline__ bool barrier_ended(uint64_t* barrier, uint32_t parity) {
  uint32_t ended;
  asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
               : "=r"(ended)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
  return ended;
}

// [thread] Return whether the round of this parity has ended, without any sleep.
__device__ __forceinline__ bool barrier_ended_now(uint64_t* barrier, uint32_t parity) {
  uint32_t ended;
  asm volatile("{\n .reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
               : "=r"(ended)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
  return ended;
}

// [thread] Wait for the end of the round of this parity. Then its bulk loads have landed and are visible.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  while (!barrier_ended(barrier, parity)) {
  }
}

// Bulk copies. Addresses and sizes are multiples of 16 bytes. They use the asynchronous proxy: fences order them with
// ordinary accesses.

// [thread] Start a load to shared memory. `barrier` counts the bytes as they land.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// [thread] Start a store from shared memory. It belongs to the group of the thread's next bulk_commit.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(bytes)
               : "memory");
}

// [thread] Close the current group of bulk stores.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// [thread] Wait until all but the last kPending groups of this thread have read shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// [thread] Wait until all but the last kPending groups of this thread have written global memory, visible to this
// thread. On H200 stores to a peer may still be on their way then: a fence of the system waits until they have arrived.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// [thread] Order earlier ordinary accesses before later bulk copies: those of this thread, and those of threads it has
// synchronized with. The second function covers shared memory only.
__device__ __forceinline__ void fence_before_bulk() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void fence_shared_before_bulk() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// [thread] Bring a line of memory to the L2 cache.
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Ordered accesses, visible to peers.

// [thread] Load; later accesses of this thread come after it. It pairs with fence_system and store_relaxed.
__device__ __forceinline__ uint64_t load_acquire(const uint64_t* p) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}

// [thread] Order all earlier accesses, done or observed by this thread, before its later ones: in the block, on this
// GPU, or in the whole system. fence_system and then store_relaxed make a release.
__device__ __forceinline__ void fence_block() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// [thread] Store without ordering of its own, visible to peers.
__device__ __forceinline__ void store_relaxed(uint64_t* p, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

// [thread] Store and load two words as one: no reader ever sees only one of them. Without ordering of other memory,
// visible to peers. Addresses are multiples of 16 bytes. Needs PTX 8.4 (CUDA 12.4), and between GPUs native atomics, as
// NVLink has.
__device__ __forceinline__ void store_pair(void* p, uint64_t first, uint64_t second) {
  asm volatile("{\n .reg .b128 pair;\n mov.b128 pair, {%1, %2};\n st.relaxed.sys.global.b128 [%0], pair;\n}" ::"l"(p),
               "l"(first), "l"(second)
               : "memory");
}
__device__ __forceinline__ void load_pair(const void* p, uint64_t& first, uint64_t& second) {
  asm volatile("{\n .reg .b128 pair;\n ld.relaxed.sys.global.b128 pair, [%2];\n mov.b128 {%0, %1}, pair;\n}"
               : "=l"(first), "=l"(second)
               : "l"(p)
               : "memory");
}

// [thread] Return the time of the GPU's global timer.
__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// [thread] Wait at named barrier `barrier` for `threads` threads of the block. Number 0 is also that of __syncthreads;
// 15 is the last.
__device__ __forceinline__ void named_barrier(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// [thread] Arrive at a named barrier, without waiting. Threads that wait there then see what this thread has stored.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace ep::ptx
