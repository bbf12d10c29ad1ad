#include "testing/attention_cases.h"

#include <algorithm>
#include <cmath>

namespace fastlin {
namespace {

template <class Choices>
std::int64_t pick(Choices& random, const std::vector<std::int64_t>& values) {
  return values[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(values.size())))];
}

template <class Choices>
Case draw(Choices& random) {
  Case c{};
  for (const Size& size : sizes()) c.*size.member = pick(random, size.values);
  // A stack runs its trials one after another: nine test as much as 35.
  if (c.layers > 0) c.R = std::min<std::int64_t>(c.R, 9);
  c.mode = static_cast<Mode>(std::min<std::int64_t>(random.below(5) / 2, 2));
  c.indexed = c.K > 1 || random.coin();
  c.sorted = random.coin();
  c.is_gram = random.below(4) == 0;
  if (c.is_gram) c.n = c.m;
  c.see_query = random.coin();
  c.weighted = random.coin();
  c.skips = random.coin();
  c.x_layout = static_cast<int>(random.below(3));
  c.q_layout = static_cast<int>(random.below(3));
  // Every fourth case wants all gradients: a random subset seldom does.
  c.wants = random.below(4) == 0 ? ~0u : static_cast<unsigned>(random.next());
  c.seed = random.next();
  c.shares_v = c.seed % 4 == 0;
  return c;
}

template <class T>
Buffer<T> filled(Random& random, std::int64_t size, double scale = 1) {
  Buffer<T> out = nan_buffer<T>(size);
  for (std::int64_t i = 0; i < size; ++i) out[i] = static_cast<T>(scale * random.unit());
  return out;
}

// Matrices [B, rows, m] with strides; the gaps between rows stay NaN.
template <class T>
Buffer<T> strided(Random& random, std::int64_t B, std::int64_t rows, std::int64_t m, std::int64_t batch,
                  std::int64_t row, std::int64_t shortage) {
  if (B == 0 || rows == 0) return nullptr;
  const std::int64_t size = (B - 1) * batch + (rows - 1) * row + m - shortage;
  Buffer<T> out = nan_buffer<T>(size);
  for (std::int64_t i = 0; i < B * rows * m; ++i) {
    const std::int64_t at = i / (rows * m) * batch + i / m % rows * row + i % m;
    if (at < size) out[at] = static_cast<T>(random.unit());
  }
  return out;
}

}  // namespace

const std::vector<Size>& sizes() {
  static const std::vector<Size> all = {
      {"m", &Case::m, {1, 2, 3, 5, 7, 8, 9, 11, 12, 15, 16, 17, 21, 33}},
      {"n", &Case::n, {0, 1, 2, 7, 8, 9, 17, 130, 520}},
      {"B", &Case::B, {0, 1, 2, 7, 8, 9, 17, 65, 130}},
      {"K", &Case::K, {1, 3, 40}},
      {"t", &Case::t, {0, 1, 3}},
      {"R", &Case::R, {1, 2, 9, 35}},
      {"H", &Case::H, {1, 2}},
      {"layers", &Case::layers, {0, 1, 2}},
  };
  return all;
}

double work(const Case& c) {
  const double lanes = static_cast<double>((c.B + 15) / 16 * 16), m = static_cast<double>(c.m);
  const double R = static_cast<double>(c.R), H = static_cast<double>(c.H);
  const double context = c.is_gram ? 0 : 4 * static_cast<double>(c.n) * m * std::min(m, 2 * R * H);
  return lanes * (context + R * H * 6 * m * m + R * static_cast<double>(c.layers) * (7 * H + 5) * m * m * m);
}

template <class Choices>
Case draw_case(Choices& choices, double most) {
  Case c = draw(choices);
  while (work(c) > most) c = draw(choices);
  return c;
}
template Case draw_case(ByteChoices&, double);

Case draw_case(std::uint64_t number, double most) {
  Random random(number);
  return draw_case(random, most);
}

double parameter_scale(std::int64_t n, std::int64_t m) {
  return 1 / (std::sqrt(static_cast<double>(n) + 1) * static_cast<double>(m));
}

std::string describe(const Case& c) {
  std::string text;
  const auto put = [&text](const char* name, std::int64_t value) {
    text += std::string(text.empty() ? "" : " ") + name + "=" + std::to_string(value);
  };
  for (const Size& size : sizes()) put(size.name, c.*size.member);
  put("mode", static_cast<int>(c.mode));
  put("indexed", c.indexed);
  put("sorted", c.sorted);
  put("is_gram", c.is_gram);
  put("see_query", c.see_query);
  put("shares_v", c.shares_v);
  put("weighted", c.weighted);
  put("skips", c.skips);
  put("x_layout", c.x_layout);
  put("q_layout", c.q_layout);
  put("wants", c.wants & 0xfffu);
  return text;
}

template <class T>
OwnedProblem<T>::OwnedProblem(const Case& c, Shortage shortage) {
  Random random(c.seed);
  Problem<T>& P = problem;
  P = {};
  P.B = c.B, P.n = c.n, P.m = c.m, P.K = c.K, P.t = c.t, P.R = c.R, P.H = c.H, P.layers = c.layers;
  const std::int64_t m = c.m, matrices = c.R * c.H * m * m;
  P.x_row = m + (c.x_layout == 1 ? 3 : 0);
  P.x_batch = c.x_layout == 2 ? 0 : c.n * P.x_row + (c.x_layout == 1 ? 5 : 0);
  P.q_batch = c.q_layout == 2 ? 0 : m + (c.q_layout == 1 ? 2 : 0);
  const double size = parameter_scale(c.n, m);
  x = strided<T>(random, c.B, c.n, m, P.x_batch, P.x_row, shortage.x);
  q = strided<T>(random, c.B, 1, m, P.q_batch, m, 0);
  p = filled<T>(random, c.R * c.K * c.t * m);
  A = filled<T>(random, matrices * c.layers, std::sqrt(size));
  C = filled<T>(random, matrices * c.layers, std::sqrt(size));
  W = filled<T>(random, matrices, size);
  v = filled<T>(random, c.R * c.H * (c.shares_v ? 1 : c.K) * m);
  if (c.skips) h = filled<T>(random, c.R * c.K * m);
  if (c.mode == Mode::kLoss) y = filled<T>(random, c.B);
  if (c.mode == Mode::kLoss && c.weighted) weight = filled<T>(random, c.K);
  if (c.mode == Mode::kReverse) gy = filled<T>(random, c.R * c.B);
  if (c.indexed) {
    task = Buffer<std::int64_t>(c.B == 0 ? nullptr : new std::int64_t[static_cast<std::size_t>(c.B)]);
    // The middle task is absent.
    for (std::int64_t b = 0; b < c.B; ++b) {
      task[b] = random.below(c.K);
      if (c.K > 1 && task[b] == c.K / 2) --task[b];
    }
    if (c.sorted) std::sort(task.get(), task.get() + c.B);
  }
  P.x = x.get(), P.q = q.get(), P.task = task.get(), P.p = p.get(), P.A = A.get(), P.C = C.get();
  P.W = W.get(), P.v = v.get(), P.h = h.get(), P.y = y.get(), P.weight = weight.get(), P.gy = gy.get();
  P.scale = random.coin() ? 1.0 : 0.37;
  P.first_skip = c.skips ? -0.8 : 0.0;
  P.skip = c.skips ? 0.9 : 0.0;
  P.last_skip = c.skips ? 1.1 : 0.0;
  P.is_gram = c.is_gram;
  P.see_query = c.see_query;
  P.shares_v = c.shares_v;
}

template <class T>
const std::vector<ResultField<T>>& result_fields() {
  using To = Results<T>;
  static const std::vector<ResultField<T>> all = {
      {"yhat", &To::yhat, &OracleResults::yhat, &Roundings::yhat},
      {"loss", &To::loss, &OracleResults::loss, &Roundings::loss},
      {"per_task", &To::per_task, &OracleResults::per_task, &Roundings::per_task},
      {"dx", &To::dx, &OracleResults::dx, &Roundings::dx},
      {"dq", &To::dq, &OracleResults::dq, &Roundings::dq},
      {"dp", &To::dp, &OracleResults::dp, &Roundings::dp},
      {"dA", &To::dA, &OracleResults::dA, &Roundings::dA},
      {"dC", &To::dC, &OracleResults::dC, &Roundings::dC},
      {"dW", &To::dW, &OracleResults::dW, &Roundings::dW},
      {"dv", &To::dv, &OracleResults::dv, &Roundings::dv},
      {"dh", &To::dh, &OracleResults::dh, &Roundings::dh},
  };
  return all;
}

template <class T>
OwnedResults<T>::OwnedResults(const Case& c, const OracleResults& expected, Shortage shortage) {
  for (std::size_t i = 0; i < result_fields<T>().size(); ++i) {
    const ResultField<T>& slot = result_fields<T>()[i];
    const bool is_loss = slot.result == &Results<T>::loss || slot.result == &Results<T>::per_task;
    bool wanted = (c.wants >> i & 1u) != 0 && c.mode != Mode::kPredict;
    if (is_loss) wanted = c.mode == Mode::kLoss;
    if (slot.result == &Results<T>::yhat) wanted = wanted || c.mode == Mode::kPredict;
    if (slot.result == &Results<T>::dh) wanted = wanted && c.skips;
    const auto size = static_cast<std::int64_t>((expected.*slot.expected).size());
    const std::int64_t missing = slot.result == &Results<T>::yhat ? shortage.yhat : 0;
    count.push_back(wanted ? size : 0);
    buffers.push_back(nan_buffer<T>(count.back() - missing));
    results.*slot.result = buffers.back().get();
  }
}

template struct OwnedProblem<float>;
template struct OwnedProblem<double>;
template struct OwnedResults<float>;
template struct OwnedResults<double>;
template const std::vector<ResultField<float>>& result_fields();
template const std::vector<ResultField<double>>& result_fields();

}  // namespace fastlin
