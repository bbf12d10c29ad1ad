// The trials of trials.cu: what a lane keeps of one, and what it does with a sequence.
#pragma once

#include "cuda/trials_stage.cuh"

namespace fastlin {
namespace cuda {
namespace {

// Which trial a thread works for. Threads are numbered (set, trial, lane of the trial); those past the sets,
// or of a trial that is not there, keep nothing.
struct Lane {
  int set, trial, part;
  std::int64_t r;
  bool is_real;
};

// Sums of all sets, in the order of the sets: put(number, sum) on a thread with the trial and part of that
// lane. `area` holds 16 numbers of all threads. The first `wanted` of `values` count.
template <int count, class Put>
__device__ inline void add_sets(const float (&values)[count], int wanted, const Lane& lane, const Plan& plan,
                                int lanes, float* area, Put put) {
  constexpr int kOnce = 16;
  const int of_set = plan.slab * lanes, own = threadIdx.x - lane.set * of_set;
  FASTLIN_UNROLL
  for (int first = 0; first < count; first += kOnce) {
    if (first >= wanted) break;
    __syncthreads();
    FASTLIN_UNROLL
    for (int u = 0; u < kOnce && first + u < count; ++u) area[u * kThreads + threadIdx.x] = values[first + u];
    __syncthreads();
    if (!lane.is_real) continue;
    FASTLIN_NO_UNROLL
    for (int u = lane.set; u < std::min(kOnce, wanted - first); u += plan.sets) {
      const float* from = area + u * kThreads + own;
      float sum = 0;
      FASTLIN_NO_UNROLL
      for (int set = 0; set < plan.sets; set += 4) {
        float x[4];
        FASTLIN_UNROLL
        for (int s = 0; s < 4; ++s) x[s] = set + s < plan.sets ? from[(set + s) * of_set] : 0;
        sum = (((sum + x[0]) + x[1]) + x[2]) + x[3];
      }
      put(first + u, sum);
    }
  }
}

// What is wanted of a call, the same for all threads.
struct Wanted {
  const float* gy;  // [R, B] or null
  float* yhat;      // [R, B] or null
  bool gradients, rq;

  __device__ explicit Wanted(const Work& work)
      : gy(work.P.gy), yhat(work.out.yhat), gradients(work.gradients()), rq(work.at.q >= 0) {}
};

// What both mappings keep: v and c0 = P_k v of the task, of the columns that a lane owns, and the sums.
template <int M>
struct Trial {
  using S = Shape<M>;
  static constexpr int N = S::columns;
  float c0[N] = {};
  float squares = 0, dv[N] = {}, rq[N] = {}, dW[M * N] = {};
  float coefficient = 0;  // of r: twice that of a squared error

  // The sums since the last call for `task`, into the chunk's row.
  __device__ void end_run(const Work& work, const Plan& plan, const Wanted& wanted, const Lane& lane, int task,
                          float* area, float* to) {
    float sums[1 + 2 * N];
    sums[0] = squares;
    squares = 0;
    FASTLIN_UNROLL
    for (int u = 0; u < N; ++u) {
      sums[1 + u] = dv[u], sums[1 + N + u] = rq[u];
      dv[u] = rq[u] = 0;
    }
    const int m = static_cast<int>(work.P.m);
    float* row = to + work.numbers.sums + (task * work.P.R + lane.r) * work.at.width;
    add_sets(sums, !wanted.gradients ? 1 : wanted.rq ? 1 + 2 * N : 1 + N, lane, plan, S::lanes, area,
             [&](int i, float sum) {
               const int u = i > N ? i - 1 - N : i - 1, j = i == 0 ? 0 : lane.part + S::lanes * u;
               const std::int64_t at = i == 0 ? work.at.squares : i > N ? work.at.q : work.at.e;
               if (at >= 0 && j < m && (i > 0 || lane.part == 0)) row[at + j] += sum;
             });
  }

  __device__ void end_part(const Work& work, const Plan& plan, const Lane& lane, float* area, float* to) {
    if (work.out.dW == nullptr) return;
    const int m = static_cast<int>(work.P.m);
    float* matrix = to + work.numbers.dW + lane.r * m * m;
    add_sets(dW, M * N, lane, plan, S::lanes, area, [&](int x, float sum) {
      const int i = x / N, j = lane.part + S::lanes * (x % N);
      if (i < m && j < m) matrix[i * m + j] += sum;
    });
    FASTLIN_UNROLL
    for (int x = 0; x < M * N; ++x) dW[x] = 0;
  }
};

// One lane a trial, M <= 12: dW, dv, v in registers, W in shared memory.
template <int M>
struct OneLane : Trial<M> {
  using S = Shape<M>;
  using Trial<M>::c0;
  using Trial<M>::squares;
  using Trial<M>::dv;
  using Trial<M>::rq;
  using Trial<M>::dW;
  using Trial<M>::coefficient;
  static constexpr int T = S::together, kTriangle = RecordOf<M>::triangle;

  const float* W;  // shared, of all trials of the block
  int W_at;
  float v[M] = {};

  __device__ OneLane(const Work& work, const Plan& plan, const Lane& lane, float* shared)
      : W(shared), W_at(lane.trial * S::W) {
    const int m = static_cast<int>(work.P.m), r0 = static_cast<int>(lane.r) - lane.trial;
    FASTLIN_NO_UNROLL
    for (int x = threadIdx.x; x < plan.slab * S::W; x += kThreads) {
      const int trial = x / S::W, i = x % S::W / M, j = x % S::W % M;
      const bool is_there = r0 + trial < work.P.R && i < m && j < m;
      shared[x] = is_there ? work.P.W[(static_cast<std::int64_t>(r0 + trial) * m + i) * m + j] : 0;
    }
  }

  __device__ void begin_run(const Work& work, const Lane& lane, int task) {
    const Problem<float>& P = work.P;
    if (!lane.is_real) return;
    const int m = static_cast<int>(P.m);
    const float* from = P.v_of(lane.r, task);
    FASTLIN_UNROLL
    for (int j = 0; j < M; ++j) v[j] = j < m ? from[j] : 0, c0[j] = 0;
    if (P.p == nullptr) return;
    const float* prompt = P.p + (lane.r * P.K + task) * P.t * m;
    FASTLIN_NO_UNROLL
    for (int t = 0; t < P.t; ++t, prompt += m) {
      float token[M], with_v = 0;
      FASTLIN_UNROLL
      for (int j = 0; j < M; ++j) token[j] = j < m ? prompt[j] : 0, with_v = std::fma(token[j], v[j], with_v);
      FASTLIN_UNROLL
      for (int j = 0; j < M; ++j) c0[j] = std::fma(token[j], with_v, c0[j]);
    }
  }

  template <class Index>
  __device__ void add(const Work& work, const Plan& plan, const Wanted& wanted, const Lane& lane, int count,
                      const float* tile, Index index) {
    const float scale = static_cast<float>(work.P.scale);
    const int step = plan.sets * T;
    FASTLIN_NO_UNROLL
    for (int place = lane.is_real ? lane.set * T : count; place < count; place += step) {
      const float* here = tile + place * S::floats;
      float given[T] = {};
      if (wanted.gy != nullptr) {
        FASTLIN_UNROLL
        for (int s = 0; s < T; ++s) {
          if (place + s < count) given[s] = wanted.gy[lane.r * work.P.B + index(place + s)];
        }
      }
      const int w_at = opaque(W_at);
      float a[T][M] = {};  // W' q
      FASTLIN_UNROLL
      for (int x = 0; x < M * M; x += 4) {
        const Quad w = load_quad(W + w_at + x);
        FASTLIN_UNROLL
        for (int u = x; u < x + 4 && u < M * M; ++u) {
          FASTLIN_UNROLL
          for (int s = 0; s < T; ++s) {
            a[s][u % M] = std::fma(here[s * S::floats + S::q + u / M], w.x[u % 4], a[s][u % M]);
          }
        }
      }
      FASTLIN_UNROLL
      for (int s = 0; s < T; ++s, here += S::floats) {
        float c[M], e[M] = {};  // c0 + G v, G a
        Quad x;
        FASTLIN_UNROLL
        for (int j = 0; j < M; ++j) c[j] = c0[j];
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
        const float yhat = scale * (dot[0] + dot[1]), diff = yhat - here[S::y];
        squares = std::fma(diff, diff, squares);
        if (wanted.yhat != nullptr && place + s < count) {
          wanted.yhat[lane.r * work.P.B + index(place + s)] = yhat;
        }
        if (!wanted.gradients) continue;
        const float r = wanted.gy != nullptr ? given[s] : coefficient * diff;
        FASTLIN_UNROLL
        for (int j = 0; j < M; ++j) dv[j] = std::fma(r, e[j], dv[j]);
        FASTLIN_UNROLL
        for (int i = 0; i < M; ++i) {
          const float rq_i = r * here[S::q + i];
          FASTLIN_UNROLL
          for (int j = 0; j < M; ++j) dW[i * M + j] = std::fma(rq_i, c[j], dW[i * M + j]);
        }
        if (!wanted.rq) continue;
        FASTLIN_UNROLL
        for (int i = 0; i < M; ++i) rq[i] = std::fma(r, here[S::q + i], rq[i]);
      }
    }
  }
};

// Several lanes a trial, M > 12: lane l owns columns l, l + lanes, ... of W, dW and G, all in registers but G.
template <int M>
struct ManyLanes : Trial<M> {
  using S = Shape<M>;
  using Trial<M>::c0;
  using Trial<M>::squares;
  using Trial<M>::dv;
  using Trial<M>::rq;
  using Trial<M>::dW;
  using Trial<M>::coefficient;
  static constexpr int N = S::columns;

  float *v, *exchange;  // shared: v of the trial [row]; a of the trial, for this group of lanes
  float W[M * N];

  __device__ ManyLanes(const Work& work, const Plan& plan, const Lane& lane, float* shared)
      : v(shared + lane.trial * S::row),
        exchange(shared + plan.slab * S::row + static_cast<int>(threadIdx.x) / S::lanes * S::exchange) {
    const int m = static_cast<int>(work.P.m);
    FASTLIN_UNROLL
    for (int x = 0; x < M * N; ++x) {
      const int i = x / N, j = lane.part + S::lanes * (x % N);
      W[x] = lane.is_real && i < m && j < m ? work.P.W[(lane.r * m + i) * m + j] : 0;
    }
  }

  __device__ void begin_run(const Work& work, const Lane& lane, int task) {
    const Problem<float>& P = work.P;
    const int m = static_cast<int>(P.m);
    const float* from = P.v_of(lane.r, task);
    if (lane.set == 0) {
      FASTLIN_NO_UNROLL
      for (int j = lane.part; j < 4 * S::quads; j += S::lanes) v[j] = lane.is_real && j < m ? from[j] : 0;
    }
    FASTLIN_UNROLL
    for (int u = 0; u < N; ++u) c0[u] = 0;
    if (P.p == nullptr || !lane.is_real) return;
    const float* prompt = P.p + (lane.r * P.K + task) * P.t * m;
    FASTLIN_NO_UNROLL
    for (int t = 0; t < P.t; ++t, prompt += m) {
      float with_v = 0;
      FASTLIN_NO_UNROLL
      for (int j = 0; j < m; ++j) with_v = std::fma(prompt[j], from[j], with_v);
      FASTLIN_UNROLL
      for (int u = 0; u < N; ++u) {
        const int j = lane.part + S::lanes * u;
        c0[u] = std::fma(j < m ? prompt[j] : 0, with_v, c0[u]);
      }
    }
  }

  template <class Index>
  __device__ void add(const Work& work, const Plan& plan, const Wanted& wanted, const Lane& lane, int count,
                      const float* tile, Index index) {
    const float scale = static_cast<float>(work.P.scale);
    FASTLIN_NO_UNROLL
    for (int first = 0; first < count; first += plan.sets) {
      // All lanes of a warp take part in what it does together: those without a sequence have the zeros.
      const int place = std::min(first + lane.set, count);
      const bool is_real = lane.is_real && place < count;
      const float* here = tile + place * S::floats;
      float given = 0;
      if (wanted.gy != nullptr && is_real) given = wanted.gy[lane.r * work.P.B + index(place)];
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
      FASTLIN_UNROLL
      for (int u = 0; u < N; ++u) exchange[lane.part + S::lanes * u] = a[u];
      __syncwarp();
      float c[N], e[N] = {};  // c0 + G v, G a
      FASTLIN_UNROLL
      for (int u = 0; u < N; ++u) c[u] = c0[u];
      FASTLIN_UNROLL
      for (int j = 0; j < M; j += 4) {
        const Quad of_v = load_quad(v + j), of_a = load_quad(exchange + j);
        FASTLIN_UNROLL
        for (int u = 0; u < N; ++u) {
          // A lane's last columns may be beyond M: it reads a row that is there, and its W is zero.
          const Quad G = load_quad(here + std::min(lane.part + S::lanes * u, M - 1) * S::row + j);
          FASTLIN_UNROLL
          for (int x = 0; x < 4; ++x) {
            c[u] = std::fma(G.x[x], of_v.x[x], c[u]), e[u] = std::fma(G.x[x], of_a.x[x], e[u]);
          }
        }
      }
      float dot = 0;
      FASTLIN_UNROLL
      for (int u = 0; u < N; ++u) dot = std::fma(a[u], c[u], dot);
      FASTLIN_UNROLL
      for (int bits = 1; bits < S::lanes; bits *= 2) dot += __shfl_xor_sync(0xffffffffu, dot, bits);
      const float yhat = scale * dot, diff = yhat - here[S::y];
      squares = std::fma(diff, diff, squares);
      if (wanted.yhat != nullptr && is_real && lane.part == 0) {
        wanted.yhat[lane.r * work.P.B + index(place)] = yhat;
      }
      if (wanted.gradients) {
        const float r = wanted.gy != nullptr ? given : coefficient * diff;
        float rc[N];
        FASTLIN_UNROLL
        for (int u = 0; u < N; ++u) rc[u] = r * c[u], dv[u] = std::fma(r, e[u], dv[u]);
        FASTLIN_UNROLL
        for (int x = 0; x < M * N; ++x) dW[x] = std::fma(here[S::q + x / N], rc[x % N], dW[x]);
        FASTLIN_UNROLL
        for (int u = 0; wanted.rq && u < N; ++u) {
          rq[u] = std::fma(r, here[S::q + std::min(lane.part + S::lanes * u, M - 1)], rq[u]);
        }
      }
      __syncwarp();  // nobody writes a before all have read it
    }
  }
};

}  // namespace
}  // namespace cuda
}  // namespace fastlin
