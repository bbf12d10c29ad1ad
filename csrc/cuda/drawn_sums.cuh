// Sums of drawn.cu over the sequences of a chunk.
#pragma once

#include "cuda/drawn_rows.cuh"

namespace fastlin {
namespace cuda {
namespace {

// What a lane adds to the sums of its tile; a lane without a sequence has task -1.
struct DrawnTerms {
  int task;
  float square, residual;
  float c_y, e_y;        // label entries of G v and G a, without the query's part
  float with_v, with_a;  // q . v and q . a with see_query, else 0
  float root;            // sqrt n
};

// The sums of a warp over its tiles. A stage in shared memory has rows of 32 lanes, four numbers more in the
// stride: then reads of 128 bits in neighbouring rows meet in no bank.
template <int M, bool kBias>
class DrawnSums {
  using E = Column<M, kBias>;

 public:
  // `base` is the warp's memory.
  __device__ DrawnSums(const Work& work, const DrawnMemory& at, float* base, int lane)
      : work(work), at(at), base(base), stage(base + E::beta * kLanes), lane(lane) {}

  __device__ void clear() {
    FASTLIN_NO_UNROLL
    for (int i = lane; i < work.P.K * work.at.width; i += kLanes) base[at.stage_sums + i] = 0;
    FASTLIN_UNROLL
    for (int i = 0; i < E::tile.rows * E::tile.columns; ++i) dW[i] = 0;
  }

  // Writes the stage. `own` is the lane's column of draws, all of which but the query's are used up.
  __device__ FASTLIN_INLINE void write(const Applied<M, kBias>& applied, const float* own,
                                       const float* of_prompt, const DrawnTerms& terms) {
    const auto put = [this](int row, float value) { stage[row * kStageStride + lane] = value; };
    __syncwarp();  // those of the other lanes are
    put(0, terms.square);
    FASTLIN_NO_UNROLL
    for (int k = 0; k < work.P.K; ++k) {
      put(E::of_masks + k, as_float(Word{terms.task == k ? 0xffffffffu : 0u}).x);
    }
    if (work.gradients()) {
      float prompt[M];
      load_row(of_prompt, prompt);
      FASTLIN_UNROLL
      for (int j = 0; j < M; ++j) {
        const bool feature = j >= kBias && j < M - 1;
        const int x = feature ? j - kBias : 0;
        float c = feature ? applied.c[x] : j == M - 1 ? terms.c_y : terms.root * applied.root_v;
        float e = feature ? applied.e[x] : j == M - 1 ? terms.e_y : terms.root * applied.root_a;
        const float q = feature ? own[(E::query + x) * kLanes] : j == M - 1 ? 0.0f : 1.0f;
        if (j < M - 1) {
          c = std::fma(q, terms.with_v, c);
          e = std::fma(q, terms.with_a, e);
        }
        put(E::of_c + j, c + prompt[j]);
        put(E::of_e + j, terms.residual * e);
        put(E::of_q + j, terms.residual * q);
      }
    }
    __syncwarp();
  }

  // Adds the stage.
  __device__ FASTLIN_INLINE void add() {
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
      for (int k = 0; k < work.P.K; ++k) {
        const float* mask = stage + (E::of_masks + k) * kStageStride;
        float sum = 0;
        FASTLIN_UNROLL
        for (int l = 0; l < kLanes; l += 4) {
          const Quad value = load_quad(values + l), of_mask = load_quad(mask + l);
          FASTLIN_UNROLL
          for (int x = 0; x < 4; ++x) {
            sum += as_float(bits_of(Vec<float>{of_mask.x[x]}) & bits_of(Vec<float>{value.x[x]})).x;
          }
        }
        base[at.stage_sums + k * width + column] += sum;
      }
    }
    __syncwarp();
  }

  // Writes dW where the other warps find it. Until then the draws' memory is the warp's own.
  __device__ void store() const {
    if (work.out.dW == nullptr || lane >= E::tile_rows * E::tile_columns) return;
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

 private:
  const Work& work;
  const DrawnMemory& at;
  float *const base, *const stage;
  const int lane;
  float dW[E::tile.rows * E::tile.columns];
};

// Writes the sums of a chunk, those of all warps in their order; `first` is the first warp's memory. All
// threads, after DrawnSums::store and a barrier.
template <int M>
__device__ inline void finish_chunk(const Work& work, const DrawnMemory& at, const float* first,
                                    float* partial) {
  const int threads = static_cast<int>(blockDim.x);
  const auto sum = [&](const float* number) {
    float total = 0;
    FASTLIN_NO_UNROLL
    for (int warp = 0; warp < threads / kLanes; ++warp) total += number[warp * at.each_warp];
    return total;
  };
  FASTLIN_NO_UNROLL
  for (int i = static_cast<int>(threadIdx.x); work.out.dW != nullptr && i < M * M; i += threads) {
    partial[work.numbers.dW + i] = i < (M - 1) * M ? sum(first + i) : 0.0f;  // q ends with a zero
  }
  const int count = static_cast<int>(work.P.K * work.at.width);
  FASTLIN_NO_UNROLL
  for (int i = static_cast<int>(threadIdx.x); i < count; i += threads) {
    partial[work.numbers.sums + i] = sum(first + at.stage_sums + i);
  }
}

}  // namespace
}  // namespace cuda
}  // namespace fastlin
