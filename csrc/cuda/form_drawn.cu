// Records of drawn sequences (family.h): G = sum_k X_k X_k' over the rows of the triangular factor, with the
// noise of the labels, and q, y, task. The numbers are those of core/sampler-inl.h, bit for bit.
//
// Mapping. A block takes tiles of T sequences, 32 up to m = 12, 16 up to 22, 8 at 33: then its draws, records
// and tables fit into 99 KB. Thread = (sequence, worker); workers are T threads each, all numbers of a
// sequence a column of shared memory [entries, T]. Workers share out, with a barrier after each:
//
//   pairs of Philox blocks and of chi variates (draw.cuh); the task
//   entries of beta and, with a feature factor, of q and of the rows X_k = F R_k
//   labels X_k . beta + s g_k
//   bands of two or four rows of G's triangle, a band for each warp, columns for its 32 / T workers in turn
//   quads of the records, from shared to global memory, whole lines
//
// A band of two rows takes a load for each two multiply-adds; rows of the factor that are zero in its columns
// are left out. With G in a lane's registers a sequence would take 66 of them at m = 11 and 561 at m = 33.
//
// Instructions of a sequence, sm_90, m = 11, two tasks with full factors, n = 50: about 7,000. Draws take
// 4,140 of these, beta and labels 430, G 920, the rest of the record and its copy 480; what each of the four
// warps does for itself, 270 times 4. Warps of a multiprocessor of an H100: m = 11: 82 registers, 29 KB, 16
// warps by the grid of 512 blocks of four; m = 22 and 33: 95 registers, 16 warps.
#include "cuda/form_drawn_memory.cuh"

namespace fastlin {
namespace cuda {
namespace {

template <int M, bool kBias>
class Forming {
  using E = FormShape<M, kBias>;
  static constexpr int d = E::d, T = E::tile;

 public:
  __device__ Forming(const Work& work, const FormMemory& at, const WidePhilox& keys, float* shared)
      : source(work.source),
        at(at),
        philox(keys),
        shared(shared),
        thread(static_cast<int>(threadIdx.x)),
        place(static_cast<int>(threadIdx.x % T)),
        worker(static_cast<int>(threadIdx.x / T)),
        own(shared + at.columns + place),
        tasks(reinterpret_cast<int*>(shared + at.tasks)),
        counts(reinterpret_cast<int*>(shared + at.counts)),
        shape(work.source),
        see_query(work.P.see_query) {}

  // The tables, and counts that start at zero. All threads.
  __device__ void start() {
    FASTLIN_NO_UNROLL
    for (int i = thread; i < source.K; i += E::threads) counts[i] = 0;
    const int K = source.means != nullptr ? static_cast<int>(source.K) : 0;
    FASTLIN_NO_UNROLL
    for (int i = thread; i < K * at.task_stride; i += E::threads) {
      shared[i] = of_task(i / at.task_stride, i % at.task_stride);
    }
    FASTLIN_NO_UNROLL
    for (int i = thread; source.feature_factor != nullptr && i < d * E::d_quads; i += E::threads) {
      shared[at.feature_factor + i] = matrix_entry<d>(source.feature_factor, i);
    }
    const WidePhilox at_step = philox_of(source);
    BlockTable table(reinterpret_cast<DrawBlock*>(shared + at.blocks), at_step, thread, E::threads);
    table.add(Sections::block(Sections::kQuery), d + (shape.noisy ? 1 : 0), T, E::query);
    if (draws_beta(source)) table.add(Sections::block(Sections::kBeta), d, T, E::normals_of_beta);
    if (shape.noisy) table.add(Sections::block(Sections::kNoise), shape.rows(), T, E::noise);
    table.add(Sections::block(Sections::kFactor), shape.normals_before(shape.rank), T, E::factor);
    pairs = table.pairs();
    write_slots(reinterpret_cast<ChiSlot*>(shared + at.slots), shape, at_step, T, E::chi, thread, E::threads);
    __syncthreads();
  }

  // The records of `count` sequences from `first` on, of the call.
  __device__ void tile(std::int64_t first, int count, bool counts_tasks, float* records) {
    const std::int64_t i = first + (place < count ? place : count - 1);
    const DrawnSequence sequence = sequence_of(philox, source, i);
    draw_normals<T>(philox, sequence, reinterpret_cast<const DrawBlock*>(shared + at.blocks), worker, pairs,
                    E::workers, own);
    // In the other order: a worker with a pair of blocks less may have one of chi variates more.
    const int last = E::workers - 1 - worker;
    draw_chi<T>(philox, sequence, source, shape, reinterpret_cast<const ChiSlot*>(shared + at.slots), last,
                E::workers, own);
    if (worker == E::workers - 1) {
      const int task = drawn_task(philox, sequence, source, i);
      tasks[place] = task;
      if (counts_tasks && place < count) atomicAdd(counts + task, 1);
    }
    __syncthreads();
    make_beta();
    if (source.feature_factor != nullptr) make_features();
    __syncthreads();
    make_labels();
    __syncthreads();
    float* record = shared + at.records + place * E::floats;
    FASTLIN_NO_UNROLL
    for (int band = thread / 32; band < E::bands; band += E::threads / 32) {
      make_band(band, record, std::make_integer_sequence<int, E::bands>{});
    }
    finish_record(record);
    __syncthreads();
    const auto* from = reinterpret_cast<const Quad*>(shared + at.records);
    auto* to = reinterpret_cast<Quad*>(records);
    FASTLIN_NO_UNROLL
    for (int q = thread; q < count * (E::floats / 4); q += E::threads) to[q] = from[q];
  }

  // The block's row of counts. All threads.
  __device__ void write_counts(int* row) const {
    __syncthreads();
    if (thread < source.K) row[thread] = counts[thread];
  }

 private:
  // Numbers of a task: mean, factor.
  __device__ float of_task(int k, int i) const {
    if (i < E::d_quads) return i < d ? static_cast<float>(source.means[k * d + i]) : 0.0f;
    i -= E::d_quads;
    if (source.factors == nullptr || i >= d * E::d_quads) return 0.0f;
    return matrix_entry<d>(source.factors + k * d * d, i);
  }

  // row . x, in the order of their entries.
  __device__ FASTLIN_INLINE static float dot_row(const float* row, const float (&x)[d]) {
    float sum = 0;
    FASTLIN_UNROLL
    for (int j = 0; j < d; j += 4) {
      const Quad quad = load_quad(row + j);
      FASTLIN_UNROLL
      for (int l = 0; l < 4; ++l) {
        if (j + l < d) sum = std::fma(quad.x[l], x[j + l], sum);
      }
    }
    return sum;
  }

  __device__ FASTLIN_INLINE static void load_column(const float* from, float (&to)[d]) {
    FASTLIN_UNROLL
    for (int i = 0; i < d; ++i) to[i] = from[i * T];
  }

  __device__ FASTLIN_INLINE void make_beta() {
    const float* normals = own + E::normals_of_beta * T;
    const float* of_task = shared + tasks[place] * at.task_stride;
    float* beta = own + E::beta * T;
    if (source.means == nullptr) {
      const float stretch = static_cast<float>(source.radius) / std::sqrt(dot_columns(normals, normals));
      FASTLIN_NO_UNROLL
      for (int i = worker; i < d; i += E::workers) beta[i * T] = stretch * normals[i * T];
    } else if (source.factors == nullptr) {
      FASTLIN_NO_UNROLL
      for (int i = worker; i < d; i += E::workers) beta[i * T] = of_task[i];
    } else {
      float x[d];
      load_column(normals, x);
      FASTLIN_NO_UNROLL
      for (int i = worker; i < d; i += E::workers) {
        beta[i * T] = dot_row(of_task + (i + 1) * E::d_quads, x) + of_task[i];
      }
    }
  }

  // x . y of columns, even and odd entries apart as Entries::dot has it.
  __device__ FASTLIN_INLINE static float dot_columns(const float* x, const float* y) {
    float sum = 0, other = 0;
    int j = 0;
    FASTLIN_NO_UNROLL
    for (; j + 2 <= d; j += 2) {
      sum = std::fma(x[j * T], y[j * T], sum);
      other = std::fma(x[(j + 1) * T], y[(j + 1) * T], other);
    }
    if (j < d) sum = std::fma(x[j * T], y[j * T], sum);
    return sum + other;
  }

  // Row k of the factor as it is drawn, with the constant coordinate's at k = -1: entry j > k is row[j].
  // Where there are rows at all, a source with a constant coordinate has its row.
  __device__ FASTLIN_INLINE const float* drawn_row(int k) const {
    return own + (E::factor + (k < 0 ? 0 : (kBias ? d : 0) + k * d - k * (k + 1) / 2 - k - 1)) * T;
  }

  // q and X_k = F R_k, in the order of the entries of R_k.
  __device__ void make_features() {
    const float* F = shared + at.feature_factor;
    const int items = (shape.rows() + 1) * d;
    FASTLIN_NO_UNROLL
    for (int item = worker; item < items; item += E::workers) {
      const int i = item % d, k = item / d - 1 - shape.constant;
      float sum = 0;
      if (item < d) {
        float x[d];
        load_column(own + E::query * T, x);
        sum = dot_row(F + i * E::d_quads, x);
      } else {
        const float* row = drawn_row(k);
        if (k >= 0) sum = F[i * E::d_quads + k] * own[(E::chi + k) * T];
        FASTLIN_NO_UNROLL
        for (int j = k + 1; j < d; ++j) sum = std::fma(F[i * E::d_quads + j], row[j * T], sum);
      }
      own[(E::made + item) * T] = sum;
    }
  }

  __device__ FASTLIN_INLINE const float* q_features() const {
    return own + (source.feature_factor != nullptr ? E::made : E::query) * T;
  }

  // The label of row k, of which there are `rank`, and the constant coordinate's at k = -1; `beta` from entry
  // max(k, 0) on. Sums of even and of odd entries, as Entries::dot has them.
  template <int kRow>
  __device__ FASTLIN_INLINE float label_of_row(const float (&beta)[d]) const {
    const float* x = drawn_row(kRow);
    float sums[2] = {};
    FASTLIN_UNROLL
    for (int j = kRow < 0 ? 0 : kRow; j < d; ++j) {
      sums[j % 2] = std::fma(j == kRow ? own[(E::chi + j) * T] : x[j * T], beta[j], sums[j % 2]);
    }
    return sums[0] + sums[1];
  }

  // Row by row, unrolled: each is its worker's.
  template <int... kRows>
  __device__ FASTLIN_INLINE void label_rows(float deviation, std::integer_sequence<int, kRows...>) {
    float beta[d];
    load_column(own + E::beta * T, beta);
    const auto one = [&](auto row) {
      constexpr int kRow = decltype(row)::value - kBias;
      if (worker != (kRow + kBias) % E::workers || kRow >= shape.rank) return;
      put_label(kRow + kBias, deviation, label_of_row<kRow>(beta));
    };
    (one(std::integral_constant<int, kRows>{}), ...);
  }

  __device__ FASTLIN_INLINE void put_label(int row, float deviation, float label) {
    if (shape.noisy) label = std::fma(deviation, own[(E::noise + row) * T], label);
    own[(E::labels + row) * T] = label;
  }

  __device__ FASTLIN_INLINE void make_labels() {
    const auto deviation = static_cast<float>(source.noise_std);
    if (source.feature_factor != nullptr) {
      FASTLIN_NO_UNROLL
      for (int row = worker; row < shape.rows(); row += E::workers) {
        put_label(row, deviation, dot_columns(own + (E::made + (row + 1) * d) * T, own + E::beta * T));
      }
    } else if (shape.rows() > 0) {
      label_rows(deviation, std::make_integer_sequence<int, d + kBias>{});
    }
  }

  // Where entry (i, j) of the triangle is, i <= j.
  __device__ FASTLIN_INLINE static constexpr int in_triangle(int i, int j) {
    return i * M - i * (i - 1) / 2 + j - i;
  }

  // Features kBand * band, ... of G's triangle: a row each, columns of the worker, and the label.
  template <int kBand>
  __device__ FASTLIN_INLINE void make_band(float* record) const {
    constexpr int kFirst = kBand * E::band, kRows = d - kFirst < E::band ? d - kFirst : E::band;
    constexpr int kColumns = (d - kFirst + E::split - 1) / E::split;
    const int offset = kFirst + (E::split > 1 ? worker % E::split : 0);  // of the worker's first column
    // Column t of the worker; the last one may be beyond the features, and repeats them.
    const int last = std::min(offset + (kColumns - 1) * E::split, d - 1);
    const auto column = [&](int t) { return t + 1 < kColumns ? offset + t * E::split : last; };
    float G[kRows][kColumns] = {}, with_label[kRows] = {};
    const auto add = [&](const float (&left)[kRows], const float (&right)[kColumns], float label) {
      FASTLIN_UNROLL
      for (int i = 0; i < kRows; ++i) {
        FASTLIN_UNROLL
        for (int t = 0; t < kColumns; ++t) {
          if (E::split > 1 || t >= i) G[i][t] = std::fma(left[i], right[t], G[i][t]);
        }
        with_label[i] = std::fma(left[i], label, with_label[i]);
      }
    };
    // Rows that are full in these columns.
    const bool made = source.feature_factor != nullptr;
    const int full = made ? shape.rows() : shape.constant + std::min(shape.rank, +kFirst);
    const float* x = made ? own + (E::made + d) * T : drawn_row(-static_cast<int>(kBias));
    const float* label = own + E::labels * T;
    int step = made ? d : d - 2 + kBias;
    FASTLIN_NO_UNROLL
    for (int row = 0; row < full; ++row, x += step * T, label += T, step -= made ? 0 : 1) {
      float left[kRows], right[kColumns];
      FASTLIN_UNROLL
      for (int i = 0; i < kRows; ++i) left[i] = x[(kFirst + i) * T];
      FASTLIN_UNROLL
      for (int t = 0; t < kColumns; ++t) right[t] = x[column(t) * T];
      add(left, right, *label);
    }
    // Rows of the factor whose diagonal is in the band.
    FASTLIN_UNROLL
    for (int k = 0; k < kRows; ++k) {
      if (kFirst + k >= shape.rank || made) break;
      const float* drawn = drawn_row(kFirst + k);
      const float diagonal = own[(E::chi + kFirst + k) * T];
      float left[kRows], right[kColumns];
      FASTLIN_UNROLL
      for (int i = 0; i < kRows; ++i) {
        left[i] = i < k ? 0.0f : i == k ? diagonal : drawn[(kFirst + i) * T];
      }
      FASTLIN_UNROLL
      for (int t = 0; t < kColumns; ++t) {
        const int j = column(t) - kFirst;
        right[t] = j < k ? 0.0f : j == k ? diagonal : drawn[(kFirst + j) * T];
      }
      add(left, right, own[(E::labels + kBias + kFirst + k) * T]);
    }
    if (see_query) {
      const float* q = q_features();
      float left[kRows], right[kColumns];
      FASTLIN_UNROLL
      for (int i = 0; i < kRows; ++i) left[i] = q[(kFirst + i) * T];
      FASTLIN_UNROLL
      for (int t = 0; t < kColumns; ++t) right[t] = q[column(t) * T];
      add(left, right, 0.0f);
    }
    FASTLIN_UNROLL
    for (int i = 0; i < kRows; ++i) {
      FASTLIN_UNROLL
      for (int t = 0; t < kColumns; ++t) {
        const int j = offset + t * E::split;
        if (j >= kFirst + i && j < d) record[in_triangle(kFirst + i + kBias, j + kBias)] = G[i][t];
      }
      if (offset == kFirst) record[in_triangle(kFirst + i + kBias, M - 1)] = with_label[i];
    }
  }

  // Band `number`, the same in all threads of a warp.
  template <int... kBands>
  __device__ FASTLIN_INLINE void make_band(int number, float* record,
                                           std::integer_sequence<int, kBands...>) const {
    static_cast<void>(((number == kBands ? (make_band<kBands>(record), true) : false) || ...));
  }

  // What is not a feature's: the constant coordinate, the label's square, q, y, the task and zeros.
  __device__ FASTLIN_INLINE void finish_record(float* record) const {
    using R = RecordOf<M>;
    const float* q = q_features();
    if (worker == E::workers - 1) {
      float square = 0;
      FASTLIN_NO_UNROLL
      for (int row = 0; row < shape.rows(); ++row) {
        const float label = own[(E::labels + row) * T];
        square = std::fma(label, label, square);
      }
      if (shape.noisy) {
        const float rest = static_cast<float>(source.noise_std) * own[(E::chi + d) * T];
        square = std::fma(rest, rest, square);
      }
      record[R::triangle - 1] = square;
    }
    if (worker == E::workers - 2) {
      float y = dot_columns(q, own + E::beta * T);
      if (shape.noisy) y = std::fma(static_cast<float>(source.noise_std), own[(E::query + d) * T], y);
      record[R::y] = y;
      record[R::task] = as_float(Word{static_cast<std::uint32_t>(tasks[place])}).x;
      FASTLIN_UNROLL
      for (int i = R::triangle; i < R::q; ++i) record[i] = 0;
      FASTLIN_UNROLL
      for (int i = R::task + 1; i < R::floats; ++i) record[i] = 0;
    }
    const auto root = static_cast<float>(std::sqrt(static_cast<double>(source.n)));
    FASTLIN_NO_UNROLL
    for (int j = E::workers - 1 - worker; j < M; j += E::workers) {
      const bool feature = j >= kBias && j < M - 1;
      const float qj = feature ? q[(j - kBias) * T] : j == M - 1 ? 0.0f : 1.0f;
      record[R::q + j] = qj;
      if (!kBias) continue;
      float x = 0;  // of the first row, sqrt n times which is row 0 of G
      if (shape.constant != 0) {
        const float* row = source.feature_factor != nullptr ? own + (E::made + d) * T : own + E::factor * T;
        x = root * (feature ? row[(j - kBias) * T] : j == 0 ? root : own[E::labels * T]);
      }
      record[j] = see_query ? x + qj : x;
    }
  }

  const Source& source;
  const FormMemory& at;
  const WidePhilox& philox;
  float* const shared;
  const int thread, place, worker;
  float* const own;
  int *const tasks, *const counts;
  const FactorShape shape;
  const bool see_query;
  int pairs = 0;
};

// Threads (128 or 256): a block takes tiles gridDim.x apart.
template <int M, bool kBias>
__global__ void __launch_bounds__(FormShape<M, kBias>::threads, M <= 12 ? 5 : 2)
    form_drawn_kernel(const __grid_constant__ Work work, const __grid_constant__ FormMemory at,
                      const __grid_constant__ WidePhilox keys, bool counts_tasks) {
  FASTLIN_SHARED_MEMORY(memory);
  constexpr int T = FormShape<M, kBias>::tile;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * T, end = work.records_count;
  int* counts = counts_tasks ? work.counts + blockIdx.x * work.source.K : nullptr;  // the block's row
  if (begin >= end) {
    if (counts_tasks && threadIdx.x < work.source.K) counts[threadIdx.x] = 0;
    return;
  }
  Forming<M, kBias> forming(work, at, keys, reinterpret_cast<float*>(memory));
  forming.start();
  FASTLIN_NO_UNROLL
  for (std::int64_t i = begin; i < end; i += static_cast<std::int64_t>(gridDim.x) * T) {
    const int count = static_cast<int>(std::min<std::int64_t>(end - i, +T));
    forming.tile(work.first + i, count, counts_tasks, work.records + i * RecordOf<M>::floats);
  }
  if (counts_tasks) forming.write_counts(counts);
}

template <int M, bool kBias>
struct FormFits {
  static bool call(const Source& source) { return form_memory<M, kBias>(source).bytes() <= kSharedBytes; }
};

template <int M, bool kBias>
struct LaunchForm {
  static int call(const Work& work, bool counts_tasks, void* stream) {
    const FormMemory at = form_memory<M, kBias>(work.source);
    constexpr int T = FormShape<M, kBias>::tile;
    const std::int64_t tiles = (work.records_count + T - 1) / T;
    // With counts, blocks without a tile write zeros.
    const std::int64_t grid = counts_tasks ? kCountRows : std::clamp<std::int64_t>(tiles, 1, +kCountRows);
    return launch(form_drawn_kernel<M, kBias>, dim3(static_cast<unsigned>(grid)),
                  dim3(FormShape<M, kBias>::threads), at.bytes(), stream, work, at, keys_of(work.source),
                  counts_tasks);
  }
};

}  // namespace

bool form_drawn_serves(const Source& source) {
  return source.K <= kMostTasks && for_width<FormFits>(source, false, source);
}

int launch_form_drawn(const Work& work, bool counts_tasks, void* stream) {
  return for_width<LaunchForm>(work.source, static_cast<int>(cudaErrorInvalidValue), work, counts_tasks,
                               stream);
}

}  // namespace cuda
}  // namespace fastlin
