// Several lanes for a trial of trials.cu.
#pragma once

#include "cuda/trials_lane.cuh"

namespace fastlin {
namespace cuda {
namespace {

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
      // q is read again for dW: kept, it would take registers that sm_120 does not have.
      const auto q_own = [&](int x) {
        return here[S::q + (x < kShared - 1 ? part() + S::lanes * x : at_last)];
      };
      float a_shared = 0, c_shared = 0, e_shared = 0;
      FASTLIN_UNROLL
      for (int x = 0; x < kShared; ++x) a_shared = std::fma(q_own(x), W[kOwn + x], a_shared);
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
          for (int x = 0; x < kShared; ++x) dW[kOwn + x] = std::fma(q_own(x), r * c_shared, dW[kOwn + x]);
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
