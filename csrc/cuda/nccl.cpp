#include "cuda/nccl.h"

#include <dlfcn.h>

#include <chrono>
#include <climits>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "cuda/device/check.h"
#include "cuda/device/owned.h"

namespace ep::cuda {
namespace {

// As in nccl.h. NCCL takes configurations of older versions; this one is of 2.18.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef, version = 21800;
  int blocking = 1;
  int cga_cluster_size = 0;                    // blocks in a cluster begin together, so they would wait for each other
  int min_ctas = INT_MIN, max_ctas = INT_MIN;  // INT_MIN: not set
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};
struct UniqueId {
  char bytes[128];
};
constexpr int kUint8 = 1;

// The functions of the library.
struct Library {
  int (*get_version)(int*);
  const char* (*get_error_string)(int);
  const char* (*get_last_error)(void*);
  int (*get_unique_id)(UniqueId*);
  int (*init)(void**, int, UniqueId, int, Config*);
  int (*group_start)();
  int (*group_end)();
  int (*send)(const void*, size_t, int, int, void*, cudaStream_t);
  int (*recv)(void*, size_t, int, int, void*, cudaStream_t);
  int (*destroy)(void*);
  int (*abort)(void*);

  // Look the functions up in the library that is loaded already. Where PyTorch holds NCCL itself, look everywhere.
  Library() {
    void* const found = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
    void* const library = found ? found : RTLD_DEFAULT;
    const auto look_up = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (!function) throw std::runtime_error(std::string("PyTorch has loaded no NCCL with ") + name);
    };
    look_up(get_version, "ncclGetVersion");
    look_up(get_error_string, "ncclGetErrorString");
    look_up(get_last_error, "ncclGetLastError");
    look_up(get_unique_id, "ncclGetUniqueId");
    look_up(init, "ncclCommInitRankConfig");
    look_up(group_start, "ncclGroupStart");
    look_up(group_end, "ncclGroupEnd");
    look_up(send, "ncclSend");
    look_up(recv, "ncclRecv");
    look_up(destroy, "ncclCommDestroy");
    look_up(abort, "ncclCommAbort");
  }
};

const Library& library() {
  static const Library library;
  return library;
}

void check_nccl(int result, const char* step) {
  if (result == 0) return;
  std::string text = std::string("NCCL, ") + step + ": " + library().get_error_string(result);
  const char* const last = library().get_last_error(nullptr);
  if (last && *last) text += std::string(" (") + last + ")";
  throw std::runtime_error(text);
}

}  // namespace

std::string NcclComm::make_id() {
  UniqueId id;
  check_nccl(library().get_unique_id(&id), "unique id");
  return std::string(id.bytes, sizeof(id.bytes));
}

int NcclComm::version() {
  int version = 0;
  check_nccl(library().get_version(&version), "version");
  return version;
}

NcclComm::~NcclComm() { abort_if_left(); }

void NcclComm::join(const std::string& id, int rank, int num_ranks, int max_ctas) {
  UniqueId bytes;
  if (id.size() != sizeof(bytes.bytes)) throw std::runtime_error("NCCL: the unique id has another size");
  std::memcpy(bytes.bytes, id.data(), sizeof(bytes.bytes));
  Config config;
  config.min_ctas = 1;
  config.max_ctas = max_ctas;
  rank_ = rank, num_ranks_ = num_ranks;
  void* comm = nullptr;
  const int result = library().init(&comm, num_ranks, bytes, rank, &config);
  comm_ = comm;  // NCCL may leave a communicator after an error too
  try {
    check_nccl(result, "start");
    throw_if_freed();
  } catch (...) {
    abort_if_left();
    throw;
  }
}

void NcclComm::connect() {
  // These are freed last, after an abort: cudaFree waits for NCCL's kernel.
  OwnedMemory memory;
  OwnedStream stream;
  connects_ = true;
  try {
    check(cudaMalloc(&memory.handle, 2), "memory");
    check(cudaStreamCreateWithFlags(&stream.handle, cudaStreamNonBlocking), "stream");
    char* const bytes = static_cast<char*>(memory.handle);
    group([&] {
      for (int peer = 0; peer < num_ranks_; ++peer) {
        if (peer == rank_) continue;
        send(bytes, 1, peer, stream);
        receive(bytes + 1, 1, peer, stream);
      }
    });
    // Wait. Do not call cudaStreamSynchronize: if a peer is gone, only an abort ends the kernel.
    while (true) {
      throw_if_freed();
      const cudaError_t status = cudaStreamQuery(stream);
      if (status == cudaSuccess) break;
      if (status != cudaErrorNotReady) check(status, "first message");
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    connects_ = false;
    throw_if_freed();  // `free` may have left the abort to this thread
  } catch (...) {
    abort_if_left();
    connects_ = false;
    throw;
  }
}

void NcclComm::throw_if_freed() const {
  if (is_freed_) throw std::runtime_error("NCCL: the communicator was freed while it was made");
}

void NcclComm::abort_if_left() noexcept {
  if (void* const comm = comm_.exchange(nullptr)) library().abort(comm);
}

void NcclComm::begin() const { check_nccl(library().group_start(), "begin"); }
void NcclComm::end() const { check_nccl(library().group_end(), "end"); }
void NcclComm::cancel() const { library().group_end(); }

void NcclComm::send(const void* memory, size_t bytes, int rank, cudaStream_t stream) const {
  check_nccl(library().send(memory, bytes, kUint8, rank, comm_, stream), "send");
}

void NcclComm::receive(void* memory, size_t bytes, int rank, cudaStream_t stream) const {
  check_nccl(library().recv(memory, bytes, kUint8, rank, comm_, stream), "receive");
}

void NcclComm::free(bool aborts) {
  is_freed_ = true;
  void* comm;
  {
    const std::unique_lock lock(mutex_, std::chrono::seconds(1));
    if (!lock && connects_) return;  // it is inside NCCL, and looks at is_freed_ afterwards
    comm = comm_.exchange(nullptr);
  }
  if (comm) check_nccl(aborts ? library().abort(comm) : library().destroy(comm), aborts ? "abort" : "end");
}

}  // namespace ep::cuda
