// The CUDA kernels as a Python module, on addresses in device memory: without torch, as bindings.cpp of the
// CPU. Compiled by the host's compiler; only launch.cu needs nvcc. With FASTLIN_EMULATED the addresses are
// the host's.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "binding_arguments.h"
#include "binding_update.h"
#include "cuda/launch.h"
#include "cuda/update.h"

#ifndef FASTLIN_MODULE
#define FASTLIN_MODULE _cuda
#endif

namespace py = pybind11;

namespace fastlin {
namespace cuda {
namespace {

void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

// Enqueues without the GIL: what waits for room in the driver's queue does not hold up other threads.
template <class Launch>
void launched(const char* name, Launch launch) {
  int error;
  {
    py::gil_scoped_release release;
    error = launch();
  }
  if (error != 0) throw std::runtime_error(std::string("CUDA: ") + name + ": " + describe(error));
}

// `bytes` says how many there should be: asked only when there is no workspace.
template <class Bytes>
void check_workspace(std::uintptr_t address, Bytes bytes) {
  check_array("workspace", reinterpret_cast<const double*>(address), address == 0 ? bytes() : 0,
              Use::kNeeded);
}

// What the kernels need beyond binding_checks.h: positions of sequences by task are 32 bits.
template <class T>
void check_call(const Call<T>& call) {
  if (call.problem.shares_v) refuse("shares_v", "true", "false, and v of each task");
  if (call.problem.K > 1) check_within("batch", call.problem.B, 0, std::numeric_limits<std::int32_t>::max());
}

template <class T>
void attend(const Call<T>& call, std::uintptr_t workspace, int device, std::uintptr_t stream) {
  check_call(call);
  check_workspace(workspace, [&] { return workspace_bytes(call.problem, call.results, device); });
  launched("attention", [&] {
    return attention(call.problem, call.results, pointer(workspace), device, pointer(stream));
  });
}

template <class T>
void form_gram(const std::array<std::int64_t, 5>& sizes, const Addresses& addresses, std::uintptr_t workspace,
               int device, std::uintptr_t stream) {
  const std::int64_t B = sizes[0], n = sizes[1], m = sizes[2], batch = sizes[3], row = sizes[4];
  check_count("addresses", addresses, 2);
  const T* z = at<const T>(addresses, 0);
  T* G = at<T>(addresses, 1);
  check_gram(z, G, B, n, m, batch, row);
  check_workspace(workspace, [&] { return gram_bytes<T>(B, n, m, device); });
  launched("gram",
           [&] { return gram(z, batch, row, B, n, m, G, pointer(workspace), device, pointer(stream)); });
}

template <class T>
void draw(const SourceTuple& source, std::int64_t B, bool is_gram, const Addresses& results,
          std::uintptr_t workspace, int device, std::uintptr_t stream) {
  const Source S = source_of(source);
  const Sample<T> out = sample_of<T>(S, B, is_gram, results);
  check_workspace(workspace, [&] { return sample_bytes<T>(S, B, is_gram, device); });
  launched("sample", [&] { return sample(S, B, is_gram, out, pointer(workspace), device, pointer(stream)); });
}

void define_attention(py::module_& m) {
  m.def(
      "plan",
      [](bool dbl, int device, const Sizes& sizes, const Strides& strides, const Factors& factors,
         const Flags& flags, const Addresses& inputs, const Addresses& results,
         const std::optional<SourceTuple>& source) {
        const auto plan = [device](const auto& call) {
          check_call(call);
          return py::make_tuple(workspace_bytes(call.problem, call.results, device),
                                kernels_for(call.problem, call.results, device));
        };
        return dbl ? plan(Call<double>(sizes, strides, factors, flags, inputs, results, source))
                   : plan(Call<float>(sizes, strides, factors, flags, inputs, results, source));
      },
      "Bytes of device memory that `attention` works in, and the kernels that it runs.", py::arg("float64"),
      py::arg("device"), py::arg("sizes"), py::arg("strides"), py::arg("factors"), py::arg("flags"),
      py::arg("inputs"), py::arg("results"), py::arg("source"));
  m.def(
      "attention",
      [](bool dbl, int device, std::uintptr_t stream, std::uintptr_t workspace, const Sizes& sizes,
         const Strides& strides, const Factors& factors, const Flags& flags, const Addresses& inputs,
         const Addresses& results, const std::optional<SourceTuple>& source) {
        if (dbl) {
          attend<double>({sizes, strides, factors, flags, inputs, results, source}, workspace, device,
                         stream);
        } else {
          attend<float>({sizes, strides, factors, flags, inputs, results, source}, workspace, device, stream);
        }
      },
      "Losses, predictions and gradients of one call, enqueued.", py::arg("float64"), py::arg("device"),
      py::arg("stream"), py::arg("workspace"), py::arg("sizes"), py::arg("strides"), py::arg("factors"),
      py::arg("flags"), py::arg("inputs"), py::arg("results"), py::arg("source"));
  m.def(
      "gram_workspace",
      [](bool dbl, int device, const std::array<std::int64_t, 5>& sizes) {
        check_gram_sizes(sizes[0], sizes[1], sizes[2]);
        return (dbl ? &gram_bytes<double> : &gram_bytes<float>)(sizes[0], sizes[1], sizes[2], device);
      },
      "Bytes of device memory that `gram` works in.", py::arg("float64"), py::arg("device"),
      py::arg("sizes"));
  m.def(
      "gram",
      [](bool dbl, int device, std::uintptr_t stream, std::uintptr_t workspace,
         const std::array<std::int64_t, 5>& sizes, const Addresses& addresses) {
        (dbl ? &form_gram<double> : &form_gram<float>)(sizes, addresses, workspace, device, stream);
      },
      "Gram matrices of tokens, enqueued.", py::arg("float64"), py::arg("device"), py::arg("stream"),
      py::arg("workspace"), py::arg("sizes"), py::arg("addresses"));
}

void define_sample(py::module_& m) {
  m.def(
      "sample_workspace",
      [](bool dbl, int device, const SourceTuple& source, std::int64_t B, bool is_gram) {
        const Source S = source_of(source);
        check_within("batch", B, 0, kMaxElements);
        return (dbl ? &sample_bytes<double> : &sample_bytes<float>)(S, B, is_gram, device);
      },
      "Bytes of device memory that `sample` works in.", py::arg("float64"), py::arg("device"),
      py::arg("source"), py::arg("batch"), py::arg("is_gram"));
  m.def(
      "sample",
      [](bool dbl, int device, std::uintptr_t stream, std::uintptr_t workspace, const SourceTuple& source,
         std::int64_t B, bool is_gram, const Addresses& results) {
        (dbl ? &draw<double> : &draw<float>)(source, B, is_gram, results, workspace, device, stream);
      },
      "Gram matrices or tokens, queries, targets and tasks of drawn sequences, enqueued.", py::arg("float64"),
      py::arg("device"), py::arg("stream"), py::arg("workspace"), py::arg("source"), py::arg("batch"),
      py::arg("is_gram"), py::arg("results"));
  m.def(
      "sample_tasks",
      [](int device, std::uintptr_t stream, const SourceTuple& source, std::int64_t B, std::uintptr_t task) {
        const Source S = source_of(source);
        std::int64_t* out = tasks_of(task, B);
        launched("sample_tasks", [&] { return sample_tasks(S, B, out, device, pointer(stream)); });
      },
      "Tasks [batch] of drawn sequences, enqueued.", py::arg("device"), py::arg("stream"), py::arg("source"),
      py::arg("batch"), py::arg("task"));
}

// words, rows, width, whether the update ends the step; no words: no schedule.
using ScheduleTuple = std::tuple<std::uintptr_t, std::int64_t, std::int64_t, bool>;

Schedule schedule_of(const ScheduleTuple& tuple) {
  const auto& [words, rows, width, ends] = tuple;
  const Schedule schedule{reinterpret_cast<double*>(words), rows, width, ends};
  check_array("schedule", schedule.words, elements("schedule", {rows, width}), Use::kOptional);
  if (words != 0) check_within("schedule", width, Schedule::kFewestColumns, kMaxElements);
  return schedule;
}

template <class T>
void update_of(const UpdateArguments& given, const ScheduleTuple& tuple, std::uintptr_t workspace, int device,
               std::uintptr_t stream) {
  check_within("parameters", static_cast<std::int64_t>(given.sizes.size()), 0, kMostParameters);
  const auto parameters = parameters_of<T>(given);
  const UpdatedTrials<T> trials = trials_of<T>(given);
  const Schedule schedule = schedule_of(tuple);
  check_array("workspace", reinterpret_cast<const double*>(workspace), 1, Use::kNeeded);
  launched("update", [&] {
    return update(given.rule, trials, parameters, schedule, pointer(workspace), device, pointer(stream));
  });
}

void define_update(py::module_& m) {
  m.def(
      "update_workspace",
      [](std::int64_t R, std::int64_t width) {
        elements("values", {R, width});
        return update_bytes(R, width);
      },
      "Bytes of device memory that `update` works in, for R trials of `width` numbers.", py::arg("R"),
      py::arg("width"));
  m.def(
      "update",
      [](bool dbl, int device, std::uintptr_t stream, std::uintptr_t workspace, const ScheduleTuple& schedule,
         std::int64_t R, const ParameterSizes& sizes, const ParameterArrays& arrays,
         const Addresses& of_trials, bool is_adam, const UpdateNumbers& numbers) {
        (dbl ? &update_of<double> : &update_of<float>)({R, sizes, arrays, of_trials, is_adam, numbers},
                                                       schedule, workspace, device, stream);
      },
      "One update of Adam or SGD of all parameters of all trials, in place, enqueued. With a schedule "
      "(words, "
      "rows, width, ends) the factor of the learning rates and the weight of the averages are read there.",
      py::arg("float64"), py::arg("device"), py::arg("stream"), py::arg("workspace"), py::arg("schedule"),
      py::arg("R"), py::arg("sizes"), py::arg("arrays"), py::arg("of_trials"), py::arg("is_adam"),
      py::arg("numbers"));
}

py::dict build_info() {
  py::dict info;
#ifdef FASTLIN_EMULATED
  info["emulated"] = true;
#else
  info["emulated"] = false;
#endif
#ifdef FASTLIN_CUDA_VERSION
  info["cuda"] = FASTLIN_CUDA_VERSION;
#endif
#ifdef FASTLIN_ARCHITECTURES
  info["architectures"] = FASTLIN_ARCHITECTURES;
#endif
#ifdef FASTLIN_FLAGS
  info["flags"] = FASTLIN_FLAGS;
#endif
  return info;
}

}  // namespace

PYBIND11_MODULE(FASTLIN_MODULE, m) {
  m.doc() = "CUDA kernels of fastlin, on addresses of device memory.";
#ifdef FASTLIN_VERSION
  m.attr("__version__") = FASTLIN_VERSION;
#endif
  m.def("why_not", &why_not, "Why no kernel can run here; empty when a device is there.");
  m.def("build_info", &build_info, "CUDA version, architectures and flags of this build.");
  define_attention(m);
  define_sample(m);
  define_update(m);
}

}  // namespace cuda
}  // namespace fastlin
