// Orders streams, for Python code that knows them by their addresses.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <vector>

#include "cuda/device/check.h"

namespace ep::cuda {

// Makes a device the current one, and at the end the one that was it before.
class OnDevice {
 public:
  explicit OnDevice(int device) : device_(device) {
    check(cudaGetDevice(&before_), "device");
    if (before_ != device_) check(cudaSetDevice(device_), "device");
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() {
    if (before_ != device_) cudaSetDevice(before_);
  }

 private:
  int device_, before_ = 0;
};

// Return the event of order_streams, without times, of the current device. It is never destroyed, because CUDA may end
// before this module does.
inline cudaEvent_t order_event(int device) {
  static std::vector<cudaEvent_t> events;
  if (events.size() <= static_cast<size_t>(device)) events.resize(device + 1);
  cudaEvent_t& event = events[device];
  if (event == nullptr) check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
  return event;
}

// [host] Let `later` wait for all that `earlier` has been given so far. Both are streams of the device; null is its
// default stream. The caller holds Python's lock (the GIL).
//
// One event of the device serves all calls. Recording it again changes no wait of an earlier call, because a wait is
// for what the event stood for when it was given to the stream. No other thread records between the two steps here,
// because of the lock. While `earlier` is captured into a CUDA graph, `later` joins the capture, and the wait becomes
// an edge of the graph; the next record outside of a capture makes an ordinary event of it again.
inline void order_streams(int device, cudaStream_t earlier, cudaStream_t later) {
  const OnDevice on_device(device);
  const cudaEvent_t event = order_event(device);
  check(cudaEventRecord(event, earlier), "record of an event");
  check(cudaStreamWaitEvent(later, event, 0), "wait for an event");
}

// [host] Return whether a stream is being captured into a CUDA graph. The default stream never is: do not ask it.
inline bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "capture");
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace ep::cuda
