// One layer, one trial, on drawn sequences, without Gram matrices: a context is the rows X_k of its
// triangular factor (core/sampler-inl.h), which are drawn and used at once. With R_k = F^-1 X_k, beta the
// task's weights, s g_k the noise of row k's label and rest^2 that of the remainder:
//
//   a = W' q     u_v = F' (v_x + beta v_y)     u_a = F' (a_x + beta a_y)      x: features, y: label
//   row k:       w_v = R_k . u_v + s g_k v_y   w_a = R_k . u_a + s g_k a_y    (first row: + sqrt n v_0, a_0)
//                c_x += R_k w_v                e_x += R_k w_a                 c_0, e_0 = sqrt n w of the
//                first row
//   c_y = beta . F c_x + s sum g_k w_v + rest^2 v_y                           and e_y
//   a . c = sum w_v w_a + rest^2 v_y a_y + a . P_k v                          + (q . a)(q . v) with see_query
//
// Mapping. A block has a chunk, its warps take tiles of 32 sequences in turn, a lane has a sequence. Draws
// lie in a column of shared memory for each lane (draw.cuh). The rows of the factor are unrolled, for d known
// at compile time: of an entry, one load of 32 bits and four multiply-adds; u and c, e of a lane are in
// registers. The factor's normals come in groups of rows that fit into a ring of 64 entries, so that a warp
// takes 11 KB at d = 10 and 21 KB at d = 32.
//
// Sums. dW of a tile is an outer product over its 32 sequences: r q, c, r e of all lanes go through shared
// memory (over the draws, which are used up), and a lane keeps I x J entries of dW for the whole chunk, 4 at
// m =
// 11. In the lanes' own registers dW takes m^2 of them, 121, for 121 multiply-adds in place of 160 and 34
// stores: 3 % of a sequence's instructions for half the warps. Sums of a task: a lane has a column, and
// multiplies by the tasks' masks.
#include "cuda/draw.cuh"

namespace fastlin {
namespace cuda {
namespace {

constexpr int kLanes = 32, kMostWarps = 4, kStageStride = kLanes + 4;

// Entries of dW that a lane keeps, rows x columns: the least that 32 lanes cover.
struct OuterTile {
  int rows, columns;
};
constexpr OuterTile outer_tile(int M) {
  OuterTile best{M, M};
  for (int i = 1; i <= M; ++i) {
    for (int j = 1; j <= M; ++j) {
      const bool covers = ((M - 2 + i) / i) * ((M - 1 + j) / j) <= kLanes;
      const int size = i * j * 64 + i + j;
      if (covers && size < best.rows * best.columns * 64 + best.rows + best.columns) best = {i, j};
    }
  }
  return best;
}

// A column of draws, and the groups of the factor's rows.
template <int M, bool kBias>
struct Column {
  static constexpr int d = M - 1 - kBias, quads = round_up(M, 4), d_quads = round_up(d, 4);
  static constexpr int normals_before(int row) { return (kBias ? d : 0) + row * d - row * (row + 1) / 2; }
  static constexpr int normals = normals_before(d);
  static constexpr int ring = normals < 64 ? round_up(normals, 8) : 64;
  // The first row that group `group` does not have.
  static constexpr int row_after(int group) {
    int row = 0;
    for (int g = 0; g <= group && row < d; ++g) {
      const int first = row == 0 ? 0 : normals_before(row);
      while (row < d && round_up(normals_before(row + 1), 8) - first <= ring) ++row;
    }
    return row;
  }
  static constexpr int count_groups() {
    int count = 1;
    while (row_after(count - 1) < d) ++count;
    return count;
  }
  static constexpr int groups = count_groups();
  static constexpr int query = 0, beta = round_up(d + 1, 4), chi = beta + d_quads;
  static constexpr int factor = chi + round_up(d + 1, 2), noise = factor + ring;
  static constexpr int after_noise = noise + round_up(d + 1, 4);

  static constexpr OuterTile tile = outer_tile(M);
  static constexpr int tile_rows = (M - 2 + tile.rows) / tile.rows;
  static constexpr int tile_columns = (M - 1 + tile.columns) / tile.columns;
  // Rows of the stage: squares, r e [M], r q [M], c [M and the tile's overhang], masks of tasks.
  static constexpr int of_e = 1, of_q = 1 + M, of_c = 1 + 2 * M,
                       of_masks = of_c + tile_columns * tile.columns;
  static_assert(tile_rows * tile.rows <= M + tile_columns * tile.columns, "rows of the tile reach beyond c");

  // Blocks of the table, at most.
  static constexpr int blocks = beta / 4 * 2 + d_quads / 4 + normals / 4 + 2 * groups + 2;
};

// Where a block's shared memory has what, in floats.
struct DrawnMemory {
  int task_stride, W, feature_factor, coefficients, group_ends, blocks, slots, warps;
  int scratch, stage_sums, each_warp, total_warps;  // of a warp
  std::size_t bytes() const {
    return sizeof(float) * static_cast<std::size_t>(warps + total_warps * each_warp);
  }
};

template <int M, bool kBias>
DrawnMemory drawn_memory(const Problem<float>& P, const Source& source) {
  using E = Column<M, kBias>;
  DrawnMemory at{};
  const int K = static_cast<int>(P.K), features = E::d * E::d_quads;
  const int of_task = 3 * E::quads + E::d_quads + (source.factors != nullptr ? features : 0);
  // Lanes of different tasks read 128 bits in different banks.
  at.task_stride = K == 1 ? of_task : round_up(of_task - 4, kLanes) + 4;
  at.W = K * at.task_stride;
  at.feature_factor = at.W + (M - 1) * E::quads;
  at.coefficients = at.feature_factor + (source.feature_factor != nullptr ? features : 0);
  at.group_ends = at.coefficients + round_up(K, 4);
  at.blocks = at.group_ends + round_up(E::groups, 4);
  at.slots = at.blocks + 4 * E::blocks;
  at.warps = at.slots + 8 * round_up(E::d + 1, 2);
  at.scratch = (source.noise_std != 0 ? E::after_noise : E::noise) * kLanes;
  const int draws = at.scratch + (source.feature_factor != nullptr ? E::d * kLanes : 0);
  const int stage = E::beta * kLanes + (E::of_masks + K) * kStageStride;
  at.stage_sums = round_up(draws > stage ? draws : stage, 4);
  // Columns of a record: squares, e, q.
  at.each_warp = round_up(at.stage_sums + K * (1 + 2 * M), 4);
  at.total_warps = 0;
  while (at.total_warps < kMostWarps &&
         sizeof(float) * (at.warps + (at.total_warps + 1) * at.each_warp) <= kSharedBytes) {
    ++at.total_warps;
  }
  return at;
}

// Calls f(i), i < kCount; the loop is unrolled if it is short and what it is part of runs often.
template <bool kOften, int kCount, class F>
__device__ FASTLIN_INLINE void each(const F& f) {
  if constexpr (kOften && kCount <= 12) {
    FASTLIN_UNROLL
    for (int i = 0; i < kCount; ++i) f(i);
  } else {
    FASTLIN_NO_UNROLL
    for (int i = 0; i < kCount; ++i) f(i);
  }
}

// out_j = sum_i matrix_ij x_i, rows of whole quads, x a column of draws.
template <bool kOften, int kRows, int kColumns>
__device__ FASTLIN_INLINE void multiply_transposed(const float* matrix, const float* x,
                                                   float (&out)[kColumns]) {
  constexpr int kStride = round_up(kColumns, 4);
  each<kOften, kRows>([&](int i) {
    const float xi = x[i * kLanes];
    FASTLIN_UNROLL
    for (int j = 0; j < kStride; j += 4) {
      const Quad row = load_quad(matrix + i * kStride + j);
      FASTLIN_UNROLL
      for (int l = 0; l < 4; ++l) {
        if (j + l < kColumns) out[j + l] = std::fma(row.x[l], xi, out[j + l]);
      }
    }
  });
}

// A column to_i = sum_j matrix_ij x_j, in the order of j, + plus_i unless that is null.
template <bool kOften, int d>
__device__ FASTLIN_INLINE void multiply(const float* matrix, const float (&x)[d], const float* plus,
                                        float* to) {
  constexpr int kStride = round_up(d, 4);
  each<kOften, d>([&](int i) {
    float sum = 0;
    FASTLIN_UNROLL
    for (int j = 0; j < kStride; j += 4) {
      const Quad row = load_quad(matrix + i * kStride + j);
      FASTLIN_UNROLL
      for (int l = 0; l < 4; ++l) {
        if (j + l < d) sum = std::fma(row.x[l], x[j + l], sum);
      }
    }
    to[i * kLanes] = plus == nullptr ? sum : sum + plus[i];
  });
}

// x . y of columns, in the order of Entries::dot: even and odd entries apart.
template <int kCount>
__device__ FASTLIN_INLINE float dot_columns(const float* x, const float* y) {
  float sums[2] = {};
  each<true, (kCount + 1) / 2>([&](int pair) {
    FASTLIN_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int entry = (2 * pair + i) * kLanes;
      if (2 * pair + i < kCount) sums[i] = std::fma(x[entry], y[entry], sums[i]);
    }
  });
  return sums[0] + sums[1];
}

template <int kCount>
__device__ FASTLIN_INLINE void load_column(const float* from, float (&to)[kCount]) {
  FASTLIN_UNROLL
  for (int i = 0; i < kCount; ++i) to[i] = from[i * kLanes];
}

// Numbers of a task, at a multiple of 16 bytes.
template <int kCount>
__device__ FASTLIN_INLINE void load_row(const float* from, float (&to)[kCount]) {
  FASTLIN_UNROLL
  for (int i = 0; i < kCount; i += 4) {
    const Quad quad = load_quad(from + i);
    FASTLIN_UNROLL
    for (int l = 0; l < 4; ++l) {
      if (i + l < kCount) to[i + l] = quad.x[l];
    }
  }
}

// A sequence's context as it is applied to v and a, in registers.
template <int M, bool kBias>
struct Applied {
  using E = Column<M, kBias>;
  static constexpr int d = E::d;
  float u_v[d], u_a[d], c[d], e[d];
  float noise_v, noise_a;          // s v_y, s a_y; after the rows:
  float noise_c = 0, noise_e = 0;  // sums of g_k w
  float root_v, root_a;            // sqrt n v_0, sqrt n a_0; after the first row: its w
  float product = 0;               // sum of w_v w_a
  bool noisy;

  // Row kRow of the factor, -1 that of the constant coordinate.
  template <int kRow>
  __device__ FASTLIN_INLINE void row(const float* own) {
    constexpr int kNormals = kRow < 0 ? 0 : E::normals_before(kRow) - kRow - 1;  // less the column
    constexpr int kFirst = kRow < 0 ? 0 : kRow;
    float x[d];
    if (kRow >= 0) x[kRow < 0 ? 0 : kRow] = own[(E::chi + kRow) * kLanes];
    FASTLIN_UNROLL
    for (int j = kRow + 1; j < d; ++j) x[j] = own[(E::factor + (kNormals + j) % E::ring) * kLanes];
    const float g = noisy ? own[(E::noise + kBias + kRow) * kLanes] : 0.0f;
    float w_v = kRow < 0 ? std::fma(g, noise_v, root_v) : g * noise_v;
    float w_a = kRow < 0 ? std::fma(g, noise_a, root_a) : g * noise_a;
    FASTLIN_UNROLL
    for (int j = kFirst; j < d; ++j) {
      w_v = std::fma(x[j], u_v[j], w_v);
      w_a = std::fma(x[j], u_a[j], w_a);
    }
    FASTLIN_UNROLL
    for (int j = kFirst; j < d; ++j) {
      c[j] = std::fma(x[j], w_v, c[j]);
      e[j] = std::fma(x[j], w_a, e[j]);
    }
    product = std::fma(w_v, w_a, product);
    noise_c = std::fma(g, w_v, noise_c);
    noise_e = std::fma(g, w_a, noise_e);
    if (kRow < 0) {
      root_v = w_v;
      root_a = w_a;
    }
  }

  template <int kFirst, int... kRows>
  __device__ FASTLIN_INLINE void rows(const float* own, std::integer_sequence<int, kRows...>) {
    (row<kFirst + kRows>(own), ...);
  }

  template <int kGroup>
  __device__ FASTLIN_INLINE void group(const float* own) {
    constexpr int kBegin = kGroup == 0 ? -static_cast<int>(kBias) : E::row_after(kGroup - 1);
    rows<kBegin>(own, std::make_integer_sequence<int, E::row_after(kGroup) - kBegin>{});
  }

  // Group `number`, the same in all lanes.
  template <int... kGroups>
  __device__ FASTLIN_INLINE void group(int number, const float* own, std::integer_sequence<int, kGroups...>) {
    static_cast<void>(((number == kGroups ? (group<kGroups>(own), true) : false) || ...));
  }
};

template <int M, bool kBias>
class DrawnWorker {
  using E = Column<M, kBias>;
  static constexpr int d = E::d;

 public:
  __device__ DrawnWorker(const Work& work, const DrawnMemory& at, const WidePhilox& keys, float* shared)
      : work(work),
        P(work.P),
        source(work.source),
        at(at),
        shared(shared),
        warp(static_cast<int>(threadIdx.x) / kLanes),
        lane(static_cast<int>(threadIdx.x) % kLanes),
        base(shared + at.warps + warp * at.each_warp),
        own(base + lane),
        stage(base + E::beta * kLanes),
        shape(work.source),
        philox(keys) {}

  // Parameters, the tables of draws, and the sums that start at zero. All threads.
  __device__ void start() {
    const int K = static_cast<int>(P.K), thread = static_cast<int>(threadIdx.x);
    const int threads = static_cast<int>(blockDim.x);
    load_coefficients(work, shared + at.coefficients, warp, threads / kLanes);
    FASTLIN_NO_UNROLL
    for (int i = thread; i < K * at.task_stride; i += threads) {
      shared[i] = of_task(i / at.task_stride, i % at.task_stride);
    }
    FASTLIN_NO_UNROLL
    for (int i = thread; i < (M - 1) * E::quads; i += threads) {
      const int row = i / E::quads, column = i % E::quads;
      shared[at.W + i] = column < M ? P.W[row * M + column] : 0.0f;
    }
    FASTLIN_NO_UNROLL
    for (int i = thread; source.feature_factor != nullptr && i < d * E::d_quads; i += threads) {
      shared[at.feature_factor + i] = matrix_entry<d>(source.feature_factor, i);
    }
    auto* ends = reinterpret_cast<int*>(shared + at.group_ends);
    const WidePhilox at_step = philox_of(source);
    BlockTable table(reinterpret_cast<DrawBlock*>(shared + at.blocks), at_step, thread, threads);
    table.add(Sections::block(Sections::kQuery), d + (shape.noisy ? 1 : 0), kLanes, E::query);
    if (draws_beta(source)) table.add(Sections::block(Sections::kBeta), d, kLanes, E::beta);
    if (shape.noisy) table.add(Sections::block(Sections::kNoise), shape.rows(), kLanes, E::noise);
    const int wanted = (shape.normals_before(shape.rank) + 3) / 4;  // blocks
    int begin = 0;
    FASTLIN_NO_UNROLL
    for (int group = 0; group < E::groups; ++group) {
      const int end = std::min(wanted, round_up(E::normals_before(E::row_after(group)), 8) / 4);
      if (end > begin) {
        table.add(Sections::block(Sections::kFactor) + static_cast<std::uint32_t>(begin), end - begin, kLanes,
                  E::factor, 4 * begin % E::ring, E::ring);
      }
      const int pairs = table.pairs();
      if (thread == 0) ends[group] = pairs;
      begin = std::max(begin, end);
    }
    write_slots(reinterpret_cast<ChiSlot*>(shared + at.slots), shape, at_step, kLanes, E::chi, thread,
                threads);
    FASTLIN_NO_UNROLL
    for (int i = lane; i < K * work.at.width; i += kLanes) base[at.stage_sums + i] = 0;
    FASTLIN_UNROLL
    for (int i = 0; i < E::tile.rows * E::tile.columns; ++i) dW[i] = 0;
    __syncthreads();
  }

  // 32 sequences from `first` on, of the call; `count` of them are there.
  __device__ void tile(std::int64_t first, int count) {
    const bool real = lane < count;
    const std::int64_t i = first + (real ? lane : count - 1);
    const DrawnSequence sequence = sequence_of(philox, source, i);
    const int task = drawn_task(philox, sequence, source, i);
    const auto* blocks = reinterpret_cast<const DrawBlock*>(shared + at.blocks);
    const auto* ends = reinterpret_cast<const int*>(shared + at.group_ends);
    draw_normals<kLanes>(philox, sequence, blocks, 0, ends[0], 1, own);
    draw_chi<kLanes>(philox, sequence, source, shape, reinterpret_cast<const ChiSlot*>(shared + at.slots), 0,
                     1, own);
    const float* of_task = shared + task * at.task_stride;
    const float* F = source.feature_factor != nullptr ? shared + at.feature_factor : nullptr;
    make_beta(of_task);
    if (F != nullptr) {
      float normals[d];
      load_column(own + E::query * kLanes, normals);
      multiply<false>(F, normals, nullptr, own + E::query * kLanes);
    }
    const auto deviation = static_cast<float>(source.noise_std);
    float y = dot_columns<d>(own + E::query * kLanes, own + E::beta * kLanes);
    if (shape.noisy) y = std::fma(deviation, own[(E::query + d) * kLanes], y);

    Applied<M, kBias> applied;
    applied.noisy = shape.noisy;
    float v_y, a_y, attended = 0, with_v = 0, with_a = 0, skipped = 0;
    {
      float v[M], a[M];
      load_row(of_task, v);
      FASTLIN_UNROLL
      for (int j = 0; j < M; ++j) a[j] = kBias ? shared[at.W + j] : 0.0f;
      multiply_transposed<true, d>(shared + at.W + (kBias ? E::quads : 0), own + E::query * kLanes, a);
      if (P.p != nullptr) {
        float of_prompt[M];
        load_row(of_task + E::quads, of_prompt);
        FASTLIN_UNROLL
        for (int j = 0; j < M; ++j) attended = std::fma(a[j], of_prompt[j], attended);
      }
      if (P.see_query) {
        with_v = kBias ? v[0] : 0.0f;
        with_a = kBias ? a[0] : 0.0f;
        FASTLIN_UNROLL
        for (int j = 0; j < d; ++j) {
          const float q = own[(E::query + j) * kLanes];
          with_v = std::fma(q, v[j + kBias], with_v);
          with_a = std::fma(q, a[j + kBias], with_a);
        }
        attended = std::fma(with_v, with_a, attended);
      }
      const auto root = static_cast<float>(std::sqrt(static_cast<double>(source.n)));
      applied.root_v = root * v[0];
      applied.root_a = root * a[0];
      v_y = v[M - 1];
      a_y = a[M - 1];
      FASTLIN_UNROLL
      for (int j = 0; j < d; ++j) {
        const float beta = own[(E::beta + j) * kLanes];
        applied.u_v[j] = std::fma(beta, v_y, v[j + kBias]);
        applied.u_a[j] = std::fma(beta, a_y, a[j + kBias]);
      }
    }
    if (P.h != nullptr) skipped = dot_query(of_task + 2 * E::quads);
    apply(applied, F, v_y, a_y, deviation, sequence, blocks, ends);
    float c_y = 0, e_y = 0;
    FASTLIN_UNROLL
    for (int j = 0; j < d; ++j) {
      const float beta = own[(E::beta + j) * kLanes];
      c_y = std::fma(beta, applied.c[j], c_y);
      e_y = std::fma(beta, applied.e[j], e_y);
    }
    attended += applied.product;
    if (shape.noisy) {
      const float rest = deviation * own[(E::chi + d) * kLanes];
      const float more_c = rest * rest * v_y, more_e = rest * rest * a_y;
      c_y = std::fma(deviation, applied.noise_c, c_y) + more_c;
      e_y = std::fma(deviation, applied.noise_e, e_y) + more_e;
      attended = std::fma(more_c, a_y, attended);
    }
    float yhat = static_cast<float>(P.scale) * attended;
    if (P.h != nullptr) yhat = std::fma(static_cast<float>(P.last_skip), skipped, yhat);
    if (work.out.yhat != nullptr && real) work.out.yhat[i] = yhat;
    const float difference = yhat - y;
    const float residual = real ? (difference + difference) * shared[at.coefficients + task] : 0.0f;
    write_stage(applied, of_task, residual, real ? difference * difference : 0.0f, real ? task : -1, c_y, e_y,
                with_v, with_a);
    add_stage();
  }

  // The sums of the chunk, all warps' in order. All threads.
  __device__ void finish(float* partial) {
    const int warps = static_cast<int>(blockDim.x) / kLanes, thread = static_cast<int>(threadIdx.x);
    const float* first = shared + at.warps;
    if (work.out.dW != nullptr) {
      if (lane < E::tile_rows * E::tile_columns) {
        FASTLIN_UNROLL
        for (int i = 0; i < E::tile.rows; ++i) {
          FASTLIN_UNROLL
          for (int j = 0; j < E::tile.columns; ++j) {
            const int row = lane / E::tile_columns + i * E::tile_rows;
            const int column = lane % E::tile_columns + j * E::tile_columns;
            if (row < M - 1 && column < M) base[row * M + column] = dW[i * E::tile.columns + j];
          }
        }
      }
      __syncthreads();
      FASTLIN_NO_UNROLL
      for (int i = thread; i < M * M; i += kLanes * warps) {
        partial[work.numbers.dW + i] = i < (M - 1) * M ? sum_of_warps(first + i, warps) : 0.0f;
      }
    } else {
      __syncthreads();
    }
    const int count = static_cast<int>(P.K * work.at.width);
    FASTLIN_NO_UNROLL
    for (int i = thread; i < count; i += kLanes * warps) {
      partial[work.numbers.sums + i] = sum_of_warps(first + at.stage_sums + i, warps);
    }
  }

 private:
  // Numbers of a task: v, P_k v and h, whole quads each; mean, factor.
  __device__ float of_task(int k, int i) const {
    const int vector = i / E::quads, j = i % E::quads;
    if (vector < 3 && j >= M) return 0.0f;
    const float* v = P.v_of(0, k);
    if (vector == 0) return v[j];
    if (vector == 1) return P.p != nullptr ? prompted(P.p + k * P.t * M, v, j) : 0.0f;
    if (vector == 2) return P.h != nullptr ? P.h[k * M + j] : 0.0f;
    i -= 3 * E::quads;
    if (source.means == nullptr) return 0.0f;
    if (i < E::d_quads) return i < d ? static_cast<float>(source.means[k * d + i]) : 0.0f;
    i -= E::d_quads;
    if (source.factors == nullptr || i >= d * E::d_quads) return 0.0f;
    return matrix_entry<d>(source.factors + k * d * d, i);
  }

  // Entry j of sum_t p_t (p_t . v).
  __device__ float prompted(const float* p, const float* v, int j) const {
    float sum = 0;
    FASTLIN_NO_UNROLL
    for (std::int64_t t = 0; t < P.t; ++t, p += M) {
      float product = 0;
      FASTLIN_NO_UNROLL
      for (int l = 0; l < M; ++l) product = std::fma(p[l], v[l], product);
      sum = std::fma(product, p[j], sum);
    }
    return sum;
  }

  __device__ FASTLIN_INLINE void make_beta(const float* of_task) {
    float* beta = own + E::beta * kLanes;
    const float* mean = of_task + 3 * E::quads;
    if (!draws_beta(source)) {
      FASTLIN_NO_UNROLL
      for (int j = 0; j < d; ++j) beta[j * kLanes] = mean[j];
    } else if (source.factors == nullptr) {
      const float stretch = static_cast<float>(source.radius) / std::sqrt(dot_columns<d>(beta, beta));
      FASTLIN_NO_UNROLL
      for (int j = 0; j < d; ++j) beta[j * kLanes] *= stretch;
    } else {
      float normals[d];
      load_column(beta, normals);
      multiply<true>(mean + E::d_quads, normals, mean, beta);
    }
  }

  __device__ FASTLIN_INLINE float dot_query(const float* with) const {
    float sum = kBias ? with[0] : 0.0f;
    FASTLIN_NO_UNROLL
    for (int j = 0; j < d; ++j) sum = std::fma(own[(E::query + j) * kLanes], with[j + kBias], sum);
    return sum;
  }

  // All rows of the factor, group by group.
  __device__ FASTLIN_INLINE void apply(Applied<M, kBias>& applied, const float* F, float v_y, float a_y,
                                       float deviation, const DrawnSequence& sequence,
                                       const DrawBlock* blocks, const int* ends) {
    if (F != nullptr) {
      pull_back(F, applied.u_v);
      pull_back(F, applied.u_a);
    }
    applied.noise_v = deviation * v_y;
    applied.noise_a = deviation * a_y;
    FASTLIN_UNROLL
    for (int j = 0; j < d; ++j) applied.c[j] = applied.e[j] = 0;
    FASTLIN_NO_UNROLL
    for (int group = 0; group < E::groups; ++group) {
      if (group > 0) draw_normals<kLanes>(philox, sequence, blocks, ends[group - 1], ends[group], 1, own);
      if (shape.rank < d) clear_after_rank(E::row_after(group));
      applied.group(group, own, std::make_integer_sequence<int, E::groups>{});
    }
    if (kBias && shape.constant == 0) applied.root_v = applied.root_a = 0;
    if (F != nullptr) {
      push_forward(F, applied.c);
      push_forward(F, applied.e);
    }
  }

  // Fewer tokens than features: rows that are not there, of those before `end`, are zero.
  __device__ void clear_after_rank(int end) {
    int begin = shape.constant < kBias ? 0 : E::normals_before(shape.rank);
    begin = std::max(begin, E::normals_before(end) - E::ring);
    FASTLIN_NO_UNROLL
    for (int i = begin; i < E::normals_before(end); ++i) own[(E::factor + i % E::ring) * kLanes] = 0;
    FASTLIN_NO_UNROLL
    for (int i = shape.rank; i < d; ++i) own[(E::chi + i) * kLanes] = 0;
    FASTLIN_NO_UNROLL
    for (int i = shape.rows(); shape.noisy && i < d + kBias; ++i) own[(E::noise + i) * kLanes] = 0;
  }

  // x = F' x and x = F x, through entries of their own.
  __device__ FASTLIN_INLINE void pull_back(const float* F, float (&x)[d]) {
    float* scratch = own + at.scratch;
    FASTLIN_UNROLL
    for (int j = 0; j < d; ++j) {
      scratch[j * kLanes] = x[j];
      x[j] = 0;
    }
    multiply_transposed<false, d>(F, scratch, x);
  }
  __device__ FASTLIN_INLINE void push_forward(const float* F, float (&x)[d]) {
    multiply<false>(F, x, nullptr, own + at.scratch);
    load_column(own + at.scratch, x);
  }

  // What the sums of a tile are made of, by lane; a lane without a sequence has no task.
  __device__ FASTLIN_INLINE void write_stage(const Applied<M, kBias>& applied, const float* of_task,
                                             float residual, float square, int task, float c_y, float e_y,
                                             float with_v, float with_a) {
    const auto put = [this](int row, float value) { stage[row * kStageStride + lane] = value; };
    __syncwarp();  // the draws of all lanes are used up
    put(0, square);
    FASTLIN_NO_UNROLL
    for (int k = 0; k < P.K; ++k) put(E::of_masks + k, task == k ? 1.0f : 0.0f);
    if (work.gradients()) {
      const auto root = static_cast<float>(std::sqrt(static_cast<double>(source.n)));
      float of_prompt[M];
      load_row(of_task + E::quads, of_prompt);
      FASTLIN_UNROLL
      for (int j = 0; j < M; ++j) {
        const bool feature = j >= kBias && j < M - 1;
        const int x = feature ? j - kBias : 0;
        float c = feature ? applied.c[x] : j == M - 1 ? c_y : root * applied.root_v;
        float e = feature ? applied.e[x] : j == M - 1 ? e_y : root * applied.root_a;
        const float q = feature ? own[(E::query + x) * kLanes] : j == M - 1 ? 0.0f : 1.0f;
        if (j < M - 1) {
          c = std::fma(q, with_v, c);
          e = std::fma(q, with_a, e);
        }
        put(E::of_c + j, c + of_prompt[j]);
        put(E::of_e + j, residual * e);
        put(E::of_q + j, residual * q);
      }
    }
    __syncwarp();
  }

  // Adds a tile to the sums.
  __device__ FASTLIN_INLINE void add_stage() {
    if (work.out.dW != nullptr) {
      const float* q = stage + (E::of_q + lane / E::tile_columns) * kStageStride;
      const float* c = stage + (E::of_c + lane % E::tile_columns) * kStageStride;
      if (lane >= E::tile_rows * E::tile_columns) q = c = stage;
      FASTLIN_ROLL
      for (int l = 0; l < kLanes; l += 4) {
        Quad row[E::tile.rows], column[E::tile.columns];
        FASTLIN_UNROLL
        for (int i = 0; i < E::tile.rows; ++i) row[i] = load_quad(q + i * E::tile_rows * kStageStride + l);
        FASTLIN_UNROLL
        for (int j = 0; j < E::tile.columns; ++j) {
          column[j] = load_quad(c + j * E::tile_columns * kStageStride + l);
        }
        FASTLIN_UNROLL
        for (int x = 0; x < 4; ++x) {
          FASTLIN_UNROLL
          for (int i = 0; i < E::tile.rows; ++i) {
            FASTLIN_UNROLL
            for (int j = 0; j < E::tile.columns; ++j) {
              float& sum = dW[i * E::tile.columns + j];
              sum = std::fma(row[i].x[x], column[j].x[x], sum);
            }
          }
        }
      }
    }
    const int width = static_cast<int>(work.at.width);
    const int of_e = static_cast<int>(work.at.e), of_q = static_cast<int>(work.at.q);
    FASTLIN_NO_UNROLL
    for (int column = lane; column < width; column += kLanes) {
      int row = 0;
      if (of_e >= 0 && column >= of_e) row = E::of_e + column - of_e;
      if (of_q >= 0 && column >= of_q) row = E::of_q + column - of_q;
      const float* values = stage + row * kStageStride;
      FASTLIN_NO_UNROLL
      for (int k = 0; k < P.K; ++k) {
        const float* mask = stage + (E::of_masks + k) * kStageStride;
        float sum = 0;
        FASTLIN_UNROLL
        for (int l = 0; l < kLanes; l += 4) {
          const Quad value = load_quad(values + l), of_mask = load_quad(mask + l);
          FASTLIN_UNROLL
          for (int x = 0; x < 4; ++x) sum = std::fma(of_mask.x[x], value.x[x], sum);
        }
        base[at.stage_sums + k * width + column] += sum;
      }
    }
    __syncwarp();
  }

  __device__ float sum_of_warps(const float* first, int warps) const {
    float sum = 0;
    FASTLIN_NO_UNROLL
    for (int w = 0; w < warps; ++w) sum += first[w * at.each_warp];
    return sum;
  }

  const Work& work;
  const Problem<float>& P;
  const Source& source;
  const DrawnMemory& at;
  float* const shared;
  const int warp, lane;
  float *const base, *const own, *const stage;  // of the warp: its memory, the lane's column, sums
  const FactorShape shape;
  const WidePhilox& philox;
  float dW[E::tile.rows * E::tile.columns];
};

// Threads (32 warps): a block is a chunk.
template <int M, bool kBias>
__global__ void __launch_bounds__(kLanes* kMostWarps, M <= 12 ? 4 : 2)
    drawn_kernel(const __grid_constant__ Work work, const __grid_constant__ DrawnMemory at,
                 const __grid_constant__ WidePhilox keys, std::int64_t first_chunk) {
  FASTLIN_SHARED_MEMORY(memory);
  DrawnWorker<M, kBias> worker(work, at, keys, reinterpret_cast<float*>(memory));
  worker.start();
  const std::int64_t chunk = first_chunk + blockIdx.x, begin = chunk * work.chunk;
  const int count = static_cast<int>(std::min(work.chunk, work.P.B - begin));
  const int warps = static_cast<int>(blockDim.x) / kLanes;
  FASTLIN_NO_UNROLL
  for (int first = static_cast<int>(threadIdx.x) / kLanes * kLanes; first < count; first += warps * kLanes) {
    worker.tile(begin + first, std::min(count - first, +kLanes));
  }
  worker.finish(work.partial + chunk * work.numbers.count);
}

template <int M, bool kBias>
struct Fits {
  static bool call(const Problem<float>& P, const Source& source) {
    return drawn_memory<M, kBias>(P, source).total_warps > 0;
  }
};

template <int M, bool kBias>
struct Launch {
  static int call(const Work& work, std::int64_t first_chunk, std::int64_t chunks, void* stream) {
    const DrawnMemory at = drawn_memory<M, kBias>(work.P, work.source);
    const dim3 threads(static_cast<unsigned>(at.total_warps * kLanes));
    return launch(drawn_kernel<M, kBias>, dim3(static_cast<unsigned>(chunks)), threads, at.bytes(), stream,
                  work, at, keys_of(work.source), first_chunk);
  }
};

}  // namespace

bool drawn_serves(const Problem<float>& P, const Results<float>& out, const Source& source) {
  return P.R == 1 && P.H == 1 && P.layers == 0 && P.K <= kMostTasks && source.K <= P.K && P.gy == nullptr &&
         out.dx == nullptr && out.dq == nullptr && for_width<Fits>(source, false, P, source);
}

int launch_drawn(const Work& work, std::int64_t first_chunk, std::int64_t chunks, void* stream) {
  return for_width<Launch>(work.source, static_cast<int>(cudaErrorInvalidValue), work, first_chunk, chunks,
                           stream);
}

}  // namespace cuda
}  // namespace fastlin
