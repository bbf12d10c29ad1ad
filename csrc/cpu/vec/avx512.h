// Vec for AVX-512 F: 16 floats or 8 doubles. Included inside a target region.

constexpr int kVectorBytes = 64, kRegisters = 32;
#define FASTLIN_VECTOR_REGISTER "v"
#include "cpu/vec/native.h"

// Masked intrinsics with every lane: the unmasked ones start from a value that GCC 12 reports as
// uninitialised.
constexpr __mmask16 kAllFloats = 0xffff;
constexpr __mmask8 kAllDoubles = 0xff;

inline Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
inline Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
  return {_mm512_fmadd_pd(a.x, b.x, c.x)};
}

inline __mmask16 first_floats(int count) {
  return static_cast<__mmask16>(count >= 16 ? 0xffffu : (1u << count) - 1u);
}
inline __mmask8 first_doubles(int count) {
  return static_cast<__mmask8>(count >= 8 ? 0xffu : (1u << count) - 1u);
}
template <>
inline Vec<float> Vec<float>::load_first(const float* p, int count) {
  return {_mm512_maskz_loadu_ps(first_floats(count), p)};
}
template <>
inline void Vec<float>::store_first(float* p, int count) const {
  _mm512_mask_storeu_ps(p, first_floats(count), x);
}
template <>
inline Vec<double> Vec<double>::load_first(const double* p, int count) {
  return {_mm512_maskz_loadu_pd(first_doubles(count), p)};
}
template <>
inline void Vec<double>::store_first(double* p, int count) const {
  _mm512_mask_storeu_pd(p, first_doubles(count), x);
}

template <>
inline void Vec<float>::zip(Vec a, Vec b, Vec& low, Vec& high) {
  const __m512i lower = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  low.x = _mm512_permutex2var_ps(a.x, lower, b.x);
  high.x = _mm512_permutex2var_ps(a.x, _mm512_add_epi32(lower, _mm512_set1_epi32(8)), b.x);
}
template <>
inline void Vec<double>::zip(Vec a, Vec b, Vec& low, Vec& high) {
  const __m512i lower = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
  low.x = _mm512_permutex2var_pd(a.x, lower, b.x);
  high.x = _mm512_permutex2var_pd(a.x, _mm512_add_epi64(lower, _mm512_set1_epi64(4)), b.x);
}

// 11 columns take 12 ns on Zen 4; masked broadcasts from memory would take 16 ns.
template <>
FASTLIN_INLINE Vec<float> Vec<float>::load_quads(const float* const* rows, std::int64_t offset) {
  const __m256 low = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[0] + offset)),
                                          _mm_loadu_ps(rows[1] + offset), 1);
  const __m256 high = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[2] + offset)),
                                           _mm_loadu_ps(rows[3] + offset), 1);
  return {_mm512_castpd_ps(_mm512_maskz_insertf64x4(
      kAllDoubles, _mm512_castpd256_pd512(_mm256_castps_pd(low)), _mm256_castps_pd(high), 1))};
}
template <>
FASTLIN_INLINE Vec<double> Vec<double>::load_quads(const double* const* rows, std::int64_t offset) {
  return {_mm512_maskz_insertf64x4(kAllDoubles, _mm512_castpd256_pd512(_mm256_loadu_pd(rows[0] + offset)),
                                   _mm256_loadu_pd(rows[1] + offset), 1)};
}
template <>
FASTLIN_INLINE Vec<float> Vec<float>::load_quad(const float* p) {
  return {_mm512_maskz_broadcast_f32x4(kAllFloats, _mm_loadu_ps(p))};
}
template <>
FASTLIN_INLINE Vec<double> Vec<double>::load_quad(const double* p) {
  return {_mm512_maskz_broadcast_f64x4(kAllDoubles, _mm256_loadu_pd(p))};
}
template <>
template <int kJ>
FASTLIN_INLINE Vec<float> Vec<float>::spread(Vec a) {
  return {_mm512_maskz_permute_ps(kAllFloats, a.x, 0x55 * kJ)};
}
template <>
template <int kJ>
FASTLIN_INLINE Vec<double> Vec<double>::spread(Vec a) {
  return {_mm512_maskz_permutex_pd(kAllDoubles, a.x, 0x55 * kJ)};
}
template <>
FASTLIN_INLINE Vec<float> Vec<float>::sum_quads(Vec a) {
  const __m512 pairs = _mm512_add_ps(a.x, _mm512_maskz_permute_ps(kAllFloats, a.x, 0xb1));
  return {_mm512_add_ps(pairs, _mm512_maskz_permute_ps(kAllFloats, pairs, 0x4e))};
}
template <>
FASTLIN_INLINE Vec<double> Vec<double>::sum_quads(Vec a) {
  const __m512d pairs = _mm512_add_pd(a.x, _mm512_maskz_permute_pd(kAllDoubles, a.x, 0x55));
  return {_mm512_add_pd(pairs, _mm512_maskz_permutex_pd(kAllDoubles, pairs, 0x4e))};
}

template <>
FASTLIN_INLINE void Vec<float>::transpose_quads(Vec (&r)[4]) {
  const __m512 a = _mm512_maskz_unpacklo_ps(kAllFloats, r[0].x, r[1].x),
               b = _mm512_maskz_unpackhi_ps(kAllFloats, r[0].x, r[1].x);
  const __m512 c = _mm512_maskz_unpacklo_ps(kAllFloats, r[2].x, r[3].x),
               d = _mm512_maskz_unpackhi_ps(kAllFloats, r[2].x, r[3].x);
  r[0].x = _mm512_maskz_shuffle_ps(kAllFloats, a, c, 0x44);
  r[1].x = _mm512_maskz_shuffle_ps(kAllFloats, a, c, 0xee);
  r[2].x = _mm512_maskz_shuffle_ps(kAllFloats, b, d, 0x44);
  r[3].x = _mm512_maskz_shuffle_ps(kAllFloats, b, d, 0xee);
}
template <>
FASTLIN_INLINE void Vec<double>::transpose_quads(Vec (&r)[4]) {
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
  const __m512i high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
  const __m512d a = _mm512_maskz_unpacklo_pd(kAllDoubles, r[0].x, r[1].x),
                b = _mm512_maskz_unpackhi_pd(kAllDoubles, r[0].x, r[1].x);
  const __m512d c = _mm512_maskz_unpacklo_pd(kAllDoubles, r[2].x, r[3].x),
                d = _mm512_maskz_unpackhi_pd(kAllDoubles, r[2].x, r[3].x);
  r[0].x = _mm512_permutex2var_pd(a, low, c);
  r[1].x = _mm512_permutex2var_pd(b, low, d);
  r[2].x = _mm512_permutex2var_pd(a, high, c);
  r[3].x = _mm512_permutex2var_pd(b, high, d);
}

#include "cpu/vec/avx512_words.h"
