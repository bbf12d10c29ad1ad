// Runs the fill kernels of every instruction set of this machine, and of the portable vectors, over edge
// sizes in buffers of exactly their size, for the address and undefined-behaviour sanitizers. Returns 0 if
// every number is finite, if a batch in two pieces or on several threads has the same bits, and if uniforms
// and, in double, normals and chi variates have the bits of the scalar kernels.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <vector>

#include "testing/instruction_sets.h"

namespace fastlin {

namespace {

// Small degrees of freedom reject often: at 2, one attempt in twenty.
const std::vector<std::int64_t> kFreedom{2, 0, 1, 3, 2, 10, 50, 2, 1000000000000, 2, 3, 2, 2, 2, 2, 2, 51};

enum Kind { kUniform, kNormal, kChi };

template <class T>
struct FilledArray {
  std::int64_t rows, columns;
  std::unique_ptr<T[]> out;

  FilledArray(std::int64_t r, std::int64_t c)
      : rows(r), columns(c), out(new T[static_cast<std::size_t>(r * c)]) {
    for (std::int64_t i = 0; i < r * c; ++i) out[i] = std::numeric_limits<T>::quiet_NaN();
  }

  void fill(const Kernels<T>& kernels, Kind kind, std::int64_t first, std::int64_t count, Draws draws,
            int threads) {
    T* to = out.get() + first * columns;
    draws.offset += static_cast<std::uint64_t>(first);
    if (kind == kChi) {
      draws.block = 0;
      kernels.fill_chi(to, kFreedom.data(), count, columns, draws, threads);
    } else {
      (kind == kUniform ? kernels.fill_uniform : kernels.fill_normal)(to, count, columns, draws, threads);
    }
  }

  bool equals(const FilledArray& other) const {
    const std::size_t bytes = static_cast<std::size_t>(rows * columns) * sizeof(T);
    return bytes == 0 || std::memcmp(out.get(), other.out.get(), bytes) == 0;
  }
};

template <class T>
bool holds(const Kernels<T>& kernels, const Kernels<T>& scalar, Kind kind, std::int64_t rows,
           std::int64_t columns, const Draws& draws) {
  FilledArray<T> whole(rows, columns), pieces(rows, columns), shared(rows, columns), expected(rows, columns);
  const std::int64_t half = rows / 2;
  whole.fill(kernels, kind, 0, rows, draws, 1);
  pieces.fill(kernels, kind, 0, half, draws, 1);
  pieces.fill(kernels, kind, half, rows - half, draws, 1);
  shared.fill(kernels, kind, 0, rows, draws, 3);
  expected.fill(scalar, kind, 0, rows, draws, 1);
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    if (!std::isfinite(whole.out[i])) return false;
  }
  // Normals and chi variates in float are fused where there is a multiply-add.
  const bool fixed = kind == kUniform || sizeof(T) == sizeof(double);
  return whole.equals(pieces) && whole.equals(shared) && (!fixed || whole.equals(expected));
}

bool holds(const InstructionSet& set) {
  // The last sequence, so that the second row wraps to sequence 0; the last blocks, the largest step and
  // stream.
  const Draws draws{~std::uint64_t{0}, ~std::uint64_t{0}, 0xfffff7u, 0xffffffu, 0xffffu};
  const InstructionSet& scalar = *instruction_sets().back();
  for (std::int64_t rows : {0, 1, 2, 5, 17, 131}) {
    for (std::int64_t columns : {0, 1, 2, 3, 4, 5, 7, 8, 9, 17, 33}) {
      for (Kind kind : {kUniform, kNormal, kChi}) {
        if (kind == kChi && columns > static_cast<std::int64_t>(kFreedom.size())) continue;
        if (!holds(set.single, scalar.single, kind, rows, columns, draws) ||
            !holds(set.dbl, scalar.dbl, kind, rows, columns, draws)) {
          std::printf("%s: kind %d, [%lld, %lld]\n", set.name, kind, static_cast<long long>(rows),
                      static_cast<long long>(columns));
          return false;
        }
      }
    }
  }
  return true;
}

}  // namespace
}  // namespace fastlin

int main() {
  using namespace fastlin;
  const std::vector<const InstructionSet*> sets = tested_instruction_sets();
  for (const InstructionSet* set : sets) {
    if (!holds(*set)) return 1;
  }
  std::printf("ok %zu\n", sets.size());
  return 0;
}
