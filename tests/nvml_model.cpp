// Plays libnvidia-ml.so.1 with one GPU. NVML_MODEL has what it says of the GPU's fabric: the status of the call, then
// of the fabric, its state, the clique, and each byte of the cluster's id.
#include <cstdlib>
#include <cstring>
#include <sstream>

namespace {

// As nvml.h defines it.
struct FabricInfo {
  unsigned int version;
  unsigned char cluster[16];
  unsigned int status;
  unsigned int clique;
  unsigned char state;
  unsigned int health;
};

int users, gpu;

}  // namespace

extern "C" {

int nvmlInit_v2() {
  ++users;
  return 0;
}

int nvmlShutdown() { return users-- > 0 ? 0 : 1; }

int nvmlModelUsers() { return users; }

int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  if (users == 0) return 1;                          // uninitialized
  if (std::strcmp(uuid, "GPU-0123") != 0) return 6;  // not found
  *device = &gpu;
  return 0;
}

int nvmlDeviceGetGpuFabricInfoV(void* device, FabricInfo* info) {
  if (device != &gpu) return 2;                                        // invalid argument
  if (info->version != (sizeof(FabricInfo) | (2U << 24U))) return 25;  // argument version mismatch
  std::istringstream words(std::getenv("NVML_MODEL"));
  int result, byte, state;
  words >> result >> info->status >> state >> info->clique >> byte;
  info->state = static_cast<unsigned char>(state);
  std::memset(info->cluster, byte, sizeof info->cluster);
  info->health = ~0U;
  return result;
}

}  // extern "C"
