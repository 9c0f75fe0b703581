// A network made of software: a remote transport of NVSHMEM 3.4.x (version 3 of its interface to plug-ins) for tests on
// one host without a network card.
//
// Build it with the SONAME of a transport that NVSHMEM knows, load it first, and give the ranks of a node a host name:
//
//   nvcc -std=c++17 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fPIC,-fvisibility=hidden -O2 -cudart static
//       -shared tests/remote_wire.cu -o libremote_wire.so -Xlinker -soname=nvshmem_transport_ucx.so.3
//   export LD_PRELOAD=$PWD/libremote_wire.so NVSHMEM_REMOTE_TRANSPORT=ucx
//   export REMOTE_WIRE_HOST=node$((LOCAL_RANK / 2))
//
// NVSHMEM then opens "nvshmem_transport_ucx.so.3" and gets the library that is loaded already. nvshmem_ptr() of a PE
// with another host name is null. Every put, get, atomic, fence and quiet of a kernel for it goes through the proxy, a
// thread of NVSHMEM on the host, which calls the functions below. They copy and write in one stream per peer, to a
// mapping of the peer's memory that NVSHMEM does not know of. Streams keep their order, as a queue pair of a network
// card does.
//
//   REMOTE_WIRE_HOLD_US   hold every put back for so many microseconds, or until a fence or quiet demands it; then
//                         deliver the newest first (default 0: deliver at once). Finds signals without a fence and
//                         sources that are written again too early.
//   REMOTE_WIRE_AMO=copy  do atomics by copies, not by a kernel of one thread: for kernels that fill every SM
//
// Limits. The proxy makes CUDA calls, and these wait while another host thread is blocked in one. So a host thread must
// not block inside a CUDA call while a kernel waits for a put: the copy of an output to the host right after a dispatch
// hangs both. Buffer.check() polls; call it before such a copy. Nothing here bounds what is under way, and speed,
// errors of a network and the order between queue pairs of GPU-initiated networking (IBGDA) are not tested. The heaps
// of peers are fetched by pidfd_getfd (Linux 5.6), which a container may forbid.
#include <cuda.h>
#include <cuda_runtime.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <mutex>
#include <vector>

namespace {

// ---- NVSHMEM's interface to transports, version 3: what is used here, in the library's layout -----------------------

constexpr int kInterface = 3;  // api_version / 10000

enum RmaKind : int { kPut = 1, kPutValue = 2, kGet = 4, kGetValue = 5 };

enum AmoKind : int {
  kIncrement = 2,
  kSet,
  kAdd,
  kAnd,
  kOr,
  kXor,
  kSignal,
  kSignalSet,
  kSignalAdd,
  kLastWithoutResult,
  kFetch,
  kFetchIncrement,
  kFetchAdd,
  kFetchAnd,
  kFetchOr,
  kFetchXor,
  kSwap,
  kCompareSwap,
};

enum Capability : int { kCpuWrites = 1 << 4, kCpuReads = 1 << 5, kCpuAtomics = 1 << 6 };
enum Attribute : int { kConnected = 1 << 1 };

struct Bootstrap {
  int version, rank, size, rank_in_node, ranks_in_node;
  int (*allgather)(const void*, void*, int, Bootstrap*);
  int (*alltoall)(const void*, void*, int, Bootstrap*);
  int (*barrier)(Bootstrap*);
};

struct PeInfo {
  int pcie[3], pe;
  uint64_t host_hash;
  char uuid[16];
};

struct MemoryHandle {
  char bytes[512];
};

struct RmaVerb {
  int kind, is_nbi, is_stream;
  cudaStream_t stream;
};

struct MemoryRef {
  void* address;
  uint64_t offset;
  MemoryHandle* handle;
};

struct RmaBytes {
  size_t num_elements;
  int element_bytes;
  ptrdiff_t src_stride, dst_stride;
};

struct AmoVerb {
  int kind, is_fetch, is_value, is_compare;
};

struct AmoOperands {
  MemoryRef remote;
  uint64_t result_flag;
  void *result, *value_at, *compare_at;  // result: uint64 [2] of this PE: the old value, then result_flag
  uint64_t value, compare;
  MemoryHandle* result_handle;
};

struct AmoBytes {
  int type, element_bytes;
};

struct Transport {
  int api_version, type, *capabilities;
  int (*can_reach_peer)(int*, PeInfo*, Transport*);
  int (*connect_endpoints)(Transport*, int*, int);
  int (*get_mem_handle)(MemoryHandle*, void*, size_t, Transport*, bool);
  int (*release_mem_handle)(MemoryHandle*, Transport*);
  int (*finalize)(Transport*);
  int (*show_info)(Transport*, int);
  int (*progress)(Transport*);
  int (*rma)(Transport*, int, RmaVerb, MemoryRef*, MemoryRef*, RmaBytes, int);
  int (*amo)(Transport*, int, void*, AmoVerb, AmoOperands*, AmoBytes, int);
  int (*fence)(Transport*, int, int);
  int (*quiet)(Transport*, int, int);
  int (*enforce_cst)(Transport*);
  int (*enforce_cst_at_target)(Transport*);
  int (*add_device_remote_mem_handles)(Transport*, int, MemoryHandle*, uint64_t, size_t);
  Bootstrap* bootstrap;
  void *state, *type_state, *handle_cache;
  char** pci_paths;
  int attributes, num_devices;
  bool atomics_complete_on_quiet, is_successfully_initialized, needs_no_proxy;
  void* heap_base;
  size_t log2_granularity;
  uint64_t max_operation_bytes;
  uint32_t min_endianness;
  int index, own_pe, num_pes;
  void *alias_map, *egm_map;
};

static_assert(sizeof(Transport) == 240 && sizeof(AmoOperands) == 80 && sizeof(RmaVerb) == 24 && sizeof(RmaBytes) == 32);

// ---- state of the process -------------------------------------------------------------------------------------------

constexpr int kFailed = 7;  // any value but 0: NVSHMEM's proxy then ends the process
constexpr uint64_t kMagic = 0x63696e76736e7631;
constexpr size_t kLockBytes = 4096;
constexpr double kForever = std::numeric_limits<double>::infinity();

// An allocation of one PE, as its peers get it in a MemoryHandle.
struct Allocation {
  uint64_t magic;
  int pid, fd;  // fd -1: peers open `ipc`
  uint64_t begin, bytes;
  CUipcMemHandle ipc;
};
static_assert(sizeof(Allocation) <= sizeof(MemoryHandle));

// The same allocation, mapped here: an address of the peer plus `delta` is one of this process.
struct Region {
  uint64_t begin, bytes;
  int64_t delta;
};

struct HeldPut {
  int pe;
  void *dst, *src;
  size_t bytes;
  double since_us;
};

struct Peer {
  std::vector<Region> regions;
  cudaStream_t stream = nullptr;
};

struct Wire {
  std::mutex mutex;  // of all below but own_pe, once connected
  std::vector<Peer> peers;
  std::deque<HeldPut> held;    // oldest first
  std::atomic<int>* amo_lock;  // [num_pes] in memory of all PEs, for atomics by copies; 1 while held
  int own_pe, hold_us;
  bool copies_atomics;
  uint64_t num_puts = 0;
} wire;

double now_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// No std::string here: the process would share this library's copies of its functions, because it is loaded first.
struct Failure {
  char text[200];
};

template <class... Args>
[[noreturn]] void fail(const char* format, Args... args) {
  Failure failure;
  std::snprintf(failure.text, sizeof(failure.text), format, args...);
  throw failure;
}

// Throw unless a call of CUDA's runtime or driver, or of the bootstrap, returned 0.
void check(int status, const char* what) {
  if (status != 0) fail("%s failed: %d", what, status);
}

// Call a step and return 0, or kFailed when it has thrown: what NVSHMEM understands.
template <auto kStep, class... Args>
int run(Args... args) noexcept {
  try {
    kStep(args...);
    return 0;
  } catch (const Failure& failure) {
    std::fprintf(stderr, "[remote wire, PE %d] %s\n", wire.own_pe, failure.text);
    return kFailed;
  }
}

// Look a function of the driver up, so that nothing links libcuda.
void* find_in_driver(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  check(cudaGetDriverEntryPointByVersion(name, &found, CUDA_VERSION, cudaEnableDefault, &result), name);
  if (found == nullptr) fail("%s is not in the driver: %d", name, static_cast<int>(result));
  return found;
}

// A macro, because cuda.h redefines many of these names: the text keeps the plain name, the type gets the version.
#define DRIVER(function)                                                      \
  ([] {                                                                       \
    static const auto found = (decltype(&function))find_in_driver(#function); \
    return found;                                                             \
  }())

// ---- one write, one atomic ------------------------------------------------------------------------------------------

void write_value64(cudaStream_t stream, void* address, uint64_t value) {
  check(DRIVER(cuStreamWriteValue64)(stream, reinterpret_cast<CUdeviceptr>(address), value, 0), "cuStreamWriteValue64");
}

void write_value32(cudaStream_t stream, void* address, uint32_t value) {
  check(DRIVER(cuStreamWriteValue32)(stream, reinterpret_cast<CUdeviceptr>(address), value, 0), "cuStreamWriteValue32");
}

// [thread] Do one atomic. The order of the stream has put the data that it signals in place.
template <class T>
__global__ void do_amo(T* address, int kind, T value, T compare, volatile uint64_t* result, uint64_t result_flag) {
  T old = 0;
  switch (kind) {
    case kIncrement:
    case kAdd:
    case kSignalAdd:
    case kFetchIncrement:
    case kFetchAdd:
      old = atomicAdd_system(address, value);
      break;
    case kAnd:
    case kFetchAnd:
      old = atomicAnd_system(address, value);
      break;
    case kOr:
    case kFetchOr:
      old = atomicOr_system(address, value);
      break;
    case kXor:
    case kFetchXor:
      old = atomicXor_system(address, value);
      break;
    case kFetch:
      old = atomicAdd_system(address, static_cast<T>(0));
      break;
    case kCompareSwap:
      old = atomicCAS_system(address, compare, value);
      break;
    default:  // kSet, kSignal, kSignalSet, kSwap
      old = atomicExch_system(address, value);
  }
  if (result != nullptr) {
    result[0] = old;
    __threadfence_system();
    result[1] = result_flag;
  }
}

// Return what the same atomic makes of `old`.
uint64_t value_after(int kind, uint64_t old, uint64_t value, uint64_t compare) {
  switch (kind) {
    case kIncrement:
    case kAdd:
    case kSignalAdd:
    case kFetchIncrement:
    case kFetchAdd:
      return old + value;
    case kAnd:
    case kFetchAnd:
      return old & value;
    case kOr:
    case kFetchOr:
      return old | value;
    case kXor:
    case kFetchXor:
      return old ^ value;
    case kFetch:
      return old;
    case kCompareSwap:
      return old == compare ? value : old;
    default:
      return value;
  }
}

// ---- setting up -----------------------------------------------------------------------------------------------------

void can_reach_peer(int* access, PeInfo*, Transport*) { *access = kCpuWrites | kCpuReads | kCpuAtomics; }

// Map a page that all PEs of the host share.
void* share_page(const char* name, Bootstrap* bootstrap) {
  const int fd = shm_open(name, O_CREAT | O_RDWR, 0600);
  if (fd < 0 || ftruncate(fd, kLockBytes) != 0) fail("shm_open: %s", std::strerror(errno));
  void* page = mmap(nullptr, kLockBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (page == MAP_FAILED) fail("mmap: %s", std::strerror(errno));
  close(fd);
  check(bootstrap->barrier(bootstrap), "barrier");
  shm_unlink(name);
  return page;
}

// Run what the proxy will need once. Loading a kernel at its first use would deadlock while a kernel of the user spins.
void load_kernels(cudaStream_t stream) {
  uint64_t* memory;
  check(cudaMalloc(&memory, 64), "cudaMalloc");
  check(cudaMemset(memory, 0, 64), "cudaMemset");
  using U64 = unsigned long long;
  do_amo<U64><<<1, 1, 0, stream>>>(reinterpret_cast<U64*>(memory), kAdd, 1, 0, memory + 2, 1);
  do_amo<unsigned><<<1, 1, 0, stream>>>(reinterpret_cast<unsigned*>(memory), kAdd, 1, 0, memory + 2, 1);
  write_value64(stream, memory, 5);
  check(cudaStreamSynchronize(stream), "loading kernels");
  check(cudaFree(memory), "cudaFree");
}

void connect_endpoints(Transport* transport, int*, int) {
  wire.own_pe = transport->own_pe;
  wire.peers.resize(transport->num_pes);
  int lowest, highest;
  check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
  for (Peer& peer : wire.peers)
    check(cudaStreamCreateWithPriority(&peer.stream, cudaStreamNonBlocking, highest), "cudaStreamCreateWithPriority");
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);  // else Yama keeps peers from taking file descriptors
  std::vector<int> pids(transport->num_pes);
  const int own_pid = getpid();
  check(transport->bootstrap->allgather(&own_pid, pids.data(), sizeof(int), transport->bootstrap), "allgather");
  char name[64];
  std::snprintf(name, sizeof(name), "/remote_wire_%d", pids[0]);
  wire.amo_lock = static_cast<std::atomic<int>*>(share_page(name, transport->bootstrap));
  load_kernels(wire.peers[0].stream);
}

// ---- memory of peers ------------------------------------------------------------------------------------------------

// Export the whole allocation behind `memory`: as a file descriptor, or, where cudaMalloc made it
// (NVSHMEM_DISABLE_CUDA_VMM=1), as a handle of CUDA IPC.
void get_mem_handle(MemoryHandle* out, void* memory, size_t bytes, Transport*, bool is_local_only) {
  std::memset(out, 0, sizeof(*out));
  if (is_local_only) return;
  const auto address = reinterpret_cast<CUdeviceptr>(memory);
  Allocation own{kMagic, getpid(), -1, address, bytes, {}};
  CUmemGenericAllocationHandle handle;
  if (DRIVER(cuMemRetainAllocationHandle)(&handle, memory) == CUDA_SUCCESS) {
    constexpr auto kind = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    if (DRIVER(cuMemExportToShareableHandle)(&own.fd, handle, kind, 0) != CUDA_SUCCESS) own.fd = -1;
    check(DRIVER(cuMemRelease)(handle), "cuMemRelease");
    CUdeviceptr begin = 0;
    size_t whole = 0;
    const auto ask = DRIVER(cuPointerGetAttribute);
    if (ask(&begin, CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, address) == CUDA_SUCCESS && begin != 0 &&
        ask(&whole, CU_POINTER_ATTRIBUTE_MAPPING_SIZE, address) == CUDA_SUCCESS && whole != 0) {
      own.begin = begin;
      own.bytes = whole;
    }
  }
  if (own.fd < 0) {
    CUdeviceptr begin;
    size_t whole;
    check(DRIVER(cuMemGetAddressRange)(&begin, &whole, address), "cuMemGetAddressRange");
    check(DRIVER(cuIpcGetMemHandle)(&own.ipc, begin), "cuIpcGetMemHandle");
    own.begin = begin;
    own.bytes = whole;
  }
  std::memcpy(out, &own, sizeof(own));
}

void release_mem_handle(MemoryHandle* handle, Transport*) {
  Allocation own;
  std::memcpy(&own, handle, sizeof(own));
  if (own.magic == kMagic && own.pid == getpid() && own.fd >= 0) close(own.fd);
}

// Map what another process exports as a file descriptor, on the current GPU.
CUdeviceptr map_exported(const Allocation& remote) {
  const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, remote.pid, 0));
  const int fd = pidfd < 0 ? -1 : static_cast<int>(syscall(SYS_pidfd_getfd, pidfd, remote.fd, 0));
  if (fd < 0) fail("pidfd_getfd: %s", std::strerror(errno));
  CUmemGenericAllocationHandle handle;
  auto* const shared = reinterpret_cast<void*>(static_cast<intptr_t>(fd));
  check(DRIVER(cuMemImportFromShareableHandle)(&handle, shared, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        "cuMemImportFromShareableHandle");
  close(fd);
  close(pidfd);
  CUdeviceptr mapped = 0;
  check(DRIVER(cuMemAddressReserve)(&mapped, remote.bytes, 0, 0, 0), "cuMemAddressReserve");
  check(DRIVER(cuMemMap)(mapped, remote.bytes, 0, handle, 0), "cuMemMap");
  check(DRIVER(cuMemRelease)(handle), "cuMemRelease");
  int device;
  check(cudaGetDevice(&device), "cudaGetDevice");
  CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  check(DRIVER(cuMemSetAccess)(mapped, remote.bytes, &access, 1), "cuMemSetAccess");
  return mapped;
}

CUdeviceptr open_ipc(const Allocation& remote) {
  CUdeviceptr mapped = 0;
  check(DRIVER(cuIpcOpenMemHandle)(&mapped, remote.ipc, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS), "cuIpcOpenMemHandle");
  return mapped;
}

// Map what is new in the heaps of all PEs; handles [num_pes, num_transports]. NVSHMEM calls this while no kernel waits.
void add_remote_handles(Transport* transport, int num_transports, MemoryHandle* handles, uint64_t, size_t) {
  std::lock_guard<std::mutex> lock(wire.mutex);
  for (int pe = 0; pe < transport->num_pes; ++pe) {
    Allocation remote;
    std::memcpy(&remote, &handles[pe * num_transports + transport->index], sizeof(remote));
    if (remote.magic != kMagic) continue;
    std::vector<Region>& regions = wire.peers[pe].regions;
    bool is_known = false;
    for (const Region& region : regions) is_known |= region.begin == remote.begin;
    if (is_known) continue;
    const CUdeviceptr mapped = pe == transport->own_pe ? static_cast<CUdeviceptr>(remote.begin)
                               : remote.fd >= 0        ? map_exported(remote)
                                                       : open_ipc(remote);
    regions.push_back({remote.begin, remote.bytes, static_cast<int64_t>(mapped) - static_cast<int64_t>(remote.begin)});
  }
}

// Return where memory of a PE is mapped in this process.
void* mapped_at(int pe, void* remote, size_t bytes) {
  const auto begin = reinterpret_cast<uint64_t>(remote);
  for (const Region& region : wire.peers[pe].regions)
    if (begin >= region.begin && begin + bytes <= region.begin + region.bytes)
      return reinterpret_cast<void*>(begin + region.delta);
  fail("address %p + %zu of PE %d is in no region that it has registered", remote, bytes, pe);
}

// ---- puts and gets --------------------------------------------------------------------------------------------------

// Deliver the puts to `pe` (-1: to all) that have been held since `until_us` or earlier, the newest first: puts without
// a fence between them have no order.
void deliver_held(int pe, double until_us) {
  for (size_t i = wire.held.size(); i-- > 0;) {
    const HeldPut put = wire.held[i];
    if ((pe >= 0 && put.pe != pe) || put.since_us > until_us) continue;
    wire.held.erase(wire.held.begin() + i);
    check(cudaMemcpyAsync(put.dst, put.src, put.bytes, cudaMemcpyDefault, wire.peers[put.pe].stream), "held put");
  }
}

// Write a value that lies on the stack of the proxy, so that it must be read before this returns.
void put_value(cudaStream_t stream, void* dst, const void* src, size_t bytes) {
  if (bytes == 8) {
    write_value64(stream, dst, *static_cast<const uint64_t*>(src));
  } else if (bytes == 4) {
    write_value32(stream, dst, *static_cast<const uint32_t*>(src));
  } else {
    check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream), "put of a value");
    check(cudaStreamSynchronize(stream), "put of a value");
  }
}

void rma(Transport*, int pe, RmaVerb verb, MemoryRef* remote, MemoryRef* local, RmaBytes sizes, int) {
  std::lock_guard<std::mutex> lock(wire.mutex);
  const size_t bytes = sizes.num_elements * sizes.element_bytes;
  void* const there = mapped_at(pe, remote->address, bytes);
  cudaStream_t stream = wire.peers[pe].stream;
  if (local->handle == nullptr && verb.kind != kPutValue)
    fail("local buffer %p is neither symmetric nor registered: a network card has no key for it", local->address);
  switch (verb.kind) {
    case kPut:
      ++wire.num_puts;
      if (wire.hold_us > 0)
        wire.held.push_back({pe, there, local->address, bytes, now_us()});
      else
        check(cudaMemcpyAsync(there, local->address, bytes, cudaMemcpyDefault, stream), "put");
      break;
    case kPutValue:
      put_value(stream, there, local->address, bytes);
      break;
    case kGet:
    case kGetValue:
      check(cudaMemcpyAsync(local->address, there, bytes, cudaMemcpyDefault, stream), "get");
      break;
    default:
      fail("put or get of an unknown kind: %d", verb.kind);
  }
}

// ---- atomics --------------------------------------------------------------------------------------------------------

// Launch a kernel of one thread. It needs room for one warp on some SM.
void amo_by_kernel(cudaStream_t stream, void* there, int kind, const AmoOperands& given, int bytes, uint64_t* result) {
  using U64 = unsigned long long;
  if (bytes == 8)
    do_amo<U64>
        <<<1, 1, 0, stream>>>(static_cast<U64*>(there), kind, given.value, given.compare, result, given.result_flag);
  else if (bytes == 4)
    do_amo<unsigned><<<1, 1, 0, stream>>>(static_cast<unsigned*>(there), kind, static_cast<unsigned>(given.value),
                                          static_cast<unsigned>(given.compare), result, given.result_flag);
  else
    fail("atomic of an unknown size: %d bytes", bytes);
  check(cudaGetLastError(), "atomic");
}

// Read, compute on the host and write, which needs no SM. The lock makes it atomic among the proxies, and only there.
void amo_by_copies(cudaStream_t stream, int pe, void* there, int kind, const AmoOperands& given, int bytes,
                   uint64_t* result) {
  const bool only_sets = kind == kSet || kind == kSignal || kind == kSignalSet;
  if (only_sets && bytes == 8) {
    write_value64(stream, there, given.value);
    return;
  }
  check(cudaStreamSynchronize(stream), "atomic");
  while (wire.amo_lock[pe].exchange(1, std::memory_order_acquire) != 0) {
  }
  uint64_t old = 0;
  check(cudaMemcpyAsync(&old, there, bytes, cudaMemcpyDefault, stream), "read of an atomic");
  check(cudaStreamSynchronize(stream), "read of an atomic");
  const uint64_t value = value_after(kind, old, given.value, given.compare);
  if (bytes == 8)
    write_value64(stream, there, value);
  else
    write_value32(stream, there, static_cast<uint32_t>(value));
  check(cudaStreamSynchronize(stream), "write of an atomic");
  wire.amo_lock[pe].store(0, std::memory_order_release);
  if (result != nullptr) {  // in the order of the stream
    write_value64(stream, result, old);
    write_value64(stream, result + 1, given.result_flag);
  }
}

// Do an atomic, a signal among them. It overtakes puts that are held.
void amo(Transport*, int pe, void*, AmoVerb verb, AmoOperands* given, AmoBytes sizes, int) {
  std::lock_guard<std::mutex> lock(wire.mutex);
  void* const there = mapped_at(pe, given->remote.address, sizes.element_bytes);
  cudaStream_t stream = wire.peers[pe].stream;
  auto* const result = verb.kind > kLastWithoutResult ? static_cast<uint64_t*>(given->result) : nullptr;
  if (wire.copies_atomics)
    amo_by_copies(stream, pe, there, verb.kind, *given, sizes.element_bytes, result);
  else
    amo_by_kernel(stream, there, verb.kind, *given, sizes.element_bytes, result);
}

// ---- order ----------------------------------------------------------------------------------------------------------

// Order what follows behind what was issued: one stream per peer, so to be in it is enough.
void fence(Transport*, int pe, int) {
  std::lock_guard<std::mutex> lock(wire.mutex);
  deliver_held(pe, kForever);
}

void quiet(Transport*, int pe, int) {
  std::lock_guard<std::mutex> lock(wire.mutex);
  deliver_held(pe, kForever);
  check(cudaStreamSynchronize(wire.peers[pe].stream), "quiet");
}

// Deliver the puts whose time is up. The proxy calls this all the time.
void progress(Transport*) {
  if (wire.hold_us == 0) return;
  std::lock_guard<std::mutex> lock(wire.mutex);
  if (!wire.held.empty()) deliver_held(-1, now_us() - wire.hold_us);
}

void show_info(Transport*, int) {}

void finalize(Transport* transport) {
  for (const Peer& peer : wire.peers)
    if (peer.stream != nullptr) {
      cudaStreamSynchronize(peer.stream);
      cudaStreamDestroy(peer.stream);
    }
  std::free(transport);
}

}  // namespace

// The whole process takes its host name from here. NVSHMEM uses NVLink between PEs of one name alone.
extern "C" __attribute__((visibility("default"))) int gethostname(char* name, size_t bytes) noexcept {
  utsname host;
  const char* given = std::getenv("REMOTE_WIRE_HOST");
  if (given == nullptr && uname(&host) == 0) given = host.nodename;
  std::snprintf(name, bytes, "%s", given);
  return 0;
}

// Return how many puts this process has made.
extern "C" __attribute__((visibility("default"))) uint64_t remote_wire_num_puts() { return wire.num_puts; }

// NVSHMEM calls this once. Return a transport that std::free can free, or a value but 0 to another version.
extern "C" __attribute__((visibility("default"))) int nvshmemt_init(Transport** out, void*, int api_version) {
  if (api_version / 10000 != kInterface) {
    std::fprintf(stderr, "[remote wire] NVSHMEM's interface to transports is %d, allowed: version %d (NVSHMEM 3.4)\n",
                 api_version, kInterface);
    return kFailed;
  }
  const char* hold_us = std::getenv("REMOTE_WIRE_HOLD_US");
  wire.hold_us = hold_us != nullptr ? std::atoi(hold_us) : 0;
  const char* amo_by = std::getenv("REMOTE_WIRE_AMO");
  wire.copies_atomics = amo_by != nullptr && std::strcmp(amo_by, "copy") == 0;
  auto* transport = static_cast<Transport*>(std::calloc(1, sizeof(Transport)));
  transport->api_version = api_version;
  transport->can_reach_peer = run<can_reach_peer>;
  transport->connect_endpoints = run<connect_endpoints>;
  transport->get_mem_handle = run<get_mem_handle>;
  transport->release_mem_handle = run<release_mem_handle>;
  transport->finalize = run<finalize>;
  transport->show_info = run<show_info>;
  transport->progress = run<progress>;
  transport->rma = run<rma>;
  transport->amo = run<amo>;
  transport->fence = run<fence>;
  transport->quiet = run<quiet>;
  transport->add_device_remote_mem_handles = run<add_remote_handles>;
  transport->attributes = kConnected;
  transport->atomics_complete_on_quiet = false;  // those with a result raise the flag of its place
  transport->is_successfully_initialized = true;
  *out = transport;
  return 0;
}
