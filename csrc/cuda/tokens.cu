// One layer, one trial, from tokens: no Gram matrix. A sequence with query q, task k and tokens z:
//
//   a = W' q    c = P_k v_k + sum z (z . v_k)    e = sum z (z . a)
//   yhat = scale a . c (+ last_skip q . h_k)     r = dloss/dyhat    dW = sum r q c'
//   and of each task: the sums of squared errors, of r e and of r q
//
// A block of 4 warps takes a chunk, a tile of 32 sequences at a time, whose tokens come in pieces:
//
//   lane = sequence: a, v, c, e are in registers, 4 M of them; a token is loaded once, for 4 M + 1 FMAs
//   warps share the tokens of a piece, two at a time of a width up to 12, else one
//   warps' parts of c, e and a . c go through shared memory; each warp adds every fourth row of them
//   thread (i, j) owns dW_ij, and adds 32 sequences with 16 loads of 128 bits (tokens_sums.cuh)
//
// By the machine code of sm_90, all gradients, K = 2, t = 1, n = 50; for a tile, against the clocks that its
// bytes take at the bandwidth of an A100 (H100), and a warp's share of instructions in them:
//
//   M     bytes a sequence    clocks          instructions of a warp    registers    shared memory    blocks
//   11    2256                5390 (5630)     3410 (63 %)               118          50 KB            3 (4)
//   33    6744                16100 (16800)   10060 (62 %)              232          100 KB           1 (2)
//
// The instructions are those of dev/paper.py, which counts branches as executed. A multiprocessor has 68 KB
// (90 KB) on their way. The order of sums is the same for all layouts of the tokens, with gradients and
// without.
#include "cuda/pieces.cuh"
#include "cuda/tokens_sums.cuh"

namespace fastlin {
namespace cuda {
namespace {

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
  FASTLIN_NO_UNROLL
  for (int n = thread; n < M * Shape<M>::w_row; n += kThreads) {
    const int i = n / Shape<M>::w_row, j = n % Shape<M>::w_row;
    memory[at.W + n] = i < m && j < m ? P.W[i * m + j] : 0.0f;
  }
  FASTLIN_NO_UNROLL
  for (int n = thread; n < static_cast<int>(P.K) * M; n += kThreads) {
    const int k = n / M, j = n % M, to = k * kQuery<M> + j;
    const float* v = P.v_of(0, k);
    memory[at.v + to] = j < m ? v[j] : 0.0f;
    if (P.h != nullptr) memory[at.h + to] = j < m ? P.h[k * m + j] : 0.0f;
    if (at.h == at.c0) continue;
    float sum = 0;
    FASTLIN_NO_UNROLL
    for (int t = 0; j < m && t < P.t; ++t) {
      const float* token = P.p + (k * P.t + t) * m;
      float with_v = 0;
      for (int i = 0; i < m; ++i) with_v = std::fma(token[i], v[i], with_v);
      sum = std::fma(with_v, token[j], sum);
    }
    memory[at.c0 + to] = sum;
  }
}

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
  FASTLIN_NO_UNROLL
  for (int stage = 0; stage < kStages; ++stage) copy(stage);
  load_parameters<M>(P, at, memory);
  if (gradients && has_targets) load_coefficients(work, memory + at.coefficients, warp, kWarps);
  __pipeline_wait_prior(kStages - 1);
  __syncthreads();  // the first piece is here

  Sums<M> sums;
  int stage = 0;
  float a[M], v[M], c[M], e[M], query[S::own_rows], dot = 0, target = 0, skipped = 0;
  int k = 0;
  float* parts = memory + at.parts;
  FASTLIN_NO_UNROLL
  for (std::int64_t first = begin; first < end; first += kTile) {
    const float* head = memory + at.heads + (how.heads > 1 ? stage : 0) * kHead<M>;
    const float* q = head + lane * kQuery<M>;
    const float* scalars = head + kTile * kQuery<M> + lane;
    target = scalars[0];
    k = P.task == nullptr || P.K == 1 ? 0 : reinterpret_cast<const int*>(scalars)[kTile];
    if (first + lane >= end) k = 0;
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

    FASTLIN_NO_UNROLL
    for (int left = how.all, piece = 0; piece < how.count; ++piece, left -= how.tokens) {
      const int m = static_cast<int>(P.m), tokens = std::min(how.tokens, left);
      const float* own = memory + at.stages + stage * how.stage_floats() + lane * how.stride;
      if (gradients) {
        add_piece<M, true>(how, own, m, tokens, v, a, c, e, dot);
      } else {
        add_piece<M, false>(how, own, m, tokens, v, a, c, e, dot);
      }
      __pipeline_wait_prior(kStages - 2);
      __syncthreads();  // the next piece is here, and this one has been read: it makes room
      copy(stage);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }

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
    const bool real = first + lane < end;
    float yhat = static_cast<float>(P.scale) * joined(2 * M);
    if (P.h != nullptr) yhat = std::fma(static_cast<float>(P.last_skip), skipped, yhat);
    if (work.out.yhat != nullptr && warp == 0 && real) work.out.yhat[first + lane] = yhat;
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
  if (chunks == 0) return 0;
  return with_width(
      work.P.m, [&](auto M) { return launch_width<decltype(M)::value>(work, first_chunk, chunks, stream); });
}

}  // namespace cuda
}  // namespace fastlin
