// The definitions of fastlin/backends/problem.py and eager.py, sequence by sequence and trial by trial. G and
// its gradient are always formed: the kernels' short cuts (streamed tokens, the prompt's part once a task)
// have no counterpart here.

#include "testing/attention_oracle.h"

#include <algorithm>
#include <cmath>

namespace fastlin {
namespace {

using Vector = std::vector<double>;

struct Matrix {
  explicit Matrix(std::int64_t size) : m(size), entries(static_cast<std::size_t>(size * size), 0.0) {}
  double& operator()(std::int64_t i, std::int64_t j) { return entries[static_cast<std::size_t>(i * m + j)]; }
  double operator()(std::int64_t i, std::int64_t j) const {
    return entries[static_cast<std::size_t>(i * m + j)];
  }
  std::int64_t m;
  Vector entries;
};

Matrix transposed(const Matrix& x) {
  Matrix out(x.m);
  for (std::int64_t i = 0; i < x.m; ++i) {
    for (std::int64_t j = 0; j < x.m; ++j) out(j, i) = x(i, j);
  }
  return out;
}

Matrix operator*(const Matrix& x, const Matrix& y) {
  Matrix out(x.m);
  for (std::int64_t i = 0; i < x.m; ++i) {
    for (std::int64_t k = 0; k < x.m; ++k) {
      for (std::int64_t j = 0; j < x.m; ++j) out(i, j) += x(i, k) * y(k, j);
    }
  }
  return out;
}

Vector operator*(const Matrix& x, const Vector& y) {
  Vector out(y.size(), 0.0);
  for (std::int64_t i = 0; i < x.m; ++i) {
    for (std::int64_t j = 0; j < x.m; ++j) out[i] += x(i, j) * y[j];
  }
  return out;
}

double dot(const Vector& x, const Vector& y) {
  double sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
  return sum;
}

// to += factor x y'
void add_outer(double factor, const Vector& x, const Vector& y, Matrix& to) {
  for (std::int64_t i = 0; i < to.m; ++i) {
    for (std::int64_t j = 0; j < to.m; ++j) to(i, j) += factor * x[i] * y[j];
  }
}

void add(double factor, const double* from, std::int64_t count, double* to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] += factor * from[i];
}

// to += factor sym(x)
void add_symmetric(double factor, const Matrix& x, Matrix& to) {
  for (std::int64_t i = 0; i < x.m; ++i) {
    for (std::int64_t j = 0; j < x.m; ++j) to(i, j) += 0.5 * factor * (x(i, j) + x(j, i));
  }
}

template <class T>
class Evaluation {
 public:
  Evaluation(const Problem<T>& P, bool magnitudes)
      : P(P), m(P.m), magnitudes(magnitudes), scale(of(P.scale)) {
    const std::int64_t length = P.is_gram ? m * m : P.n * m, matrices = P.R * P.H * m * m;
    const auto zeros = [](std::int64_t count) { return Vector(static_cast<std::size_t>(count), 0.0); };
    out = {zeros(P.R * P.B),
           zeros(P.R),
           zeros(P.R * P.K),
           zeros(P.B * length),
           zeros(P.B * m),
           zeros(P.R * P.K * P.t * m),
           zeros(matrices * P.layers),
           zeros(matrices * P.layers),
           zeros(matrices),
           zeros(P.R * P.H * (P.shares_v ? 1 : P.K) * m),
           zeros(P.R * P.K * m)};
    count.assign(static_cast<std::size_t>(P.K), 0.0);
    for (std::int64_t b = 0; b < P.B; ++b) count[task(b)] += 1;
  }

  OracleResults run() {
    for (std::int64_t b = 0; b < P.B; ++b) sequence(b);
    for (std::int64_t r = 0; P.y != nullptr && r < P.R; ++r) {
      for (std::int64_t k = 0; k < P.K; ++k) {
        double& mean = out.per_task[r * P.K + k];  // still a sum here
        const double weight = P.weight == nullptr ? count[k] / P.B : of(P.weight[k]);
        mean = count[k] > 0 ? mean / count[k] : 0;
        out.loss[r] += weight * mean;
      }
    }
    return out;
  }

  Matrix gram_of_tokens(std::int64_t b) const {
    Matrix G(m);
    for (std::int64_t i = 0; i < P.n; ++i) add_outer(1, row(b, i), row(b, i), G);
    return G;
  }

 private:
  template <class N>
  double of(N number) const {
    return magnitudes ? std::abs(static_cast<double>(number)) : static_cast<double>(number);
  }
  Vector vector(const T* from) const {
    Vector x(static_cast<std::size_t>(m));
    for (std::int64_t i = 0; i < m; ++i) x[i] = of(from[i]);
    return x;
  }
  Matrix matrix(const T* from, std::int64_t index) const {
    Matrix x(m);
    for (std::int64_t i = 0; i < m * m; ++i) x.entries[i] = of(from[index * m * m + i]);
    return x;
  }
  Vector row(std::int64_t b, std::int64_t i) const { return vector(P.x + b * P.x_batch + i * P.x_row); }
  std::int64_t task(std::int64_t b) const { return P.task == nullptr ? 0 : P.task[b]; }
  std::int64_t layer(std::int64_t r, std::int64_t l, std::int64_t h) const {
    return (r * P.layers + l) * P.H + h;
  }
  std::int64_t head(std::int64_t r, std::int64_t h, std::int64_t k) const {
    return P.shares_v ? r * P.H + h : (r * P.H + h) * P.K + k;
  }

  // dloss/dyhat; squared errors go to per_task.
  double residual(std::int64_t r, std::int64_t b, double yhat) {
    if (P.y == nullptr) return P.gy == nullptr ? 0.0 : of(P.gy[r * P.B + b]);
    const std::int64_t k = task(b);
    const double error = magnitudes ? yhat + of(P.y[b]) : yhat - of(P.y[b]);
    out.per_task[r * P.K + k] += error * error;
    return 2 * error * (P.weight == nullptr ? 1.0 / P.B : of(P.weight[k]) / count[k]);
  }

  void sequence(std::int64_t b) {
    const Vector q = vector(P.q + b * P.q_batch);
    Matrix G = P.is_gram ? Matrix(m) : gram_of_tokens(b);
    if (P.is_gram) {
      Matrix stored(m);
      for (std::int64_t i = 0; i < m; ++i) {
        const Vector entries = row(b, i);
        for (std::int64_t j = 0; j < m; ++j) stored(i, j) = entries[j];
      }
      add_symmetric(1, stored, G);
    }
    if (P.see_query) add_outer(1, q, q, G);
    Matrix Gb(m);  // dloss/dG and dloss/dq of all trials
    Vector qb(q.size(), 0.0);
    for (std::int64_t r = 0; r < P.R; ++r) trial(b, r, G, q, Gb, qb);
    add(1, qb.data(), m, &out.dq[b * m]);
    if (P.see_query) add(2, (Gb * q).data(), m, &out.dq[b * m]);
    if (P.is_gram) add(1, Gb.entries.data(), m * m, &out.dx[b * m * m]);
    for (std::int64_t i = 0; !P.is_gram && i < P.n; ++i) {
      add(2, (Gb * row(b, i)).data(), m, &out.dx[(b * P.n + i) * m]);
    }
  }

  void trial(std::int64_t b, std::int64_t r, Matrix G, Vector q, Matrix& Gb_all, Vector& qb_all) {
    const std::int64_t k = task(b);
    std::vector<Vector> prompts;
    for (std::int64_t t = 0; P.p != nullptr && t < P.t; ++t) {
      prompts.push_back(vector(P.p + ((r * P.K + k) * P.t + t) * m));
      add_outer(1, prompts.back(), prompts.back(), G);
    }
    std::vector<Matrix> Gs, Ts;
    std::vector<Vector> qs;
    for (std::int64_t l = 0; l < P.layers; ++l) {
      Matrix T_l(m);
      for (std::int64_t i = 0; i < m; ++i) T_l(i, i) = of(l == 0 ? P.first_skip : P.skip);
      for (std::int64_t h = 0; h < P.H; ++h) {
        const Matrix AGC = matrix(P.A, layer(r, l, h)) * G * matrix(P.C, layer(r, l, h));
        add(scale, AGC.entries.data(), m * m, T_l.entries.data());
      }
      Gs.push_back(G);
      qs.push_back(q);
      G = transposed(T_l) * G * T_l;
      q = transposed(T_l) * q;
      Ts.push_back(T_l);
    }

    const double rho = of(P.last_skip);
    std::vector<Vector> as, cs, vs;
    double yhat = 0;
    for (std::int64_t h = 0; h < P.H; ++h) {
      vs.push_back(vector(P.v + head(r, h, k) * m));
      as.push_back(transposed(matrix(P.W, r * P.H + h)) * q);
      cs.push_back(G * vs.back());
      yhat += scale * dot(as.back(), cs.back());
    }
    if (P.h != nullptr) yhat += rho * dot(q, vector(P.h + (r * P.K + k) * m));
    out.yhat[r * P.B + b] = yhat;

    const double error = residual(r, b, yhat), g = scale * error;
    Matrix Gb(m);
    Vector qb(q.size(), 0.0);
    for (std::int64_t h = 0; h < P.H; ++h) {
      Matrix dW(m), av(m);
      add_outer(g, q, cs[h], dW);
      add(1, dW.entries.data(), m * m, &out.dW[(r * P.H + h) * m * m]);
      add(g, (G * as[h]).data(), m, &out.dv[head(r, h, k) * m]);
      add_outer(g, as[h], vs[h], av);
      add_symmetric(1, av, Gb);
      add(g, (matrix(P.W, r * P.H + h) * cs[h]).data(), m, qb.data());
    }
    if (P.h != nullptr) {
      add(rho * error, q.data(), m, &out.dh[(r * P.K + k) * m]);
      add(rho * error, vector(P.h + (r * P.K + k) * m).data(), m, qb.data());
    }

    for (std::int64_t l = P.layers - 1; l >= 0; --l) {
      Matrix Tb(m);
      add_outer(1, qs[l], qb, Tb);
      add(2, (Gs[l] * Ts[l] * Gb).entries.data(), m * m, Tb.entries.data());
      Gb = Ts[l] * Gb * transposed(Ts[l]);
      for (std::int64_t h = 0; h < P.H; ++h) {
        const Matrix At = transposed(matrix(P.A, layer(r, l, h)));
        const Matrix TbCt = Tb * transposed(matrix(P.C, layer(r, l, h)));
        add(scale, (TbCt * Gs[l]).entries.data(), m * m, &out.dA[layer(r, l, h) * m * m]);
        add(scale, (Gs[l] * At * Tb).entries.data(), m * m, &out.dC[layer(r, l, h) * m * m]);
        add_symmetric(scale, At * TbCt, Gb);
      }
      qb = Ts[l] * qb;
    }
    for (std::size_t t = 0; t < prompts.size(); ++t) {
      add(2, (Gb * prompts[t]).data(), m, &out.dp[((r * P.K + k) * P.t + static_cast<std::int64_t>(t)) * m]);
    }
    add(1, Gb.entries.data(), m * m, Gb_all.entries.data());
    add(1, qb.data(), m, qb_all.data());
  }

  const Problem<T>& P;
  const std::int64_t m;
  const bool magnitudes;
  const double scale;
  Vector count;  // [K] sequences
  OracleResults out;
};

}  // namespace

template <class T>
OracleResults evaluate(const Problem<T>& problem, bool magnitudes) {
  return Evaluation<T>(problem, magnitudes).run();
}

template <class T>
std::vector<double> evaluate_gram(const Problem<T>& problem, bool magnitudes) {
  const Evaluation<T> evaluation(problem, magnitudes);
  std::vector<double> all;
  for (std::int64_t b = 0; b < problem.B; ++b) {
    const Matrix G = evaluation.gram_of_tokens(b);
    all.insert(all.end(), G.entries.begin(), G.entries.end());
  }
  return all;
}

// A product has the roundings of its factors and one more; a sum has those of its longest term and one for
// each addition.
template <class T>
Roundings roundings(const Problem<T>& P) {
  const double m = P.m, H = P.H, B = P.B, R = P.R;
  std::vector<double> G{static_cast<double>(P.n + P.t) + 4}, q{0}, Ts;
  for (std::int64_t l = 0; l < P.layers; ++l) {
    Ts.push_back(G[l] + 2 * m + H + 4);
    G.push_back(2 * Ts[l] + G[l] + 2 * m);
    q.push_back(Ts[l] + q[l] + m);
  }
  const double a = q.back() + m, c = G.back() + m, e = G.back() + a + m;
  Roundings N;
  N.yhat = a + c + m + H + 4;
  N.per_task = 2 * N.yhat + B + 4;
  N.loss = N.per_task + static_cast<double>(P.K) + 2;
  const double g = N.yhat + 8;
  double Gb = g + a + H + 3, qb = g + c + m + H;
  N.dW = g + c + q.back() + B;
  N.dv = g + std::max(e, a + 2 * m + static_cast<double>(P.t)) + B;
  N.dh = g + q.back() + B;
  N.dA = N.dC = 0;
  for (std::int64_t l = P.layers - 1; l >= 0; --l) {
    const double Tb = std::max(q[l] + qb, G[l] + Ts[l] + Gb + 2 * m) + 3;
    N.dA = N.dC = std::max(N.dA, Tb + G[l] + 2 * m + B + 2);
    Gb = std::max(2 * Ts[l] + Gb, Tb) + 2 * m + H + 4;
    qb += Ts[l] + m;
  }
  N.dp = Gb + 2 * m + H + B + 4;
  N.dx = Gb + m + R * H + 4;
  N.dq = std::max(qb, Gb + m) + R * H + 4;
  return N;
}

template OracleResults evaluate(const Problem<float>&, bool);
template OracleResults evaluate(const Problem<double>&, bool);
template std::vector<double> evaluate_gram(const Problem<float>&, bool);
template std::vector<double> evaluate_gram(const Problem<double>&, bool);
template Roundings roundings(const Problem<float>&);
template Roundings roundings(const Problem<double>&);

}  // namespace fastlin
