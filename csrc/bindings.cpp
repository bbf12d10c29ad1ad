// The only file that knows Python. Tensors arrive as addresses, so that one build serves every torch version;
// the GIL is released while a kernel runs.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <limits>
#include <string>

#include "core/philox.h"
#include "kernels.h"

namespace py = pybind11;

namespace fastlin {
namespace {

void check_below(const char* name, std::int64_t value, std::int64_t limit) {
  if (value < 0 || value >= limit) {
    throw py::value_error(std::string(name) + ": got " + std::to_string(value) +
                          ", wants an integer in [0, " + std::to_string(limit) + ")");
  }
}

template <class T>
T* pointer(std::uintptr_t address, std::int64_t rows, std::int64_t columns) {
  // rows * columns * sizeof(T) stays addressable, so no index overflows.
  constexpr std::int64_t kMaxElements = std::numeric_limits<std::int64_t>::max() / sizeof(T);
  check_below("rows", rows, columns == 0 ? kMaxElements : kMaxElements / columns);
  if (address == 0 && rows > 0 && columns > 0) {
    throw py::value_error("address: got 0, wants the address of a buffer of rows * columns elements");
  }
  if (address % alignof(T) != 0) {
    throw py::value_error("address: got " + std::to_string(address) + ", wants a multiple of " +
                          std::to_string(alignof(T)));
  }
  return reinterpret_cast<T*>(address);
}

Draws draws_of(std::uint64_t seed, std::int64_t step, std::int64_t stream, std::uint64_t offset,
               std::int64_t block, std::int64_t columns) {
  check_below("block", block, kMaxBlocks);
  check_below("columns", columns, 4 * (kMaxBlocks - block) + 1);
  check_below("step", step, kMaxSteps);
  check_below("stream", stream, kMaxStreams);
  return {seed, offset, static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(step),
          static_cast<std::uint32_t>(stream)};
}

// A fill kernel for each dtype behind one Python function.
template <class Single, class Double>
void fill(Single single, Double dbl, std::uintptr_t address, std::int64_t rows, std::int64_t columns,
          const std::string& dtype, const Draws& draws) {
  if (dtype == "float32") {
    float* out = pointer<float>(address, rows, columns);
    py::gil_scoped_release release;
    single(out, rows, columns, draws);
  } else if (dtype == "float64") {
    double* out = pointer<double>(address, rows, columns);
    py::gil_scoped_release release;
    dbl(out, rows, columns, draws);
  } else {
    throw py::value_error("dtype: got '" + dtype + "', wants 'float32' or 'float64'");
  }
}

template <class Single, class Double>
void define_fill(py::module_& m, const char* name, const char* doc, Single single, Double dbl) {
  m.def(
      name,
      [single, dbl](std::uintptr_t address, std::int64_t rows, std::int64_t columns, const std::string& dtype,
                    std::uint64_t seed, std::int64_t step, std::int64_t stream, std::uint64_t offset,
                    std::int64_t block) {
        fill(single, dbl, address, rows, columns, dtype,
             draws_of(seed, step, stream, offset, block, columns));
      },
      doc, py::arg("address"), py::arg("rows"), py::arg("columns"), py::arg("dtype"), py::arg("seed"),
      py::arg("step"), py::arg("stream"), py::arg("offset"), py::arg("block"));
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
  m.doc() = "Compiled kernels of fastlin, on addresses of contiguous buffers.";
  m.attr("__version__") = FASTLIN_VERSION;
  m.def("build_info", &build_info, "Version, compiler, C++ standard and flags of this build.");
  m.def(
      "philox4x32",
      [](const std::array<std::uint32_t, 4>& counter, const std::array<std::uint32_t, 2>& key) {
        const Counter words =
            philox4x32({{counter[0], counter[1], counter[2], counter[3]}}, {{key[0], key[1]}});
        return py::make_tuple(words.word[0], words.word[1], words.word[2], words.word[3]);
      },
      "The four words of one Philox4x32-10 block.", py::arg("counter"), py::arg("key"));
  define_fill(m, "fill_uniform", "Fill [rows, columns] with uniforms; row i is sequence offset + i.",
              &fill_uniform<float>, &fill_uniform<double>);
  define_fill(m, "fill_normal", "Fill [rows, columns] with normals; row i is sequence offset + i.",
              &fill_normal<float>, &fill_normal<double>);
}

}  // namespace fastlin
