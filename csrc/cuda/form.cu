// Records (family.h) of tokens or of stored Gram matrices, for the kernels of many trials and of stacks. G =
// sum z z', of a stored matrix the symmetric part; with see_query also q q'.
//
// Tokens: a block takes tiles of 32 sequences, whose tokens come in pieces (pieces.cuh). Lane = sequence;
// each of four warps owns a quarter of the triangle of G, in whole quads, and reads all tokens. Every token
// is read from memory once, and from shared memory about three times. Records are put together in shared
// memory, and stored by 128 bits, one after another. By the machine code of sm_90, n = 50; for a tile,
// against the clocks that its bytes take at the bandwidth of an A100 (H100), and a warp's share of
// instructions in them:
//
//   M     bytes a sequence    clocks           instructions of a warp    registers    shared memory    blocks
//   11    2256 + 336          6190 (6470)      3530 (57 %)               80           47 KB            3 (4)
//   33    6744 + 2416         21900 (22800)    not counted               208          75 KB            2 (2)
//
// A warp has 16 to 18 multiply-adds for a token of width 11, and 140 of width 33: those keep the units of an
// A100 busy for 64 % of the clocks, and those of an H100 for 32 %.
//
// Stored matrices: a tile is copied as it is, and a thread makes quads of records, which are stored at once:
// M = 11 about 830 instructions of a warp, for 876 bytes a sequence that take 2090 clocks of an A100.
#include "cuda/counts.cuh"
#include "cuda/pieces.cuh"

namespace fastlin {
namespace cuda {
namespace {

template <int M>
struct Forming {
  using Record = RecordOf<M>;
  static constexpr int quads = Record::q / 4;                             // of the triangle
  static constexpr int begin(int part) { return quads * part / kWarps; }  // of a warp
  static constexpr int own = (quads + kWarps - 1) / kWarps;               // at most
  static constexpr int all = Record::floats / 4;
  static constexpr int rest = (all - quads + kWarps - 1) / kWarps;  // of a warp, behind the triangle
  static constexpr int piece = M <= 7 ? 16 : M <= 12 ? 8 : 4;       // tokens at most
  static constexpr int together = M <= 12 ? 32 : M <= 22 ? 16 : 8;  // records stored at a time
  static constexpr int blocks = M <= 12 ? 4 : M <= 22 ? 3 : 2;      // a multiprocessor
  // Stored matrices: sequences of a tile, whose matrices take at most 18 KB.
  static constexpr int tile = M <= 12 ? 32 : M <= 22 ? 8 : 4;

  static_assert(own * kWarps >= quads && begin(kWarps) == quads);
};

// Row and column of number `at` of the triangle.
struct Entry {
  int i = 0, j = 0;
  FASTLIN_HD constexpr Entry(int at, int M) {
    while (at >= M - i && i < M) at -= M - i++;
    j = i + at;
  }
};

// Adds a piece's tokens to the quads of a warp's part: the numbers from `first` to `last` of the triangle.
template <int M, int kPart, int kLoads>
__device__ inline void add_piece(const float* own, int m, int tokens, float (&G)[4 * Forming<M>::own]) {
  using F = Forming<M>;
  constexpr int end = 4 * F::begin(kPart + 1), triangle = F::Record::triangle;
  constexpr Entry first(4 * F::begin(kPart), M), last((end < triangle ? end : triangle) - 1, M);
  FASTLIN_NO_UNROLL
  for (int t = 0; t < tokens; t += kTokens<M>) {
    float x[kTokens<M> * M];
    load_tokens<M, kLoads>(own + t * (kLoads == 2 ? M : m), m, x);
    FASTLIN_UNROLL
    for (int u = 0; u < kTokens<M>; ++u) {
      const float* z = x + u * M;
      FASTLIN_UNROLL
      for (int i = first.i, at = 0; i <= last.i; ++i) {
        FASTLIN_UNROLL
        for (int j = i == first.i ? first.j : i; j <= (i == last.i ? last.j : M - 1); ++j, ++at) {
          G[at] = std::fma(z[i], z[j], G[at]);
        }
      }
    }
  }
}

template <int M, int kPart>
__device__ inline void add_part(const Pieces& how, const float* own, int m, int tokens,
                                float (&G)[4 * Forming<M>::own]) {
  if constexpr (kReadsPairs<M>) {
    if (how.loads == 2) return add_piece<M, kPart, 2>(own, m, tokens, G);
  }
  add_piece<M, kPart, 1>(own, m, tokens, G);
}

// Number i of a record behind the triangle: q, y, task, zeros.
template <int M>
__device__ inline float behind(const Work& work, const float* head, int s, int i) {
  const int scalar = kTile * (kQuery<M> + i - M) + s;  // y, task
  const bool exists = i < M || (i == M && work.P.y != nullptr) || (i == M + 1 && work.P.K > 1);
  const float number = head[i < M ? s * kQuery<M> + i : i < M + 2 ? scalar : 0];
  return exists ? number : 0.0f;
}

template <int M>
int form_floats(const Pieces& how) {
  return kStages * how.stage_floats() + how.heads * kHead<M> + Forming<M>::together * RecordOf<M>::floats;
}

template <int M>
__global__ void __launch_bounds__(kThreads, Forming<M>::blocks)
    form_kernel(const __grid_constant__ Work work, const __grid_constant__ Pieces how, std::int64_t share,
                bool counts_tasks) {
  using F = Forming<M>;
  constexpr int floats = RecordOf<M>::floats;
  FASTLIN_SHARED_MEMORY(shared);
  float* stages = reinterpret_cast<float*>(shared);
  float* heads = stages + kStages * how.stage_floats();
  float* made = heads + how.heads * kHead<M>;
  const Problem<float>& P = work.P;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int m = static_cast<int>(P.m);
  const std::int64_t begin = work.first + blockIdx.x * share, last = work.first + work.records_count;
  const std::int64_t end = begin + share < last ? begin + share : last;

  clear(heads, how.heads * kHead<M> / 4);
  __syncthreads();
  Place next{begin};
  const auto copy = [&](int stage) {
    if (next.first < end) {
      copy_piece<M, F::piece>(P, how, next, end, stages + stage * how.stage_floats(),
                              heads + (how.heads > 1 ? stage : 0) * kHead<M>);
      next.next(how);
    }
    __pipeline_commit();
  };
  FASTLIN_NO_UNROLL
  for (int stage = 0; stage < kStages; ++stage) copy(stage);
  __pipeline_wait_prior(kStages - 1);
  __syncthreads();  // the first piece is here

  float G[4 * F::own];
  Quad rest[F::rest] = {};  // behind the triangle
  int stage = 0, count = 0;
  FASTLIN_NO_UNROLL
  for (std::int64_t tile = begin; tile < end; tile += kTile) {
    const float* head = heads + (how.heads > 1 ? stage : 0) * kHead<M>;
    if (counts_tasks && warp == 0) {
      const int task = reinterpret_cast<const int*>(head)[kTile * (kQuery<M> + 1) + lane];
      add_counts(static_cast<int>(P.K), tile + lane < end ? task : -1, count);
    }
    FASTLIN_UNROLL
    for (int k = 0; k < F::rest; ++k) {
      FASTLIN_UNROLL
      for (int u = 0; u < 4; ++u) rest[k].x[u] = behind<M>(work, head, lane, 4 * (warp + k * kWarps) + u);
    }
    FASTLIN_UNROLL
    for (int i = 0; i < 4 * F::own; ++i) G[i] = 0;
    FASTLIN_NO_UNROLL
    for (int left = how.all, piece = 0; piece < how.count; ++piece, left -= how.tokens) {
      const int tokens = std::min(how.tokens, left);
      const float* own = stages + stage * how.stage_floats() + lane * how.stride;
      switch (warp) {
        case 0:
          add_part<M, 0>(how, own, m, tokens, G);
          break;
        case 1:
          add_part<M, 1>(how, own, m, tokens, G);
          break;
        case 2:
          add_part<M, 2>(how, own, m, tokens, G);
          break;
        default:
          add_part<M, 3>(how, own, m, tokens, G);
      }
      __pipeline_wait_prior(kStages - 2);
      __syncthreads();  // the next piece is here, and this one has been read: it makes room
      copy(stage);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }

    // The end of a tile.
    const int sequences = static_cast<int>(end - tile < kTile ? end - tile : kTile);
    FASTLIN_NO_UNROLL
    for (int first = 0; first < sequences; first += F::together) {
      if (first > 0) __syncthreads();  // the records before are stored
      float* record = made + (lane - first) * floats;
      if (lane >= first && lane < first + F::together) {
        const int part = F::begin(warp), quads = F::begin(warp + 1) - part;
        FASTLIN_UNROLL
        for (int k = 0; k < F::own; ++k) {
          if (k < quads) {
            store_quad(record + 4 * (part + k), {{G[4 * k], G[4 * k + 1], G[4 * k + 2], G[4 * k + 3]}});
          }
        }
        FASTLIN_UNROLL
        for (int k = 0; k < F::rest; ++k) {
          const int to = F::quads + warp + k * kWarps;
          if (to < F::all) store_quad(record + 4 * to, rest[k]);
        }
      }
      __syncthreads();
      const int stored = sequences - first < F::together ? sequences - first : F::together;
      float* to = work.records + (tile + first - work.first) * floats;
      FASTLIN_NO_UNROLL
      for (int i = thread; i < stored * F::all; i += kThreads)
        store_quad_global(to + 4 * i, load_quad(made + 4 * i));
    }
  }
  __pipeline_wait_prior(0);
  if (counts_tasks && thread < P.K) work.counts[blockIdx.x * P.K + thread] = count;
}

// Two indices of each of four numbers, in 16 bits each; kZero: the number is zero.
struct alignas(16) Indices {
  int of[4];
};
constexpr int kZero = -0x7fffffff - 1;

// Shared memory of stored matrices, in floats.
template <int M>
struct Stored {
  static constexpr int stage = Forming<M>::tile * M * M, head = kHead<M>;
  static constexpr int tables = 8 * Forming<M>::quads;  // where an entry and its mirror lie; row and column
  static constexpr int all = kStages * (stage + head) + tables;
};

// Begins to copy the matrices, queries, targets and tasks of sequences first, ..., first + sequences - 1.
template <int M>
__device__ inline void copy_matrices(const Problem<float>& P, std::int64_t first, int sequences, float* stage,
                                     float* head) {
  const int thread = static_cast<int>(threadIdx.x), m = static_cast<int>(P.m), square = m * m;
  const float* from = P.x + first * P.x_batch;
  const bool dense = P.x_row == m && P.x_batch == square;
  int copied = 0;
  if (dense && reinterpret_cast<std::uintptr_t>(from) % 16 == 0) {
    copied = sequences * square / 4 * 4;
    FASTLIN_NO_UNROLL
    for (int i = 4 * thread; i < copied; i += 4 * kThreads) __pipeline_memcpy_async(stage + i, from + i, 16);
  }
  FASTLIN_NO_UNROLL
  for (int at = copied + thread; at < sequences * square; at += kThreads) {
    const int s = at / square, i = (at - s * square) / m, j = at - s * square - i * m;
    __pipeline_memcpy_async(stage + at, from + s * P.x_batch + i * P.x_row + j, 4);
  }
  FASTLIN_NO_UNROLL
  for (int at = thread; at < sequences * m; at += kThreads) {
    const int s = at / m, j = at - s * m;
    __pipeline_memcpy_async(head + s * kQuery<M> + j, P.q + (first + s) * P.q_batch + j, 4);
  }
  if (thread < sequences) {
    float* scalars = head + kTile * kQuery<M> + thread;
    if (P.y != nullptr) __pipeline_memcpy_async(scalars, P.y + first + thread, 4);
    if (P.task != nullptr) __pipeline_memcpy_async(scalars + kTile, P.task + first + thread, 4);
  }
}

template <int M>
__global__ void __launch_bounds__(kThreads, 3)
    form_stored_kernel(const __grid_constant__ Work work, std::int64_t share, bool counts_tasks) {
  using F = Forming<M>;
  using S = Stored<M>;
  FASTLIN_SHARED_MEMORY(shared);
  float *stages = reinterpret_cast<float*>(shared), *heads = stages + kStages * S::stage;
  int* tables = reinterpret_cast<int*>(heads + kStages * S::head);
  const Problem<float>& P = work.P;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, m = static_cast<int>(P.m);
  const std::int64_t begin = work.first + blockIdx.x * share, last = work.first + work.records_count;
  const std::int64_t end = begin + share < last ? begin + share : last;

  clear(heads, kStages * S::head / 4);
  FASTLIN_NO_UNROLL
  for (int at = thread; at < 4 * F::quads; at += kThreads) {
    const Entry entry(at, M);
    const bool exists = entry.j < m;
    tables[at] = exists ? (entry.i * m + entry.j) | (entry.j * m + entry.i) << 16 : kZero;
    tables[4 * F::quads + at] = exists ? entry.i | entry.j << 16 : kZero;
  }
  __syncthreads();
  std::int64_t next = begin;
  const auto copy = [&](int stage) {
    if (next < end) {
      copy_matrices<M>(P, next, static_cast<int>(end - next < F::tile ? end - next : F::tile),
                       stages + stage * S::stage, heads + stage * S::head);
    }
    next += F::tile;
    __pipeline_commit();
  };
  for (int stage = 0; stage < kStages - 1; ++stage) copy(stage);

  int stage = 0, count = 0;
  for (std::int64_t first = begin; first < end; first += F::tile) {
    __pipeline_wait_prior(kStages - 2);
    __syncthreads();  // this tile is here, and the one before has been read
    copy(stage == 0 ? kStages - 1 : stage - 1);
    const int sequences = static_cast<int>(end - first < F::tile ? end - first : F::tile);
    const float *matrices = stages + stage * S::stage, *head = heads + stage * S::head;
    if (counts_tasks && thread < 32) {
      const int task = reinterpret_cast<const int*>(head)[kTile * (kQuery<M> + 1) + lane];
      add_counts(static_cast<int>(P.K), lane < sequences ? task : -1, count);
    }
    float* to = work.records + (first - work.first) * RecordOf<M>::floats;
    FASTLIN_NO_UNROLL
    for (int at = thread; at < sequences * F::all; at += kThreads) {
      const int s = at / F::all, k = at % F::all;
      const float *G = matrices + s * m * m, *q = head + s * kQuery<M>;
      Quad quad;
      if (k < F::quads) {
        const Indices both = *reinterpret_cast<const Indices*>(tables + 4 * k);
        FASTLIN_UNROLL
        for (int u = 0; u < 4; ++u) {
          const float entry = G[both.of[u] & 0xffff], mirror = G[both.of[u] >> 16 & 0x7fff];
          quad.x[u] = both.of[u] < 0 ? 0.0f : 0.5f * (entry + mirror);
        }
        if (P.see_query) {
          const Indices pairs = *reinterpret_cast<const Indices*>(tables + 4 * (F::quads + k));
          FASTLIN_UNROLL
          for (int u = 0; u < 4; ++u) {
            const float more = std::fma(q[pairs.of[u] & 0xffff], q[pairs.of[u] >> 16 & 0x7fff], quad.x[u]);
            quad.x[u] = pairs.of[u] < 0 ? 0.0f : more;
          }
        }
      } else {
        FASTLIN_UNROLL
        for (int u = 0; u < 4; ++u) quad.x[u] = behind<M>(work, head, s, 4 * (k - F::quads) + u);
      }
      store_quad_global(to + 4 * at, quad);
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  __pipeline_wait_prior(0);
  if (counts_tasks && thread < P.K) work.counts[blockIdx.x * P.K + thread] = count;
}

template <int M>
int launch_width(const Work& work, bool counts_tasks, void* stream) {
  using F = Forming<M>;
  const auto grid_of = [&](std::int64_t share) {
    const std::int64_t blocks = counts_tasks ? kCountRows : (work.records_count + share - 1) / share;
    return dim3(static_cast<unsigned>(blocks));
  };
  if (work.P.is_gram) {
    const std::int64_t share = std::max<std::int64_t>(share_of(work.records_count, F::tile), F::tile);
    return launch(form_stored_kernel<M>, grid_of(share), dim3(kThreads), sizeof(float) * Stored<M>::all,
                  stream, work, share, counts_tasks);
  }
  const std::int64_t share = std::max<std::int64_t>(share_of(work.records_count, kTile), kTile);
  const Pieces how = cut<M>(work.P, work.first, F::piece);
  const auto bytes = sizeof(float) * static_cast<std::size_t>(form_floats<M>(how));
  return launch(form_kernel<M>, grid_of(share), dim3(kThreads), bytes, stream, work, how, share,
                counts_tasks);
}

}  // namespace

int launch_form(const Work& work, bool counts_tasks, void* stream) {
  counts_tasks = counts_tasks && work.counts != nullptr;
  if (work.records_count == 0 && !counts_tasks) return 0;
  return with_width(work.P.m,
                    [&](auto M) { return launch_width<decltype(M)::value>(work, counts_tasks, stream); });
}

}  // namespace cuda
}  // namespace fastlin
