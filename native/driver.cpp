#include "driver.hpp"

#include <dlfcn.h>

#include <mutex>

namespace trims {
namespace {

template <typename Function>
bool find(void* library, const char* symbol, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, symbol));
  return *function != nullptr;
}

Status resolve(void* library, Driver* table) {
#define TRIMS_FIND(member, symbol, parameters) \
  if (!find(library, #symbol, &table->member)) return {Code::kNoDriver, 0, #symbol};
  TRIMS_DRIVER_CALLS(TRIMS_FIND)
#undef TRIMS_FIND
  return {};
}

}  // namespace

Status Driver::load(const Driver** driver) {
  static std::mutex mutex;
  static Driver table;
  static bool is_loaded = false;
  *driver = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if (!is_loaded) {
    // The library stays: its threads and thread-local data do not survive dlclose.
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return {Code::kNoDriver, 0, "libcuda.so.1"};
    const Status resolved = resolve(library, &table);
    if (!resolved.ok()) return resolved;
    is_loaded = true;
  }
  // On every call: it costs nothing, and in a forked child it returns the right error.
  const Status ready = check(table.init(0), "cuInit");
  if (ready.ok()) *driver = &table;
  return ready;
}

}  // namespace trims
