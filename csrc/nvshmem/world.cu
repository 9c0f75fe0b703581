#include <nvshmem.h>
#include <nvshmemx.h>

#include <cstring>
#include <stdexcept>

#include "cuda/config.h"
#include "cuda/device/check.h"
#include "nvshmem/world.h"

#define EP_TEXT_OF(number) #number
#define EP_TEXT(number) EP_TEXT_OF(number)

namespace ep::nvshmem {

// nvshmem_library.py reads it from the module's file, because a module with another host library may not load.
[[gnu::used]] static const char kBuiltWith[] = "_C_nvshmem is built with NVSHMEM " EP_TEXT(
    NVSHMEM_VENDOR_MAJOR_VERSION) "." EP_TEXT(NVSHMEM_VENDOR_MINOR_VERSION) "." EP_TEXT(NVSHMEM_VENDOR_PATCH_VERSION);

bool is_running() { return nvshmemx_init_status() >= NVSHMEM_STATUS_IS_INITIALIZED; }

std::string make_id() {
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  if (nvshmemx_get_uniqueid(&id) != 0) throw std::runtime_error("NVSHMEM gave no unique id");
  return std::string(reinterpret_cast<const char*>(&id), sizeof(id));
}

void start(const std::string& id, int rank, int num_ranks) {
  if (id.empty()) {
    nvshmem_init();  // counts one more user, and gives this module's kernels the address of the heap
  } else {
    static nvshmemx_uniqueid_t kept;  // static: NVSHMEM keeps its address
    if (id.size() != sizeof(kept)) throw std::runtime_error("the unique id is of another version of NVSHMEM");
    std::memcpy(&kept, id.data(), sizeof(kept));
    nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
    nvshmemx_set_attr_uniqueid_args(rank, num_ranks, &kept, &attributes);
    const int status = nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes);
    if (status != 0) throw std::runtime_error("NVSHMEM did not start: status " + std::to_string(status));
  }
  // A start without a transport also returns 0.
  if (!is_running()) throw std::runtime_error("NVSHMEM found no transport to every rank; NVSHMEM_DEBUG=WARN says more");
}

int own_pe() { return nvshmem_my_pe(); }
int num_pes() { return nvshmem_n_pes(); }

void* allocate(size_t bytes) {
  void* memory = nvshmem_align(cuda::kLine, bytes);
  if (memory == nullptr)
    throw std::runtime_error("NVSHMEM's symmetric heap has no " + std::to_string(bytes) +
                             " bytes left: set NVSHMEM_SYMMETRIC_SIZE");
  return memory;
}

void* address_at(void* memory, int pe) { return nvshmem_ptr(memory, pe); }

void quiet() {
  nvshmemx_quiet_on_stream(nullptr);
  cuda::check(cudaStreamSynchronize(nullptr), "quiet");
}

}  // namespace ep::nvshmem
