// Arguments for the functions of the Python modules, made from bytes: correct ones, and ones with a few wrong
// values.
#pragma once

#include <limits>

#include "binding_arguments.h"
#include "testing/attention_cases.h"
#include "testing/drawn_cases.h"

namespace fastlin {

// Stands for an array that is not allocated yet; aligned as any type wants.
constexpr std::uintptr_t kFakeAddress = 64;

template <class T>
std::uintptr_t address_of(const T* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer);
}

// A size, a stride or a count: small, just inside or outside a limit, or absurd.
inline std::int64_t any_number(ByteChoices& bytes) {
  constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();
  constexpr std::int64_t kOdd[] = {0,
                                   1,
                                   -1,
                                   kLeast,
                                   kLeast + 1,
                                   std::numeric_limits<std::int64_t>::max(),
                                   std::int64_t{1} << 62,
                                   (std::int64_t{1} << 31) - 1,
                                   std::int64_t{1} << 31,
                                   std::int64_t{1} << 32,
                                   std::int64_t{1} << 22,
                                   kMaxElements,
                                   kMaxElements + 1,
                                   kMaxThreads,
                                   kMaxThreads + 1,
                                   -7};
  return bytes.coin() ? bytes.below(40) : kOdd[bytes.below(16)];
}

inline double any_factor(ByteChoices& bytes) {
  constexpr double kOdd[] = {0.0, -0.0, 1.0, -1.0, 1e-310, 1e300, HUGE_VAL, NAN};
  return kOdd[bytes.below(8)];
}

template <class Container>
auto& any_element(ByteChoices& bytes, Container& values) {
  return values[static_cast<std::size_t>(bytes.below(static_cast<std::int64_t>(values.size())))];
}

// Makes an address null, non-null or misaligned, or adds or removes one.
inline void change_addresses(ByteChoices& bytes, Addresses& addresses) {
  const std::int64_t kind = bytes.below(8);
  if (addresses.empty() || kind == 0) {
    addresses.push_back(kFakeAddress);
  } else if (kind == 1) {
    addresses.pop_back();
  } else {
    std::uintptr_t& address = any_element(bytes, addresses);
    address = kind == 2 ? kFakeAddress + static_cast<std::uintptr_t>(bytes.below(8))
                        : (address == 0 ? kFakeAddress : 0);
  }
}

// Returns whether results can still be compared with the oracle's.
inline bool change_source(ByteChoices& bytes, SourceTuple& source) {
  auto& [sizes, numbers, addresses, counter] = source;
  switch (bytes.below(4)) {
    case 0:
      any_element(bytes, sizes) = any_number(bytes);
      return true;
    case 1:
      any_element(bytes, numbers) = any_factor(bytes);
      return false;
    case 2:
      change_addresses(bytes, addresses);
      return true;
    default:
      any_element(bytes, counter) = static_cast<std::uint64_t>(any_number(bytes));
      return true;
  }
}

inline SourceTuple any_source(ByteChoices& bytes) {
  const auto kind = static_cast<SourceKind>(bytes.below(4));
  const TestSource test(kind, 1 + bytes.below(9), bytes.below(20), bytes.coin());
  const Source& S = test.source;
  const auto flag = [](const void* pointer) { return pointer == nullptr ? 0 : kFakeAddress; };
  return {{S.d, S.n, S.K, S.bias, S.period},
          {S.radius, S.noise_std},
          {flag(S.means), flag(S.factors), flag(S.cumulative), flag(S.strata), flag(S.feature_factor), 0},
          {bytes.next(), bytes.next(), S.step, S.stream}};
}

// The arguments of `attention`, in their order.
struct AttentionArguments {
  std::int64_t threads = 1;
  Sizes sizes{};
  Strides strides{};
  Factors factors{};
  Flags flags{};
  Addresses inputs, results;
  std::optional<SourceTuple> source;
  bool comparable = true;   // whether the oracle can follow every number
  bool wrong_task = false;  // whether a task index is outside [0, K)

  template <class T>
  AttentionArguments(const Problem<T>& P, const Results<T>& out)
      : sizes{P.B, P.n, P.m, P.K, P.t, P.R, P.H, P.layers, P.total},
        strides{P.x_batch, P.x_row, P.q_batch},
        factors{P.scale, P.first_skip, P.skip, P.last_skip},
        flags{P.is_gram, P.see_query, P.shares_v},
        inputs{address_of(P.x),      address_of(P.q),  address_of(P.task),  address_of(P.p), address_of(P.A),
               address_of(P.C),      address_of(P.W),  address_of(P.v),     address_of(P.h), address_of(P.y),
               address_of(P.weight), address_of(P.gy), address_of(P.counts)},
        results{address_of(out.yhat), address_of(out.loss), address_of(out.per_task), address_of(out.dx),
                address_of(out.dq),   address_of(out.dp),   address_of(out.dA),       address_of(out.dC),
                address_of(out.dW),   address_of(out.dv),   address_of(out.dh)} {}

  // Makes the kernel draw its data from a source.
  void draw_from(const SourceTuple& tuple) {
    source = tuple;
    const auto& [source_sizes, numbers, addresses, counter] = tuple;
    sizes[1] = source_sizes[1], sizes[2] = source_sizes[0] + (source_sizes[3] != 0 ? 2 : 1),
    sizes[3] = source_sizes[2];
    for (std::size_t data : {0, 1, 2, 9, 11}) inputs[data] = 0;
    for (std::size_t data : {3, 4}) results[data] = 0;
  }

  void change(ByteChoices& bytes) {
    switch (bytes.below(9)) {
      case 0:
      case 1:
        any_element(bytes, sizes) = any_number(bytes);
        break;
      case 2:
        any_element(bytes, strides) = any_number(bytes);
        break;
      case 3:
        any_element(bytes, factors) = any_factor(bytes);
        comparable = false;
        break;
      case 4:
        any_element(bytes, flags) = bytes.coin();
        break;
      case 5:
        change_addresses(bytes, inputs);
        break;
      case 6:
        change_addresses(bytes, results);
        break;
      case 7:
        threads = any_number(bytes);
        break;
      default:
        if (source) {
          comparable = change_source(bytes, *source) && comparable;
        } else {
          wrong_task = true;
        }
    }
  }
};

}  // namespace fastlin
