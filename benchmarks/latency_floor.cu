// The parts of a latency, each alone: a launch, a flag, a row, all rows. latency_floor.py compiles and runs it.
//
//   latency_floor [--limit-ms N]   print a line "name<TAB>unit<TAB>sample sample ..." for each part
//
// It drives two GPUs with peer access, or one GPU in place of both. The instructions are those of
// csrc/cuda/device/ptx.cuh. No wait lasts longer than the limit: then all kernels end, and so does the program, with
// exit code 3.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "latency_floor.cuh"

namespace {

constexpr int kInGraph = 20, kGraphs = 12;  // launches of a graph, and replays; the first two do not count
constexpr int kManyRows = 16384;

// [host] End the program after an error of CUDA.
void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}

// One GPU of the two; both may be the same.
struct Gpu {
  int device;
  cudaStream_t stream;
  char *from, *to;  // [kPieces, kRow]
  uint64_t* flags;  // lines: of both players, and the balls they have thrown
  uint32_t* words;  // counters and a sink
  uint32_t* ring;   // [kPieces, kRow] a walk of single loads
  float* ns;        // [kInGraph] results of kernels, in pinned host memory

  explicit Gpu(int device) : device(device) {
    check(cudaSetDevice(device), "device");
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    for (char** buffer : {&from, &to}) {
      check(cudaMalloc(buffer, static_cast<size_t>(kPieces) * kRow), "memory");
      check(cudaMemset(*buffer, 1, static_cast<size_t>(kPieces) * kRow), "memory");
    }
    check(cudaMalloc(&flags, 8 * kFlagStride * sizeof(uint64_t)), "memory");
    check(cudaMemset(flags, 0, 8 * kFlagStride * sizeof(uint64_t)), "memory");
    check(cudaMalloc(&words, 4096), "memory");
    check(cudaMemset(words, 0, 4096), "memory");
    check(cudaMalloc(&ring, static_cast<size_t>(kPieces) * kRow), "memory");
    check(cudaMemset(ring, 0, static_cast<size_t>(kPieces) * kRow), "memory");
    for (uint32_t i = 0; i < kPieces; ++i) {
      const uint32_t next = (i + 7) % kPieces;
      check(cudaMemcpy(reinterpret_cast<char*>(ring) + static_cast<size_t>(i) * kRow, &next, 4, cudaMemcpyDefault),
            "memory");
    }
    check(cudaMallocHost(&ns, kInGraph * sizeof(float)), "memory");
    check(cudaDeviceSynchronize(), "memory");
  }
};

struct Floor {
  Gpu here, there;
  Guard guard;

  // Replay graphs of kInGraph launches on one GPU or both. `launch(gpu, i)` makes the i-th launch of a graph. Return
  // the nanoseconds of each replay's launches: of the whole graph by events, or with `inside` those in Gpu::ns.
  template <class Launch>
  std::vector<float> time(bool both, bool inside, const Launch& launch) {
    std::vector<Gpu*> gpus{&here};
    if (both) gpus.push_back(&there);
    std::vector<cudaGraphExec_t> graphs;
    for (Gpu* gpu : gpus) {
      cudaGraph_t graph;
      cudaGraphExec_t exec;
      check(cudaSetDevice(gpu->device), "device");
      check(cudaStreamBeginCapture(gpu->stream, cudaStreamCaptureModeRelaxed), "capture");
      for (int i = 0; i < kInGraph; ++i) launch(*gpu, i);
      check(cudaStreamEndCapture(gpu->stream, &graph), "capture");
      check(cudaGraphInstantiate(&exec, graph, 0), "graph");
      check(cudaGraphUpload(exec, gpu->stream), "graph");
      check(cudaGraphDestroy(graph), "graph");
      graphs.push_back(exec);
    }
    check(cudaSetDevice(here.device), "device");
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin), "event");
    check(cudaEventCreate(&end), "event");
    std::vector<float> samples;
    for (int replay = 0; replay < kGraphs; ++replay) {
      for (size_t i = graphs.size(); i-- > 0;) {  // `here` last: the other one is there by then
        check(cudaSetDevice(gpus[i]->device), "device");
        if (i == 0) check(cudaEventRecord(begin, here.stream), "event");
        check(cudaGraphLaunch(graphs[i], gpus[i]->stream), "launch");
        if (i == 0) check(cudaEventRecord(end, here.stream), "event");
      }
      for (Gpu* gpu : gpus) check(cudaStreamSynchronize(gpu->stream), "kernels");
      if (*guard.failed != 0) {
        std::fprintf(stderr, "a wait lasted longer than the limit\n");
        std::exit(3);
      }
      float ms;
      check(cudaEventElapsedTime(&ms, begin, end), "event");
      if (replay < 2) continue;
      if (inside)
        samples.insert(samples.end(), here.ns, here.ns + kInGraph);
      else
        samples.push_back(ms * 1e6f / kInGraph);
    }
    for (cudaGraphExec_t exec : graphs) check(cudaGraphExecDestroy(exec), "graph");
    check(cudaEventDestroy(begin), "event");
    check(cudaEventDestroy(end), "event");
    return samples;
  }

  static void print(const std::string& name, const std::vector<float>& ns) {
    std::printf("%s\tns\t", name.c_str());
    for (float sample : ns) std::printf("%.1f ", sample);
    std::printf("\n");
    std::fflush(stdout);
  }

  template <class Kernel>
  static void allow(Kernel* kernel, size_t shared) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
          "shared memory");
  }

  void launches() {
    allow(empty_kernel, kShared);
    allow(arrive_kernel, kShared);
    print("launch, 1 block of 32 threads",
          time(false, false, [&](Gpu& gpu, int) { empty_kernel<<<1, 32, 0, gpu.stream>>>(Params{}); }));
    for (int blocks : {24, 48, 96}) {
      const std::string sizes = ", " + std::to_string(blocks) + " blocks of 512 threads";
      print("launch" + sizes,
            time(false, false, [&](Gpu& gpu, int) { empty_kernel<<<blocks, kThreads, 0, gpu.stream>>>(Params{}); }));
      print("launch" + sizes + ", 226 KB", time(false, false, [&](Gpu& gpu, int) {
              empty_kernel<<<blocks, kThreads, kShared, gpu.stream>>>(Params{});
            }));
      print("launch" + sizes + ", 226 KB, last block", time(false, false, [&](Gpu& gpu, int) {
              arrive_kernel<<<blocks, kThreads, kShared, gpu.stream>>>(Params{}, gpu.words);
            }));
    }
  }

  template <Single kWhich>
  void single(const std::string& name, int threads, uint32_t* ring) {
    print(name, time(false, true, [&](Gpu& gpu, int i) {
            single_kernel<kWhich><<<1, threads, 0, gpu.stream>>>(ring, gpu.words + 64, gpu.ns + i);
          }));
  }

  void singles() {
    single<Single::kClock>("step of the clock", 1, here.ring);
    single<Single::kLoad>("load, own memory", 1, here.ring);
    single<Single::kLoad>("load, peer's memory", 1, there.ring);
    single<Single::kAtomic>("atomic add, own memory", 1, here.ring);
    single<Single::kFence>("fence of the system", 1, here.ring);
    single<Single::kFenceAfterStore>("fence of the system after a store, own memory", 1, here.ring);
    single<Single::kFenceAfterStore>("fence of the system after a store, peer's memory", 1, there.ring);
    single<Single::kFenceBeforeBulk>("fence before bulk copies", 1, here.ring);
    single<Single::kFenceBeforeBulk>("fence before bulk copies, 256 threads", kMovers, here.ring);
    single<Single::kBarrier>("named barrier of 256 threads", kMovers, here.ring);
  }

  Player player(const Gpu& me, const Gpu& peer, int number, float* ns) const {
    Player p;
    p.flag_here = me.flags + number * kFlagStride;
    p.flag_there = peer.flags + (1 - number) * kFlagStride;
    p.thrown = me.flags + (2 + number) * kFlagStride;
    p.rows_here = me.to + static_cast<size_t>(number) * kTimes * 2 * kRow;
    p.rows_there = peer.to + static_cast<size_t>(1 - number) * kTimes * 2 * kRow;
    p.torn = me.words + 128;
    p.ns = ns;
    return p;
  }

  // A game between the two GPUs, or with `alone` between two blocks of one.
  template <Ball kBall>
  void game(const std::string& name, int bytes, bool alone) {
    const Gpu& peer = alone ? here : there;
    for (const Gpu* gpu : {&here, &there})  // both players count from 0
      check(cudaMemset(gpu->flags, 0, 8 * kFlagStride * sizeof(uint64_t)), "flags");
    check(cudaDeviceSynchronize(), "flags");
    for (const Gpu* gpu : {&here, &there}) {
      check(cudaSetDevice(gpu->device), "device");
      allow(catch_kernel<kBall>, 2 * kRow);
      check(cudaDeviceSynchronize(), "flags");
    }
    const auto samples = time(!alone, true, [&](Gpu& gpu, int i) {
      const int number = &gpu == &here ? 0 : 1;
      const Players players{player(here, peer, 0, here.ns + i), player(peer, here, 1, there.ns + i)};
      const int threads = kBall == Ball::kTeam ? kMovers : 32;
      catch_kernel<kBall><<<alone ? 2 : 1, threads, 2 * kRow, gpu.stream>>>(players, number, bytes, guard);
    });
    print(name, samples);
    uint32_t torn[2] = {};
    check(cudaMemcpy(&torn[0], here.words + 128, 4, cudaMemcpyDefault), "torn");
    check(cudaMemcpy(&torn[1], there.words + 128, 4, cudaMemcpyDefault), "torn");
    if (torn[0] + torn[1] == 0) return;
    std::fprintf(stderr, "%s: %u rows were not complete when their flag was seen\n", name.c_str(), torn[0] + torn[1]);
    std::exit(4);
  }

  void games() {
    game<Ball::kFlag>("flag, one way, to the peer", 16, false);
    game<Ball::kTeam>("flag, one way, to the peer, for 8 warps", 16, false);
    game<Ball::kFlag>("flag, one way, between blocks of a GPU", 16, true);
    game<Ball::kTeam>("flag, one way, between blocks of a GPU, for 8 warps", 16, true);
    for (int rows : {1, 2}) {
      const std::string size = std::to_string(7 * rows) + " KB";
      game<Ball::kStores>("push of " + size + " and its flag, stores of a warp", rows * kRow, false);
      game<Ball::kBulk>("push of " + size + " and its flag, bulk copy", rows * kRow, false);
    }
  }

  void pulled_rows() {
    for (int rows : {1, 2}) {
      const std::string name = "pull of " + std::to_string(7 * rows) + " KB";
      const Guard limit = guard;
      for (const auto& [where, from] : {std::pair{", own memory", here.from}, {", peer's memory", there.from}}) {
        print(name + where + ", bulk copy", time(false, true, [&, from = from](Gpu& gpu, int i) {
                row_kernel<true><<<1, 32, 2 * kRow, gpu.stream>>>(from, rows * kRow, gpu.words, gpu.ns + i, limit);
              }));
        for (int warps : {1, 8})
          print(name + where + ", loads of " + (warps == 1 ? "a warp" : "8 warps"),
                time(false, true, [&, from = from](Gpu& gpu, int i) {
                  row_kernel<false>
                      <<<1, 32 * warps, 2 * kRow, gpu.stream>>>(from, rows * kRow, gpu.words, gpu.ns + i, limit);
                }));
      }
    }
  }

  void rows(const std::string& name, const char* from, char* to, int num_rows, int blocks) {
    constexpr size_t kRings = static_cast<size_t>(kMoverWarps) * kPlaces * kRow;
    allow(rows_kernel, kRings);
    const std::string size = std::to_string(num_rows) + " rows of 7 KB, " + std::to_string(blocks) + " blocks";
    print(name + size, time(false, false, [&](Gpu& gpu, int) {
            rows_kernel<<<blocks, kThreads, kRings, gpu.stream>>>(from, to, num_rows, guard);
          }));
  }

  void all_rows() {
    for (int blocks : {8, 24, 48, 96})
      for (int num_rows : {512, 1024, 2048}) {
        rows("load from the peer: ", there.from, nullptr, num_rows, blocks);
        rows("pull from the peer: ", there.from, here.to, num_rows, blocks);
        rows("push to the peer: ", here.from, there.to, num_rows, blocks);
        rows("copy in own memory: ", here.from, here.to, num_rows, blocks);
      }
    // So many that what remains is the rate of a multiprocessor.
    for (int blocks : {8, 24}) {
      rows("load in own memory: ", here.from, nullptr, kManyRows, blocks);
      rows("store in own memory: ", nullptr, here.to, kManyRows, blocks);
      rows("copy in own memory: ", here.from, here.to, kManyRows, blocks);
    }
  }
};

}  // namespace

int main(int argc, char** argv) {
  uint64_t limit_ms = 2000;
  if (argc == 3 && std::strcmp(argv[1], "--limit-ms") == 0) limit_ms = std::strtoull(argv[2], nullptr, 10);
  int num = 0;
  check(cudaGetDeviceCount(&num), "GPUs");
  const int second = num > 1 ? 1 : 0;
  if (second != 0) {
    int reaches = 0;
    check(cudaDeviceCanAccessPeer(&reaches, 0, 1), "peer access");
    if (reaches == 0) {
      std::fprintf(stderr, "GPU 0 cannot reach the memory of GPU 1; CUDA_VISIBLE_DEVICES=0 takes one GPU twice\n");
      return 2;
    }
    for (int device : {0, 1}) {
      check(cudaSetDevice(device), "device");
      check(cudaDeviceEnablePeerAccess(1 - device, 0), "peer access");
    }
  }
  uint32_t* failed;
  check(cudaMallocHost(&failed, sizeof(uint32_t)), "memory");
  *failed = 0;
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0), "GPU");
  std::printf("GPUs\tname\t%s\nGPUs\tnumber\t%d\n", properties.name, second + 1);
  Floor floor{Gpu(0), Gpu(second), {limit_ms * 1000000, failed}};
  check(cudaSetDevice(0), "device");
  floor.launches();
  floor.singles();
  floor.games();
  floor.pulled_rows();
  floor.all_rows();
  return 0;
}
