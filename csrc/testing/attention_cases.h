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

// A buffer of its own, so that the address sanitizer sees one element too many. Null when empty, as torch
// has it.
template <class T>
using Buffer = std::unique_ptr<T[]>;

// Elements that are taken off some buffers, to prove that an overrun is seen.
struct Shortage {
  std::int64_t x = 0, yhat = 0;
};

template <class T>
Buffer<T> poisoned(std::int64_t size) {
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

// The same choices from bytes that somebody else makes up; zeros when there are no more.
class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {}

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
  bool indexed, sorted;  // tasks: whether there is an index, and in order
  bool is_gram, see_query, shares_v, weighted, skips;
  int x_layout, q_layout;  // 0 contiguous, 1 with gaps, 2 the same for all sequences
  unsigned wants;          // bits in the order of `slots`
  std::uint64_t seed;
};

// Values that sizes are drawn from: on both sides of lane counts, of register tiles, of blocks and of the
// lengths at which sums are split.
struct Size {
  const char* name;
  std::int64_t Case::* member;
  std::vector<std::int64_t> values;
};
const std::vector<Size>& sizes();

// Multiply-adds of 16 lanes, roughly.
double work(const Case& c);

// A case whose work is at most `most` multiply-adds; larger draws are drawn again. From Random or Bytes.
template <class Choices>
Case draw_case(Choices& choices, double most);

// The case with this number.
Case draw_case(std::uint64_t number, double most);

// The size of W, and the square of that of A and C, at which each layer leaves numbers as large as it finds
// them.
double size_of_parameters(std::int64_t n, std::int64_t m);

std::string describe(const Case& c);

// A problem and the memory that it points to.
template <class T>
struct Given {
  explicit Given(const Case& c, Shortage shortage = {});
  Given(const Given&) = delete;

  Problem<T> problem;
  Buffer<T> x, q, p, A, C, W, v, h, y, weight, gy;
  Buffer<std::int64_t> task;
};

// A result: its name, where the kernel leaves it, what the oracle says, and through how many roundings.
template <class T>
struct Slot {
  const char* name;
  T* Results<T>::* result;
  std::vector<double> Outcome::* expected;
  double Roundings::* steps;
};
template <class T>
const std::vector<Slot<T>>& slots();

// Room for the wanted results, all NaN.
template <class T>
struct Made {
  Made(const Case& c, const Outcome& expected, Shortage shortage = {});

  Results<T> results{};
  std::vector<Buffer<T>> buffers;   // as slots
  std::vector<std::int64_t> count;  // of elements; 0 when not wanted
};

}  // namespace fastlin
