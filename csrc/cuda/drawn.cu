// One layer, one trial, on drawn sequences, without Gram matrices: a context is the rows X_k of its
// triangular factor (core/sampler-inl.h), which are drawn and used at once. With R_k = F^-1 X_k, beta the
// task's weights, s g_k the noise of row k's label and rest^2 that of the remainder:
//
//   a = W' q     u_v = F' (v_x + beta v_y)     u_a = F' (a_x + beta a_y)      x: features, y: label
//   row k:       w_v = R_k . u_v + s g_k v_y   w_a = R_k . u_a + s g_k a_y    (first row: + sqrt n v_0, a_0)
//                c_x += R_k w_v                e_x += R_k w_a     first row: c_0, e_0 = sqrt n w_v, w_a
//   c_y = beta . F c_x + s sum g_k w_v + rest^2 v_y                           and e_y
//   a . c = sum w_v w_a + rest^2 v_y a_y + a . P_k v                          + (q . a)(q . v) with see_query
//
// Mapping. A block has a chunk, its warps take tiles of 32 sequences in turn, a lane has a sequence. Draws
// lie in a column of shared memory for each lane (draw.cuh). The rows of the factor are unrolled, for d known
// at compile time: of an entry, one load of 32 bits and four multiply-adds; u, c and e of a lane are in
// registers. The factor's normals come in groups of rows that fit into a ring of 64 entries. Lanes whose
// tasks differ read the numbers of their tasks from different banks.
//
// Sums. dW of a tile is an outer product over its 32 sequences: r q and c of all lanes go through shared
// memory, over the draws, which are used up, and a lane keeps 4 entries of dW (m = 11) for the whole chunk:
// 180 instructions a tile. In the lanes' own registers dW takes 110 of them for 110 multiply-adds: 1 % of a
// sequence's instructions for half of the warps. A sum of a task is one lane's, which selects by the tasks'
// masks: sequences of a task that has diverged leave the other tasks' sums alone.
//
// Instructions of a sequence, sm_90, m = 11, two tasks with full factors, n = 50, one prompt token, all
// gradients: 5,600. Of these 18 Philox blocks with their 72 normals 2,740; 10 chi variates 1,300 with second
// attempts; the task 100; beta 155, a 150; rows 275, and 60 for noise, which may be zero; dW 180, other sums
// 200, what they need 120. By kind: 2,450 multiply-adds, products and sums in float, 470 products of words of
// 32 x 32 bits, 290 loads and 140 stores of shared memory, 56 reciprocal square roots, and 2,200 operations
// on integers, bits and predicates; nothing in global memory. Registers and shared memory of a block of four
// warps (two tasks, no noise): m = 11: 117, 47 KB, 16 warps a multiprocessor of an H100; m = 22: 192, 79 KB,
// 8 warps; m = 33: 254, 83 KB (three warps), 6 warps.
#include "cuda/drawn_sums.cuh"

namespace fastlin {
namespace cuda {
namespace {

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
        shape(work.source),
        philox(keys),
        sums(work, at, base, lane) {}

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
    sums.clear();
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
    const auto root = static_cast<float>(std::sqrt(static_cast<double>(source.n)));
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
    DrawnTerms terms{
        real ? task : -1, real ? difference * difference : 0.0f, residual, c_y, e_y, with_v, with_a, root};
    sums.write(applied, own, of_task + E::quads, terms);
    sums.add();
  }

  // Writes the sums of the chunk. All threads.
  __device__ void finish(float* partial) const {
    sums.store();
    __syncthreads();
    finish_chunk<M>(work, at, shared + at.warps, partial);
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

  const Work& work;
  const Problem<float>& P;
  const Source& source;
  const DrawnMemory& at;
  float* const shared;
  const int warp, lane;
  float *const base, *const own;  // of the warp, and the lane's column in it
  const FactorShape shape;
  const WidePhilox& philox;
  DrawnSums<M, kBias> sums;
};

// Threads (32 x warps): a block is a chunk.
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
  if (chunks == 0) return 0;
  return for_width<Launch>(work.source, static_cast<int>(cudaErrorInvalidValue), work, first_chunk, chunks,
                           stream);
}

}  // namespace cuda
}  // namespace fastlin
