// Matrix layers and the layer after them, one head, from records: loss and gradients of all parameters.
//
// The algebra is that of fastlin/backends/eager.py, A and W with `scale`: T = rho I + A G C in each layer.
// All matrix layers but the last are dense: X' = C' G, T' = rho I + X' A', G T, G <- T' (G T), and in reverse
//   Tb = q qb' + (G T) H     dA = Tb X'     Z = A' Tb     dC = G Z     H <- T H T' + Z C' + C Z'
// with H = 2 Gb: at the bottom, where only dp = H p is wanted, of vectors. The last matrix layer has no matrix
// of its own. T x and T' x are three products of a matrix and a vector, G_L v = T'(G (T v)), and H of G_L has
// rank two, so that dA and dC are sums of three outer products of vectors that the forward pass has made, and
// H below has rank eight:
//   dA = q (G C qb)' + (G T a)(G C v)' + (G T v)(G C a)'
//   dC = (G A' q) qb' + (G A' G T a) v' + (G A' G T v) a'                             (a times dloss/dyhat)
//   H = S + S',  S = (T a)(T v)' + (A' q)(C qb)' + (A' G T a)(C v)' + (A' G T v)(C a)'
//
// Mapping: stack_group.cuh. A warp has 8 sequences at m = 11 and 12, 16 below, 2 or 1 above. Sums of dA and dC
// of one dense layer stay in registers for the whole chunk, as those of the outer products do by tiles of
// 4 x 4; sums by task are in shared memory, in few streams. A block is a chunk and a trial, with up to 4 warps.
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
    static_assert(S::numbers + 2 >= S::vectors + kVectors && S::numbers >= S::qb + 3);
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
  __device__ FASTLIN_INLINE const float* of_task(int table) const { return memory + table + task * S::column; }
  __device__ FASTLIN_INLINE const float* of_token(int table, int t) const {
    return memory + table + (task * at.t + t) * S::column;
  }
  __device__ FASTLIN_INLINE int* parts_of_sums() const {
    return reinterpret_cast<int*>(memory + own_memory + at.parts) + number;
  }
  __device__ FASTLIN_INLINE bool is_first() const { return lane.writes && lane.column == 0 && lane.part == 0; }
  __device__ FASTLIN_INLINE float rho(int l) const {
    return l == 0 ? at.first_skip : at.skip;
  }
  __device__ FASTLIN_INLINE int left_of(int product) const {
    return product == 0 ? at.queries + at.dense * S::column : (S::vectors + kGa + product - 1) * S::column;
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
      const bool is_own = (S::parts == 1 || c / (4 * S::row_quads) == lane.part) &&
                          (j * S::lanes + S::lanes <= M || c < M);
      if (lane.writes && is_own) matrix[c * S::column + c] += x;
    }
  }

  // The last matrix layer and the head, and all that follows from the error.
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
    lane.put(Gcv, vector(kGcv));
    __syncwarp();
    lane.apply(G, vector(kAq), Gaq);
    scale(skip, own_v, u);
    apply_A(vector(kGcv), u);
    lane.put(Gaq, vector(kGaq));
    lane.put(u, vector(kU));
    __syncwarp();
    scale(skip, own_q, qn);
    apply_Ct(vector(kGaq), qn);
    lane.apply(G, vector(kU), w);
    lane.put(qn, vector(kQn));
    lane.put(w, vector(kGTv));
    __syncwarp();
    apply_Wt(vector(kQn), a);
    apply_At(vector(kGTv), Aw);
    lane.put(Aw, vector(kAw));
    __syncwarp();
    lane.apply(G, vector(kAw), Gaw);
    lane.put(Gaw, vector(kGaw));
    __syncwarp();
    scale(skip, w, c);
    apply_Ct(vector(kGaw), c);

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
    if (!work.gradients()) return;
    if (!is_real) residual = 0;

    Own ra, rq, Rc, ca = {}, qb, Gca = {}, Cqb = {}, Ta, Gcqb = {}, Ga = {}, below, Aga = {}, Gaga = {}, e;
    scale(residual, a, ra);
    scale(residual, c, Rc);
    lane.put(ra, vector(kA));
    lane.put(Rc, vector(kRc));
    __syncwarp();
    apply_C(vector(kA), ca);
    lane.own(of_task(at.h), h);
    scale(residual * at.last_skip, h, qb);
    apply_W(vector(kRc), qb);
    lane.put(ca, vector(kCa));
    lane.put(qb, vector(kQb));
    __syncwarp();
    lane.apply(G, vector(kCa), Gca);
    apply_C(vector(kQb), Cqb);
    lane.put(Gca, vector(kGca));
    lane.put(Cqb, vector(kCqb));
    __syncwarp();
    scale(skip, ra, Ta);
    apply_A(vector(kGca), Ta);
    lane.apply(G, vector(kCqb), Gcqb);
    lane.put(Ta, vector(kTa));
    lane.put(Gcqb, vector(kGcqb));
    __syncwarp();
    lane.apply(G, vector(kTa), Ga);
    scale(skip, qb, below);
    apply_A(vector(kGcqb), below);
    lane.put(Ga, vector(kGa));
    __syncwarp();
    apply_At(vector(kGa), Aga);
    lane.put(Aga, vector(kAga));
    __syncwarp();
    lane.apply(G, vector(kAga), Gaga);
    lane.put(Gaga, vector(kGaga));
    __syncwarp();
    scale(skip, Ga, e);
    apply_Ct(vector(kGaga), e);
    lane.own(vector(kQn), rq);
    scale(residual, rq, rq);

    add_products();
    const bool reverses = work.out.dA != nullptr || work.out.dC != nullptr || work.at.p >= 0;
    if (reverses) {
      clear(G);
      add_outer(vector(kTa), vector(kU), G);
      add_outer(vector(kAq), vector(kCqb), G);
      add_outer(vector(kAga), Cv, G);
      add_outer(vector(kAw), vector(kCa), G);
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

  // tile += x y'
  __device__ FASTLIN_INLINE void add_outer(const float* x, const float* y, Tile& tile) const {
    Own own;
    lane.own(y, own);
    lane.add_outer(x, own, tile);
  }

  // The outer products of dA, dC and dW of all sequences of the warp.
  __device__ FASTLIN_INLINE void add_products() {
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
  __device__ FASTLIN_INLINE static void add_quads(const float* x, const float* y, float (&sums)[16]) {
    const Quad left = load_quad(x), right = load_quad(y);
    FASTLIN_UNROLL
    for (int i = 0; i < 16; ++i) sums[i] = std::fma(left.x[i / 4], right.x[i % 4], sums[i]);
  }

  // Carries H, in the matrix at work, and qb through a dense layer.
  __device__ FASTLIN_INLINE void reverse(int l) {
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
                                             Tile& sums) {
    float* kept = memory + own_memory + at.accumulated + (2 * l + which) * 32 * S::tile;
    const bool stored = !S::keeps_sums || at.dense > 1;
    if (stored) {
      FASTLIN_UNROLL
      for (int i = 0; i < S::tile; ++i) sums[i / S::rows][i % S::rows] = kept[i * 32 + number];
    }
    lane.multiply_from(left, right, false, sums);
    if (stored) store_sums(sums, kept);
  }
  __device__ FASTLIN_INLINE void store_sums(const Tile& sums, float* to) const {
    FASTLIN_UNROLL
    for (int i = 0; i < S::tile; ++i) to[i * 32 + number] = sums[i / S::rows][i % S::rows];
  }

  // The part of dp = H_0 p that goes through T: T H T' p, with T x = rho x + A (X x). T' p is in its place.
  __device__ FASTLIN_INLINE void prompts_above(const float* G) const {
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
  // The rest: Z C' p + C Z' p.
  __device__ FASTLIN_INLINE void prompts_below(const float* Z) const {
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

  // Adds e, q and dp of all sequences of the warp to the sums of their tasks.
  __device__ FASTLIN_INLINE void add_numbers() const {
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

// A parameter, or its transpose, with zeros around it.
template <int M>
__device__ FASTLIN_INLINE void load_matrix(const float* from, int m, bool transposes, float factor, float* to) {
  using S = StackShape<M>;
  FASTLIN_NO_UNROLL
  for (int i = static_cast<int>(threadIdx.x); i < S::matrix; i += static_cast<int>(blockDim.x)) {
    const int c = i / S::column, k = i % S::column;
    to[i] = c < m && k < m ? factor * from[transposes ? c * m + k : k * m + c] : 0.0f;
  }
}

// factor (M x) or factor (M' x) of vectors [count, column]; without a matrix, the vectors x [count, m].
template <int M>
__device__ FASTLIN_INLINE void load_vectors(const float* matrix, bool transposes, float factor, const float* x,
                                            int count, int m, float* to) {
  constexpr int column = StackShape<M>::column;
  FASTLIN_NO_UNROLL
  for (int i = static_cast<int>(threadIdx.x); i < count * column; i += static_cast<int>(blockDim.x)) {
    const int n = i / column, c = i % column;
    float sum = 0;
    if (c < m && x != nullptr) {
      if (matrix == nullptr) sum = x[n * m + c];
      FASTLIN_NO_UNROLL
      for (int k = 0; matrix != nullptr && k < m; ++k) {
        sum = std::fma(matrix[transposes ? k * m + c : c * m + k], x[n * m + k], sum);
      }
    }
    to[i] = factor * sum;
  }
}

template <int M>
__device__ FASTLIN_INLINE void load_parameters(const Work& work, const StackLayout& at, float* memory, int r) {
  constexpr int matrix = StackShape<M>::matrix;
  const Problem<float>& P = work.P;
  const int m = static_cast<int>(P.m);
  const float *A = P.A + r * P.layers * m * m, *C = P.C + r * P.layers * m * m, *W = P.W + std::int64_t{r} * m * m;
  FASTLIN_NO_UNROLL
  for (int l = 0; l < at.dense; ++l) {
    load_matrix<M>(A + l * m * m, m, true, at.scale, memory + at.A + l * matrix);
    load_matrix<M>(C + l * m * m, m, true, 1.0f, memory + at.C + l * matrix);
  }
  const float *last_A = A + at.dense * m * m, *last_C = C + at.dense * m * m;
  FASTLIN_NO_UNROLL
  for (int i = 0; i < (StackShape<M>::has_both ? 6 : 3); ++i) {
    const float* from = i % 3 == 0 ? last_A : i % 3 == 1 ? last_C : W;
    load_matrix<M>(from, m, i < 3, i % 3 == 1 ? 1.0f : at.scale, memory + at.last + i * matrix);
  }
  FASTLIN_NO_UNROLL
  for (int k = 0; k < at.K; ++k) {
    const int first = k * StackShape<M>::column;
    load_vectors<M>(nullptr, false, 1.0f, P.v_of(r, k), 1, m, memory + at.v + first);
    load_vectors<M>(last_C, false, 1.0f, P.v_of(r, k), 1, m, memory + at.Cv + first);
  }
  load_vectors<M>(nullptr, false, 1.0f, P.h == nullptr ? nullptr : P.h + r * P.K * m, at.K, m, memory + at.h);
  const float* p = at.t == 0 ? nullptr : P.p + r * P.K * P.t * m;
  load_vectors<M>(nullptr, false, 1.0f, p, at.K * at.t, m, memory + at.p);
  load_vectors<M>(C, true, 1.0f, p, at.K * at.t, m, memory + at.Cp);
}

// Sums over the warps of a block, for the chunk's row of `partial`.
template <int M>
__device__ FASTLIN_INLINE void write_sums(const Work& work, const StackLayout& at, const float* memory, int r,
                                          float* partial) {
  using S = StackShape<M>;
  const Problem<float>& P = work.P;
  const int m = static_cast<int>(P.m), square = m * m, thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const bool was_kept = S::keeps_sums && at.dense == 1;
  for (int i = thread; i < 2 * at.dense * square; i += threads) {
    const int l = i / square / 2, which = i / square % 2, row = i % square / m, c = i % m;
    float* to = which == 0 ? work.out.dA : work.out.dC;
    if (to == nullptr) continue;
    const int part = S::parts == 1 ? 0 : row / (4 * S::row_quads);
    const int number = c / S::lanes * S::rows + row - part * 4 * S::row_quads;
    const float* from = memory + at.warp0 + (was_kept ? at.sequences : at.accumulated) +
                        ((2 * l + which) * S::tile + number) * 32 + part * S::lanes + c % S::lanes;
    float sum = 0;
    FASTLIN_NO_UNROLL
    for (int w = 0; w < at.warps; ++w) {
      FASTLIN_NO_UNROLL
      for (int s = 0; s < S::sequences; ++s) sum += from[w * at.warp + s * S::group];
    }
    partial[(which == 0 ? work.numbers.dA : work.numbers.dC) + (r * P.layers + l) * square + row * m + c] =
        which == 0 ? at.scale * sum : sum;
  }
  const int products = S::splits_products ? at.sequences + (was_kept ? 64 * S::tile : 0) : at.tiles;
  for (int i = thread; i < 3 * square; i += threads) {
    const int matrix = i / square, row = i % square / m, c = i % m;
    const float* wanted = matrix == 0 ? work.out.dA : matrix == 1 ? work.out.dC : work.out.dW;
    if (wanted == nullptr) continue;
    const int first = S::splits_products ? 3 * matrix : matrix;
    const int end = S::splits_products && matrix < 2 ? first + 3 : first + 1;
    const int place = (row / 4 * S::side + c / 4) * 16 + row % 4 * 4 + c % 4;
    float sum = 0;
    FASTLIN_NO_UNROLL
    for (int w = 0; w < at.warps; ++w) {
      FASTLIN_NO_UNROLL
      for (int j = first; j < end; ++j) {
        sum += memory[at.warp0 + w * at.warp + products + j * S::tiles * 16 + place];
      }
    }
    const std::int64_t to = matrix == 2 ? work.numbers.dW + r * square
                                        : (matrix == 0 ? work.numbers.dA : work.numbers.dC) +
                                              (r * P.layers + at.dense) * square;
    partial[to + row * m + c] = matrix == 0 ? at.scale * sum : sum;
  }
}

template <int M>
__device__ FASTLIN_INLINE void write_task_sums(const Work& work, const StackLayout& at, const float* memory,
                                               int r, float* partial) {
  using S = StackShape<M>;
  const Problem<float>& P = work.P;
  const Record& columns = work.at;
  const int m = static_cast<int>(P.m), width = static_cast<int>(columns.width);
  const int numbers = (2 + at.t) * S::column;
  // e has been multiplied by the scale.
  const float unscale = P.scale != 0 ? static_cast<float>(1 / P.scale) : 0.0f;
  const int threads = static_cast<int>(blockDim.x);
  for (int i = static_cast<int>(threadIdx.x); i < at.K * width; i += threads) {
    const int k = i / width, column = i % width;
    const float* from = memory + at.warp0;
    int count = at.streams, step = at.K * numbers;
    if (column == columns.squares) {
      from += at.squares + k * S::sequences, count = S::sequences, step = 1;
    } else {
      int first = 0;
      if (columns.q >= 0 && column >= columns.q) first = static_cast<int>(columns.q);
      const bool is_p = columns.p >= 0 && column >= columns.p && column < columns.p + at.t * m;
      const bool is_e = columns.e >= 0 && column >= columns.e && column < columns.e + m;
      if (is_p) first = static_cast<int>(columns.p);
      if (is_e) first = static_cast<int>(columns.e);
      const int kind = is_e ? 0 : is_p ? 2 : 1, number = column - first;
      from += at.sums + k * numbers + (kind + number / m) * S::column + number % m;
    }
    float sum = 0;
    FASTLIN_NO_UNROLL
    for (int w = 0; w < at.warps; ++w) {
      FASTLIN_NO_UNROLL
      for (int s = 0; s < count; ++s) sum += from[w * at.warp + s * step];
    }
    const bool is_e = columns.e >= 0 && column >= columns.e && column < columns.e + m;
    partial[work.numbers.sums + (std::int64_t{k} * P.R + r) * width + column] = is_e ? unscale * sum : sum;
  }
}

template <int M>
__global__ void __launch_bounds__(128)
    stack_kernel(const __grid_constant__ Work work, const __grid_constant__ StackLayout at,
                 int first_chunk) {
  FASTLIN_SHARED_MEMORY(bytes);
  float* const memory = reinterpret_cast<float*>(bytes);
  // The compiler must see that the warp's number is the same in all lanes: loops over sequences are then uniform.
  const int r = static_cast<int>(blockIdx.y);
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32, 0);
  const int chunk = first_chunk + static_cast<int>(blockIdx.x);
  const std::int64_t begin = chunk * work.chunk;
  const int count = static_cast<int>(std::min(work.chunk, work.P.B - begin));
  load_parameters<M>(work, at, memory, r);
  load_coefficients(work, memory + at.coefficients, warp, at.warps);
  __syncthreads();
  {
    StackWarp<M> own(work, at, memory, warp, r);
    FASTLIN_NO_UNROLL
    for (int first = warp * StackShape<M>::sequences; first < count;
         first += at.warps * StackShape<M>::sequences) {
      own.run(begin, first, count);
    }
    if (work.gradients()) own.leave_sums();
  }
  __syncthreads();
  float* partial = work.partial + chunk * work.numbers.count;
  if (work.gradients()) write_sums<M>(work, at, memory, r, partial);
  write_task_sums<M>(work, at, memory, r, partial);
}

template <int M>
int launch_width(const Work& work, std::int64_t first_chunk, std::int64_t chunks, void* stream) {
  const StackLayout at = stack_layout<M>(work.P);
  const dim3 grid(static_cast<unsigned>(chunks), static_cast<unsigned>(work.P.R));
  return launch(stack_kernel<M>, grid, dim3(32 * static_cast<unsigned>(at.warps)),
                4 * static_cast<std::size_t>(at.floats), stream, work, at, static_cast<int>(first_chunk));
}

// Calls `f` with the compiled width that serves m.
template <class F>
auto with_width(std::int64_t m, const F& f) {
  switch (width_for(m)) {
    case 6:
      return f(std::integral_constant<int, 6>{});
    case 7:
      return f(std::integral_constant<int, 7>{});
    case 11:
      return f(std::integral_constant<int, 11>{});
    case 12:
      return f(std::integral_constant<int, 12>{});
    case 21:
      return f(std::integral_constant<int, 21>{});
    case 22:
      return f(std::integral_constant<int, 22>{});
    default:
      return f(std::integral_constant<int, 33>{});
  }
}

}  // namespace

bool stack_serves(const Problem<float>& P, const Results<float>& out) {
  if (P.layers < 1 || P.layers > 16 || P.H != 1 || P.K < 1 || P.K > kMostTasks || P.R > 65535 ||
      width_for(P.m) == 0 || P.t > 256 || out.dx != nullptr || out.dq != nullptr) {
    return false;
  }
  return with_width(P.m, [&](auto M) { return stack_layout<decltype(M)::value>(P).fits(); });
}

int launch_stack(const Work& work, std::int64_t first_chunk, std::int64_t chunks, void* stream) {
  if (chunks == 0 || work.P.R == 0) return 0;
  return with_width(work.P.m, [&](auto M) {
    return launch_width<decltype(M)::value>(work, first_chunk, chunks, stream);
  });
}

}  // namespace cuda
}  // namespace fastlin
