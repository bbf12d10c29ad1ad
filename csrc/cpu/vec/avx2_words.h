// Words, bits and comparisons for AVX2: 8 words, or 4 in lanes of 64 bits. Included inside a target region.

// The top bit of a lane is set where the mask holds.
template <class T>
struct Mask;

template <>
struct Mask<float> {
  __m256 x;
};

template <>
struct Mask<double> {
  __m256d x;
  static Mask all() { return {_mm256_castsi256_pd(_mm256_set1_epi64x(-1))}; }
};

template <int N>
inline Vec<std::uint32_t> shift_right_signed(Vec<std::uint32_t> a) {
  return {(Vec<std::uint32_t>::Native)_mm256_srai_epi32((__m256i)a.x, N)};
}
inline Vec<std::uint64_t> multiply_words(Vec<std::uint64_t> a, Vec<std::uint64_t> b) {
  return {(Vec<std::uint64_t>::Native)_mm256_mul_epu32((__m256i)a.x, (__m256i)b.x)};
}
// A shuffle instead of a shift: port 5 is free, unlike the ports that multiply.
inline Vec<std::uint64_t> high_word(Vec<std::uint64_t> a) {
  return {(Vec<std::uint64_t>::Native)_mm256_shuffle_epi32((__m256i)a.x, 0xf5)};
}
inline Vec<std::uint32_t> words_of(const Vec<std::uint64_t>* parts) {
  const __m256 words = _mm256_shuffle_ps((__m256)parts[0].x, (__m256)parts[1].x, 0x88);
  return {(Vec<std::uint32_t>::Native)_mm256_permute4x64_epi64((__m256i)words, 0xd8)};
}
inline Vec<float> to_float(Vec<std::uint32_t> a) { return {_mm256_cvtepi32_ps((__m256i)a.x)}; }
inline Vec<float> sqrt(Vec<float> a) { return {_mm256_sqrt_ps(a.x)}; }
inline Vec<double> sqrt(Vec<double> a) { return {_mm256_sqrt_pd(a.x)}; }
inline void store_rounded(Vec<double> a, float* p) { _mm_storeu_ps(p, _mm256_cvtpd_ps(a.x)); }

inline Mask<float> top_bit(Vec<std::uint32_t> a) { return {(__m256)a.x}; }
inline Mask<double> top_bit(Vec<std::uint64_t> a) { return {(__m256d)a.x}; }
inline Mask<double> less(Vec<double> a, Vec<double> b) { return {_mm256_cmp_pd(a.x, b.x, _CMP_LT_OQ)}; }
inline Mask<float> less(Vec<float> a, Vec<float> b) { return {_mm256_cmp_ps(a.x, b.x, _CMP_LT_OQ)}; }
inline Mask<float> operator&(Mask<float> a, Mask<float> b) { return {_mm256_and_ps(a.x, b.x)}; }
inline Mask<float> operator|(Mask<float> a, Mask<float> b) { return {_mm256_or_ps(a.x, b.x)}; }
inline bool any(Mask<float> a) { return _mm256_movemask_ps(a.x) != 0; }
inline Mask<double> operator&(Mask<double> a, Mask<double> b) { return {_mm256_and_pd(a.x, b.x)}; }
inline Mask<double> operator|(Mask<double> a, Mask<double> b) { return {_mm256_or_pd(a.x, b.x)}; }
inline Mask<double> without(Mask<double> a, Mask<double> b) { return {_mm256_andnot_pd(b.x, a.x)}; }
inline bool any(Mask<double> a) { return _mm256_movemask_pd(a.x) != 0; }
inline Vec<float> select(Mask<float> mask, Vec<float> a, Vec<float> b) {
  return {_mm256_blendv_ps(b.x, a.x, mask.x)};
}
inline Vec<double> select(Mask<double> mask, Vec<double> a, Vec<double> b) {
  return {_mm256_blendv_pd(b.x, a.x, mask.x)};
}
