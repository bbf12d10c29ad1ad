// The trials of trials.cu: what a lane keeps of one, and what it does with a sequence.
#pragma once

#include "cuda/trials_stage.cuh"

namespace fastlin {
namespace cuda {
namespace {

// Which trial a thread works for. Threads are numbered (set, trial, lane of the trial); those past the sets,
// or of a trial that is not there, keep nothing. What is rarely needed takes one register, and is taken apart
// where it is needed.
class Lane {
 public:
  __device__ Lane(const Plan& plan, int lanes, std::int64_t R) {
    const int i = static_cast<int>(threadIdx.x), of_set = plan.slab * lanes;
    const int set = i / of_set, trial = i % of_set / lanes;
    const bool is_real = set < plan.sets && first(plan) + trial < R;
    bits_ = set | trial << 10 | (is_real ? 1 << 20 : 0);
  }
  // The block's first trial.
  __device__ static int first(const Plan& plan) { return static_cast<int>(blockIdx.x) * plan.slab; }

  __device__ int set() const { return opaque(bits_) & 1023; }
  __device__ int trial() const { return opaque(bits_) >> 10 & 1023; }
  __device__ bool is_real() const { return opaque(bits_) >> 20 != 0; }
  __device__ std::int64_t r(const Plan& plan) const { return first(plan) + trial(); }

 private:
  int bits_;
};

// Sums of all sets, in the order of the sets: put(number, sum) on a thread with the trial and part of that
// lane. `area` holds kSummed numbers of all threads. The first `wanted` of `values` count.
constexpr int kSummed = 16;

template <int count, class Put>
__device__ inline void add_sets(const float (&values)[count], int wanted, const Lane& lane, const Plan& plan,
                                int lanes, float* area, Put put) {
  const int of_set = plan.slab * lanes;
  FASTLIN_UNROLL
  for (int first = 0; first < count; first += kSummed) {
    if (first >= wanted) break;
    __syncthreads();
    FASTLIN_UNROLL
    for (int u = 0; u < kSummed && first + u < count; ++u) {
      area[u * kThreads + threadIdx.x] = values[first + u];
    }
    __syncthreads();
    const int set = lane.set(), end = lane.is_real() ? std::min(wanted - first, +kSummed) : 0;
    FASTLIN_NO_UNROLL
    for (int u = set; u < end; u += plan.sets) {
      const float* from = area + u * kThreads + threadIdx.x - set * of_set;
      float sum = 0;
      FASTLIN_NO_UNROLL
      for (int s = 0; s < plan.sets; ++s, from += of_set) sum += *from;
      put(first + u, sum);
    }
  }
}

// What a lane keeps of a trial: c0 = P_k v of the task, of the columns that it owns, and the sums.
template <int M>
struct Trial {
  using S = Shape<M>;
  static constexpr int N = S::columns + (S::rest ? 1 : 0);  // with the column that is shared by rows
  static constexpr int kOwn = M * S::columns, kShared = S::rest ? M / S::lanes + 1 : 0;  // of W
  float c0[N] = {};
  float squares = 0, dv[N] = {}, rq[N] = {}, dW[kOwn + kShared] = {};
  float coefficient = 0;  // twice that of a squared error: of r

  __device__ static int part() { return static_cast<int>(threadIdx.x) % S::lanes; }
  // Which column is a lane's u-th: M where it is another lane's.
  __device__ static int column(int u) {
    return u < S::columns ? part() + S::lanes * u : part() == 0 ? M - 1 : M;
  }
  __device__ static int row_of(int x) { return x < kOwn ? x / S::columns : part() + S::lanes * (x - kOwn); }
  __device__ static int column_of(int x) { return x < kOwn ? part() + S::lanes * (x % S::columns) : M - 1; }

  // Adds the sums since the last call to those of `task` in the chunk's row.
  __device__ void end_run(const Work& work, const Plan& plan, const Lane& lane, int task, float* area,
                          float* to) {
    float sums[1 + 2 * N];
    sums[0] = squares;
    squares = 0;
    FASTLIN_UNROLL
    for (int u = 0; u < N; ++u) {
      sums[1 + u] = dv[u], sums[1 + N + u] = rq[u];
      dv[u] = rq[u] = 0;
    }
    const int m = static_cast<int>(work.P.m);
    const int wanted = !work.gradients() ? 1 : work.at.q >= 0 ? 1 + 2 * N : 1 + N;
    add_sets(sums, wanted, lane, plan, S::lanes, area, [&](int i, float sum) {
      const int u = i > N ? i - 1 - N : i - 1, j = i == 0 ? (part() == 0 ? 0 : M) : column(u);
      const std::int64_t at = i == 0 ? work.at.squares : i > N ? work.at.q : work.at.e;
      const std::int64_t row = (task * work.P.R + lane.r(plan)) * work.at.width;
      if (at >= 0 && j < m) to[work.numbers.sums + row + at + j] += sum;
    });
  }

  __device__ void end_part(const Work& work, const Plan& plan, const Lane& lane, float* area, float* to) {
    if (work.out.dW == nullptr) return;
    const int m = static_cast<int>(work.P.m);
    add_sets(dW, kOwn + kShared, lane, plan, S::lanes, area, [&](int x, float sum) {
      const int i = row_of(x), j = column_of(x);
      if (i < m && j < m) to[work.numbers.dW + (lane.r(plan) * m + i) * m + j] += sum;
    });
    FASTLIN_UNROLL
    for (int x = 0; x < kOwn + kShared; ++x) dW[x] = 0;
  }
};

template <int count>
__device__ inline void load_quads(const float* from, Quad (&to)[count]) {
  FASTLIN_UNROLL
  for (int x = 0; x < count; ++x) to[x] = load_quad(from + 4 * x);
}

// What a kernel of one lane a trial is for: the gradients of a loss, without and with prompts, which neither
// stores predictions nor takes their slopes; or all that a call may ask for.
enum class For { kPlain, kPrompted, kAll };

// One lane a trial, M <= 12: dW, dv, v in registers, W in shared memory.
template <int M, For kFor>
struct OneLane : Trial<M> {
  using S = Shape<M>;
  using Trial<M>::c0;
  using Trial<M>::squares;
  using Trial<M>::dv;
  using Trial<M>::rq;
  using Trial<M>::dW;
  using Trial<M>::coefficient;
  static constexpr int T = S::together;

  float v[M] = {};

  __device__ OneLane(const Work& work, const Plan& plan, const Lane&, float* shared) {
    const int m = static_cast<int>(work.P.m), r0 = Lane::first(plan);
    FASTLIN_NO_UNROLL
    for (int x = threadIdx.x; x < plan.slab * S::W; x += kThreads) {
      const int r = r0 + x / S::W, i = x % S::W / M, j = x % S::W % M;
      const bool is_there = r < work.P.R && i < m && j < m;
      shared[x] = is_there ? work.P.W[(static_cast<std::int64_t>(r) * m + i) * m + j] : 0;
    }
  }

  __device__ void begin_run(const Work& work, const Plan& plan, const Lane& lane, int task, float*) {
    const Problem<float>& P = work.P;
    if (!lane.is_real()) return;
    const int m = static_cast<int>(P.m);
    const std::int64_t r = lane.r(plan);
    const float* from = P.v_of(r, task);
    FASTLIN_UNROLL
    for (int j = 0; j < M; ++j) v[j] = j < m ? from[j] : 0, c0[j] = 0;
    if (kFor == For::kPlain || P.p == nullptr) return;
    const float* prompt = P.p + (r * P.K + task) * P.t * m;
    FASTLIN_NO_UNROLL
    for (int t = 0; t < P.t; ++t, prompt += m) {
      float token[M], with_v = 0;
      FASTLIN_UNROLL
      for (int j = 0; j < M; ++j) token[j] = j < m ? prompt[j] : 0, with_v = std::fma(token[j], v[j], with_v);
      FASTLIN_UNROLL
      for (int j = 0; j < M; ++j) c0[j] = std::fma(token[j], with_v, c0[j]);
    }
  }

  template <class Sequence>
  __device__ void add(const Work& work, const Plan& plan, const Lane& lane, int count, const float* shared,
                      const float* tile, Sequence sequence) {
    constexpr bool kPlain = kFor == For::kPlain, kAll = kFor == For::kAll;
    const bool reverses = kAll && work.P.gy != nullptr, stores = kAll && work.out.yhat != nullptr;
    const bool gradients = !kAll || work.gradients(), sums_rq = kAll ? work.at.q >= 0 : !kPlain;
    const int begin = (lane.is_real() ? lane.set() * T : count) * S::floats;
    const float* const end = tile + count * S::floats;
    FASTLIN_NO_UNROLL
    for (const float* group = tile + begin; group < end; group += plan.step) {
      const int place = static_cast<int>(group - tile) / S::floats;
      const float* here = group;
      const float* W =
          shared + lane.trial() * S::W;  // new in each turn: else W would be taken out of the loop
      Quad q[T][S::quads];
      float a[T][M] = {};  // W' q
      FASTLIN_UNROLL
      for (int s = 0; s < T; ++s) load_quads(here + s * S::floats + S::q, q[s]);
      FASTLIN_UNROLL
      for (int x = 0; x < M * M; x += 4) {
        const Quad w = load_quad(W + x);
        FASTLIN_UNROLL
        for (int u = x; u < x + 4 && u < M * M; ++u) {
          FASTLIN_UNROLL
          for (int s = 0; s < T; ++s) {
            a[s][u % M] = std::fma(q[s][u / M / 4].x[u / M % 4], w.x[u % 4], a[s][u % M]);
          }
        }
      }
      FASTLIN_UNROLL
      for (int s = 0; s < T; ++s, here += S::floats) {
        float given = 0;
        if (reverses && place + s < count) {
          given = work.P.gy[lane.r(plan) * work.P.B + sequence(place + s)];
        }
        float c[M], e[M] = {};  // c0 + G v, G a
        Quad x;
        FASTLIN_UNROLL
        for (int j = 0; j < M; ++j) c[j] = kPlain ? 0 : c0[j];
        FASTLIN_UNROLL
        for (int i = 0, n = 0; i < M; ++i) {
          FASTLIN_UNROLL
          for (int j = i; j < M; ++j, ++n) {
            if (n % 4 == 0) x = load_quad(here + n);
            const float g = x.x[n % 4];
            c[i] = std::fma(g, v[j], c[i]), e[i] = std::fma(g, a[s][j], e[i]);
            if (j > i) c[j] = std::fma(g, v[i], c[j]), e[j] = std::fma(g, a[s][i], e[j]);
          }
        }
        float dot[2] = {};
        FASTLIN_UNROLL
        for (int j = 0; j < M; ++j) dot[j % 2] = std::fma(a[s][j], c[j], dot[j % 2]);
        constexpr int kY =
            std::min(S::y - S::q, 4 * S::quads - 1);  // of q's quads, where there is room for y
        const float y = kPlain && kY == S::y - S::q ? q[s][kY / 4].x[kY % 4] : here[S::y];
        const float product = dot[0] + dot[1], diff = std::fma(plan.scale, product, -y);
        squares = std::fma(diff, diff, squares);
        if (stores && place + s < count) {
          work.out.yhat[lane.r(plan) * work.P.B + sequence(place + s)] = plan.scale * product;
        }
        if (!gradients) continue;
        const float r = reverses ? given : coefficient * diff;
        // Beside c0 and the sums of r q there is no room for q: it is read again.
        if (!kPlain) load_quads(tile + opaque(static_cast<int>(here - tile) + S::q), q[s]);
        FASTLIN_UNROLL
        for (int j = 0; j < M; ++j) dv[j] = std::fma(r, e[j], dv[j]);
        FASTLIN_UNROLL
        for (int i = 0; i < M; ++i) {
          const float rq_i = r * q[s][i / 4].x[i % 4];
          FASTLIN_UNROLL
          for (int j = 0; j < M; ++j) dW[i * M + j] = std::fma(rq_i, c[j], dW[i * M + j]);
        }
        if (sums_rq) {
          FASTLIN_UNROLL
          for (int i = 0; i < M; ++i) rq[i] = std::fma(r, q[s][i / 4].x[i % 4], rq[i]);
        }
      }
    }
  }
};

// Several lanes a trial, M > 12: lane l owns columns l, l + lanes, ... of W, dW and G. W and dW are in its
// registers.
template <int M>
struct ManyLanes : Trial<M> {
  using S = Shape<M>;
  using Trial<M>::c0;
  using Trial<M>::squares;
  using Trial<M>::dv;
  using Trial<M>::rq;
  using Trial<M>::dW;
  using Trial<M>::coefficient;
  using Trial<M>::part;
  using Trial<M>::column;
  using Trial<M>::kOwn;
  using Trial<M>::kShared;
  static constexpr int N = S::columns;

  float W[kOwn + kShared];

  __device__ ManyLanes(const Work& work, const Plan& plan, const Lane& lane, float*) {
    const int m = static_cast<int>(work.P.m);
    const float* from = work.P.W + lane.r(plan) * m * m;
    FASTLIN_UNROLL
    for (int x = 0; x < kOwn + kShared; ++x) {
      const int i = this->row_of(x), j = this->column_of(x);
      W[x] = lane.is_real() && i < m && j < m ? from[i * m + j] : 0;
    }
  }

  // v of the block's trials [slab, row] in shared memory; behind them a, of each group of lanes.
  __device__ static float* v_of(const Lane& lane, float* shared) { return shared + lane.trial() * S::row; }
  __device__ static float* exchange_of(const Plan& plan, float* shared) {
    return shared + plan.slab * S::row + static_cast<int>(threadIdx.x) / S::lanes * S::exchange;
  }

  __device__ void begin_run(const Work& work, const Plan& plan, const Lane& lane, int task, float* shared) {
    const Problem<float>& P = work.P;
    const int m = static_cast<int>(P.m);
    const std::int64_t r = lane.r(plan);
    const float* from = P.v_of(r, task);
    if (lane.set() == 0) {
      FASTLIN_NO_UNROLL
      for (int j = part(); j < 4 * S::quads; j += S::lanes) {
        v_of(lane, shared)[j] = lane.is_real() && j < m ? from[j] : 0;
      }
    }
    FASTLIN_UNROLL
    for (int u = 0; u < Trial<M>::N; ++u) c0[u] = 0;
    if (P.p == nullptr || !lane.is_real()) return;
    const float* prompt = P.p + (r * P.K + task) * P.t * m;
    FASTLIN_NO_UNROLL
    for (int t = 0; t < P.t; ++t, prompt += m) {
      float with_v = 0;
      FASTLIN_NO_UNROLL
      for (int j = 0; j < m; ++j) with_v = std::fma(prompt[j], from[j], with_v);
      FASTLIN_UNROLL
      for (int u = 0; u < Trial<M>::N; ++u) {
        const int j = u < N ? column(u) : M - 1;  // all lanes have c of the shared column
        c0[u] = std::fma(j < m ? prompt[j] : 0, with_v, c0[u]);
      }
    }
  }

  __device__ static float over_lanes(float x) {
    FASTLIN_UNROLL
    for (int bits = 1; bits < S::lanes; bits *= 2) x += __shfl_xor_sync(0xffffffffu, x, bits);
    return x;
  }

  template <class Sequence>
  __device__ void add(const Work& work, const Plan& plan, const Lane& lane, int count, float* shared,
                      const float* tile, Sequence sequence) {
    const bool reverses = work.P.gy != nullptr, stores = work.out.yhat != nullptr;
    const bool gradients = work.gradients(), sums_rq = work.at.q >= 0;
    const float* v = v_of(lane, shared);
    float* exchange = exchange_of(plan, shared);
    const int rows = part() * S::row, at_last = std::min(part() + S::lanes * (kShared - 1), M - 1);
    const bool has_last = part() + S::lanes * (kShared - 1) < M;
    FASTLIN_NO_UNROLL
    for (int first = 0; first < count; first += plan.sets) {
      // All lanes of a warp take part in what it does together: those without a sequence have the zeros.
      const int place = std::min(first + lane.set(), count);
      const bool is_real = lane.is_real() && place < count;
      const float* here = tile + place * S::floats;
      float given = 0;
      if (reverses && is_real) given = work.P.gy[lane.r(plan) * work.P.B + sequence(place)];
      float a[N] = {};  // W' q
      FASTLIN_UNROLL
      for (int i = 0; i < M; i += 4) {
        const Quad q = load_quad(here + S::q + i);
        FASTLIN_UNROLL
        for (int x = i; x < i + 4 && x < M; ++x) {
          FASTLIN_UNROLL
          for (int u = 0; u < N; ++u) a[u] = std::fma(q.x[x - i], W[x * N + u], a[u]);
        }
      }
      // Of the shared column: entries part(), part() + lanes, ...; nothing behind the last.
      float q_own[kShared + 1], a_shared = 0, c_shared = 0, e_shared = 0;
      FASTLIN_UNROLL
      for (int x = 0; x < kShared; ++x) {
        q_own[x] = here[S::q + (x < kShared - 1 ? part() + S::lanes * x : at_last)];
        a_shared = std::fma(q_own[x], W[kOwn + x], a_shared);
      }
      FASTLIN_UNROLL
      for (int u = 0; u < N; ++u) exchange[part() + S::lanes * u] = a[u];
      if (S::rest) {
        a_shared = over_lanes(a_shared);
        if (part() == 0) exchange[M - 1] = a_shared;
      }
      __syncwarp();
      float c[N], e[N] = {}, dot = 0;  // c0 + G v, G a
      FASTLIN_UNROLL
      for (int u = 0; u < N; ++u) c[u] = c0[u];
      FASTLIN_UNROLL
      for (int j = 0; j < M; j += 4) {
        const Quad of_v = load_quad(v + j), of_a = load_quad(exchange + j);
        FASTLIN_UNROLL
        for (int u = 0; u < N; ++u) {
          // A lane's last column may be beyond M: it reads the last row, and its W is zero.
          const bool is_sure = S::lanes * (u + 1) <= M;
          const int row = is_sure ? rows + S::lanes * u * S::row
                                  : std::min(rows + S::lanes * u * S::row, (M - 1) * S::row);
          const Quad G = load_quad(here + row + j);
          FASTLIN_UNROLL
          for (int x = 0; x < 4 && j + x < M; ++x) {
            c[u] = std::fma(G.x[x], of_v.x[x], c[u]), e[u] = std::fma(G.x[x], of_a.x[x], e[u]);
          }
        }
      }
      FASTLIN_UNROLL
      for (int x = 0; x < kShared; ++x) {
        const int j = x < kShared - 1 ? part() + S::lanes * x : at_last;
        const float G = x < kShared - 1 || has_last ? here[(M - 1) * S::row + j] : 0;
        c_shared = std::fma(G, v[j], c_shared), e_shared = std::fma(G, exchange[j], e_shared);
      }
      FASTLIN_UNROLL
      for (int u = 0; u < N; ++u) dot = std::fma(a[u], c[u], dot);
      dot = over_lanes(dot);
      if (S::rest) {
        c_shared = c0[Trial<M>::N - 1] + over_lanes(c_shared);
        dot = std::fma(a_shared, c_shared, dot);
      }
      const float diff = std::fma(plan.scale, dot, -here[S::y]);
      squares = std::fma(diff, diff, squares);
      if (stores && is_real && part() == 0) {
        work.out.yhat[lane.r(plan) * work.P.B + sequence(place)] = plan.scale * dot;
      }
      if (gradients) {
        const float r = reverses ? given : coefficient * diff;
        FASTLIN_UNROLL
        for (int u = 0; u < N; ++u) dv[u] = std::fma(r, e[u], dv[u]), c[u] *= r;
        FASTLIN_UNROLL
        for (int x = 0; x < kOwn; ++x) dW[x] = std::fma(here[S::q + x / N], c[x % N], dW[x]);
        FASTLIN_UNROLL
        for (int u = 0; sums_rq && u < N; ++u) {
          rq[u] = std::fma(r, here[S::q + std::min(part() + S::lanes * u, M - 1)], rq[u]);
        }
        if (S::rest) {
          dv[Trial<M>::N - 1] = std::fma(r, e_shared, dv[Trial<M>::N - 1]);
          rq[Trial<M>::N - 1] = std::fma(r, here[S::q + M - 1], rq[Trial<M>::N - 1]);
          FASTLIN_UNROLL
          for (int x = 0; x < kShared; ++x) dW[kOwn + x] = std::fma(q_own[x], r * c_shared, dW[kOwn + x]);
        }
      }
      __syncwarp();  // nobody writes a before all have read it
    }
  }

  __device__ void end_run(const Work& work, const Plan& plan, const Lane& lane, int task, float* area,
                          float* to) {
    if (S::rest) dv[Trial<M>::N - 1] = over_lanes(dv[Trial<M>::N - 1]);
    Trial<M>::end_run(work, plan, lane, task, area, to);
  }
};

}  // namespace
}  // namespace cuda
}  // namespace fastlin
