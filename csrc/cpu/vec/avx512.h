// Vec for AVX-512 F: 16 floats or 8 doubles. Included inside a target region.

#include "cpu/vec/common.h"

template <class T>
struct Vec;

template <>
struct Vec<float> {
  static constexpr int size = 16;
  static constexpr int columns = 4;  // that load_columns takes
  static constexpr int quads = 4;    // rows of load_quads
  static constexpr int registers = 32;
  __m512 x;

  static Vec zero() { return {_mm512_setzero_ps()}; }
  static Vec set(float value) { return {_mm512_set1_ps(value)}; }
  static Vec broadcast(const float* p) { return {_mm512_set1_ps(*p)}; }
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec load_once(const float* p) {
    Vec value = load(p);
    asm("" : "+v"(value.x));
    return value;
  }
  static Vec load_first(const float* p, int count) { return {_mm512_maskz_loadu_ps(first(count), p)}; }
  void store(float* p) const { _mm512_storeu_ps(p, x); }
  void store_first(float* p, int count) const { _mm512_mask_storeu_ps(p, first(count), x); }

  // Interleaves the lower, then the upper halves of two vectors.
  static void zip(Vec a, Vec b, Vec& low, Vec& high) {
    const __m512i lower = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    low.x = _mm512_permutex2var_ps(a.x, lower, b.x);
    high.x = _mm512_permutex2var_ps(a.x, _mm512_add_epi32(lower, _mm512_set1_epi32(8)), b.x);
  }
  // Four elements of each row. Masked broadcasts from memory would take 16 ns for 11 columns on Zen 4 where
  // this takes 12.
  FASTLIN_INLINE static Vec load_quads(const float* const* rows, std::int64_t offset) {
    const __m256 low = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[0] + offset)),
                                            _mm_loadu_ps(rows[1] + offset), 1);
    const __m256 high = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[2] + offset)),
                                             _mm_loadu_ps(rows[3] + offset), 1);
    return {_mm512_castpd_ps(_mm512_maskz_insertf64x4(0xff, _mm512_castpd256_pd512(_mm256_castps_pd(low)),
                                                      _mm256_castps_pd(high), 1))};
  }
  FASTLIN_INLINE static Vec load_quad(const float* p) {
    return {_mm512_maskz_broadcast_f32x4(kAll, _mm_loadu_ps(p))};
  }
  template <int kJ>
  FASTLIN_INLINE static Vec spread(Vec a) {
    return {_mm512_maskz_permute_ps(kAll, a.x, 0x55 * kJ)};
  }
  FASTLIN_INLINE static Vec sum_quads(Vec a) {
    const __m512 pairs = _mm512_add_ps(a.x, _mm512_maskz_permute_ps(kAll, a.x, 0xb1));
    return {_mm512_add_ps(pairs, _mm512_maskz_permute_ps(kAll, pairs, 0x4e))};
  }
  FASTLIN_INLINE static void transpose_quads(Vec (&r)[4]) {
    const __m512 a = _mm512_maskz_unpacklo_ps(kAll, r[0].x, r[1].x),
                 b = _mm512_maskz_unpackhi_ps(kAll, r[0].x, r[1].x);
    const __m512 c = _mm512_maskz_unpacklo_ps(kAll, r[2].x, r[3].x),
                 d = _mm512_maskz_unpackhi_ps(kAll, r[2].x, r[3].x);
    r[0].x = _mm512_maskz_shuffle_ps(kAll, a, c, 0x44);
    r[1].x = _mm512_maskz_shuffle_ps(kAll, a, c, 0xee);
    r[2].x = _mm512_maskz_shuffle_ps(kAll, b, d, 0x44);
    r[3].x = _mm512_maskz_shuffle_ps(kAll, b, d, 0xee);
  }
  FASTLIN_INLINE static void load_columns(const float* const* rows, std::int64_t offset, Vec (&r)[4]) {
    load_columns_by_quads(rows, offset, r);
  }
  FASTLIN_INLINE static void transpose(Vec (&r)[16]) { transpose_by_zips(r); }
  FASTLIN_INLINE static Vec sums(Vec (&r)[16]) { return sums_by_zips(r); }

 private:
  // Masked forms with every lane: the others start from a value that GCC 12 warns is not initialised.
  static constexpr __mmask16 kAll = 0xffff;

  static __mmask16 first(int count) {
    return static_cast<__mmask16>(count >= 16 ? 0xffffu : (1u << count) - 1u);
  }
};

inline Vec<float> operator+(Vec<float> a, Vec<float> b) { return {_mm512_add_ps(a.x, b.x)}; }
inline Vec<float> operator-(Vec<float> a, Vec<float> b) { return {_mm512_sub_ps(a.x, b.x)}; }
inline Vec<float> operator*(Vec<float> a, Vec<float> b) { return {_mm512_mul_ps(a.x, b.x)}; }
inline Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }

template <>
struct Vec<double> {
  static constexpr int size = 8;
  static constexpr int columns = 4;
  static constexpr int quads = 2;
  static constexpr int registers = 32;
  __m512d x;

  static Vec zero() { return {_mm512_setzero_pd()}; }
  static Vec set(double value) { return {_mm512_set1_pd(value)}; }
  static Vec broadcast(const double* p) { return {_mm512_set1_pd(*p)}; }
  static Vec load(const double* p) { return {_mm512_loadu_pd(p)}; }
  static Vec load_once(const double* p) {
    Vec value = load(p);
    asm("" : "+v"(value.x));
    return value;
  }
  static Vec load_first(const double* p, int count) { return {_mm512_maskz_loadu_pd(first(count), p)}; }
  void store(double* p) const { _mm512_storeu_pd(p, x); }
  void store_first(double* p, int count) const { _mm512_mask_storeu_pd(p, first(count), x); }

  static void zip(Vec a, Vec b, Vec& low, Vec& high) {
    const __m512i lower = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
    low.x = _mm512_permutex2var_pd(a.x, lower, b.x);
    high.x = _mm512_permutex2var_pd(a.x, _mm512_add_epi64(lower, _mm512_set1_epi64(4)), b.x);
  }
  FASTLIN_INLINE static Vec load_quads(const double* const* rows, std::int64_t offset) {
    return {_mm512_maskz_insertf64x4(kAll, _mm512_castpd256_pd512(_mm256_loadu_pd(rows[0] + offset)),
                                     _mm256_loadu_pd(rows[1] + offset), 1)};
  }
  FASTLIN_INLINE static Vec load_quad(const double* p) {
    return {_mm512_maskz_broadcast_f64x4(kAll, _mm256_loadu_pd(p))};
  }
  template <int kJ>
  FASTLIN_INLINE static Vec spread(Vec a) {
    return {_mm512_maskz_permutex_pd(kAll, a.x, 0x55 * kJ)};
  }
  FASTLIN_INLINE static Vec sum_quads(Vec a) {
    const __m512d pairs = _mm512_add_pd(a.x, _mm512_maskz_permute_pd(kAll, a.x, 0x55));
    return {_mm512_add_pd(pairs, _mm512_maskz_permutex_pd(kAll, pairs, 0x4e))};
  }
  FASTLIN_INLINE static void transpose_quads(Vec (&r)[4]) {
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
    const __m512i high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    const __m512d a = _mm512_maskz_unpacklo_pd(kAll, r[0].x, r[1].x),
                  b = _mm512_maskz_unpackhi_pd(kAll, r[0].x, r[1].x);
    const __m512d c = _mm512_maskz_unpacklo_pd(kAll, r[2].x, r[3].x),
                  d = _mm512_maskz_unpackhi_pd(kAll, r[2].x, r[3].x);
    r[0].x = _mm512_permutex2var_pd(a, low, c);
    r[1].x = _mm512_permutex2var_pd(b, low, d);
    r[2].x = _mm512_permutex2var_pd(a, high, c);
    r[3].x = _mm512_permutex2var_pd(b, high, d);
  }
  FASTLIN_INLINE static void load_columns(const double* const* rows, std::int64_t offset, Vec (&r)[4]) {
    load_columns_by_quads(rows, offset, r);
  }
  FASTLIN_INLINE static void transpose(Vec (&r)[8]) { transpose_by_zips(r); }
  FASTLIN_INLINE static Vec sums(Vec (&r)[8]) { return sums_by_zips(r); }

 private:
  static constexpr __mmask8 kAll = 0xff;

  static __mmask8 first(int count) { return static_cast<__mmask8>(count >= 8 ? 0xffu : (1u << count) - 1u); }
};

inline Vec<double> operator+(Vec<double> a, Vec<double> b) { return {_mm512_add_pd(a.x, b.x)}; }
inline Vec<double> operator-(Vec<double> a, Vec<double> b) { return {_mm512_sub_pd(a.x, b.x)}; }
inline Vec<double> operator*(Vec<double> a, Vec<double> b) { return {_mm512_mul_pd(a.x, b.x)}; }
inline Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
  return {_mm512_fmadd_pd(a.x, b.x, c.x)};
}

#include "cpu/vec/avx512_words.h"
