// Runs the fill kernels over edge sizes in buffers of exactly their size, for the address and
// undefined-behaviour sanitizers. Returns 0 when every number is finite and a batch taken in two pieces has
// the same bits.

#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <limits>
#include <memory>

#include "kernels.h"

namespace {

template <class T>
using Fill = void (*)(T*, std::int64_t, std::int64_t, fastlin::Draws);

template <class T>
std::unique_ptr<T[]> poisoned(std::int64_t size) {
  auto out = std::make_unique<T[]>(static_cast<std::size_t>(size));
  for (std::int64_t i = 0; i < size; ++i) out[i] = std::numeric_limits<T>::quiet_NaN();
  return out;
}

template <class T>
bool holds(Fill<T> fill, std::int64_t rows, std::int64_t columns, fastlin::Draws draws) {
  const std::int64_t size = rows * columns;
  const auto whole = poisoned<T>(size);
  const auto pieces = poisoned<T>(size);
  const std::int64_t half = rows / 2;
  fastlin::Draws rest = draws;
  rest.offset += static_cast<std::uint64_t>(half);
  fill(whole.get(), rows, columns, draws);
  fill(pieces.get(), half, columns, draws);
  fill(pieces.get() + half * columns, rows - half, columns, rest);
  for (std::int64_t i = 0; i < size; ++i) {
    if (!std::isfinite(whole[i]) || whole[i] != pieces[i]) {
      std::printf("[%lld, %lld]: element %lld\n", static_cast<long long>(rows),
                  static_cast<long long>(columns), static_cast<long long>(i));
      return false;
    }
  }
  return true;
}

}  // namespace

int main() {
  using namespace fastlin;
  // The last sequence, so that the second row wraps to sequence 0; the last blocks, the largest step and
  // stream.
  const Draws draws{~std::uint64_t{0}, ~std::uint64_t{0}, 0xfffff7u, 0xffffffu, 0xffffu};
  bool good = true;
  for (std::int64_t rows : {0, 1, 2, 5}) {
    for (std::int64_t columns : {0, 1, 2, 3, 4, 5, 7, 8, 9, 33}) {
      good = good && holds<float>(&fill_uniform<float>, rows, columns, draws) &&
             holds<double>(&fill_uniform<double>, rows, columns, draws) &&
             holds<float>(&fill_normal<float>, rows, columns, draws) &&
             holds<double>(&fill_normal<double>, rows, columns, draws);
    }
  }
  if (good) std::puts("ok");
  return good ? 0 : 1;
}
