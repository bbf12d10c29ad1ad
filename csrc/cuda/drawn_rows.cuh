// The algebra of a sequence in drawn.cu: small products with a lane's column, and the rows of the factor as
// they are applied to two vectors.
#pragma once

#include "cuda/drawn_memory.cuh"

namespace fastlin {
namespace cuda {
namespace {

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

}  // namespace
}  // namespace cuda
}  // namespace fastlin
