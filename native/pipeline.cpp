#include "pipeline.hpp"

#include <errno.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <new>
#include <system_error>
#include <utility>

namespace trims {
namespace {

// Signals are for the interpreter's threads: a signal delivered to a thread of ours would not
// interrupt the main thread's system call.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

uint64_t count_chunks(const Window& window) {
  return (window.total_bytes + window.chunk_bytes - 1) / window.chunk_bytes;
}

}  // namespace

Pipeline::Pipeline(std::unique_ptr<Step> step)
    : step_(std::move(step)),
      window_(step_->window()),
      chunks_(count_chunks(window_)),
      ready_(window_.slots, false) {}

Pipeline::~Pipeline() { stop(); }

Status Pipeline::start(unsigned threads) {
  const SignalsBlocked blocked;
  for (unsigned number = 0; number < threads; ++number) {
    try {
      threads_.emplace_back(&Pipeline::run_thread, this);
    } catch (const std::system_error& error) {
      if (threads_.empty()) return {Code::kNoThread, error.code().value(), "pthread_create"};
      break;
    } catch (const std::bad_alloc&) {
      if (threads_.empty()) return {Code::kNoMemory, ENOMEM, "pthread_create"};
      break;
    }
  }
  return {};
}

Pipeline::Outcome Pipeline::take(std::chrono::milliseconds patience, Ready* ready) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (released_ != taken_) {
    for (; released_ != taken_; ++released_) ready_[released_ % window_.slots] = false;
    is_free_.notify_all();
  }
  if (taken_ == chunks_) return Outcome::kEnd;
  const size_t slot = taken_ % window_.slots;
  is_ready_.wait_for(lock, patience, [&] { return ready_[slot] || !failure_.ok(); });
  if (!failure_.ok()) return Outcome::kFailed;
  if (!ready_[slot]) return Outcome::kNotYet;
  const uint64_t begin = taken_ * window_.chunk_bytes;
  taken_ += count_ready();
  const uint64_t end = std::min(taken_ * window_.chunk_bytes, window_.total_bytes);
  ready->data = window_.data + slot * window_.chunk_bytes;
  ready->size = static_cast<size_t>(end - begin);
  return Outcome::kReady;
}

// Counts the ready chunks that follow in one piece of memory, at most a batch.
uint64_t Pipeline::count_ready() const {
  const size_t first = taken_ % window_.slots;
  const size_t last = std::min(first + window_.batch, window_.slots);
  size_t slot = first;
  while (slot < last && ready_[slot]) ++slot;
  return slot - first;
}

Status Pipeline::failure() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

Status Pipeline::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_stopping_) return {};
    is_stopping_ = true;
  }
  is_free_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  return step_->drain();
}

void Pipeline::run_thread() {
  std::unique_lock<std::mutex> lock(mutex_);
  Chunk chunk;
  while (claim(lock, &chunk)) {
    lock.unlock();
    const Status status = process(chunk);
    lock.lock();
    if (status.ok()) {
      ready_[chunk.slot] = true;
    } else if (failure_.ok()) {
      failure_ = status;
      is_free_.notify_all();
    }
    is_ready_.notify_one();
  }
}

bool Pipeline::claim(std::unique_lock<std::mutex>& lock, Chunk* chunk) {
  const auto may_go_on = [&] {
    return is_stopping_ || !failure_.ok() || claimed_ == chunks_ ||
           claimed_ < released_ + window_.slots;
  };
  is_free_.wait(lock, may_go_on);
  if (is_stopping_ || !failure_.ok() || claimed_ == chunks_) return false;
  chunk->number = claimed_++;
  chunk->offset = chunk->number * window_.chunk_bytes;
  const uint64_t left = window_.total_bytes - chunk->offset;
  chunk->size = static_cast<size_t>(std::min<uint64_t>(window_.chunk_bytes, left));
  chunk->slot = chunk->number % window_.slots;
  chunk->data = window_.data + chunk->slot * window_.chunk_bytes;
  return true;
}

// An exception of a step must neither end the process nor leave the consumer waiting.
Status Pipeline::process(const Chunk& chunk) {
  try {
    return step_->process(chunk);
  } catch (...) {
    return {Code::kNoMemory, ENOMEM, "process"};
  }
}

}  // namespace trims
