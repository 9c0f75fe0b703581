// All blocks share each copy, one copy after the other: NVLink to one peer is as fast as to all of them together, and a
// block that has ended its part goes on to the next copy at once.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>

#include "cuda/balance/slots.h"
#include "cuda/device/launch.h"
#include "cuda/device/ptx.cuh"

namespace ep::cuda {
namespace {

constexpr int kThreads = 512;
// 16-byte loads that a thread has under way. A block has 64 KiB on their way in a push, and in a pull 32 KiB from
// peers. NVLink needs about 1 MB a GPU: some 20 or 30 blocks (slot_layout.py), which leave room for the GEMMs beside
// them.
constexpr int kPushLoads = 8, kPullLoads = 4;

// The parameters of an expert, by value.
struct Parameters {
  ExpertParameter of[kMaxSlotParameters];
  int32_t count;
};

// [thread] Return the local number of the expert in a slot if this rank is its home and another rank's slot has it.
// Otherwise return -1.
__device__ int own_expert_in(const NodeSlots& node, const int32_t* copies, int local_rank, int slot) {
  const int rank = node.ranks[local_rank], home = node.ranks[node.local_rank];
  const int expert = copies[(static_cast<int64_t>(rank) * node.num_slots + slot) * 3];
  const bool is_own = rank != home && expert >= 0 && expert / node.num_local_experts == home;
  return is_own ? expert % node.num_local_experts : -1;
}

// [thread] Return where this rank's memory has an expert's parameter.
__device__ char* home_of(const ExpertParameter& parameter, int expert) {
  return parameter.table ? reinterpret_cast<char*>(parameter.table[expert]) : parameter.first + expert * parameter.step;
}

// [thread] Return where a rank's slot has a parameter.
__device__ char* slot_of(const NodeSlots& node, const ExpertParameter& parameter, int local_rank, int slot) {
  return node.regions[local_rank] + parameter.slot_begin + slot * parameter.slot_step;
}

__device__ uint32_t thread_in_grid() { return blockIdx.x * kThreads + threadIdx.x; }
__device__ uint32_t threads_in_grid() { return gridDim.x * kThreads; }

// [thread] Copy this thread's part of `bytes` bytes. `to` is a multiple of 16, `from` need not be.
__device__ void copy_part(char* to, const char* from, int64_t bytes) {
  const uint32_t thread = thread_in_grid(), num_threads = threads_in_grid();
  const bool is_aligned = reinterpret_cast<uintptr_t>(from) % kVector == 0;
  const uint32_t num_vectors = is_aligned ? bytes / kVector : 0;
  const auto* from_vectors = reinterpret_cast<const uint4*>(from);
  auto* to_vectors = reinterpret_cast<uint4*>(to);
  // In the last round all threads have about the same number of vectors left, because they are dealt out in turn.
  for (uint32_t begin = thread; begin < num_vectors; begin += kPushLoads * num_threads) {
    uint4 vectors[kPushLoads];
#pragma unroll
    for (int i = 0; i < kPushLoads; ++i)
      if (begin + i * num_threads < num_vectors) vectors[i] = __ldcg(from_vectors + begin + i * num_threads);
#pragma unroll
    for (int i = 0; i < kPushLoads; ++i)
      if (begin + i * num_threads < num_vectors) to_vectors[begin + i * num_threads] = vectors[i];
  }
  // The rest: less than a vector, or all of a bias that does not begin at a multiple of 16.
  for (int64_t at = int64_t{num_vectors} * kVector + thread; at < bytes; at += num_threads) to[at] = from[at];
}

// The stores are drained before the kernel ends, because the barrier behind it announces itself by relaxed stores,
// which order nothing that came before them. Peers acquire these before they read the slots. No kernel of this stream
// may begin before the one ahead of it has ended (no programmatic dependent launch).
__global__ void __launch_bounds__(kThreads)
    push_kernel(const __grid_constant__ NodeSlots node, const __grid_constant__ Parameters parameters,
                const int32_t* copies) {
  // Every rank begins with another peer, so that not all send to the same one at first.
  for (int i = 1; i < node.num_local; ++i) {
    const int local_rank = (node.local_rank + i) % node.num_local;
    for (int slot = 0; slot < node.num_slots; ++slot) {
      const int expert = own_expert_in(node, copies, local_rank, slot);
      if (expert < 0) continue;
      for (int p = 0; p < parameters.count; ++p) {
        const ExpertParameter& parameter = parameters.of[p];
        copy_part(slot_of(node, parameter, local_rank, slot), home_of(parameter, expert), parameter.size);
      }
    }
  }
  ptx::fence_system();
}

// Where an expert's copies are, in ascending order. In shared memory, and the same in all threads of a block.
struct Copies {
  const int32_t* places;  // [count] local rank * num_slots + slot
  int count;
};

// Four neighbouring elements of type T.
template <class T>
struct alignas(4 * sizeof(T)) Four {
  T at[4];
};

__device__ void add(float4& total, const float4& part) {
  total.x += part.x;
  total.y += part.y;
  total.z += part.z;
  total.w += part.w;
}

template <class T>
__device__ float4 as_float(const Four<T>& four) {
  return {static_cast<float>(four.at[0]), static_cast<float>(four.at[1]), static_cast<float>(four.at[2]),
          static_cast<float>(four.at[3])};
}

template <class T>
__device__ Four<T> rounded(const float4& total) {
  return {static_cast<T>(total.x), static_cast<T>(total.y), static_cast<T>(total.z), static_cast<T>(total.w)};
}

// [thread] Return where the slot of copy number c has a gradient.
__device__ const float* gradient_in_slot(const NodeSlots& node, const ExpertParameter& parameter, const Copies& copies,
                                         int c) {
  const int place = copies.places[c];
  return reinterpret_cast<const float*>(slot_of(node, parameter, place / node.num_slots, place % node.num_slots));
}

// [thread] Add the gradients in all copies to this thread's part of an expert's gradient.
template <class T>
__device__ void add_part(const NodeSlots& node, const ExpertParameter& parameter, const Copies& copies, T* home) {
  const uint32_t thread = thread_in_grid(), num_threads = threads_in_grid();
  const bool is_aligned = reinterpret_cast<uintptr_t>(home) % sizeof(Four<T>) == 0;
  const uint32_t num_fours = is_aligned ? parameter.size / 4 : 0;
  auto* home_fours = reinterpret_cast<Four<T>*>(home);
#pragma unroll 1
  for (uint32_t begin = thread; begin < num_fours; begin += kPullLoads * num_threads) {
    // Load the home's elements and those of the first copy together. Only then does a sum wait for either.
    const auto* first = reinterpret_cast<const float4*>(gradient_in_slot(node, parameter, copies, 0));
    float4 totals[kPullLoads];
    Four<T> own[kPullLoads];
#pragma unroll
    for (int i = 0; i < kPullLoads; ++i)
      if (begin + i * num_threads < num_fours) {
        totals[i] = __ldcg(first + begin + i * num_threads);
        own[i] = home_fours[begin + i * num_threads];
      }
#pragma unroll
    for (int i = 0; i < kPullLoads; ++i)
      if (begin + i * num_threads < num_fours) add(totals[i], as_float(own[i]));  // the order of two does not matter
#pragma unroll 1  // or the compiler needs more registers than there are
    for (int c = 1; c < copies.count; ++c) {
      const auto* next = reinterpret_cast<const float4*>(gradient_in_slot(node, parameter, copies, c));
      float4 parts[kPullLoads];
#pragma unroll
      for (int i = 0; i < kPullLoads; ++i)
        if (begin + i * num_threads < num_fours) parts[i] = __ldcg(next + begin + i * num_threads);
#pragma unroll
      for (int i = 0; i < kPullLoads; ++i)
        if (begin + i * num_threads < num_fours) add(totals[i], parts[i]);
    }
#pragma unroll
    for (int i = 0; i < kPullLoads; ++i)
      if (begin + i * num_threads < num_fours) home_fours[begin + i * num_threads] = rounded<T>(totals[i]);
  }
  // The rest: less than four elements, or all of a gradient that is not aligned.
#pragma unroll 1
  for (int64_t at = int64_t{num_fours} * 4 + thread; at < parameter.size; at += num_threads) {
    float total = static_cast<float>(home[at]);
#pragma unroll 1
    for (int c = 0; c < copies.count; ++c) total += __ldcg(gradient_in_slot(node, parameter, copies, c) + at);
    home[at] = static_cast<T>(total);
  }
}

// For gradients of type T. Those in the slots were written before the last barrier of the buffer, as above.
template <class T>
__global__ void __launch_bounds__(kThreads)
    pull_kernel(const __grid_constant__ NodeSlots node, const __grid_constant__ Parameters gradients,
                const int32_t* copies) {
  extern __shared__ int32_t shared[];
  const int num_places = node.num_local * node.num_slots;
  int32_t* experts = shared;              // [num_places] this rank's expert that a slot holds, or -1
  int32_t* places = shared + num_places;  // [num_places] of the copies of one expert
  for (int place = threadIdx.x; place < num_places; place += kThreads)
    experts[place] = own_expert_in(node, copies, place / node.num_slots, place % node.num_slots);
  __syncthreads();
  for (int first = 0; first < num_places; ++first) {
    const int expert = experts[first];
    // The first copy of an expert stands for all of them. All threads decide alike.
    bool is_first = expert >= 0;
    for (int before = 0; is_first && before < first; ++before) is_first = experts[before] != expert;
    if (!is_first) continue;
    int count = 0;
    __syncthreads();  // nobody reads the copies of the expert before
    for (int place = first; place < num_places; ++place)
      if (experts[place] == expert) {
        if (threadIdx.x == 0) places[count] = place;
        ++count;
      }
    __syncthreads();
    for (int p = 0; p < gradients.count; ++p)
      add_part(node, gradients.of[p], Copies{places, count}, reinterpret_cast<T*>(home_of(gradients.of[p], expert)));
  }
}

// [host] Return the kernel for gradients of a dtype. One kernel for all of them would need more registers.
auto pull_kernel_for(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return pull_kernel<__nv_bfloat16>;
    case DType::kFloat16:
      return pull_kernel<__half>;
    default:
      return pull_kernel<float>;
  }
}

// [host] Return the parameters as an argument of a kernel.
Parameters by_value(const std::vector<ExpertParameter>& parameters) {
  if (parameters.size() > kMaxSlotParameters) throw std::runtime_error("too many parameters of an expert");
  Parameters result{};
  for (const ExpertParameter& parameter : parameters) result.of[result.count++] = parameter;
  return result;
}

}  // namespace

void push_to_slots(const NodeSlots& node, const int32_t* copies, const std::vector<ExpertParameter>& parameters,
                   int num_blocks, cudaStream_t stream) {
  if (node.num_local == 1) return;
  launch(push_kernel, num_blocks, kThreads, 0, stream, node, by_value(parameters), copies);
}

void pull_from_slots(const NodeSlots& node, const int32_t* copies, const std::vector<ExpertParameter>& gradients,
                     int num_blocks, cudaStream_t stream) {
  if (node.num_local == 1) return;
  const size_t shared = 2 * sizeof(int32_t) * node.num_local * node.num_slots;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {  // as a rule all have the same
    std::vector<ExpertParameter> of_dtype;
    for (const ExpertParameter& gradient : gradients)
      if (gradient.dtype == dtype) of_dtype.push_back(gradient);
    if (of_dtype.empty()) continue;
    launch(pull_kernel_for(dtype), num_blocks, kThreads, shared, stream, node, by_value(of_dtype), copies);
  }
}

}  // namespace ep::cuda
