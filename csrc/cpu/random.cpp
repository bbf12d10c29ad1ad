// fill_uniform, fill_normal, CPU. Row i is sequence offset + i, column j is draw 4 block + j.
// One Philox block gives four columns; the last block of a row may be partial.
// Writes sizeof(T) bytes per number and reads nothing.

#include <algorithm>

#include "core/philox.h"
#include "kernels.h"

namespace fastlin {
namespace {

template <class T, class Transform>
void fill(T* out,  // [rows, columns]
          std::int64_t rows, std::int64_t columns, const Draws& draws, Transform transform) {
  const Key key = key_of(draws.seed);
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::uint64_t sequence = draws.offset + static_cast<std::uint64_t>(i);
    T* row = out + i * columns;
    for (std::int64_t j = 0; j < columns; j += 4) {
      const auto block = draws.block + static_cast<std::uint32_t>(j / 4);
      const Counter words = philox4x32(counter_of(block, sequence, draws.stream, draws.step), key);
      double values[4];
      transform(words, values);
      const std::int64_t count = std::min<std::int64_t>(4, columns - j);
      for (std::int64_t k = 0; k < count; ++k) row[j + k] = static_cast<T>(values[k]);
    }
  }
}

}  // namespace

template <class T>
void fill_uniform(T* out, std::int64_t rows, std::int64_t columns, Draws draws) {
  fill(out, rows, columns, draws, [](const Counter& words, double* values) {
    for (int k = 0; k < 4; ++k) values[k] = uniform(words.word[k]);
  });
}

template <class T>
void fill_normal(T* out, std::int64_t rows, std::int64_t columns, Draws draws) {
  fill(out, rows, columns, draws, [](const Counter& words, double* values) {
    normal_pair(words.word[0], words.word[1], values);
    normal_pair(words.word[2], words.word[3], values + 2);
  });
}

template void fill_uniform<float>(float*, std::int64_t, std::int64_t, Draws);
template void fill_uniform<double>(double*, std::int64_t, std::int64_t, Draws);
template void fill_normal<float>(float*, std::int64_t, std::int64_t, Draws);
template void fill_normal<double>(double*, std::int64_t, std::int64_t, Draws);

}  // namespace fastlin
