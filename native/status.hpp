// The result of every operation of the engine. No function of this directory throws to its caller.
#pragma once

namespace trims {

// The values cross the border to Python: memory/copying_native.py turns them into errors.
enum class Code : int {
  kOk = 0,
  kFileChanged = 1,   // the source ended before its announced size
  kReadFailed = 2,    // number: errno
  kWriteFailed = 3,   // number: errno
  kNoDriver = 4,      // libcuda.so.1 cannot be loaded, or lacks the call
  kDriverFailed = 5,  // number: CUresult
  kNoMemory = 6,
  kNoThread = 7,  // no thread could be started; number: errno
};

struct Status {
  Code code = Code::kOk;
  int number = 0;
  const char* call = "";  // static storage: the system or driver call that failed

  bool ok() const { return code == Code::kOk; }
};

}  // namespace trims
