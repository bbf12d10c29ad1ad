// Vec for AVX2 with FMA: 8 floats or 4 doubles. Included inside a target region.

constexpr int kVectorBytes = 32, kRegisters = 16;
#define FASTLIN_VECTOR_REGISTER "x"
#include "cpu/vec/native.h"

inline Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) { return {_mm256_fmadd_ps(a.x, b.x, c.x)}; }
inline Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
  return {_mm256_fmadd_pd(a.x, b.x, c.x)};
}

template <>
inline Vec<float> Vec<float>::broadcast(const float* p) {
  return {_mm256_broadcast_ss(p)};
}
template <>
inline Vec<double> Vec<double>::broadcast(const double* p) {
  return {_mm256_broadcast_sd(p)};
}

inline __m256i first_floats(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline __m256i first_doubles(int count) {
  return _mm256_cmpgt_epi64(_mm256_set1_epi64x(count), _mm256_setr_epi64x(0, 1, 2, 3));
}
template <>
inline Vec<float> Vec<float>::load_first(const float* p, int count) {
  return {_mm256_maskload_ps(p, first_floats(count))};
}
template <>
inline void Vec<float>::store_first(float* p, int count) const {
  _mm256_maskstore_ps(p, first_floats(count), x);
}
template <>
inline Vec<double> Vec<double>::load_first(const double* p, int count) {
  return {_mm256_maskload_pd(p, first_doubles(count))};
}
template <>
inline void Vec<double>::store_first(double* p, int count) const {
  _mm256_maskstore_pd(p, first_doubles(count), x);
}

template <>
FASTLIN_INLINE Vec<float> Vec<float>::load_quads(const float* const* rows, std::int64_t offset) {
  const __m128 low = _mm_loadu_ps(rows[0] + offset);
  return {_mm256_insertf128_ps(_mm256_castps128_ps256(low), _mm_loadu_ps(rows[1] + offset), 1)};
}
template <>
FASTLIN_INLINE Vec<float> Vec<float>::load_quad(const float* p) {
  return {_mm256_broadcast_ps(reinterpret_cast<const __m128*>(p))};
}
template <>
template <int kJ>
FASTLIN_INLINE Vec<float> Vec<float>::spread(Vec a) {
  return {_mm256_permute_ps(a.x, 0x55 * kJ)};
}
template <>
template <int kJ>
FASTLIN_INLINE Vec<double> Vec<double>::spread(Vec a) {
  return {_mm256_permute4x64_pd(a.x, 0x55 * kJ)};
}
template <>
FASTLIN_INLINE Vec<float> Vec<float>::sum_quads(Vec a) {
  const __m256 pairs = _mm256_add_ps(a.x, _mm256_permute_ps(a.x, 0xb1));
  return {_mm256_add_ps(pairs, _mm256_permute_ps(pairs, 0x4e))};
}
template <>
FASTLIN_INLINE Vec<double> Vec<double>::sum_quads(Vec a) {
  const __m256d pairs = _mm256_add_pd(a.x, _mm256_permute_pd(a.x, 0x5));
  return {_mm256_add_pd(pairs, _mm256_permute4x64_pd(pairs, 0x4e))};
}

template <>
FASTLIN_INLINE void Vec<float>::transpose_quads(Vec (&r)[4]) {
  const __m256 a = _mm256_unpacklo_ps(r[0].x, r[1].x), b = _mm256_unpackhi_ps(r[0].x, r[1].x);
  const __m256 c = _mm256_unpacklo_ps(r[2].x, r[3].x), d = _mm256_unpackhi_ps(r[2].x, r[3].x);
  r[0].x = _mm256_shuffle_ps(a, c, 0x44);
  r[1].x = _mm256_shuffle_ps(a, c, 0xee);
  r[2].x = _mm256_shuffle_ps(b, d, 0x44);
  r[3].x = _mm256_shuffle_ps(b, d, 0xee);
}
template <>
FASTLIN_INLINE void Vec<float>::transpose(Vec (&r)[8]) {
  __m256 u[8], w[8];
  FASTLIN_UNROLL
  for (int i = 0; i < 8; i += 2) {
    u[i] = _mm256_unpacklo_ps(r[i].x, r[i + 1].x);
    u[i + 1] = _mm256_unpackhi_ps(r[i].x, r[i + 1].x);
  }
  FASTLIN_UNROLL
  for (int i = 0; i < 8; i += 4) {
    w[i] = _mm256_shuffle_ps(u[i], u[i + 2], 0x44);
    w[i + 1] = _mm256_shuffle_ps(u[i], u[i + 2], 0xee);
    w[i + 2] = _mm256_shuffle_ps(u[i + 1], u[i + 3], 0x44);
    w[i + 3] = _mm256_shuffle_ps(u[i + 1], u[i + 3], 0xee);
  }
  FASTLIN_UNROLL
  for (int i = 0; i < 4; ++i) {
    r[i].x = _mm256_permute2f128_ps(w[i], w[i + 4], 0x20);
    r[i + 4].x = _mm256_permute2f128_ps(w[i], w[i + 4], 0x31);
  }
}
template <>
FASTLIN_INLINE void Vec<double>::transpose(Vec (&r)[4]) {
  const __m256d u0 = _mm256_unpacklo_pd(r[0].x, r[1].x), u1 = _mm256_unpackhi_pd(r[0].x, r[1].x);
  const __m256d u2 = _mm256_unpacklo_pd(r[2].x, r[3].x), u3 = _mm256_unpackhi_pd(r[2].x, r[3].x);
  r[0].x = _mm256_permute2f128_pd(u0, u2, 0x20);
  r[1].x = _mm256_permute2f128_pd(u1, u3, 0x20);
  r[2].x = _mm256_permute2f128_pd(u0, u2, 0x31);
  r[3].x = _mm256_permute2f128_pd(u1, u3, 0x31);
}
template <>
FASTLIN_INLINE void Vec<double>::load_columns(const double* const* rows, std::int64_t offset, Vec (&r)[4]) {
  __m256d u[4];
  FASTLIN_UNROLL
  for (int i = 0; i < 4; ++i) {
    const double *low = rows[i % 2] + offset + i / 2 * 2, *high = rows[i % 2 + 2] + offset + i / 2 * 2;
    u[i] = _mm256_insertf128_pd(_mm256_castpd128_pd256(_mm_loadu_pd(low)), _mm_loadu_pd(high), 1);
  }
  r[0].x = _mm256_unpacklo_pd(u[0], u[1]);
  r[1].x = _mm256_unpackhi_pd(u[0], u[1]);
  r[2].x = _mm256_unpacklo_pd(u[2], u[3]);
  r[3].x = _mm256_unpackhi_pd(u[2], u[3]);
}

template <>
FASTLIN_INLINE Vec<float> Vec<float>::sums(Vec (&r)[8]) {
  __m256 u[4], w[2];
  FASTLIN_UNROLL
  for (int i = 0; i < 4; ++i) {
    const __m256 a = r[2 * i].x, b = r[2 * i + 1].x;
    u[i] = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  }
  FASTLIN_UNROLL
  for (int i = 0; i < 2; ++i) {
    const __m256 a = u[2 * i], b = u[2 * i + 1];
    w[i] = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
  }
  return {_mm256_add_ps(_mm256_permute2f128_ps(w[0], w[1], 0x20), _mm256_permute2f128_ps(w[0], w[1], 0x31))};
}
template <>
FASTLIN_INLINE Vec<double> Vec<double>::sums(Vec (&r)[4]) {
  const __m256d a = _mm256_hadd_pd(r[0].x, r[1].x), b = _mm256_hadd_pd(r[2].x, r[3].x);
  return {_mm256_add_pd(_mm256_permute2f128_pd(a, b, 0x20), _mm256_permute2f128_pd(a, b, 0x31))};
}

#include "cpu/vec/avx2_words.h"
