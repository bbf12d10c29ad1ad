// Edge problems for `attention`, drawn from a seed, in buffers of exactly their size.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "testing/attention_oracle.h"

namespace fastlin {

// Each array is its own allocation, so that AddressSanitizer reports an access one element past its end. Null
// when empty, as in torch.
template <class T>
using Buffer = std::unique_ptr<T[]>;

// Elements missing at the end of some buffers, to prove that an overrun is reported.
struct Shortage {
  std::int64_t x = 0, yhat = 0;
};

template <class T>
Buffer<T> nan_buffer(std::int64_t size) {
  if (size <= 0) return nullptr;
  Buffer<T> out(new T[static_cast<std::size_t>(size)]);
  for (std::int64_t i = 0; i < size; ++i) out[i] = std::numeric_limits<T>::quiet_NaN();
  return out;
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {  // SplitMix64
    state_ += 0x9e3779b97f4a7c15u;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  std::int64_t below(std::int64_t count) {
    return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(count));
  }
  bool coin() { return (next() >> 63) != 0; }
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-52 - 1.0; }  // [-1, 1)

 private:
  std::uint64_t state_;
};

// The same choices from the bytes of a fuzzer; zeros after the last byte.
class ByteChoices {
 public:
  ByteChoices(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {}

  std::uint64_t next() {
    std::uint64_t all = 0;
    for (int i = 0; i < 8; ++i) all = all << 8 | byte();
    return all;
  }
  std::int64_t below(std::int64_t count) {  // at most 256
    return byte() % count;
  }
  bool coin() { return (byte() & 1) != 0; }

 private:
  std::int64_t byte() { return left_ == 0 ? 0 : (--left_, *data_++); }

  const std::uint8_t* data_;
  std::size_t left_;
};

enum class Mode { kLoss, kReverse, kPredict };

struct Case {
  std::int64_t B, n, m, K, t, R, H, layers;
  Mode mode;
  bool indexed, sorted;  // whether the tasks are given, and sorted
  bool is_gram, see_query, shares_v, weighted, skips;
  int x_layout, q_layout;  // 0 contiguous, 1 with gaps, 2 the same for all sequences
  unsigned wants;          // bits in the order of `result_fields`
  std::uint64_t seed;
};

// The values that a size may have: on both sides of lane counts, register tiles, blocks, and the lengths at
// which sums are split.
struct Size {
  const char* name;
  std::int64_t Case::* member;
  std::vector<std::int64_t> values;
};
const std::vector<Size>& sizes();

// Multiply-adds of 16 lanes, roughly.
double work(const Case& c);

// Draws until the work is at most `most` multiply-adds. Choices is Random or ByteChoices.
template <class Choices>
Case draw_case(Choices& choices, double most);

// The case with this number.
Case draw_case(std::uint64_t number, double most);

// Scale of the entries of W, and the square of the scale of A and C, at which a layer preserves the size of
// its input.
double parameter_scale(std::int64_t n, std::int64_t m);

std::string describe(const Case& c);

// A problem and the memory that it points to.
template <class T>
struct OwnedProblem {
  explicit OwnedProblem(const Case& c, Shortage shortage = {});
  OwnedProblem(const OwnedProblem&) = delete;

  Problem<T> problem;
  Buffer<T> x, q, p, A, C, W, v, h, y, weight, gy;
  Buffer<std::int64_t> task;
};

// A result: its name, its pointer in Results, the oracle's values, and how many roundings its terms pass
// through.
template <class T>
struct ResultField {
  const char* name;
  T* Results<T>::* result;
  std::vector<double> OracleResults::* expected;
  double Roundings::* steps;
};
template <class T>
const std::vector<ResultField<T>>& result_fields();

// Buffers for the wanted results, filled with NaN.
template <class T>
struct OwnedResults {
  OwnedResults(const Case& c, const OracleResults& expected, Shortage shortage = {});

  Results<T> results{};
  std::vector<Buffer<T>> buffers;   // in the order of result_fields
  std::vector<std::int64_t> count;  // elements; 0 when not wanted
};

}  // namespace fastlin
