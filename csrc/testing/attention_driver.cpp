// Runs `attention` and `gram` of every instruction set of this machine, and of the portable vectors, over
// edge problems in buffers of exactly their size, for the sanitizers. Results must agree with a naive oracle
// and have the same bits for any number of threads.
//
//   attention_driver edges     all problems, one to seven threads                    prints "ok <problems>"
//   attention_driver threads   a few in several blocks, four threads, two callers    prints "ok <problems>"
//   attention_driver plant-*   makes an error that a sanitizer must report, see `plant`

#include <set>
#include <thread>

#include "testing/attention_check.h"
#include "testing/instruction_sets.h"
#include "testing/planted_shortage.h"

namespace fastlin {

namespace {

constexpr int kProblems = 600, kThreadedProblems = 40;

// An interrupt that never stops the call and records whether another thread polled it.
struct Watch {
  std::thread::id caller = std::this_thread::get_id();
  bool polled_elsewhere = false;

  Interrupt interrupt() {
    return {[](void* state) {
              auto* watch = static_cast<Watch*>(state);
              if (std::this_thread::get_id() != watch->caller) watch->polled_elsewhere = true;
              return false;
            },
            this};
  }
};

template <class T>
bool call(const CheckedProblem<T>& checked, const InstructionSet& set, int threads,
          const OwnedResults<T>& outputs) {
  Watch watch;
  const bool done =
      kernels_of<T>(set).attention(checked.owned.problem, outputs.results, threads, watch.interrupt());
  if (!done || watch.polled_elsewhere)
    std::puts("attention stopped, or polled its interrupt on another thread");
  return done && !watch.polled_elsewhere;
}

template <class T>
bool attention_holds(const CheckedProblem<T>& checked, const InstructionSet& set,
                     const std::vector<int>& threads) {
  const OwnedResults<T> alone(checked.shape, checked.expected);
  if (!call(checked, set, 1, alone) || !checked.holds(alone)) return false;
  for (int count : threads) {
    const OwnedResults<T> shared(checked.shape, checked.expected);
    if (!call(checked, set, count, shared) || !same_bits(alone, shared)) {
      std::printf("with %d threads\n", count);
      return false;
    }
  }
  return true;
}

template <class T>
bool gram_holds(const Problem<T>& P, const InstructionSet& set, const std::vector<int>& threads) {
  if (P.is_gram) return true;
  const std::vector<double> expected = evaluate_gram(P, false), magnitude = evaluate_gram(P, true);
  Buffer<T> first;
  for (int count : threads) {
    Buffer<T> G = nan_buffer<T>(P.B * P.m * P.m);
    Watch watch;
    if (!kernels_of<T>(set).gram(P.x, P.x_batch, P.x_row, P.B, P.n, P.m, G.get(), count, watch.interrupt()) ||
        !close(G.get(), expected, magnitude, static_cast<double>(P.n) + 1, "G")) {
      return false;
    }
    if (first == nullptr) first.swap(G);
    if (G != nullptr && std::memcmp(first.get(), G.get(), expected.size() * sizeof(T)) != 0) {
      std::puts("G has different bits");
      return false;
    }
  }
  return true;
}

// A batch of one block runs on one thread only.
std::vector<int> more_threads(const Case& c) {
  return c.B > 64 ? std::vector<int>{2, 3, 7} : std::vector<int>{};
}

template <class T>
bool edge_holds(const Case& c, std::set<std::string>& paths) {
  const CheckedProblem<T> checked(c);
  const OwnedResults<T> outputs(c, checked.expected);
  for (const InstructionSet* set : tested_instruction_sets()) {
    const std::string path = path_of(checked.owned.problem, outputs.results, kernels_of<T>(*set).lanes);
    paths.insert(path + (sizeof(T) == 4 ? " float" : " double"));
    std::vector<int> threads = more_threads(c);
    const bool good = attention_holds(checked, *set, threads);
    threads.insert(threads.begin(), 1);
    if (!good || !gram_holds(checked.owned.problem, *set, threads)) {
      std::printf("%s %s: %s\n", set->name, sizeof(T) == 4 ? "float" : "double", describe(c).c_str());
      return false;
    }
  }
  return true;
}

// Changes a case so that it runs with columns in lanes, which random cases rarely do.
Case with_columns(Case c, int i) {
  c.R = c.H = 1;
  c.layers = 0;
  c.is_gram = false;
  c.m = 4 + i % 21;
  constexpr std::int64_t kTasks[] = {1, 3, 40, 300};
  c.K = kTasks[i / 8 % 4];
  c.indexed = i % 56 != 6;  // without an index, all sequences are of task 0
  c.B = 97 + i % 34;
  c.wants &= ~(1u << 3 | 1u << 4);  // dx, dq
  return c;
}

int edges() {
  std::set<std::string> paths;
  std::vector<std::set<std::int64_t>> drawn(sizes().size());
  for (int i = 0; i < kProblems; ++i) {
    // Most are small; some reach the long sums and the large widths.
    const Case random = draw_case(static_cast<std::uint64_t>(i), i % 16 < 14 ? 3e5 : 4e6);
    const Case c = i % 8 < 6 ? random : with_columns(random, i);
    for (std::size_t j = 0; j < sizes().size(); ++j) drawn[j].insert(c.*sizes()[j].member);
    if (!(i % 2 == 0 ? edge_holds<float>(c, paths) : edge_holds<double>(c, paths))) return 1;
  }
  // The cases must have covered every size and every path.
  for (std::size_t j = 0; j < sizes().size(); ++j) {
    for (std::int64_t value : sizes()[j].values) {
      if (drawn[j].count(value) == 0) {
        std::printf("not tested: %s=%lld\n", sizes()[j].name, static_cast<long long>(value));
        return 1;
      }
    }
  }
  if (paths.size() != 10) {
    for (const std::string& path : paths) std::printf("path taken: %s\n", path.c_str());
    return 1;
  }
  std::printf("ok %d\n", kProblems);
  std::fprintf(stderr, "largest error: %.3f of the tolerance\n", largest_error);
  return 0;
}

// Several blocks, so that more than one thread has work.
Case in_blocks(int number) {
  Case c = draw_case(static_cast<std::uint64_t>(number), 2e5);
  if (number % 8 >= 6) c = with_columns(c, number);
  c.B = 130 + 65 * (number % 2);
  if (number % 16 == 7) c.B = 1100, c.K = 300, c.n = 3, c.indexed = true;  // records that threads share
  return c;
}

template <class T>
bool threads_hold(const Case& c, const InstructionSet& set) {
  const CheckedProblem<T> checked(c);
  bool good = attention_holds(checked, set, {4}) && gram_holds(checked.owned.problem, set, {1, 4});
  const OwnedResults<T> mine(c, checked.expected), other(c, checked.expected);
  bool other_good = false;
  std::thread caller([&] { other_good = call(checked, set, 2, other); });
  good = call(checked, set, 2, mine) && good;
  caller.join();
  if (good && other_good && checked.holds(mine) && same_bits(mine, other)) return true;
  std::printf("%s: %s\n", set.name, describe(c).c_str());
  return false;
}

int threads() {
  for (int i = 0; i < kThreadedProblems; ++i) {
    const Case c = in_blocks(i);
    const InstructionSet& set = *tested_instruction_sets().front();
    if (!(i % 2 == 0 ? threads_hold<float>(c, set) : threads_hold<double>(c, set))) return 1;
  }
  std::printf("ok %d\n", kThreadedProblems);
  return 0;
}

// Errors that a sanitizer must report inside the kernels: reaching the end is a failure.
int plant(const std::string& error) {
  Case c = in_blocks(0);
  c.mode = Mode::kPredict;
  c.is_gram = false;
  c.layers = 0;
  c.n = 7, c.m = 9, c.x_layout = 0;
  Shortage shortage;
  if (error == "plant-input") shortage.x = 1;
  if (error == "plant-output") shortage.yhat = 1;
  // The oracle runs on the whole input: its results only give the sizes.
  const CheckedProblem<float> whole(c);
  const OwnedProblem<float> owned(c, shortage);
  Problem<float> problem = owned.problem;
  if (error == "plant-undefined") problem.x_batch = std::numeric_limits<std::int64_t>::max() / 2;
  if (error == "plant-workspace") planted_shortage = 1;
  const OwnedResults<float> outputs(c, whole.expected, shortage);
  for (const InstructionSet* set : tested_instruction_sets()) {
    const auto call = [&] { kernels_of<float>(*set).attention(problem, outputs.results, 1, {}); };
    if (error == "plant-race") {
      std::thread other(call);
      call();
      other.join();
    } else {
      call();
    }
  }
  std::printf("%s was not reported\n", error.c_str());
  return 0;
}

}  // namespace
}  // namespace fastlin

int main(int count, char** arguments) {
  const std::string mode = count == 2 ? arguments[1] : "";
  if (mode == "edges") return fastlin::edges();
  if (mode == "threads") return fastlin::threads();
  if (mode.rfind("plant-", 0) == 0) return fastlin::plant(mode);
  std::puts("wants edges, threads or plant-*");
  return 2;
}
