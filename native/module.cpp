// The border to Python: trims_shim._native. Status codes cross it as tuples. C++ exceptions do not,
// except the interpreter's own (a signal handler that raised, no memory).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "convert.hpp"
#include "pipeline.hpp"
#include "steps.hpp"

namespace py = pybind11;

namespace {

using trims::Code;
using trims::Pipeline;
using trims::Status;

// Raised when memory/copying_native.py has to change, so that an extension built from other sources
// is not used.
constexpr int kInterface = 3;
// How long a user's interrupt waits for a disk that does not answer.
constexpr std::chrono::milliseconds kPatience{100};

using StatusTuple = std::tuple<int, int, std::string>;
using RecordTuple = std::tuple<uint64_t, uint64_t, uint64_t>;

StatusTuple to_tuple(const Status& status) {
  return {static_cast<int>(status.code), status.number, status.call};
}

// One transfer, for one Python thread. Its threads exist only in the process that started it: a
// forked child only forgets it.
class Transfer {
 public:
  Transfer(Status opened, std::unique_ptr<trims::Step> step)
      : process_(getpid()), failure_(opened) {
    if (step != nullptr) pipeline_ = std::make_unique<Pipeline>(std::move(step));
  }
  ~Transfer() { close(); }
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  StatusTuple start(unsigned threads) {
    const py::gil_scoped_release release;
    if (is_ours() && pipeline_ != nullptr) failure_ = pipeline_->start(threads);
    return to_tuple(failure_);
  }

  py::object next() {
    while (is_ours() && pipeline_ != nullptr) {
      Pipeline::Ready ready{};
      switch (take(&ready)) {
        case Pipeline::Outcome::kReady:
          return py::memoryview::from_memory(ready.data, static_cast<py::ssize_t>(ready.size));
        case Pipeline::Outcome::kEnd:
          return py::none();
        case Pipeline::Outcome::kFailed:
          failure_ = pipeline_->failure();
          return py::none();
        case Pipeline::Outcome::kNotYet:
          if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      }
    }
    return py::none();
  }

  StatusTuple failure() const { return to_tuple(failure_); }

  StatusTuple finish() {
    const py::gil_scoped_release release;
    if (is_ours() && pipeline_ != nullptr) failure_ = pipeline_->stop();
    return to_tuple(failure_);
  }

  void close() {
    if (is_ours()) {
      const py::gil_scoped_release release;
      pipeline_.reset();
    } else {
      static_cast<void>(pipeline_.release());
    }
  }

 private:
  bool is_ours() const { return getpid() == process_; }

  Pipeline::Outcome take(Pipeline::Ready* ready) {
    const py::gil_scoped_release release;
    return pipeline_->take(kPatience, ready);
  }

  const pid_t process_;
  Status failure_;
  std::unique_ptr<Pipeline> pipeline_;
};

trims::DeviceFile device_file(const std::vector<RecordTuple>& records, uint64_t file_bytes,
                              int device_index, size_t chunk_bytes, size_t ring_chunks) {
  trims::DeviceFile file;
  file.device_index = device_index;
  file.file_bytes = file_bytes;
  file.chunk_bytes = chunk_bytes;
  file.ring_chunks = ring_chunks;
  file.records.reserve(records.size());
  for (const auto& [offset, size, address] : records)
    file.records.push_back({offset, size, address});
  return file;
}

std::unique_ptr<Transfer> upload(int source, int direct, int outline,
                                 const std::vector<RecordTuple>& records, uint64_t file_bytes,
                                 int device_index, size_t chunk_bytes, size_t ring_chunks) {
  const py::gil_scoped_release release;
  const trims::DeviceFile file =
      device_file(records, file_bytes, device_index, chunk_bytes, ring_chunks);
  std::unique_ptr<trims::Step> step;
  const Status opened = trims::FileToDevice::open(file, {source, direct}, outline, &step);
  return std::make_unique<Transfer>(opened, std::move(step));
}

std::unique_ptr<Transfer> download(int outline, int target, const std::vector<RecordTuple>& records,
                                   uint64_t file_bytes, int device_index, size_t chunk_bytes,
                                   size_t ring_chunks) {
  const py::gil_scoped_release release;
  const trims::DeviceFile file =
      device_file(records, file_bytes, device_index, chunk_bytes, ring_chunks);
  std::unique_ptr<trims::Step> step;
  const Status opened = trims::DeviceToFile::open(file, outline, target, &step);
  return std::make_unique<Transfer>(opened, std::move(step));
}

trims::Number number(const std::string& name) {
  if (name == "float32") return trims::Number::kFloat32;
  if (name == "float16") return trims::Number::kFloat16;
  if (name == "bfloat16") return trims::Number::kBFloat16;
  throw py::value_error("no such number: " + name);
}

// Takes as many numbers as `target` has room for.
void convert(const py::buffer& source, const std::string& from, const py::buffer& target,
             const std::string& to) {
  const trims::Number read = number(from);
  const trims::Number written = number(to);
  if (read == written) throw py::value_error("nothing to convert: both are " + from);
  const py::buffer_info numbers = source.request();
  const py::buffer_info results = target.request(true);
  const size_t count =
      static_cast<size_t>(results.size * results.itemsize) / trims::number_bytes(written);
  if (static_cast<size_t>(numbers.size * numbers.itemsize) / trims::number_bytes(read) < count)
    throw py::value_error("source is shorter than target");
  const py::gil_scoped_release release;
  trims::convert(numbers.ptr, read, results.ptr, written, count);
}

void hold_buffers(size_t size) { trims::RingKeeper::ours().hold(size); }

void release_buffers() { trims::RingKeeper::ours().release(); }

// Returns an empty string where there is no driver to ask.
std::string driver_error(int number) {
  const trims::Driver* driver = nullptr;
  const char* name = nullptr;
  if (!trims::Driver::load(&driver).ok()) return "";
  if (driver->error_name(number, &name) != trims::kCudaSuccess || name == nullptr) return "";
  return name;
}

}  // namespace

// Free-threaded Python keeps its lock off: what is shared here has locks of its own (DESIGN.md).
PYBIND11_MODULE(_native, module, py::mod_gil_not_used()) {
  module.doc() = "The copy engine; see native/DESIGN.md. Used by trims_shim.memory.copying_native.";
  module.attr("INTERFACE") = kInterface;
  py::class_<Transfer>(module, "Transfer")
      .def("start", &Transfer::start, py::arg("threads"))
      .def("next", &Transfer::next)
      .def("failure", &Transfer::failure)
      .def("finish", &Transfer::finish)
      .def("close", &Transfer::close);
  module.def("upload", &upload, py::arg("source"), py::arg("direct"), py::arg("outline"),
             py::arg("records"), py::arg("file_bytes"), py::arg("device_index"),
             py::arg("chunk_bytes"), py::arg("ring_chunks"));
  module.def("download", &download, py::arg("outline"), py::arg("target"), py::arg("records"),
             py::arg("file_bytes"), py::arg("device_index"), py::arg("chunk_bytes"),
             py::arg("ring_chunks"));
  module.def("convert", &convert, py::arg("source"), py::arg("numbers"), py::arg("target"),
             py::arg("as_numbers"));
  module.def("hold_buffers", &hold_buffers, py::arg("size"),
             py::call_guard<py::gil_scoped_release>());
  module.def("release_buffers", &release_buffers, py::call_guard<py::gil_scoped_release>());
  module.def("driver_error", &driver_error, py::arg("number"));
}
