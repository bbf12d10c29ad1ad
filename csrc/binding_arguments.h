// Turns the arguments of the Python modules into problems, sources and results, and checks them. Sizes,
// strides and addresses come in the order in which fastlin/backends/compiled.py and draw.py pack them.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "binding_checks.h"
#include "kernels.h"

namespace fastlin {

using Addresses = std::vector<std::uintptr_t>;

inline void check_count(const char* name, const Addresses& addresses, std::size_t count) {
  if (addresses.size() != count) {
    refuse(name, std::to_string(addresses.size()) + " addresses", std::to_string(count));
  }
}

template <class T>
T* at(const Addresses& addresses, std::size_t i) {
  return reinterpret_cast<T*>(addresses[i]);
}

// (d, n, K, bias, period), (radius, noise_std), addresses of (means, factors, cumulative, strata,
// feature_factor, device_step), (seed, offset, step, stream).
using SourceTuple =
    std::tuple<std::array<std::int64_t, 5>, std::array<double, 2>, Addresses, std::array<std::uint64_t, 4>>;

inline Source source_of(const SourceTuple& tuple) {
  const auto& [sizes, numbers, addresses, counter] = tuple;
  check_count("source", addresses, 6);
  check_below("step", static_cast<std::int64_t>(counter[2]), kMaxSteps);
  check_below("stream", static_cast<std::int64_t>(counter[3]), kMaxStreams);
  Source S{};
  S.d = sizes[0], S.n = sizes[1], S.K = sizes[2], S.bias = sizes[3] != 0, S.period = sizes[4];
  S.radius = numbers[0], S.noise_std = numbers[1];
  S.means = at<const double>(addresses, 0), S.factors = at<const double>(addresses, 1);
  S.cumulative = at<const double>(addresses, 2), S.strata = at<const std::int64_t>(addresses, 3);
  S.feature_factor = at<const double>(addresses, 4);
  S.device_step = at<const std::int64_t>(addresses, 5);
  S.seed = counter[0], S.offset = counter[1];
  S.step = static_cast<std::uint32_t>(counter[2]), S.stream = static_cast<std::uint32_t>(counter[3]);
  check(S);
  return S;
}

using Sizes = std::array<std::int64_t, 9>;    // B, n, m, K, t, R, H, L - 1, total
using Strides = std::array<std::int64_t, 3>;  // of x: batch, row; of q: batch
using Factors = std::array<double, 4>;        // scale, first_skip, skip, last_skip
using Flags = std::array<bool, 3>;            // is_gram, see_query, shares_v

// A problem and the results to write. It cannot be copied: the problem points to the source inside it.
template <class T>
struct Call {
  Call(const Sizes& sizes, const Strides& strides, const Factors& factors, const Flags& flags,
       const Addresses& inputs,   // x, q, task, p, A, C, W, v, h, y, weight, gy, counts
       const Addresses& outputs,  // in the order of Results
       const std::optional<SourceTuple>& source_tuple) {
    check_count("inputs", inputs, 13);
    check_count("results", outputs, 11);
    Problem<T>& P = problem;
    P.B = sizes[0], P.n = sizes[1], P.m = sizes[2], P.K = sizes[3], P.t = sizes[4];
    P.R = sizes[5], P.H = sizes[6], P.layers = sizes[7], P.total = sizes[8];
    P.x = at<const T>(inputs, 0), P.x_batch = strides[0], P.x_row = strides[1];
    P.q = at<const T>(inputs, 1), P.q_batch = strides[2];
    P.task = at<const std::int64_t>(inputs, 2);
    P.p = at<const T>(inputs, 3), P.A = at<const T>(inputs, 4), P.C = at<const T>(inputs, 5);
    P.W = at<const T>(inputs, 6), P.v = at<const T>(inputs, 7), P.h = at<const T>(inputs, 8);
    P.y = at<const T>(inputs, 9), P.weight = at<const T>(inputs, 10), P.gy = at<const T>(inputs, 11);
    P.counts = at<const std::int64_t>(inputs, 12);
    P.scale = factors[0], P.first_skip = factors[1], P.skip = factors[2], P.last_skip = factors[3];
    P.is_gram = flags[0], P.see_query = flags[1], P.shares_v = flags[2];
    if (source_tuple) {
      source = source_of(*source_tuple);
      P.source = &source;
    }
    Results<T>& out = results;
    out.yhat = at<T>(outputs, 0), out.loss = at<T>(outputs, 1), out.per_task = at<T>(outputs, 2);
    out.dx = at<T>(outputs, 3), out.dq = at<T>(outputs, 4), out.dp = at<T>(outputs, 5);
    out.dA = at<T>(outputs, 6), out.dC = at<T>(outputs, 7), out.dW = at<T>(outputs, 8);
    out.dv = at<T>(outputs, 9), out.dh = at<T>(outputs, 10);
    check(P, out);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  Source source{};
  Problem<T> problem{};
  Results<T> results{};
};

template <class T>
Sample<T> sample_of(const Source& S, std::int64_t B, bool is_gram, const Addresses& results) {
  check_count("results", results, 4);
  Sample<T> out{at<T>(results, 0), at<T>(results, 1), at<T>(results, 2), at<std::int64_t>(results, 3)};
  check(S, B, is_gram, out);
  return out;
}

inline std::int64_t* tasks_of(std::uintptr_t address, std::int64_t B) {
  check_within("batch", B, 0, kMaxElements);
  auto* task = reinterpret_cast<std::int64_t*>(address);
  check_array("task", task, B, Use::kNeeded);
  return task;
}

}  // namespace fastlin
