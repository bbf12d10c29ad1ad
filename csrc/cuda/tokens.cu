// One layer, one trial, from tokens: no Gram matrix. A sequence with query q, task k and tokens z:
//
//   a = W' q    c = P_k v_k + sum z (z . v_k)    e = sum z (z . a)    yhat = scale a . c (+ last_skip q .
//   h_k) r = dloss/dyhat    dW = sum r q c'    and of each task: sum of squared errors, of r e and of r q
//
// A block takes a chunk, 32 sequences (a tile) at a time, whose tokens come in pieces (pieces.cuh).
//
//   lane = sequence: a, v, c, e are in registers, 4 M of them; a token is loaded once, and serves 4 M FMAs
//   warps share the tokens of a piece, two at a time of a width up to 12, else one
//   warps' parts of c, e and a . c go through shared memory; each warp adds every fourth row of them
//   thread (i, j) owns dW_ij, and adds 32 sequences with 16 loads of 128 bits; widths from 12 on 2, 4 or 9
//   sums threads own the sums of tasks likewise, 32 sequences by a mask of bits; there are K (2 M + 1)
//
// Tokens of M = 11, n = 50: 2256 bytes a sequence with query, target and task, for 1.11 ns of an A100. 128
// threads, three or four blocks a multiprocessor, since each has about 51 KB of shared memory. A tile takes
// 25 pairs of 90 FMAs and 11 loads, over four warps, and the rest of a tile is about as much again.
#include "cuda/pieces.cuh"

namespace fastlin {
namespace cuda {
namespace {

constexpr int kRow =
    36;  // floats of a row of 32 sequences: eight rows that follow each other meet in no bank

template <int M>
struct Shape {
  static constexpr int rows = 2 * M + 1;  // of a warp's part: c, e, a . c
  static constexpr int w_row = (M + 3) / 4 * 4;
  static constexpr int piece = M <= 7 ? 16 : M <= 12 ? 8 : 4;   // tokens at most
  static constexpr int blocks = M <= 11 ? 4 : M == 12 ? 3 : 2;  // a multiprocessor, as registers allow
  // Sums of dW that a thread owns: rows i, i + threads_i, ... and columns likewise.
  static constexpr int own_i = M <= 11 ? 1 : M <= 22 ? 2 : 3, own_j = M <= 12 ? 1 : M <= 22 ? 2 : 3;
  static constexpr int threads_i = (M + own_i - 1) / own_i, threads_j = (M + own_j - 1) / own_j;
  static_assert(threads_i * threads_j <= kThreads);
  static constexpr int task_sums = (kMostTasks * rows + kThreads - 1) / kThreads;  // of a thread
  static constexpr int own_rows = (M + kWarps - 1) / kWarps;                       // of a warp
};

// Where the parts of a block's shared memory start, in floats.
template <int M>
struct Memory {
  int W = 0, parts, stages, heads, v, c0, h, coefficients, end;

  __host__ __device__ Memory(const Problem<float>& P, const Pieces& how) {
    const int table = static_cast<int>(P.K) * kQuery<M>;
    parts = W + M * Shape<M>::w_row;
    stages = parts + kWarps * Shape<M>::rows * kRow;
    heads = stages + kStages * how.stage_floats();
    v = heads + how.heads * kHead<M>;
    c0 = v + table;
    h = c0 + (P.p != nullptr && P.t > 0 ? table : 0);
    coefficients = h + (P.h != nullptr ? table : 0);
    end = coefficients + kMostTasks;
  }
};

// Adds tokens to c, e and `dot` = a . c: the dot alone where there are no gradients, with the same bits.
template <int M, bool kGradients>
__device__ inline void add_tokens(const float (&x)[kTokens<M> * M], const float (&v)[M], const float (&a)[M],
                                  float (&c)[M], float (&e)[M], float& dot) {
  FASTLIN_UNROLL
  for (int t = 0; t < kTokens<M>; ++t) {
    float with_v[2] = {}, with_a[2] = {};
    FASTLIN_UNROLL
    for (int j = 0; j < M; ++j) {
      with_v[j % 2] = std::fma(x[t * M + j], v[j], with_v[j % 2]);
      with_a[j % 2] = std::fma(x[t * M + j], a[j], with_a[j % 2]);
    }
    const float xv = with_v[0] + with_v[1], xa = with_a[0] + with_a[1];
    dot = std::fma(xv, xa, dot);
    if constexpr (kGradients) {
      FASTLIN_UNROLL
      for (int j = 0; j < M; ++j) {
        c[j] = std::fma(xv, x[t * M + j], c[j]);
        e[j] = std::fma(xa, x[t * M + j], e[j]);
      }
    }
  }
}

// A warp's tokens of a piece: group after group of kTokens.
template <int M, int kLoads, bool kGradients>
__device__ inline void add_groups(const float* own, int m, int tokens, const float (&v)[M],
                                  const float (&a)[M], float (&c)[M], float (&e)[M], float& dot) {
  FASTLIN_NO_UNROLL
  for (int t = static_cast<int>(threadIdx.x) / 32 * kTokens<M>; t < tokens; t += kWarps * kTokens<M>) {
    float x[kTokens<M> * M];
    load_tokens<M, kLoads>(own + t * (kLoads == 2 ? M : m), m, x);
    add_tokens<M, kGradients>(x, v, a, c, e, dot);
  }
}

template <int M, bool kGradients>
__device__ inline void add_piece(const Pieces& how, const float* own, int m, int tokens, const float (&v)[M],
                                 const float (&a)[M], float (&c)[M], float (&e)[M], float& dot) {
  if constexpr (kReadsPairs<M>) {
    if (how.loads == 2) return add_groups<M, 2, kGradients>(own, m, tokens, v, a, c, e, dot);
  }
  add_groups<M, 1, kGradients>(own, m, tokens, v, a, c, e, dot);
}

// a = W' q: a row of W is the same for all lanes.
template <int M>
__device__ inline void project(const float* W, const float* q, float (&a)[M]) {
  constexpr int at_once = M <= 12 ? M : M % 3 == 0 ? 3 : 2;
  FASTLIN_NO_UNROLL
  for (int first = 0; first < M; first += at_once) {
    FASTLIN_UNROLL
    for (int u = 0; u < at_once; ++u) {
      const float qi = q[first + u];
      FASTLIN_UNROLL
      for (int j = 0; j < M; j += 4) {
        const Quad w = load_quad(W + (first + u) * Shape<M>::w_row + j);
        FASTLIN_UNROLL
        for (int k = 0; k < 4 && j + k < M; ++k) a[j + k] = std::fma(qi, w.x[k], a[j + k]);
      }
    }
  }
}

// Writes W, and of each task v, P_k v and h, with zeros beyond m.
template <int M>
__device__ inline void load_parameters(const Problem<float>& P, const Memory<M>& at, float* memory) {
  const int m = static_cast<int>(P.m), thread = static_cast<int>(threadIdx.x);
  for (int n = thread; n < M * Shape<M>::w_row; n += kThreads) {
    const int i = n / Shape<M>::w_row, j = n % Shape<M>::w_row;
    memory[at.W + n] = i < m && j < m ? P.W[i * m + j] : 0.0f;
  }
  for (int n = thread; n < static_cast<int>(P.K) * M; n += kThreads) {
    const int k = n / M, j = n % M, to = k * kQuery<M> + j;
    const float* v = P.v_of(0, k);
    memory[at.v + to] = j < m ? v[j] : 0.0f;
    if (P.h != nullptr) memory[at.h + to] = j < m ? P.h[k * m + j] : 0.0f;
    if (at.h == at.c0) continue;
    float sum = 0;
    for (int t = 0; j < m && t < P.t; ++t) {
      const float* token = P.p + (k * P.t + t) * m;
      float with_v = 0;
      for (int i = 0; i < m; ++i) with_v = std::fma(token[i], v[i], with_v);
      sum = std::fma(with_v, token[j], sum);
    }
    memory[at.c0 + to] = sum;
  }
}

// The sums of a chunk that a thread owns.
template <int M>
struct Sums {
  using S = Shape<M>;
  float dW[S::own_i][S::own_j] = {}, task[S::task_sums] = {};

  // Rows of 32 sequences: c, r e and a . c in part 0, r q and squared errors in part 1. Number i of a task
  // is in this row: M of r e, M of r q, and the squared errors.
  static __device__ int row_of(int i) { return i < M ? M + i : M + 1 + i; }

  __device__ void add_dW(const float* parts) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread >= S::threads_i * S::threads_j) return;
    const float* rq = parts + (S::rows + thread / S::threads_j) * kRow;
    const float* c = parts + thread % S::threads_j * kRow;
    constexpr int chains = S::own_i * S::own_j == 1 ? 4 : 1;
    float tile[S::own_i][S::own_j][chains] = {};
    FASTLIN_UNROLL
    for (int s = 0; s < kTile; s += 4) {
      Quad left[S::own_i], right[S::own_j];
      FASTLIN_UNROLL
      for (int i = 0; i < S::own_i; ++i) left[i] = load_quad(rq + i * S::threads_i * kRow + s);
      FASTLIN_UNROLL
      for (int j = 0; j < S::own_j; ++j) right[j] = load_quad(c + j * S::threads_j * kRow + s);
      FASTLIN_UNROLL
      for (int k = 0; k < 4; ++k) {
        FASTLIN_UNROLL
        for (int i = 0; i < S::own_i; ++i) {
          FASTLIN_UNROLL
          for (int j = 0; j < S::own_j; ++j) {
            tile[i][j][k % chains] = std::fma(left[i].x[k], right[j].x[k], tile[i][j][k % chains]);
          }
        }
      }
    }
    FASTLIN_UNROLL
    for (int i = 0; i < S::own_i; ++i) {
      FASTLIN_UNROLL
      for (int j = 0; j < S::own_j; ++j) {
        const float (&of)[chains] = tile[i][j];
        dW[i][j] += chains == 4 ? (of[0] + of[1 % chains]) + (of[2 % chains] + of[3 % chains]) : of[0];
      }
    }
  }

  // `k` is the task of this lane's sequence, -1 past the end.
  __device__ void add_tasks(const float* parts, int tasks, int k, bool gradients) {
    int mask[S::task_sums] = {};
    FASTLIN_NO_UNROLL
    for (int each = 0; each < tasks; ++each) {
      const int bits = static_cast<int>(__ballot_sync(0xffffffffu, k == each));
      FASTLIN_UNROLL
      for (int u = 0; u < S::task_sums; ++u) {
        if (number(u) / S::rows == each) mask[u] = bits;
      }
    }
    FASTLIN_UNROLL
    for (int u = 0; u < S::task_sums; ++u) {
      const int i = number(u) % S::rows;
      if (number(u) >= tasks * S::rows || (!gradients && i != 2 * M)) continue;
      float sum[2] = {};
      FASTLIN_UNROLL
      for (int s = 0; s < kTile; s += 4) {
        const Quad quad = load_quad(parts + row_of(i) * kRow + s);
        FASTLIN_UNROLL
        for (int b = 0; b < 4; ++b) sum[b % 2] += (mask[u] >> (s + b) & 1) != 0 ? quad.x[b] : 0.0f;
      }
      task[u] += sum[0] + sum[1];
    }
  }

  __device__ void store(const Work& work, float* to) const {
    const int m = static_cast<int>(work.P.m), thread = static_cast<int>(threadIdx.x);
    if (work.out.dW != nullptr && thread < S::threads_i * S::threads_j) {
      FASTLIN_UNROLL
      for (int u = 0; u < S::own_i; ++u) {
        FASTLIN_UNROLL
        for (int w = 0; w < S::own_j; ++w) {
          const int i = thread / S::threads_j + u * S::threads_i,
                    j = thread % S::threads_j + w * S::threads_j;
          if (i < m && j < m) to[work.numbers.dW + i * m + j] = dW[u][w];
        }
      }
    }
    FASTLIN_UNROLL
    for (int u = 0; u < S::task_sums; ++u) {
      const int k = number(u) / S::rows, i = number(u) % S::rows;
      const int j = i < M ? i : i - M;
      const std::int64_t column = i == 2 * M ? work.at.squares : i < M ? work.at.e : work.at.q;
      if (k < work.P.K && column >= 0 && (i == 2 * M || j < m)) {
        to[work.numbers.sums + k * work.at.width + column + (i == 2 * M ? 0 : j)] = task[u];
      }
    }
  }

 private:
  static __device__ int number(int u) { return static_cast<int>(threadIdx.x) + u * kThreads; }
};

template <int M>
__global__ void __launch_bounds__(kThreads, Shape<M>::blocks)
    tokens_kernel(const __grid_constant__ Work work, const __grid_constant__ Pieces how,
                  std::int64_t first_chunk) {
  using S = Shape<M>;
  FASTLIN_SHARED_MEMORY(shared);
  float* memory = reinterpret_cast<float*>(shared);
  const Problem<float>& P = work.P;
  const Memory<M> at(P, how);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t chunk = first_chunk + blockIdx.x, begin = chunk * work.chunk;
  const std::int64_t end = begin + work.chunk < P.B ? begin + work.chunk : P.B;
  const bool gradients = work.gradients(), has_targets = P.has_targets(),
             sums_up = work.at.width > 0 || gradients;

  clear(memory + at.heads, how.heads * kHead<M> / 4);
  __syncthreads();
  Place next{begin};
  const auto copy = [&](int stage) {
    if (next.first < end) {
      copy_piece<M, S::piece>(P, how, next, end, memory + at.stages + stage * how.stage_floats(),
                              memory + at.heads + (how.heads > 1 ? stage : 0) * kHead<M>);
      next.next(how);
    }
    __pipeline_commit();
  };
  for (int stage = 0; stage < kStages - 1; ++stage) copy(stage);
  load_parameters<M>(P, at, memory);
  if (gradients && has_targets) load_coefficients(work, memory + at.coefficients, warp, kWarps);

  Sums<M> sums;
  int stage = 0;
  float a[M], v[M], c[M], e[M], query[S::own_rows], dot = 0, target = 0, skipped = 0;
  int k = 0;
  float* parts = memory + at.parts;
  for (Place here{begin}; here.first < end; here.next(how)) {
    __pipeline_wait_prior(kStages - 2);
    __syncthreads();  // this piece is here, and the one before has been read
    copy(stage == 0 ? kStages - 1 : stage - 1);

    if (here.piece == 0) {
      const float* head = memory + at.heads + (how.heads > 1 ? stage : 0) * kHead<M>;
      const float* q = head + lane * kQuery<M>;
      const float* scalars = head + kTile * kQuery<M> + lane;
      target = scalars[0];
      k = P.task == nullptr || P.K == 1 ? 0 : reinterpret_cast<const int*>(scalars)[kTile];
      if (here.first + lane >= end) k = 0;
      FASTLIN_UNROLL
      for (int j = 0; j < M; ++j) a[j] = c[j] = e[j] = 0, v[j] = memory[at.v + k * kQuery<M> + j];
      project<M>(memory + at.W, q, a);
      FASTLIN_UNROLL
      for (int u = 0; u < S::own_rows; ++u) query[u] = q[std::min(warp + u * kWarps, M - 1)];
      dot = 0;
      if (at.h != at.c0 && warp == 0) {
        FASTLIN_UNROLL
        for (int j = 0; j < M; ++j) dot = std::fma(a[j], memory[at.c0 + k * kQuery<M> + j], dot);
      }
      if (P.h != nullptr) {
        skipped = 0;
        FASTLIN_UNROLL
        for (int j = 0; j < M; ++j) skipped = std::fma(q[j], memory[at.h + k * kQuery<M> + j], skipped);
      }
    }

    const int m = static_cast<int>(P.m), tokens = std::min(how.tokens, how.all - here.piece * how.tokens);
    const float* own = memory + at.stages + stage * how.stage_floats() + lane * how.stride;
    if (gradients) {
      add_piece<M, true>(how, own, m, tokens, v, a, c, e, dot);
    } else {
      add_piece<M, false>(how, own, m, tokens, v, a, c, e, dot);
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
    if (here.piece + 1 < how.count) continue;

    // The end of a tile.
    float* mine = parts + warp * S::rows * kRow + lane;
    mine[2 * M * kRow] = dot;
    if (gradients) {
      FASTLIN_UNROLL
      for (int j = 0; j < M; ++j) mine[j * kRow] = c[j], mine[(M + j) * kRow] = e[j];
    }
    __syncthreads();
    const auto joined = [&](int row) {
      float sum = 0;
      FASTLIN_UNROLL
      for (int w = 0; w < kWarps; ++w) sum += parts[(w * S::rows + row) * kRow + lane];
      return sum;
    };
    const bool real = here.first + lane < end;
    float yhat = static_cast<float>(P.scale) * joined(2 * M);
    if (P.h != nullptr) yhat = std::fma(static_cast<float>(P.last_skip), skipped, yhat);
    if (work.out.yhat != nullptr && warp == 0 && real) work.out.yhat[here.first + lane] = yhat;
    if (!sums_up) continue;
    const float difference = yhat - target;
    if (gradients) {
      const float r = has_targets ? (difference + difference) * memory[at.coefficients + k] : target;
      FASTLIN_UNROLL
      for (int u = 0; u < S::own_rows; ++u) {
        const int j = warp + u * kWarps;
        if (j >= M) continue;
        float sum = joined(j);
        if (at.h != at.c0) sum += memory[at.c0 + k * kQuery<M> + j];
        const float re = r * joined(M + j);
        float* to = parts + j * kRow + lane;
        to[0] = real ? sum : 0.0f;
        to[M * kRow] = real ? re : 0.0f;
        to[S::rows * kRow] = real ? r * query[u] : 0.0f;
      }
    }
    // The row of e_0 in part 1: it was read by the same warp.
    if (warp == 0) parts[(S::rows + M) * kRow + lane] = real && has_targets ? difference * difference : 0.0f;
    __syncthreads();
    if (work.out.dW != nullptr) sums.add_dW(parts);
    if (work.at.width > 0) sums.add_tasks(parts, static_cast<int>(P.K), real ? k : -1, gradients);
  }
  __pipeline_wait_prior(0);
  sums.store(work, work.partial + chunk * work.numbers.count);
}

template <int M>
int launch_width(const Work& work, std::int64_t first_chunk, std::int64_t chunks, void* stream) {
  const auto bytes_of = [&work](const Pieces& how) {
    return sizeof(float) * static_cast<std::size_t>(Memory<M>(work.P, how).end);
  };
  // Shorter pieces where tables of many tasks, or several tiles' queries, take room; the same for all
  // strides.
  Pieces how{}, widest{};
  for (int tokens = Shape<M>::piece;; tokens /= 2) {
    widest = how = cut<M>(work.P, 0, tokens);
    widest.stride = widest_stride(how.tokens * static_cast<int>(work.P.m));
    if (bytes_of(widest) <= kSharedBytes || tokens == kTokens<M>) break;
  }
  return launch(tokens_kernel<M>, dim3(static_cast<unsigned>(chunks)), dim3(kThreads), bytes_of(how), stream,
                work, how, first_chunk);
}

}  // namespace

bool tokens_serve(const Problem<float>& P, const Results<float>& out) {
  constexpr std::int64_t most = 1 << 30;  // floats that a 32-bit offset reaches
  return P.layers == 0 && P.R == 1 && P.H == 1 && !P.is_gram && P.source == nullptr && out.dx == nullptr &&
         out.dq == nullptr && P.K <= kMostTasks && P.m >= 1 && width_for(P.m) > 0 && P.n < most / P.m &&
         P.n * P.x_row < most;
}

int launch_tokens(const Work& work, std::int64_t first_chunk, std::int64_t chunks, void* stream) {
  switch (width_for(work.P.m)) {
    case 6:
      return launch_width<6>(work, first_chunk, chunks, stream);
    case 7:
      return launch_width<7>(work, first_chunk, chunks, stream);
    case 11:
      return launch_width<11>(work, first_chunk, chunks, stream);
    case 12:
      return launch_width<12>(work, first_chunk, chunks, stream);
    case 21:
      return launch_width<21>(work, first_chunk, chunks, stream);
    case 22:
      return launch_width<22>(work, first_chunk, chunks, stream);
    default:
      return launch_width<33>(work, first_chunk, chunks, stream);
  }
}

}  // namespace cuda
}  // namespace fastlin
