// What a warp does with the sequences of a stack: forward, the error, reverse, sums. stack.cu has the
// algebra.
#pragma once

#include "cuda/stack_group.cuh"

namespace fastlin {
namespace cuda {
namespace {

template <int M>
class StackWarp {
  using S = StackShape<M>;
  using R = RecordOf<M>;
  using Tile = StackTile<M>;
  using Columns = StackColumns<M>;
  using Own = StackOwn<M>;

 public:
  __device__ StackWarp(const Work& work, const StackLayout& at, float* memory, int warp, int r)
      : work(work),
        at(at),
        memory(memory),
        r(r),
        own_memory(at.warp0 + warp * at.warp),
        number(static_cast<int>(threadIdx.x) % 32),
        lane(number) {
    static_assert(R::floats <= S::matrix);
    // A lane's part in the sums, in shared memory for the lack of registers: its stream and first quad of the
    // sums by task, and where the factors of its outer products lie; 16 bits each.
    const int quads = (2 + at.t) * S::quads;
    parts_of_sums()[0] = number / quads << 16 | number % quads;
    FASTLIN_UNROLL
    for (int pass = 0; pass < kKept; ++pass) {
      const int job = number + 32 * pass < S::jobs ? number + 32 * pass : 0, product = job / S::tiles;
      const int place = job % S::tiles, left = left_of(product) + place / S::side * 4;
      parts_of_sums()[32 * (1 + pass)] =
          left << 16 | ((S::vectors + product) * S::column + place % S::side * 4);
    }
    // What the sums start with, and zeros behind the entries of vectors.
    for (int i = number; i < at.parts; i += 32) memory[own_memory + i] = 0;
    if (!S::shares_work) {
      for (int i = number; i < S::sequences * at.sequence; i += 32) memory[own_memory + at.sequences + i] = 0;
    }
  }

  // Sequences first, ..., count - 1 of a chunk that begins at `begin`, or as many of them as a warp has.
  __device__ FASTLIN_INLINE void run(std::int64_t begin, int first, int count) {
    __syncwarp();
    // What comes of the lane's number is made again: kept for the whole loop it takes too many registers.
    lane = StackLane<M>(opaque(number));
    sequence = own_memory + at.sequences + lane.sequence * at.sequence;
    const std::int64_t index = begin + (first + lane.sequence < count ? first + lane.sequence : count - 1);
    is_real = first + lane.sequence < count && lane.writes;
    // The record comes where the matrix at work will be, in quads.
    const int lane_of_group = lane.part * S::lanes + lane.column;
    const float* from = work.records + (index - work.first) * R::floats + 4 * lane_of_group;
    float* record = memory + sequence;
    FASTLIN_UNROLL
    for (int n = 0; n < R::floats / 4; n += S::group) {
      if (lane.writes && (n + S::group <= R::floats / 4 || n + lane_of_group < R::floats / 4)) {
        store_quad(record + 4 * (n + lane_of_group), load_quad(from + 4 * n));
      }
    }
    __syncwarp();
    std::memcpy(&task, record + R::task, sizeof task);
    const float y = record[R::y];
    Tile G;
    Own q;
    load(record, G, q);
    lane.put(q, query(0));
    if (is_first()) memory[own_memory + at.tasks + lane.sequence] = static_cast<float>(task);
    if (at.dense > 0) lane.store(G, dense(0));
    __syncwarp();
    FASTLIN_NO_UNROLL
    for (int l = 0; l < at.dense; ++l) forward(l, G);
    last(G, y, index);
  }

  // Leaves the sums that are in registers where those of wide layers are.
  __device__ FASTLIN_INLINE void leave_sums() {
    __syncwarp();
    float* to = memory + own_memory + at.sequences;
    if (S::keeps_sums && at.dense == 1) {
      store_sums(dA, to);
      store_sums(dC, to + 32 * S::tile);
      to += 64 * S::tile;
    }
    FASTLIN_UNROLL
    for (int pass = 0; pass < kKept; ++pass) {
      const int job = number + 32 * pass;
      if (job >= S::jobs) continue;
      FASTLIN_UNROLL
      for (int i = 0; i < 16; ++i) to[job * 16 + i] = products[pass][i];
    }
  }

 private:
  static constexpr int kKept = S::splits_products ? S::passes : 0;

  __device__ FASTLIN_INLINE float* vector(int place) const {
    return memory + sequence + (S::vectors + place) * S::column;
  }
  __device__ FASTLIN_INLINE float* staying(int place) const {
    return memory + sequence + (S::qb + place) * S::column;
  }
  __device__ FASTLIN_INLINE float* for_sums(int place) const {
    return memory + sequence + (S::numbers + place) * S::column;
  }
  __device__ FASTLIN_INLINE float* query(int l) const {
    return memory + sequence + at.queries + l * S::column;
  }
  // G, X' and G T of a dense layer.
  __device__ FASTLIN_INLINE float* dense(int l) const {
    return memory + sequence + at.first_dense + l * 3 * S::matrix;
  }
  __device__ FASTLIN_INLINE float* work_matrix() const { return memory + sequence; }
  __device__ FASTLIN_INLINE const float* of_task(int table) const {
    return memory + table + task * S::column;
  }
  __device__ FASTLIN_INLINE const float* of_token(int table, int t) const {
    return memory + table + (task * at.t + t) * S::column;
  }
  __device__ FASTLIN_INLINE int* parts_of_sums() const {
    return reinterpret_cast<int*>(memory + own_memory + at.parts) + number;
  }
  __device__ FASTLIN_INLINE bool is_first() const {
    return lane.writes && lane.column == 0 && lane.part == 0;
  }
  __device__ FASTLIN_INLINE float rho(int l) const { return l == 0 ? at.first_skip : at.skip; }
  __device__ FASTLIN_INLINE int left_of(int product) const {
    return product == 0 ? at.queries + at.dense * S::column : (S::vectors + kGTa + product - 1) * S::column;
  }
  __device__ FASTLIN_INLINE static void scale(float factor, const Own& from, Own& to) {
    FASTLIN_UNROLL
    for (int j = 0; j < S::columns; ++j) to[j] = factor * from[j];
  }
  __device__ FASTLIN_INLINE static void clear(Tile& tile) {
    FASTLIN_UNROLL
    for (int j = 0; j < S::columns; ++j) {
      FASTLIN_UNROLL
      for (int i = 0; i < S::rows; ++i) tile[j][i] = 0;
    }
  }

  // y + A' x, A x, C' x, C x of the last matrix layer, and W' x, W x.
  template <int both, int one>
  __device__ FASTLIN_INLINE void apply_last(const float* x, Own& y) const {
    const float* parameters = memory + at.last;
    if constexpr (S::has_both || both == one) {
      lane.apply(parameters + both * S::matrix, x, y);
    } else {
      lane.apply_across(parameters + one * S::matrix, x, y);
    }
  }
  __device__ FASTLIN_INLINE void apply_A(const float* x, Own& y) const { apply_last<0, 0>(x, y); }
  __device__ FASTLIN_INLINE void apply_C(const float* x, Own& y) const { apply_last<1, 1>(x, y); }
  __device__ FASTLIN_INLINE void apply_W(const float* x, Own& y) const { apply_last<2, 2>(x, y); }
  __device__ FASTLIN_INLINE void apply_At(const float* x, Own& y) const { apply_last<3, 0>(x, y); }
  __device__ FASTLIN_INLINE void apply_Ct(const float* x, Own& y) const { apply_last<4, 1>(x, y); }
  __device__ FASTLIN_INLINE void apply_Wt(const float* x, Own& y) const { apply_last<5, 2>(x, y); }

  // G with the prompt, and q, of a record.
  __device__ FASTLIN_INLINE void load(const float* record, Tile& G, Own& q) const {
    // Entry (row, c) of the triangle is at `across` or `down`. In one part most rows are above or below the
    // columns of all lanes, and their addresses differ by constants.
    const float* across = record + lane.column;
    FASTLIN_UNROLL
    for (int j = 0; j < S::columns; ++j) {
      const int c = lane.column + j * S::lanes;
      const bool is_real = j * S::lanes + S::lanes <= M || c < M;
      const float* down = record + (is_real ? c * M - c * (c - 1) / 2 - c : 0);
      FASTLIN_UNROLL
      for (int i = 0; i < S::rows; ++i) {
        if constexpr (S::parts == 1) {
          const float* above = across + (i * M - i * (i - 1) / 2 - i + j * S::lanes);
          const float x = i <= j * S::lanes || (i < (j + 1) * S::lanes && i <= c) ? *above : down[i];
          G[j][i] = is_real ? x : 0.0f;
        } else {
          const int row = i + lane.first_row(), least = row < c ? row : c, most = row < c ? c : row;
          G[j][i] = most < M ? record[least * M - least * (least - 1) / 2 - least + most] : 0.0f;
        }
      }
      q[j] = is_real ? across[R::q + j * S::lanes] : 0.0f;
    }
    FASTLIN_NO_UNROLL
    for (int t = 0; t < at.t; ++t) {
      const float* p = of_token(at.p, t);
      Own own;
      lane.own(p, own);
      lane.add_outer(p, own, G);
    }
  }

  // A dense layer: G of the next one is in the tile, and q in its place.
  __device__ FASTLIN_INLINE void forward(int l, Tile& tile) {
    float *G = dense(l), *X = G + S::matrix, *GT = X + S::matrix, *T = work_matrix();  // X', T'
    const float *A = memory + at.A + l * S::matrix, *C = memory + at.C + l * S::matrix;
    // C' G, X' A', and of wide layers G T, T' (G T).
    FASTLIN_NO_UNROLL
    for (int step = 0; step < (S::parts == 1 ? 2 : 4); ++step) {
      const float* left = step == 0 ? C : step == 1 ? X : step == 2 ? G : T;
      const float* right = step == 0 ? G : step == 1 ? A : step == 2 ? T : GT;
      clear(tile);
      lane.multiply_from(left, right, S::parts > 1 && step == 2, tile);
      __syncwarp();
      if (step < 3) lane.store(tile, step == 0 ? X : step == 1 ? T : GT);
      if (step == 1) add_to_diagonal(rho(l), T);
      __syncwarp();
    }
    const int tokens = l == 0 && work.at.p >= 0 ? at.t : 0;
    Columns right;
    if constexpr (S::parts == 1) lane.load_across(T, right);
    FASTLIN_NO_UNROLL
    for (int n = tokens; n >= 0; --n) {  // T' q, and T' p at the bottom
      const float* x = n == 0 ? query(l) : of_token(at.p, n - 1);
      Own sum = {};
      if constexpr (S::parts == 1) {
        lane.apply_columns(right, x, sum);
      } else {
        lane.apply_across(T, x, sum);
      }
      lane.put(sum, n == 0 ? query(l + 1) : for_sums(1 + n));
    }
    if constexpr (S::parts == 1) {
      clear(tile);
      lane.multiply(G, right, tile);
      lane.store(tile, GT);
      FASTLIN_UNROLL
      for (int i = 0; i < S::tile; ++i) right[i / S::rows][i % S::rows] = tile[i / S::rows][i % S::rows];
      clear(tile);
      lane.multiply_below(T, right, tile);
      __syncwarp();
      lane.store(tile, T);
      __syncwarp();
      lane.load_above(T, tile);
    }
    if (l + 1 < at.dense) lane.store(tile, dense(l + 1));
    __syncwarp();
  }

  __device__ FASTLIN_INLINE void add_to_diagonal(float x, float* matrix) const {
    FASTLIN_UNROLL
    for (int j = 0; j < S::columns; ++j) {
      const int c = lane.column + j * S::lanes;
      const bool is_own =
          (S::parts == 1 || c / (4 * S::row_quads) == lane.part) && (j * S::lanes + S::lanes <= M || c < M);
      if (lane.writes && is_own) matrix[c * S::column + c] += x;
    }
  }

  // The last matrix layer and the head, and the error.
  __device__ FASTLIN_INLINE void last(Tile& G, float y, std::int64_t index) {
    const float* q = query(at.dense);
    const float *v = of_task(at.v), *Cv = of_task(at.Cv);
    const float skip = rho(at.dense);
    Own own_q, own_v, h, Aq = {}, Gaq = {}, Gcv = {}, qn, u, w = {}, a = {}, Aw = {}, Gaw = {}, c;
    lane.own(q, own_q);
    lane.own(v, own_v);
    apply_At(q, Aq);
    lane.put(own_v, vector(kV));
    lane.apply(G, Cv, Gcv);
    lane.put(Aq, vector(kAq));
    lane.put(Gcv, vector(kGCv));
    __syncwarp();
    lane.apply(G, vector(kAq), Gaq);
    scale(skip, own_v, u);
    apply_A(vector(kGCv), u);
    lane.put(Gaq, vector(kGAq));
    lane.put(u, vector(kTv));
    __syncwarp();
    scale(skip, own_q, qn);
    apply_Ct(vector(kGAq), qn);
    lane.apply(G, vector(kTv), w);
    lane.put(qn, vector(kQn));
    lane.put(w, vector(kGTv));
    __syncwarp();
    apply_Wt(vector(kQn), a);
    apply_At(vector(kGTv), Aw);
    lane.put(Aw, vector(kAGTv));
    __syncwarp();
    lane.apply(G, vector(kAGTv), Gaw);
    lane.put(Gaw, vector(kGAGTv));
    __syncwarp();
    scale(skip, w, c);
    apply_Ct(vector(kGAGTv), c);

    lane.own(of_task(at.h), h);
    float attended = 0, skipped = 0;
    FASTLIN_UNROLL
    for (int j = 0; j < S::columns; ++j) {
      attended = std::fma(a[j], c[j], attended);
      skipped = std::fma(qn[j], h[j], skipped);
    }
    const float yhat = lane.sum(std::fma(at.last_skip, skipped, attended));
    const std::int64_t place = r * work.P.B + index;
    if (work.out.yhat != nullptr && is_first() && is_real) work.out.yhat[place] = yhat;
    float residual = 0;
    if (work.P.has_targets()) {
      const float difference = yhat - y;
      residual = (difference + difference) * memory[at.coefficients + task];
      if (is_first() && is_real) {
        float* squares = memory + own_memory + at.squares + task * S::sequences + lane.sequence;
        *squares = std::fma(difference, difference, *squares);
      }
    } else if (work.P.gy != nullptr) {
      residual = work.P.gy[place];
    }
    if (work.gradients()) differentiate(G, a, c, is_real ? residual : 0.0f);
  }

  // All that follows from dloss/dyhat, with a = W' q scale and c = G v of the head.
  __device__ FASTLIN_INLINE void differentiate(Tile& G, const Own& a, const Own& c, float residual);

  // tile += x y'
  __device__ FASTLIN_INLINE void add_outer(const float* x, const float* y, Tile& tile) const {
    Own own;
    lane.own(y, own);
    lane.add_outer(x, own, tile);
  }

  // The outer products of dA, dC and dW of all sequences of the warp.
  __device__ FASTLIN_INLINE void add_products();
  __device__ FASTLIN_INLINE static void add_quads(const float* x, const float* y, float (&sums)[16]) {
    const Quad left = load_quad(x), right = load_quad(y);
    FASTLIN_UNROLL
    for (int i = 0; i < 16; ++i) sums[i] = std::fma(left.x[i / 4], right.x[i % 4], sums[i]);
  }

  // Carries H, in the matrix at work, and qb through a dense layer.
  __device__ FASTLIN_INLINE void reverse(int l);
  __device__ FASTLIN_INLINE void load_tile(const float* matrix, Tile& to) const {
    const float* from = matrix + lane.tile();
    FASTLIN_UNROLL
    for (int j = 0; j < S::columns; ++j) {
      FASTLIN_UNROLL
      for (int i = 0; i < S::rows; ++i) to[j][i] = from[j * lane.step + i];
    }
  }

  // Adds left right to the sums of dA or dC of a dense layer.
  __device__ FASTLIN_INLINE void add_product(int l, int which, const float* left, const float* right,
                                             Tile& sums);
  __device__ FASTLIN_INLINE void store_sums(const Tile& sums, float* to) const {
    FASTLIN_UNROLL
    for (int i = 0; i < S::tile; ++i) to[i * 32 + number] = sums[i / S::rows][i % S::rows];
  }

  // The part of dp = H_0 p that goes through T: T H T' p, with T x = rho x + A (X x). T' p is in its place.
  __device__ FASTLIN_INLINE void prompts_above(const float* G) const;
  // The rest: Z C' p + C Z' p.
  __device__ FASTLIN_INLINE void prompts_below(const float* Z) const;
  // Adds e, q and dp of all sequences of the warp to the sums of their tasks.
  __device__ FASTLIN_INLINE void add_numbers() const;
  const Work& work;
  const StackLayout& at;
  float* const memory;
  const int r, own_memory, number;
  StackLane<M> lane;
  int sequence = 0, task = 0;
  bool is_real = false;
  float products[kKept > 0 ? kKept : 1][16] = {};
  Tile dA = {}, dC = {};
};

}  // namespace
}  // namespace cuda
}  // namespace fastlin
