// The reverse mode of a stack, and the sums over sequences.
#pragma once

#include "cuda/stack_warp.cuh"

namespace fastlin {
namespace cuda {
namespace {

template <int M>
__device__ FASTLIN_INLINE void StackWarp<M>::differentiate(Tile& G, const Own& a, const Own& c,
                                                           float residual) {
  const float* Cv = of_task(at.Cv);
  const float skip = rho(at.dense);
  Own h, ra, rq, Rc, ca = {}, qb, Gca = {}, Cqb = {}, Ta, Gcqb = {}, Ga = {}, below, Aga = {}, Gaga = {}, e;
  scale(residual, a, ra);
  scale(residual, c, Rc);
  lane.put(ra, vector(kA));
  lane.put(Rc, vector(kC));
  __syncwarp();
  apply_C(vector(kA), ca);
  lane.own(of_task(at.h), h);
  scale(residual * at.last_skip, h, qb);
  apply_W(vector(kC), qb);
  lane.put(ca, vector(kCa));
  lane.put(qb, vector(kQb));
  __syncwarp();
  lane.apply(G, vector(kCa), Gca);
  apply_C(vector(kQb), Cqb);
  lane.put(Gca, vector(kGCa));
  lane.put(Cqb, vector(kCqb));
  __syncwarp();
  scale(skip, ra, Ta);
  apply_A(vector(kGCa), Ta);
  lane.apply(G, vector(kCqb), Gcqb);
  lane.put(Ta, vector(kTa));
  lane.put(Gcqb, vector(kGCqb));
  __syncwarp();
  lane.apply(G, vector(kTa), Ga);
  scale(skip, qb, below);
  apply_A(vector(kGCqb), below);
  lane.put(Ga, vector(kGTa));
  __syncwarp();
  apply_At(vector(kGTa), Aga);
  lane.put(Aga, vector(kAGTa));
  __syncwarp();
  lane.apply(G, vector(kAGTa), Gaga);
  lane.put(Gaga, vector(kGAGTa));
  __syncwarp();
  scale(skip, Ga, e);
  apply_Ct(vector(kGAGTa), e);
  lane.own(vector(kQn), rq);
  scale(residual, rq, rq);

  add_products();
  const bool reverses = work.out.dA != nullptr || work.out.dC != nullptr || work.at.p >= 0;
  if (reverses) {
    clear(G);
    add_outer(vector(kTa), vector(kTv), G);
    add_outer(vector(kAq), vector(kCqb), G);
    add_outer(vector(kAGTa), Cv, G);
    add_outer(vector(kAGTv), vector(kCa), G);
  }
  __syncwarp();
  lane.put(e, for_sums(0));
  lane.put(rq, for_sums(1));
  if (reverses && (at.dense > 0 || work.at.p >= 0)) {  // H = S + S'
    float* H = work_matrix();
    lane.store(G, H);
    if (at.dense > 0) lane.put(below, staying(0));
    __syncwarp();
    lane.add_across(H, G);
    __syncwarp();
    lane.store(G, H);
    __syncwarp();
    FASTLIN_NO_UNROLL
    for (int l = at.dense - 1; l >= 0; --l) reverse(l);
  }
  if (at.dense == 0 && work.at.p >= 0) {
    FASTLIN_NO_UNROLL
    for (int t = 0; t < at.t; ++t) {
      Own dp = {};
      lane.apply(G, of_token(at.p, t), dp);
      lane.put(dp, for_sums(2 + t));
    }
  }
  add_numbers();
}

template <int M>
__device__ FASTLIN_INLINE void StackWarp<M>::add_products() {
  const float* from = memory + own_memory + at.sequences;
  if constexpr (S::splits_products) {
    int factors[kKept];
    FASTLIN_UNROLL
    for (int pass = 0; pass < kKept; ++pass) factors[pass] = parts_of_sums()[32 * (1 + pass)];
    FASTLIN_UNROLL
    for (int s = 0; s < S::sequences; ++s) {
      FASTLIN_UNROLL
      for (int pass = 0; pass < kKept; ++pass) {
        const float* of_sequence = from + s * at.sequence;
        add_quads(of_sequence + (factors[pass] >> 16), of_sequence + (factors[pass] & 0xffff),
                  products[pass]);
      }
    }
  } else {
    FASTLIN_NO_UNROLL
    for (int job = number; job < S::jobs; job += 32) {
      const int matrix = job / S::tiles, place = job % S::tiles;
      const int rows = place / S::side * 4, columns = place % S::side * 4;
      float* to = memory + own_memory + at.tiles + job * 16;
      float sums[16];
      FASTLIN_UNROLL
      for (int i = 0; i < 16; ++i) sums[i] = to[i];
      FASTLIN_NO_UNROLL
      for (int product = 3 * matrix; product < (matrix < 2 ? 3 * matrix + 3 : kProducts); ++product) {
        FASTLIN_UNROLL
        for (int s = 0; s < S::sequences; ++s) {
          add_quads(from + s * at.sequence + left_of(product) + rows,
                    from + s * at.sequence + (S::vectors + product) * S::column + columns, sums);
        }
      }
      FASTLIN_UNROLL
      for (int i = 0; i < 16; ++i) to[i] = sums[i];
    }
  }
}

template <int M>
__device__ FASTLIN_INLINE void StackWarp<M>::reverse(int l) {
  float *G = dense(l), *H = work_matrix(), *one = memory + sequence + at.extra, *two = one + S::matrix;
  const float *X = G + S::matrix, *A = memory + at.A + l * S::matrix, *C = memory + at.C + l * S::matrix;
  float* qb = staying(0);
  if (l == 0 && work.at.p >= 0) prompts_above(G);
  // T', H T', T H T', Tb, Z, Z C': at the bottom only Tb and Z.
  FASTLIN_NO_UNROLL
  for (int step = l > 0 ? 0 : 3; step < (l > 0 ? 6 : 5); ++step) {
    const float* left = step == 0 ? X : step == 2 ? two : step == 3 ? G + 2 * S::matrix : step == 4 ? A : H;
    const float* right = step == 0 ? A : step < 3 ? one : step < 5 ? H : C;
    Tile tile;
    clear(tile);
    lane.multiply_from(left, right, false, tile);
    if (step == 3) {
      add_outer(query(l), qb, tile);
    }
    __syncwarp();
    if (step == 1) {
      lane.store_across(tile, two);
    } else if (step == 5) {
      lane.store(tile, two);
    } else {
      lane.store(tile, step < 3 ? one : H);
    }
    if (step == 0) add_to_diagonal(rho(l), one);
    __syncwarp();
    if constexpr (S::keeps_sums) {
      if (step == 3) add_product(l, 0, H, X, dA);
      if (step == 4) add_product(l, 1, G, H, dC);
    } else if (step == 3 || step == 4) {
      add_product(l, step - 3, step == 3 ? H : G, step == 3 ? X : H, tile);
    }
  }
  if (l == 0) {
    if (work.at.p >= 0) prompts_below(H);
    return;
  }
  // H = T H T' + Z C' + C Z', qb = T qb
  Tile sum, other;
  load_tile(one, sum);
  load_tile(two, other);
  FASTLIN_UNROLL
  for (int j = 0; j < S::columns; ++j) {
    FASTLIN_UNROLL
    for (int i = 0; i < S::rows; ++i) {
      sum[j][i] += other[j][i];
    }
  }
  lane.add_across(two, sum);
  Own Xqb = {}, own;
  lane.apply(X, qb, Xqb);
  float* scratch = staying(1);
  lane.put(Xqb, scratch);
  lane.own(qb, own);
  __syncwarp();
  lane.store(sum, H);
  scale(rho(l), own, own);
  lane.apply(A, scratch, own);
  lane.put(own, qb);
  __syncwarp();
}

template <int M>
__device__ FASTLIN_INLINE void StackWarp<M>::add_product(int l, int which, const float* left,
                                                         const float* right, Tile& sums) {
  float* kept = memory + own_memory + at.accumulated + (2 * l + which) * 32 * S::tile;
  const bool stored = !S::keeps_sums || at.dense > 1;
  if (stored) {
    FASTLIN_UNROLL
    for (int i = 0; i < S::tile; ++i) sums[i / S::rows][i % S::rows] = kept[i * 32 + number];
  }
  lane.multiply_from(left, right, false, sums);
  if (stored) store_sums(sums, kept);
}

template <int M>
__device__ FASTLIN_INLINE void StackWarp<M>::prompts_above(const float* G) const {
  float *one = staying(1), *two = staying(2);
  FASTLIN_NO_UNROLL
  for (int t = 0; t < at.t; ++t) {
    Own HTp = {}, XHTp = {};
    lane.apply(work_matrix(), for_sums(2 + t), HTp);
    lane.put(HTp, one);
    __syncwarp();
    lane.apply(G + S::matrix, one, XHTp);
    lane.put(XHTp, two);
    __syncwarp();
    scale(at.first_skip, HTp, HTp);
    lane.apply(memory + at.A, two, HTp);
    lane.put(HTp, for_sums(2 + t));
  }
}

template <int M>
__device__ FASTLIN_INLINE void StackWarp<M>::prompts_below(const float* Z) const {
  float* one = staying(1);
  FASTLIN_NO_UNROLL
  for (int t = 0; t < at.t; ++t) {
    Own Zp = {}, dp;
    lane.apply(Z, of_token(at.p, t), Zp);
    lane.put(Zp, one);
    __syncwarp();
    lane.own(for_sums(2 + t), dp);
    lane.apply_across(Z, of_token(at.Cp, t), dp);
    lane.apply(memory + at.C, one, dp);
    __syncwarp();
    lane.put(dp, for_sums(2 + t));
  }
}

template <int M>
__device__ FASTLIN_INLINE void StackWarp<M>::add_numbers() const {
  __syncwarp();
  const int quads = (2 + at.t) * S::quads;
  const int from = own_memory + at.sequences + S::numbers * S::column;
  const float* tasks = memory + own_memory + at.tasks;
  const int stream = parts_of_sums()[0], first = stream >> 16;
  if (first >= at.streams) return;
  FASTLIN_NO_UNROLL
  for (int s = first; s < S::sequences; s += at.streams) {
    const int to = own_memory + at.sums + (first * at.K + static_cast<int>(tasks[s])) * quads * 4;
    FASTLIN_NO_UNROLL
    for (int quad = stream & 0xffff; quad < quads; quad += 32) {
      const Quad x = load_quad(memory + from + s * at.sequence + 4 * quad);
      Quad sum = load_quad(memory + to + 4 * quad);
      FASTLIN_UNROLL
      for (int i = 0; i < 4; ++i) sum.x[i] += x.x[i];
      store_quad(memory + to + 4 * quad, sum);
    }
  }
}

}  // namespace
}  // namespace cuda
}  // namespace fastlin
