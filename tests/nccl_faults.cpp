// Runs the making and the end of an NCCL wire (csrc/cuda/nccl.cpp, csrc/cuda/rail/messages.cu) without a GPU. This file
// plays CUDA's runtime and NCCL: it counts what is made, and one of their calls fails or hangs.
//
//   nccl_faults comm|messages [fail:N | hang:N | gone | busy] [destroy | drop]
//     comm      make a communicator in a thread, as ep_dispatcher/engines/cuda/nccl.py does. After LIMIT_MS free it
//     messages  make the messages of a wire
//     fail:N    the N-th call fails
//     hang:N    the N-th call returns only when the peers come back, some time after the limit
//     gone      the first message of the communicator never arrives
//     busy      other kernels have the whole GPU
//     destroy   destroy the communicator at the end, not abort it
//     drop      leave its end to its destructor
//
// Prints lines "key: value": the result, the time until the caller goes on [ms], the calls, and what is left.
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cuda/nccl.h"
#include "cuda/rail/messages.h"

namespace {

constexpr int kLimitMs = 300;
using Clock = std::chrono::steady_clock;

std::mutex mutex;
std::condition_variable changed;
int num_calls = 0, fails_at = 0, hangs_at = 0;
bool peers_are_back = false, message_arrives = true, has_room = true;
std::string failed;  // the call that failed

struct Comm {
  bool ended = false;
  int inside = 0;  // calls that use it
};
std::vector<Comm*> comms;  // all, also ended ones
int ended_twice = 0, used_after_end = 0, ended_in_use = 0;
thread_local Comm* of_group = nullptr;

struct Stream {
  Comm* awaits = nullptr;  // a kernel of this communicator is under way, until it is aborted
  bool awaits_message = false, awaits_room = false;
  bool is_busy() const { return (awaits_message && !awaits->ended) || (awaits_room && !has_room); }
};
std::set<Stream*> streams;
std::set<void*> events, memories;

// Count a call. Return whether it fails; wait if it hangs. The mutex is held before and afterwards.
bool fails(std::unique_lock<std::mutex>& lock, const char* name) {
  const int number = ++num_calls;
  if (number == hangs_at) changed.wait(lock, [] { return peers_are_back; });
  if (number == fails_at) failed = name;
  return number == fails_at;
}

// A call of NCCL that uses a communicator.
int use(Comm* comm, const char* name, const std::function<void()>& run = [] {}) {
  std::unique_lock lock(mutex);
  used_after_end += comm->ended;
  ++comm->inside;
  const bool failed = fails(lock, name);
  --comm->inside;
  if (!failed) run();
  return failed ? 6 : 0;
}

int end(Comm* comm, const char* name) {
  std::unique_lock lock(mutex);
  ended_twice += comm->ended;
  ended_in_use += comm->inside > 0;
  comm->ended = true;
  changed.notify_all();
  return fails(lock, name) ? 6 : 0;
}

cudaError_t cuda_result(bool failed) { return failed ? cudaErrorUnknown : cudaSuccess; }

template <class T, class Made>
cudaError_t make(T* made, std::set<Made>& all, const char* name) {
  std::unique_lock lock(mutex);
  if (fails(lock, name)) return cudaErrorUnknown;
  auto* const object = reinterpret_cast<Made>(new Stream);
  all.insert(object);
  *made = reinterpret_cast<T>(object);
  return cudaSuccess;
}

}  // namespace

// ---- NCCL ----

extern "C" {
int ncclGetVersion(int* version) { return *version = 22809, 0; }
const char* ncclGetErrorString(int) { return "remote process exited"; }
const char* ncclGetLastError(void*) { return ""; }
int ncclGetUniqueId(void*) { return 0; }

// A struct of 128 bytes is passed in memory, as ncclUniqueId is.
struct Id {
  char bytes[128];
};
int ncclCommInitRankConfig(void** comm, int, Id, int, void*) {
  std::unique_lock lock(mutex);
  const bool failed = fails(lock, "ncclCommInitRankConfig");
  comms.push_back(new Comm);  // NCCL leaves one after an error, too
  *comm = comms.back();
  return failed ? 6 : 0;
}
int ncclGroupStart() {
  std::unique_lock lock(mutex);
  return fails(lock, "ncclGroupStart") ? 6 : 0;
}
int ncclSend(const void*, size_t, int, int, void* comm, cudaStream_t stream) {
  of_group = static_cast<Comm*>(comm);
  return use(of_group, "ncclSend", [&] { reinterpret_cast<Stream*>(stream)->awaits = static_cast<Comm*>(comm); });
}
int ncclRecv(void*, size_t, int, int, void* comm, cudaStream_t) { return use(static_cast<Comm*>(comm), "ncclRecv"); }
int ncclGroupEnd() {
  if (!of_group) return 0;
  Comm* const comm = std::exchange(of_group, nullptr);
  return use(comm, "ncclGroupEnd", [&] {
    for (Stream* stream : streams)
      if (stream->awaits == comm) stream->awaits_message = !message_arrives;
  });
}
int ncclCommDestroy(void* comm) { return end(static_cast<Comm*>(comm), "ncclCommDestroy"); }
int ncclCommAbort(void* comm) { return end(static_cast<Comm*>(comm), "ncclCommAbort"); }
}

// ---- CUDA's runtime ----

extern "C" {
const char* cudaGetErrorString(cudaError_t) { return "unknown error"; }
cudaError_t cudaMalloc(void** memory, size_t) { return make(memory, memories, "cudaMalloc"); }
cudaError_t cudaFree(void* memory) {  // waits for all kernels
  std::unique_lock lock(mutex);
  changed.wait(lock, [] {
    for (const Stream* stream : streams)
      if (stream->is_busy()) return false;
    return true;
  });
  return cuda_result(memories.erase(memory) == 0);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return make(stream, streams, "stream"); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return make(stream, streams, "stream");
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  std::unique_lock lock(mutex);
  return cuda_result(streams.erase(reinterpret_cast<Stream*>(stream)) == 0);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  std::unique_lock lock(mutex);
  static bool is_counted = false;  // only the first: how many there are depends on the time
  if (!std::exchange(is_counted, true) && fails(lock, "cudaStreamQuery")) return cudaErrorUnknown;
  return reinterpret_cast<Stream*>(stream)->is_busy() ? cudaErrorNotReady : cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return make(event, events, "event"); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  std::unique_lock lock(mutex);
  return cuda_result(events.erase(event) == 0);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  std::unique_lock lock(mutex);
  return cuda_result(fails(lock, "priorities"));
}
cudaError_t cudaGetLastError() {
  std::unique_lock lock(mutex);
  return cuda_result(fails(lock, "cudaGetLastError"));
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus*) { return cudaSuccess; }

// What nvcc calls for `kernel<<<...>>>()`.
static cudaStream_t launched_in;
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, CUstream_st* stream) {
  launched_in = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void* stream) {
  *static_cast<cudaStream_t*>(stream) = launched_in;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t stream) {
  std::unique_lock lock(mutex);
  reinterpret_cast<Stream*>(stream)->awaits_room = true;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3 grid, dim3 block, void** arguments, size_t bytes,
                               cudaStream_t stream) {
  return cudaLaunchKernel(nullptr, grid, block, arguments, bytes, stream);
}
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaSuccess; }
void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}
char __cudaInitModule(void**) { return 0; }
}

// ---- the program ----

namespace {

using namespace ep::cuda;

// What the caller gets: "right", or the text of an error.
template <class Run>
std::string result_of(const Run& run) {
  try {
    run();
    return "right";
  } catch (const std::exception& error) {
    return error.what();
  }
}

void make_comm(bool destroys, bool drops) {
  const auto begin = Clock::now();
  auto comm = std::make_shared<NcclComm>();
  auto start = std::async(std::launch::async, [comm] {
    return result_of([&] {
      comm->join(std::string(128, 'x'), 0, 3, 4);
      comm->connect();
    });
  });
  std::string result = "late", end = "right";
  if (start.wait_for(std::chrono::milliseconds(kLimitMs)) == std::future_status::ready) {
    result = start.get();
    if (result == "right" && !drops) end = result_of([&] { comm->free(!destroys); });
  } else {
    auto freed = std::async(std::launch::async, [&] { return result_of([&] { comm->free(true); }); });
    if (freed.wait_for(std::chrono::seconds(3)) != std::future_status::ready) end = "hangs";
    printf("went on: %d\n",
           static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count()));
    {
      std::unique_lock lock(mutex);
      peers_are_back = true;
      changed.notify_all();
    }
    printf("thread: %s\n", start.get().c_str());
    if (freed.valid()) end = freed.get();
  }
  printf("result: %s\nend: %s\n", result.c_str(), end.c_str());
}

void make_messages() {
  Context context{};
  context.timeout_ns = kLimitMs * 1000000ull;
  printf("result: %s\n", result_of([&] { Messages(context, std::make_shared<NcclComm>()); }).c_str());
}

}  // namespace

int main(int argc, char** argv) {
  bool destroys = false, drops = false;
  for (int i = 2; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.rfind("fail:", 0) == 0) fails_at = std::atoi(word.c_str() + 5);
    if (word.rfind("hang:", 0) == 0) hangs_at = std::atoi(word.c_str() + 5);
    message_arrives &= word != "gone";
    has_room &= word != "busy";
    destroys |= word == "destroy";
    drops |= word == "drop";
  }
  if (argv[1] == std::string("comm"))
    make_comm(destroys, drops);
  else
    make_messages();
  std::unique_lock lock(mutex);
  int alive = 0;
  for (const Comm* comm : comms) alive += !comm->ended;
  printf("calls: %d\nfailed: %s\n", num_calls, failed.c_str());
  printf("left: %zu streams, %zu events, %zu memories, %d communicators\n", streams.size(), events.size(),
         memories.size(), alive);
  printf("mistakes: %d ended twice, %d used after their end, %d ended in use\n", ended_twice, used_after_end,
         ended_in_use);
}
