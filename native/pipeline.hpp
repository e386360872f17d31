// Chunks of a file, made ready by threads and handed out in the order of the file.
//
// Threads claim chunks in order, so the next chunk to hand out was claimed before all later ones
// and waits only for chunks that were handed out before: no deadlock with any number of threads.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "status.hpp"

namespace trims {

struct Chunk {
  uint64_t number;
  uint64_t offset;  // in the file
  size_t size;
  uint8_t* data;  // the place for its bytes
  size_t slot;
};

// Where chunks are: chunk n in slot n % slots.
struct Window {
  uint8_t* data = nullptr;
  uint64_t total_bytes = 0;  // of the file
  size_t chunk_bytes = 0;
  size_t slots = 0;
  size_t batch = 0;  // most chunks handed out at once; threads go on with the others
};

// The work on a chunk. Called by several threads at once, for different chunks.
class Step {
 public:
  virtual ~Step() = default;
  virtual Window window() const = 0;
  // Waits for copies that still use the slot, then puts the chunk's bytes into it.
  virtual Status process(const Chunk& chunk) = 0;
  // Waits for copies that process() only started. Called after all threads have ended.
  virtual Status drain() = 0;
};

// Called by one thread, except where noted. Its own threads never call Python.
class Pipeline {
 public:
  enum class Outcome { kReady, kEnd, kFailed, kNotYet };
  struct Ready {
    const uint8_t* data;
    size_t size;
  };

  explicit Pipeline(std::unique_ptr<Step> step);
  ~Pipeline();  // stops
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  // Works with fewer threads than requested; returns kNoThread or kNoMemory when none starts.
  Status start(unsigned threads);

  // Hands out the next bytes in order; those handed out before may be overwritten from now on.
  Outcome take(std::chrono::milliseconds patience, Ready* ready);

  // The reason why take() returned kFailed.
  Status failure() const;

  // Ends and joins the threads (each finishes its chunk), then drains the step. The status is the
  // step's. Later calls do nothing.
  Status stop();

 private:
  void run_thread();
  bool claim(std::unique_lock<std::mutex>& lock, Chunk* chunk);
  Status process(const Chunk& chunk);
  uint64_t count_ready() const;

  const std::unique_ptr<Step> step_;
  const Window window_;
  const uint64_t chunks_;
  std::vector<std::thread> threads_;

  mutable std::mutex mutex_;
  std::condition_variable is_ready_;
  std::condition_variable is_free_;
  // All below: under mutex_. Chunks [0, released_) are done, [released_, taken_) handed out.
  uint64_t released_ = 0;
  uint64_t taken_ = 0;
  uint64_t claimed_ = 0;
  std::vector<bool> ready_;  // by slot
  Status failure_;
  bool is_stopping_ = false;
};

}  // namespace trims
