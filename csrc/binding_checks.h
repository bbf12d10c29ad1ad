// Checks of the Python modules: impossible sizes, missing or misaligned addresses. An address does not tell
// the size of its array; fastlin/backends validates that. Everything else that would make a kernel leave its
// arrays, divide by zero or never return is an error here that names the argument.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "core/philox.h"
#include "kernels.h"

namespace fastlin {

// 47 bits of address reach 2^44 doubles. Products that kernels form of such sizes fit 64 bits.
constexpr std::int64_t kMaxElements = std::int64_t{1} << 44;
constexpr std::int64_t kMaxThreads = 8192;  // the most processors that Linux supports

[[noreturn]] inline void refuse(const char* name, const std::string& got, const std::string& wants) {
  throw std::invalid_argument(std::string(name) + ": got " + got + ", wants " + wants);
}

inline void check_within(const char* name, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value < least || value > most) {
    refuse(name, std::to_string(value),
           "an integer in [" + std::to_string(least) + ", " + std::to_string(most) + "]");
  }
}

inline void check_below(const char* name, std::int64_t value, std::int64_t limit) {
  if (value < 0 || value >= limit) {
    refuse(name, std::to_string(value), "an integer in [0, " + std::to_string(limit) + ")");
  }
}

inline void check_threads(std::int64_t threads) { check_within("threads", threads, 1, kMaxThreads); }

// Number of elements of an array; no size is negative. The limit also holds for an empty array with ones in
// place of its zeros: kernels multiply some of the sizes.
inline std::int64_t elements(const char* name, std::initializer_list<std::int64_t> sizes) {
  std::int64_t count = 1;
  bool fits = true, empty = false;
  for (const std::int64_t size : sizes) {
    fits = !__builtin_mul_overflow(count, std::max<std::int64_t>(size, 1), &count) && fits &&
           count <= kMaxElements;
    empty = empty || size == 0;
  }
  if (!fits) {
    std::string shape;
    for (const std::int64_t size : sizes) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
    refuse(name, "sizes (" + shape + ")", "at most " + std::to_string(kMaxElements) + " elements");
  }
  return empty ? 0 : count;
}

// Elements from the first to the last one of an array [B, rows, m] with strides.
inline std::int64_t extent(const char* name, std::int64_t B, std::int64_t rows, std::int64_t m,
                           std::int64_t batch, std::int64_t row) {
  if (B == 0) return 0;
  std::int64_t over_batch = 0, over_rows = 0;
  const bool overflows = (B > 1 && __builtin_mul_overflow(B - 1, batch, &over_batch)) ||
                         (rows > 1 && __builtin_mul_overflow(rows - 1, row, &over_rows));
  if (overflows || (B > 1 && batch < 0) || (rows > 1 && row < 0) || over_batch > kMaxElements ||
      over_rows > kMaxElements) {
    refuse(name, "strides " + std::to_string(batch) + " and " + std::to_string(row),
           "strides from 0 on over at most " + std::to_string(kMaxElements) + " elements");
  }
  return rows == 0 ? 0 : over_batch + over_rows + m;  // without rows, kernels still advance along the batch
}

// Whether an array is optional, needed, or must be absent.
enum class Use { kOptional, kNeeded, kAbsent };

template <class T>
void check_array(const char* name, const T* address, std::int64_t count, Use use) {
  const auto number = reinterpret_cast<std::uintptr_t>(address);
  if (address == nullptr && use == Use::kNeeded && count > 0) {
    refuse(name, "address 0", "the address of " + std::to_string(count) + " elements");
  }
  if (address != nullptr && use == Use::kAbsent) {
    refuse(name, "address " + std::to_string(number), "0 beside a source, which draws the data");
  }
  if (number % alignof(T) != 0) {
    refuse(name, "address " + std::to_string(number), "a multiple of " + std::to_string(alignof(T)));
  }
}

// Calls each(name, pointer, elements, use) with each array of a source.
template <class F>
void for_each_array(Source& S, F each) {
  const bool drawn_tasks = S.K > 1 && S.strata == nullptr;
  each("means", S.means, elements("means", {S.K, S.d}), S.factors != nullptr ? Use::kNeeded : Use::kOptional);
  each("factors", S.factors, elements("factors", {S.K, S.d, S.d}), Use::kOptional);
  each("cumulative", S.cumulative, S.K, drawn_tasks ? Use::kNeeded : Use::kOptional);
  each("strata", S.strata, S.period, Use::kOptional);
  each("feature_factor", S.feature_factor, elements("feature_factor", {S.d, S.d}), Use::kOptional);
  each("device_step", S.device_step, 1, Use::kOptional);
}

// The same for a problem and its results.
template <class T, class F>
void for_each_array(Problem<T>& P, Results<T>& out, F each) {
  const bool drawn = P.source != nullptr;
  const Use data = drawn ? Use::kAbsent : Use::kNeeded, optional = drawn ? Use::kAbsent : Use::kOptional;
  const std::int64_t B = P.B, m = P.m, rows = P.is_gram ? m : P.n;
  const std::int64_t matrices = elements("W", {P.R, P.H, m, m}), vectors = elements("h", {P.R, P.K, m});
  const std::int64_t layers = elements("A", {P.R, P.layers, P.H, m, m});
  const std::int64_t prompts = elements("p", {P.R, P.K, P.t, m});
  const std::int64_t per_task_heads =
      elements("v", {P.R, P.H, P.K, m});  // kernels store one per task even when tasks share v
  const std::int64_t heads = P.shares_v ? elements("v", {P.R, P.H, m}) : per_task_heads;
  const std::int64_t predictions = elements("yhat", {P.R, B});
  each("x", P.x, extent("x", B, rows, m, P.x_batch, P.x_row), data);
  each("q", P.q, extent("q", B, 1, m, P.q_batch, 0), data);
  each("task", P.task, B, optional);
  each("p", P.p, prompts, Use::kNeeded);
  each("A", P.A, layers, Use::kNeeded);
  each("C", P.C, layers, Use::kNeeded);
  each("W", P.W, matrices, Use::kNeeded);
  each("v", P.v, heads, Use::kNeeded);
  each("h", P.h, vectors, out.dh != nullptr ? Use::kNeeded : Use::kOptional);
  each("y", P.y, B, optional);
  each("weight", P.weight, P.K, Use::kOptional);
  each("gy", P.gy, predictions, Use::kOptional);
  each("counts", P.counts, P.K, Use::kOptional);
  each("yhat", out.yhat, predictions, Use::kOptional);
  each("loss", out.loss, P.R, Use::kOptional);
  each("per_task", out.per_task, elements("per_task", {P.R, P.K}),
       out.loss != nullptr ? Use::kNeeded : Use::kOptional);
  each("dx", out.dx, out.dx == nullptr ? 0 : elements("dx", {B, rows, m}), optional);
  each("dq", out.dq, out.dq == nullptr ? 0 : elements("dq", {B, m}), optional);
  each("dp", out.dp, prompts, Use::kOptional);
  each("dA", out.dA, layers, Use::kOptional);
  each("dC", out.dC, layers, Use::kOptional);
  each("dW", out.dW, matrices, Use::kOptional);
  each("dv", out.dv, heads, Use::kOptional);
  each("dh", out.dh, vectors, Use::kOptional);
}

// The same for a stored batch of a source.
template <class T, class F>
void for_each_array(const Source& S, std::int64_t B, bool is_gram, Sample<T>& out, F each) {
  const std::int64_t m = S.d + 1 + (S.bias ? 1 : 0);
  each("x", out.x, elements("x", {B, is_gram ? m : S.n, m}), Use::kNeeded);
  each("q", out.q, elements("q", {B, m}), Use::kNeeded);
  each("y", out.y, B, Use::kNeeded);
  each("task", out.task, B, Use::kNeeded);
}

inline void check(Source& S) {
  check_within("d", S.d, 1, kMaxElements);
  check_within("n", S.n, 0, kMaxElements);
  check_within("K", S.K, 1, kMaxElements);
  check_within("period", S.period, S.strata != nullptr ? 1 : 0, kMaxElements);
  for_each_array(S, [](const char* name, const auto* address, std::int64_t count, Use use) {
    check_array(name, address, count, use);
  });
}

template <class T>
void check(Problem<T>& P, Results<T>& out) {
  check_within("B", P.B, 0, kMaxElements);
  check_within("n", P.n, 0, kMaxElements);
  check_within("m", P.m, 1, kMaxElements);
  check_within("K", P.K, 1, kMaxElements);
  check_within("t", P.t, 0, kMaxElements);
  check_within("R", P.R, 1, kMaxElements);
  check_within("H", P.H, 1, kMaxElements);
  check_within("layers", P.layers, 0, kMaxElements);
  check_within("total", P.total, 0, kMaxElements);
  if (P.source != nullptr) {
    const Source& S = *P.source;
    check_within("m", P.m, S.d + 1 + (S.bias ? 1 : 0), S.d + 1 + (S.bias ? 1 : 0));
    check_within("n", P.n, S.n, S.n);
    check_within("K", P.K, S.K, S.K);
  } else if (P.is_gram) {
    check_within("n", P.n, P.m, P.m);
  }
  for_each_array(P, out, [](const char* name, const auto* address, std::int64_t count, Use use) {
    check_array(name, address, count, use);
  });
}

// A batch that is drawn and stored. `check_strata` checks its tasks: strata on a GPU cannot be read here.
template <class T>
void check(const Source& S, std::int64_t B, bool is_gram, Sample<T>& out) {
  check_within("batch", B, 0, kMaxElements);
  for_each_array(S, B, is_gram, out, [](const char* name, const auto* address, std::int64_t count, Use use) {
    check_array(name, address, count, use);
  });
}

inline void check_strata(const Source& S, std::int64_t B) {
  if (S.K <= 1 || S.strata == nullptr) return;
  for (std::int64_t i = 0; i < std::min(B, S.period); ++i) {
    // A batch of at least a period uses every stratum. Checking from 0 covers an offset + i that wraps at
    // 2^64, which skips strata.
    const std::uint64_t index =
        B < S.period ? S.offset + static_cast<std::uint64_t>(i) : static_cast<std::uint64_t>(i);
    check_below("strata", S.strata[index % static_cast<std::uint64_t>(S.period)], S.K);
  }
}

inline void check_gram_sizes(std::int64_t B, std::int64_t n, std::int64_t m) {
  check_within("B", B, 0, kMaxElements);
  check_within("n", n, 0, kMaxElements);
  check_within("m", m, 1, kMaxElements);
  elements("G", {B, m, m});
}

// Tokens [B, n, m] with strides, and their Gram matrices.
template <class T>
void check_gram(const T* z, const T* G, std::int64_t B, std::int64_t n, std::int64_t m, std::int64_t batch,
                std::int64_t row) {
  check_gram_sizes(B, n, m);
  check_array("z", z, extent("z", B, n, m, batch, row), Use::kNeeded);
  check_array("G", G, B * m * m, Use::kNeeded);
}

// An array [rows, columns] to fill.
template <class T>
T* filled_array(const char* name, std::uintptr_t address, std::int64_t rows, std::int64_t columns) {
  check_within("rows", rows, 0, kMaxElements);
  check_within("columns", columns, 0, kMaxElements);
  T* out = reinterpret_cast<T*>(address);
  check_array(name, out, elements(name, {rows, columns}), Use::kNeeded);
  return out;
}

inline void check_slots(std::int64_t slots, std::int64_t block) {
  check_below("slots", slots, (kMaxBlocks - block) / kBlocksPerChi + 1);
}

inline Draws draws_of(std::uint64_t seed, std::int64_t step, std::int64_t stream, std::uint64_t offset,
                      std::int64_t block, std::int64_t columns) {
  check_below("block", block, kMaxBlocks);
  check_below("columns", columns, 4 * (kMaxBlocks - block) + 1);
  check_below("step", step, kMaxSteps);
  check_below("stream", stream, kMaxStreams);
  return {seed, offset, static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(step),
          static_cast<std::uint32_t>(stream)};
}

}  // namespace fastlin
