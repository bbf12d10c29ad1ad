// The CPU kernels as a Python module. Tensors arrive as addresses, so that one build works with every torch
// version. Kernels run without the GIL.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "binding_arguments.h"
#include "binding_checks.h"
#include "binding_update.h"
#include "cpu/update.h"
#include "kernels.h"

namespace py = pybind11;

namespace fastlin {
namespace {

// The instruction set of that name; the best one for an empty name.
const InstructionSet& instruction_set(const std::string& name) {
  for (const InstructionSet* set : instruction_sets()) {
    if ((name.empty() || name == set->name) && set->runs_here()) return *set;
  }
  throw py::value_error("instruction_set: got '" + name + "', which does not run here");
}

bool is_double(const std::string& dtype) {
  if (dtype != "float32" && dtype != "float64") refuse("dtype", "'" + dtype + "'", "'float32' or 'float64'");
  return dtype == "float64";
}

// Calls f(kernels, out) for the named dtype, without the GIL, unless the array is empty.
template <class F>
void with_buffer(const InstructionSet& set, const std::string& dtype, std::uintptr_t address,
                 std::int64_t rows, std::int64_t columns, F f) {
  const auto call = [&](const auto& kernels, auto* out) {
    if (rows == 0 || columns == 0) return;
    py::gil_scoped_release release;
    f(kernels, out);
  };
  if (is_double(dtype)) {
    call(set.dbl, filled_array<double>("address", address, rows, columns));
  } else {
    call(set.single, filled_array<float>("address", address, rows, columns));
  }
}

// A function for Python that fills an array [rows, columns]; fill_of(kernels) is its kernel.
template <class FillOf>
auto fill_columns(FillOf fill_of) {
  return [fill_of](std::uintptr_t address, std::int64_t rows, std::int64_t columns, const std::string& dtype,
                   std::uint64_t seed, std::int64_t step, std::int64_t stream, std::uint64_t offset,
                   std::int64_t block, const std::string& set, int threads) {
    check_threads(threads);
    const Draws draws = draws_of(seed, step, stream, offset, block, columns);
    with_buffer(instruction_set(set), dtype, address, rows, columns, [&](const auto& kernels, auto* out) {
      fill_of(kernels)(out, rows, columns, draws, threads);
    });
  };
}

void fill_chi(std::uintptr_t address, std::int64_t rows, const std::vector<std::int64_t>& freedom,
              const std::string& dtype, std::uint64_t seed, std::int64_t step, std::int64_t stream,
              std::uint64_t offset, std::int64_t block, const std::string& set, int threads) {
  check_threads(threads);
  const auto slots = static_cast<std::int64_t>(freedom.size());
  const Draws draws = draws_of(seed, step, stream, offset, block, 0);
  check_slots(slots, block);
  with_buffer(instruction_set(set), dtype, address, rows, slots, [&](const auto& kernels, auto* out) {
    kernels.fill_chi(out, freedom.data(), rows, slots, draws, threads);
  });
}

void box_muller(std::uintptr_t address, std::uintptr_t words, std::int64_t pairs, const std::string& dtype,
                const std::string& set) {
  const std::uint32_t* input = filled_array<std::uint32_t>("words", words, pairs, 2);
  with_buffer(instruction_set(set), dtype, address, pairs, 2,
              [&](const auto& kernels, auto* out) { kernels.box_muller(input, pairs, out); });
}

template <class Fill>
void define_fill(py::module_& m, const char* name, const char* doc, const char* columns, Fill fill) {
  m.def(name, fill, doc, py::arg("address"), py::arg("rows"), py::arg(columns), py::arg("dtype"),
        py::arg("seed"), py::arg("step"), py::arg("stream"), py::arg("offset"), py::arg("block"),
        py::arg("instruction_set") = "", py::arg("threads") = 1);
}

void define_draws(py::module_& m) {
  define_fill(m, "fill_uniform", "Fill [rows, columns] with uniforms; row i is sequence offset + i.",
              "columns", fill_columns([](const auto& kernels) { return kernels.fill_uniform; }));
  define_fill(m, "fill_normal", "Fill [rows, columns] with normals; row i is sequence offset + i.", "columns",
              fill_columns([](const auto& kernels) { return kernels.fill_normal; }));
  define_fill(m, "fill_chi", "Fill [rows, slots] with chi variates; row i is sequence offset + i.", "freedom",
              &fill_chi);
  m.def("box_muller", &box_muller, "Normals [pairs, 2] of words [pairs, 2], for tests of extreme words.",
        py::arg("address"), py::arg("words"), py::arg("pairs"), py::arg("dtype"),
        py::arg("instruction_set") = "");
}

// Whether a Python signal handler, such as that of Ctrl-C, has raised an exception.
bool signal_raised(void*) {
  py::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

// Runs a kernel without the GIL; an interrupt rethrows the exception of the signal handler.
template <class Kernel>
void run(Kernel kernel) {
  bool done;
  {
    py::gil_scoped_release release;
    done = kernel(Interrupt{&signal_raised, nullptr});
  }
  if (!done) throw py::error_already_set();
}

template <class T>
std::string attention(const InstructionSet& set, int threads, const Call<T>& call) {
  const Kernels<T>& kernels = kernels_of<T>(set);
  run([&](Interrupt interrupt) { return kernels.attention(call.problem, call.results, threads, interrupt); });
  return std::string(set.name) + (sizeof(T) == sizeof(float) ? " float32 " : " float64 ") +
         path_of(call.problem, call.results, kernels.lanes);
}

template <class T>
std::string gram(const InstructionSet& set, int threads, const std::array<std::int64_t, 5>& sizes,
                 const Addresses& addresses) {
  const std::int64_t B = sizes[0], n = sizes[1], m = sizes[2], batch = sizes[3], row = sizes[4];
  check_count("addresses", addresses, 2);
  const T* z = at<const T>(addresses, 0);
  T* G = at<T>(addresses, 1);
  check_gram(z, G, B, n, m, batch, row);
  run([&](Interrupt interrupt) {
    return kernels_of<T>(set).gram(z, batch, row, B, n, m, G, threads, interrupt);
  });
  return std::string(set.name) + (sizeof(T) == sizeof(float) ? " float32 gram" : " float64 gram");
}

template <class T>
std::string sample(const InstructionSet& set, int threads, const SourceTuple& source, std::int64_t B,
                   bool is_gram, const Addresses& results) {
  const Source S = source_of(source);
  const Sample<T> out = sample_of<T>(S, B, is_gram, results);
  check_strata(S, B);
  run([&](Interrupt interrupt) { return kernels_of<T>(set).sample(S, B, is_gram, out, threads, interrupt); });
  return std::string(set.name) + (sizeof(T) == sizeof(float) ? " float32 " : " float64 ") +
         (is_gram ? "sampled gram" : "sampled tokens");
}

void define_attention(py::module_& m) {
  m.def(
      "instruction_sets",
      [] {
        std::vector<std::pair<std::string, bool>> all;
        for (const InstructionSet* set : instruction_sets()) all.emplace_back(set->name, set->runs_here());
        return all;
      },
      "Names of the instruction sets in this build, best first, and whether each runs here.");
  m.def(
      "attention",
      [](const std::string& name, bool dbl, int threads, const Sizes& sizes, const Strides& strides,
         const Factors& factors, const Flags& flags, const Addresses& inputs, const Addresses& results,
         const std::optional<SourceTuple>& source) {
        const InstructionSet& set = instruction_set(name);
        check_threads(threads);
        return dbl ? attention<double>(set, threads,
                                       {sizes, strides, factors, flags, inputs, results, source})
                   : attention<float>(set, threads,
                                      {sizes, strides, factors, flags, inputs, results, source});
      },
      "Losses, predictions and gradients of one call; returns the kernel that ran.",
      py::arg("instruction_set"), py::arg("float64"), py::arg("threads"), py::arg("sizes"),
      py::arg("strides"), py::arg("factors"), py::arg("flags"), py::arg("inputs"), py::arg("results"),
      py::arg("source"));
  m.def(
      "sample",
      [](const std::string& set, bool dbl, int threads, const SourceTuple& source, std::int64_t B,
         bool is_gram, const Addresses& results) {
        check_threads(threads);
        return (dbl ? &sample<double> : &sample<float>)(instruction_set(set), threads, source, B, is_gram,
                                                        results);
      },
      "Gram matrices or tokens, queries, targets and tasks of drawn sequences; returns the kernel that ran.",
      py::arg("instruction_set"), py::arg("float64"), py::arg("threads"), py::arg("source"), py::arg("batch"),
      py::arg("is_gram"), py::arg("results"));
  m.def(
      "sample_tasks",
      [](const std::string& set, int threads, const SourceTuple& source, std::int64_t B,
         std::uintptr_t task) {
        check_threads(threads);
        const Source S = source_of(source);
        std::int64_t* out = tasks_of(task, B);
        const Kernels<float>& kernels = instruction_set(set).single;
        run([&](Interrupt interrupt) { return kernels.sample_tasks(S, B, out, threads, interrupt); });
      },
      "Tasks [batch] of drawn sequences.", py::arg("instruction_set"), py::arg("threads"), py::arg("source"),
      py::arg("batch"), py::arg("task"));
  m.def(
      "gram",
      [](const std::string& set, bool dbl, int threads, const std::array<std::int64_t, 5>& sizes,
         const Addresses& addresses) {
        check_threads(threads);
        return (dbl ? &gram<double> : &gram<float>)(instruction_set(set), threads, sizes, addresses);
      },
      "Gram matrices of tokens; returns the kernel that ran.", py::arg("instruction_set"), py::arg("float64"),
      py::arg("threads"), py::arg("sizes"), py::arg("addresses"));
  m.def(
      "fma_chains",
      [](std::int64_t iterations, const std::string& dtype, const std::string& name) {
        constexpr std::int64_t kMost = std::int64_t{1} << 32;  // about a minute; it does not poll signals
        check_within("iterations", iterations, 0, kMost);
        const InstructionSet& set = instruction_set(name);
        const bool dbl = is_double(dtype);
        py::gil_scoped_release release;
        return dbl ? set.dbl.fma_chains(iterations) : set.single.fma_chains(iterations);
      },
      "Run independent multiply-adds on this thread; returns the number of floating-point operations.",
      py::arg("iterations"), py::arg("dtype"), py::arg("instruction_set") = "");
}

template <class T>
void update_of(int threads, const UpdateArguments& given) {
  const auto parameters = parameters_of<T>(given);
  const UpdatedTrials<T> trials = trials_of<T>(given);
  py::gil_scoped_release release;
  update(given.rule, trials, parameters, threads);
}

void define_update(py::module_& m) {
  m.def(
      "update",
      [](bool dbl, int threads, std::int64_t R, const ParameterSizes& sizes, const ParameterArrays& arrays,
         const Addresses& of_trials, bool is_adam, const UpdateNumbers& numbers) {
        check_threads(threads);
        (dbl ? &update_of<double> : &update_of<float>)(threads,
                                                       {R, sizes, arrays, of_trials, is_adam, numbers});
      },
      "One update of Adam or SGD of all parameters of all trials, in place.", py::arg("float64"),
      py::arg("threads"), py::arg("R"), py::arg("sizes"), py::arg("arrays"), py::arg("of_trials"),
      py::arg("is_adam"), py::arg("numbers"));
}

py::dict build_info() {
  py::dict info;
  info["version"] = FASTLIN_VERSION;
  info["compiler"] =
#if defined(__clang__)
      __VERSION__;
#elif defined(__GNUC__)
      "GCC " __VERSION__;
#else
      "unknown";
#endif
  info["cxx_standard"] = static_cast<std::int64_t>(__cplusplus);
  info["flags"] = FASTLIN_FLAGS;
#ifdef __OPTIMIZE__
  info["optimized"] = true;
#else
  info["optimized"] = false;
#endif
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled kernels of fastlin, on addresses of buffers.";
  m.attr("__version__") = FASTLIN_VERSION;
  m.def("build_info", &build_info, "Version, compiler, C++ standard and flags of this build.");
  define_attention(m);
  define_draws(m);
  define_update(m);
}

}  // namespace fastlin
