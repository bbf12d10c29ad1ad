// Matrix layers and the layer after them, one head, from records: loss and gradients of all parameters.
//
// The algebra is that of fastlin/backends/eager.py, A and W with `scale`: T = rho I + A G C in each layer.
// All matrix layers but the last are dense: X' = C' G, T' = rho I + X' A', G T, G <- T' (G T), and in reverse
//   Tb = q qb' + (G T) H     dA = Tb X'     Z = A' Tb     dC = G Z     H <- T H T' + Z C' + C Z'
// with H = 2 Gb: at the bottom, where only dp = H p is wanted, of vectors. The last matrix layer has no
// matrix of its own. T x and T' x are three products of a matrix and a vector, G_L v = T'(G (T v)), and H of
// G_L has rank two, so that dA and dC are sums of three outer products of vectors that the forward pass has
// made, and H below has rank eight:
//   dA = q (G C qb)' + (G T a)(G C v)' + (G T v)(G C a)'
//   dC = (G A' q) qb' + (G A' G T a) v' + (G A' G T v) a'                             (a times dloss/dyhat)
//   H = S + S',  S = (T a)(T v)' + (A' q)(C qb)' + (A' G T a)(C v)' + (A' G T v)(C a)'
//
// Mapping: stack_group.cuh. A warp has 8 sequences at m = 11 and 12, 16 below, 2 or 1 above; a block is a
// chunk and a trial, with the 1 to 4 warps that fit into shared memory. Sums of dA and dC of one dense layer
// stay in registers for the whole chunk, as those of the outer products do by tiles of 4 x 4; deeper stacks
// and wide ones keep them in shared memory, those by task in few streams. So up to 255 registers and 24 KB a
// warp at m = 11, three layers and two tasks: 8 warps a multiprocessor of an H100. All loops are parallel in
// themselves: 33 independent multiply-adds for each step of a product.
//
// Warp instructions a sequence there, all gradients, one prompt token (sm_90): about 760, of them 524
// multiply-adds, 103 loads and 27 stores of shared memory; 324 without gradients. The multiply-adds: 347 in
// dense products, where G <- T' (G T) is computed below its diagonal alone, 120 in products of matrices and
// vectors, 57 in outer products.
#include "cuda/stack_reverse.cuh"

namespace fastlin {
namespace cuda {
namespace {

// A parameter, or its transpose, with zeros around it.
template <int M>
__device__ FASTLIN_INLINE void load_matrix(const float* from, int m, bool transposes, float factor,
                                           float* to) {
  using S = StackShape<M>;
  FASTLIN_NO_UNROLL
  for (int i = static_cast<int>(threadIdx.x); i < S::matrix; i += static_cast<int>(blockDim.x)) {
    const int c = i / S::column, k = i % S::column;
    to[i] = c < m && k < m ? factor * from[transposes ? c * m + k : k * m + c] : 0.0f;
  }
}

// factor (M x) or factor (M' x) of vectors [count, column]; without a matrix, the vectors x [count, m].
template <int M>
__device__ FASTLIN_INLINE void load_vectors(const float* matrix, bool transposes, float factor,
                                            const float* x, int count, int m, float* to) {
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
__device__ FASTLIN_INLINE void load_parameters(const Work& work, const StackLayout& at, float* memory,
                                               int r) {
  constexpr int matrix = StackShape<M>::matrix;
  const Problem<float>& P = work.P;
  const int m = static_cast<int>(P.m);
  const float *A = P.A + r * P.layers * m * m, *C = P.C + r * P.layers * m * m,
              *W = P.W + std::int64_t{r} * m * m;
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
    const std::int64_t to =
        matrix == 2 ? work.numbers.dW + r * square
                    : (matrix == 0 ? work.numbers.dA : work.numbers.dC) + (r * P.layers + at.dense) * square;
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
    stack_kernel(const __grid_constant__ Work work, const __grid_constant__ StackLayout at, int first_chunk) {
  FASTLIN_SHARED_MEMORY(bytes);
  float* const memory = reinterpret_cast<float*>(bytes);
  // The compiler must see that the warp's number is the same in all lanes: loops over sequences are then
  // uniform.
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

}  // namespace

bool stack_serves(const Problem<float>& P, const Results<float>& out) {
  if (P.layers < 1 || P.layers > 16 || P.H != 1 || P.K < 1 || P.K > kMostTasks || P.R > 65535 ||
      width_for(P.m) == 0 || P.t > 256 || out.dx != nullptr || out.dq != nullptr) {
    return false;
  }
  return with_width(P.m, [&](auto M) { return stack_layout<decltype(M)::value>(P).warps > 0; });
}

int launch_stack(const Work& work, std::int64_t first_chunk, std::int64_t chunks, void* stream) {
  if (chunks == 0 || work.P.R == 0) return 0;
  return with_width(
      work.P.m, [&](auto M) { return launch_width<decltype(M)::value>(work, first_chunk, chunks, stream); });
}

}  // namespace cuda
}  // namespace fastlin
