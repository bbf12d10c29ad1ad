// Makes calls from bytes: attention, gram, sample, sample_tasks and the random arrays, with some wrong
// arguments. Either the checks refuse the call with an error that names an argument; or the kernel runs under
// the sanitizers, on arrays of exactly the sizes that binding_checks.h computes, and its results agree with
// the oracle's.
//
//   boundary_fuzzer COUNT SEED     COUNT random byte strings; prints "ok COUNT"
//   boundary_fuzzer plant          arrays that are one element short, which a sanitizer must report
//
// With FASTLIN_LIBFUZZER it has no main: libFuzzer makes the bytes, guided by coverage.

#include "testing/attention_check.h"
#include "testing/boundary_calls.h"
#include "testing/boundary_memory.h"
#include "testing/instruction_sets.h"

namespace fastlin {

namespace {

const InstructionSet& any_set(ByteChoices& bytes) {
  static const std::vector<const InstructionSet*> all = tested_instruction_sets();
  return *any_element(bytes, all);
}

template <class T>
double work_of(const Problem<T>& P) {
  Case c{};
  c.B = P.B, c.n = P.source != nullptr ? P.m : P.n, c.m = P.m, c.K = P.K, c.t = P.t;
  c.R = P.R, c.H = P.H, c.layers = P.layers, c.is_gram = P.is_gram;
  return work(c) + static_cast<double>(P.K) * P.R * (1.0 + P.t) * P.m;
}

// Whether all numbers, zeros excepted, are between 1 / limit and limit.
bool all_within(const OracleResults& outcome, double limit) {
  for (const auto& slot : result_fields<double>()) {
    for (double value : outcome.*slot.expected) {
      if (value != 0 && !(1 / limit < value && value < limit)) return false;
    }
  }
  return true;
}

// Compares the results with the oracle's, unless they may overflow or underflow in T.
template <class T>
void compare(const Problem<T>& P, const Results<T>& out, const std::vector<std::int64_t>& sizes) {
  if (P.layers > 40) return;  // a term of L layers passes through 3^L roundings
  const OracleResults expected = evaluate(P, false), magnitude = evaluate(P, true);
  if (!all_within(magnitude, sizeof(T) == sizeof(float) ? 1e15 : 1e100)) return;
  const Roundings steps = roundings(P);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const ResultField<T>& slot = result_fields<T>()[i];
    if (out.*slot.result == nullptr) continue;
    if (static_cast<std::size_t>(sizes[i]) != (expected.*slot.expected).size()) {
      fail(std::string(slot.name) + " differs in size from the oracle's");
    }
    if (!close(out.*slot.result, expected.*slot.expected, magnitude.*slot.expected, steps.*slot.steps,
               slot.name)) {
      fail(slot.name);
    }
  }
  ++counts.compared;
}

// A problem on the sequences that a source draws, stored as Gram matrices.
template <class T>
struct StoredProblem {
  StoredProblem(const Problem<T>& P, const Kernels<T>& kernels)
      : x(nan_buffer<T>(P.B * P.m * P.m)),
        q(nan_buffer<T>(P.B * P.m)),
        y(nan_buffer<T>(P.B)),
        task(new std::int64_t[static_cast<std::size_t>(P.B)]),
        problem(P) {
    kernels.sample(*P.source, P.B, true, {x.get(), q.get(), y.get(), task.get()}, 1, {});
    problem.source = nullptr, problem.is_gram = true, problem.n = P.m;
    problem.x = x.get(), problem.x_batch = P.m * P.m, problem.x_row = P.m;
    problem.q = q.get(), problem.q_batch = P.m, problem.y = y.get(), problem.task = task.get();
  }

  Buffer<T> x, q, y;
  Buffer<std::int64_t> task;
  Problem<T> problem;
};

template <class T>
void attention(ByteChoices& bytes) {
  const Kernels<T>& kernels = kernels_of<T>(any_set(bytes));
  const bool drawn = bytes.below(3) == 0;
  const std::int64_t changes = std::max<std::int64_t>(bytes.below(6) - 2, 0);
  const Case c = draw_case(bytes, kWork);
  const OwnedProblem<T> right(c);
  const OwnedResults<T> wanted(c, evaluate(right.problem, false));
  AttentionArguments arguments(right.problem, wanted.results);
  if (drawn) arguments.draw_from(any_source(bytes));
  for (std::int64_t i = 0; i < changes; ++i) arguments.change(bytes);

  std::optional<Call<T>> call;
  if (!is_accepted(changes == 0, [&] {
        check_threads(arguments.threads);
        call.emplace(arguments.sizes, arguments.strides, arguments.factors, arguments.flags, arguments.inputs,
                     arguments.results, arguments.source);
      })) {
    return;
  }
  Problem<T>& P = call->problem;
  Results<T>& out = call->results;
  if (!is_small(work_of(P), [&](auto each) {
        for_each_array(P, out, each);
        for_each_array(call->source, each);
      })) {
    return;
  }
  CallMemory memory(c.seed);
  memory.parameters = parameter_scale(P.n, P.m);
  memory.tasks = P.K;
  memory.wrong_task = arguments.wrong_task;
  std::vector<std::int64_t> sizes;  // of the results
  for_each_array(P, out, [&](const char* name, auto*& pointer, std::int64_t count, Use) {
    memory.allocate(name, pointer, count);
    if (!std::is_const<std::remove_pointer_t<std::remove_reference_t<decltype(pointer)>>>::value) {
      sizes.push_back(count);
    }
  });
  for_each_array(call->source, [&](const char* name, auto*& pointer, std::int64_t count, Use) {
    memory.allocate(name, pointer, count);
  });
  // The kernel itself refuses wrong tasks, and nothing else.
  const bool stops = arguments.wrong_task && P.task != nullptr && P.B > 0;
  try {
    kernels.attention(P, out, static_cast<int>(arguments.threads), {});
  } catch (const std::out_of_range&) {
    if (!stops) fail("a correct task was refused");
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const T* result = out.*result_fields<T>()[i].result;
      if (result != nullptr && sizes[i] > 0 && !std::isnan(result[0]))
        fail("results were written before a wrong task was refused");
    }
    ++counts.wrong_tasks;
    return;
  }
  if (stops) fail("a wrong task was accepted");
  ++counts.ran;
  if (!arguments.comparable || P.counts != nullptr) return;
  if (P.source == nullptr) {
    compare(P, out, sizes);
  } else {
    compare(StoredProblem<T>(P, kernels).problem, out, sizes);
  }
}

template <class T>
void gram(ByteChoices& bytes) {
  const Kernels<T>& kernels = kernels_of<T>(any_set(bytes));
  const std::int64_t changes = std::max<std::int64_t>(bytes.below(4) - 1, 0);
  const Case c = draw_case(bytes, kWork);
  std::int64_t sizes[] = {c.B, c.n, c.m, c.n * (c.m + 1), c.m + 1}, threads = 1 + bytes.below(8);
  Addresses addresses{kFakeAddress, kFakeAddress};
  for (std::int64_t i = 0; i < changes; ++i) {
    const std::int64_t which = bytes.below(7);
    if (which < 5) sizes[which] = any_number(bytes);
    if (which == 5) change_addresses(bytes, addresses);
    if (which == 6) threads = any_number(bytes);
  }
  const auto [B, n, m, batch, row] = sizes;
  Problem<T> P{};
  T* G = nullptr;
  if (!is_accepted(changes == 0, [&, B = B, n = n, m = m, batch = batch, row = row] {
        check_threads(threads);
        check_count("addresses", addresses, 2);
        P.x = at<const T>(addresses, 0), G = at<T>(addresses, 1);
        check_gram(P.x, G, B, n, m, batch, row);
      })) {
    return;
  }
  P.B = B, P.n = n, P.m = m, P.x_batch = batch, P.x_row = row, P.K = P.R = P.H = 1;
  const std::int64_t z_elements = extent("z", B, n, m, batch, row);
  const auto arrays = [&](auto each) {
    each("z", P.x, z_elements, Use::kNeeded);
    each("G", G, P.B * P.m * P.m, Use::kNeeded);
  };
  if (!is_small(work_of(P), arrays)) return;
  CallMemory memory(c.seed);
  arrays([&](const char* name, auto*& pointer, std::int64_t count, Use) {
    memory.allocate(name, pointer, count);
  });
  kernels.gram(P.x, batch, row, B, n, m, G, static_cast<int>(threads), {});
  ++counts.ran;
  if (B == 0) return;
  if (!close(G, evaluate_gram(P, false), evaluate_gram(P, true), static_cast<double>(n) + 1, "G")) fail("G");
  ++counts.compared;
}

// Stored sequences, or their tasks only.
template <class T>
void sample(ByteChoices& bytes) {
  const Kernels<T>& kernels = kernels_of<T>(any_set(bytes));
  const std::int64_t changes = std::max<std::int64_t>(bytes.below(4) - 1, 0);
  std::int64_t B = bytes.below(140), threads = 1 + bytes.below(8);
  const bool is_gram = bytes.coin(), only_tasks = bytes.below(4) == 0, wrong_strata = bytes.below(8) == 0;
  const std::uint64_t seed = bytes.next();
  SourceTuple source = any_source(bytes);
  Addresses results(4, kFakeAddress);
  bool comparable = true;
  for (std::int64_t i = 0; i < changes; ++i) {
    const std::int64_t which = bytes.below(6);
    if (which < 3) comparable = change_source(bytes, source) && comparable;
    if (which == 3) B = any_number(bytes);
    if (which == 4) change_addresses(bytes, results);
    if (which == 5) threads = any_number(bytes);
  }
  Source S{};
  Sample<T> out{};
  if (!is_accepted(changes == 0, [&] {
        check_threads(threads);
        S = source_of(source);
        if (only_tasks) {
          out.task = tasks_of(results.empty() ? 0 : results[0], B);
        } else {
          out = sample_of<T>(S, B, is_gram, results);
        }
      })) {
    return;
  }
  const auto arrays = [&](auto each) {
    for_each_array(S, each);
    if (only_tasks) {
      each("task", out.task, B, Use::kNeeded);
    } else {
      for_each_array(S, B, is_gram, out, each);
    }
  };
  const double rows = static_cast<double>(is_gram ? S.d + 2 : S.n) + 1, d = static_cast<double>(S.d);
  if (!is_small(d * d * d + (static_cast<double>(B) + 16) * rows * d * d, arrays)) return;
  CallMemory memory(seed);
  memory.tasks = S.K;
  memory.wrong_task = wrong_strata && !only_tasks;
  const auto allocate = [&](const char* name, auto*& pointer, std::int64_t count, Use) {
    memory.allocate(name, pointer, count);
  };
  arrays(allocate);
  if (only_tasks) {
    kernels.sample_tasks(S, B, out.task, static_cast<int>(threads), {});
  } else {
    if (!is_accepted(!memory.wrong_task, [&] { check_strata(S, B); })) return;
    kernels.sample(S, B, is_gram, out, static_cast<int>(threads), {});
  }
  ++counts.ran;
  for (std::int64_t i = 0; i < B; ++i) {
    if (out.task[i] < 0 || out.task[i] >= S.K) fail("a task is outside [0, K)");
    if (!only_tasks && comparable && !std::isfinite(out.y[i])) fail("y is not finite");
  }
}

template <class T>
void fill(ByteChoices& bytes) {
  const Kernels<T>& kernels = kernels_of<T>(any_set(bytes));
  const std::int64_t changes = std::max<std::int64_t>(bytes.below(4) - 1, 0), kind = bytes.below(4);
  // rows, columns, step, stream, block, threads
  std::int64_t sizes[] = {bytes.below(200), bytes.below(100), bytes.below(9),
                          bytes.below(9),   bytes.below(9),   2};
  const std::uint64_t seed = bytes.next(), offset = bytes.next();
  std::uintptr_t address = kFakeAddress;
  for (std::int64_t i = 0; i < changes; ++i) {
    const std::int64_t which = bytes.below(7);
    if (which < 6) sizes[which] = any_number(bytes);
    if (which == 6) address = static_cast<std::uintptr_t>(bytes.below(9));
  }
  const std::int64_t rows = sizes[0], columns = sizes[1];
  Draws draws{};
  T* out = nullptr;
  if (!is_accepted(changes == 0, [&] {
        check_threads(sizes[5]);
        draws = draws_of(seed, sizes[2], sizes[3], offset, sizes[4], kind == 2 ? 0 : columns);
        if (kind == 2) check_slots(columns, sizes[4]);
        out = filled_array<T>("address", address, rows, columns);
      })) {
    return;
  }
  if (!is_small(0, [&](auto each) { each("address", out, rows * columns, Use::kNeeded); })) return;
  if (rows == 0 || columns == 0) return;
  CallMemory memory(seed);
  memory.allocate("address", out, rows * columns);
  const int threads = static_cast<int>(sizes[5]);
  if (kind == 2) {
    std::vector<std::int64_t> freedom;
    for (std::int64_t i = 0; i < columns; ++i) freedom.push_back(any_number(bytes));
    kernels.fill_chi(out, freedom.data(), rows, columns, draws, threads);
  } else {
    (kind == 0 ? kernels.fill_uniform : kernels.fill_normal)(out, rows, columns, draws, threads);
    for (std::int64_t i = 0; i < rows * columns; ++i) {
      if (!std::isfinite(out[i])) fail("a random number is not finite");
    }
  }
  ++counts.ran;
}

template <class T>
void call(ByteChoices& bytes) {
  const std::int64_t which = bytes.below(8);
  if (which < 5) attention<T>(bytes);
  if (which == 5) gram<T>(bytes);
  if (which == 6) sample<T>(bytes);
  if (which == 7) fill<T>(bytes);
}

}  // namespace
}  // namespace fastlin

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fastlin::ByteChoices bytes(data, size);
  (bytes.coin() ? fastlin::call<float> : fastlin::call<double>)(bytes);
  return 0;
}

#ifndef FASTLIN_LIBFUZZER
int main(int count, char** arguments) {
  const bool plants = count == 2 && std::string(arguments[1]) == "plant";
  if (!plants && count != 3) {
    std::puts("wants COUNT SEED or plant");
    return 2;
  }
  fastlin::shortage = plants ? 1 : 0;
  const long long executions = plants ? 100 : std::atoll(arguments[1]);
  fastlin::Random random(plants ? 0 : std::strtoull(arguments[2], nullptr, 10));
  for (long long i = 0; i < executions; ++i) {
    // A call reads zeros after the end of a short string.
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(random.below(160)));
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random.next());
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  const fastlin::Counts& of = fastlin::counts;
  std::fprintf(stderr,
               "refused %lld, too large to run %lld, ran %lld, of these compared %lld, wrong tasks %lld\n",
               static_cast<long long>(of.refused), static_cast<long long>(of.too_large),
               static_cast<long long>(of.ran), static_cast<long long>(of.compared),
               static_cast<long long>(of.wrong_tasks));
  std::printf("ok %lld\n", executions);
  return 0;
}
#endif
