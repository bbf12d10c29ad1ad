// The kernels on plain pointers: what bindings.cpp calls and the backends define. Arguments are validated
// above.
#pragma once

#include <cstdint>

namespace fastlin {

// Draws of sequences offset, offset + 1, ... (mod 2^64) of one stream at one step, from a first block on;
// core/philox.h has the layout.
struct Draws {
  std::uint64_t seed;
  std::uint64_t offset;
  std::uint32_t block;   // with the columns that follow, at most kMaxBlocks
  std::uint32_t step;    // below kMaxSteps
  std::uint32_t stream;  // below kMaxStreams
};

// T is float or double; column j is draw 4 block + j.
template <class T>
void fill_uniform(T* out,  // [rows, columns]
                  std::int64_t rows, std::int64_t columns, Draws draws);

template <class T>
void fill_normal(T* out,  // [rows, columns]
                 std::int64_t rows, std::int64_t columns, Draws draws);

}  // namespace fastlin
