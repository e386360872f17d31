// The CUDA driver, loaded at run time: one table of function pointers, nothing linked.
//
// Types and constants are those of cuda.h (stable ABI of libcuda.so.1, with the versioned symbol
// names that cuda.h maps its functions to), so that no CUDA toolkit is needed to build.
#pragma once

#include <cstddef>

#include "status.hpp"

namespace trims {

using CuResult = int;
using CuDevice = int;
using CuContext = struct CuContextTag*;
using CuStream = struct CuStreamTag*;
using CuEvent = struct CuEventTag*;
using CuAddress = unsigned long long;

constexpr CuResult kCudaSuccess = 0;
constexpr unsigned kStreamNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
// CU_EVENT_BLOCKING_SYNC, so that waiting threads leave the cores to readers; DISABLE_TIMING.
constexpr unsigned kEventFlags = 1 | 2;
constexpr unsigned kHostAllocPortable = 1;  // CU_MEMHOSTALLOC_PORTABLE

// X(member, symbol, parameters)
#define TRIMS_DRIVER_CALLS(X)                                                         \
  X(init, cuInit, (unsigned))                                                         \
  X(device_get, cuDeviceGet, (CuDevice*, int))                                        \
  X(context_retain, cuDevicePrimaryCtxRetain, (CuContext*, CuDevice))                 \
  X(context_release, cuDevicePrimaryCtxRelease_v2, (CuDevice))                        \
  X(context_push, cuCtxPushCurrent_v2, (CuContext))                                   \
  X(context_pop, cuCtxPopCurrent_v2, (CuContext*))                                    \
  X(stream_create, cuStreamCreate, (CuStream*, unsigned))                             \
  X(stream_destroy, cuStreamDestroy_v2, (CuStream))                                   \
  X(stream_synchronize, cuStreamSynchronize, (CuStream))                              \
  X(event_create, cuEventCreate, (CuEvent*, unsigned))                                \
  X(event_destroy, cuEventDestroy_v2, (CuEvent))                                      \
  X(event_record, cuEventRecord, (CuEvent, CuStream))                                 \
  X(event_synchronize, cuEventSynchronize, (CuEvent))                                 \
  X(host_alloc, cuMemHostAlloc, (void**, size_t, unsigned))                           \
  X(host_free, cuMemFreeHost, (void*))                                                \
  X(copy_to_device, cuMemcpyHtoDAsync_v2, (CuAddress, const void*, size_t, CuStream)) \
  X(copy_to_host, cuMemcpyDtoHAsync_v2, (void*, CuAddress, size_t, CuStream))         \
  X(error_name, cuGetErrorName, (CuResult, const char**))

struct Driver {
#define TRIMS_MEMBER(member, symbol, parameters) CuResult(*member) parameters = nullptr;
  TRIMS_DRIVER_CALLS(TRIMS_MEMBER)
#undef TRIMS_MEMBER

  // Returns kDriverFailed with this call's name unless `result` is success.
  static Status check(CuResult result, const char* call) {
    if (result == kCudaSuccess) return {};
    return {Code::kDriverFailed, result, call};
  }

  // Gets this process's driver, loaded on first use, never unloaded, and initialised. On failure
  // `*driver` is null, and the next call tries again. Thread-safe.
  static Status load(const Driver** driver);
};

}  // namespace trims
