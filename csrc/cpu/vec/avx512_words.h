// Words, bits and comparisons for AVX-512 F: 16 words, or 8 in lanes of 64 bits. Included inside a target
// region.

// A bit for each lane.
template <class T>
struct Mask;

template <>
struct Mask<float> {
  __mmask16 x;
};

template <>
struct Mask<double> {
  __mmask8 x;
  static Mask all() { return {kAllDoubles}; }
};

inline Vec<std::uint64_t> xor3(Vec<std::uint64_t> a, Vec<std::uint64_t> b, Vec<std::uint64_t> c) {
  return {
      (Vec<std::uint64_t>::Native)_mm512_ternarylogic_epi64((__m512i)a.x, (__m512i)b.x, (__m512i)c.x, 0x96)};
}
template <int N>
inline Vec<std::uint32_t> shift_right_signed(Vec<std::uint32_t> a) {
  return {(Vec<std::uint32_t>::Native)_mm512_maskz_srai_epi32(kAllFloats, (__m512i)a.x, N)};
}
inline Vec<std::uint64_t> multiply_words(Vec<std::uint64_t> a, Vec<std::uint64_t> b) {
  return {(Vec<std::uint64_t>::Native)_mm512_maskz_mul_epu32(kAllDoubles, (__m512i)a.x, (__m512i)b.x)};
}
inline Vec<std::uint64_t> high_word(Vec<std::uint64_t> a) { return shift_right<32>(a); }
inline Vec<std::uint32_t> words_of(const Vec<std::uint64_t>* parts) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  return {
      (Vec<std::uint32_t>::Native)_mm512_permutex2var_epi32((__m512i)parts[0].x, even, (__m512i)parts[1].x)};
}
inline Vec<float> to_float(Vec<std::uint32_t> a) {
  return {_mm512_maskz_cvtepi32_ps(kAllFloats, (__m512i)a.x)};
}
inline Vec<float> sqrt(Vec<float> a) { return {_mm512_maskz_sqrt_ps(kAllFloats, a.x)}; }
inline Vec<double> sqrt(Vec<double> a) { return {_mm512_maskz_sqrt_pd(kAllDoubles, a.x)}; }
inline void store_rounded(Vec<double> a, float* p) {
  _mm256_storeu_ps(p, _mm512_maskz_cvtpd_ps(kAllDoubles, a.x));
}

inline Mask<float> top_bit(Vec<std::uint32_t> a) {
  return {_mm512_cmplt_epi32_mask((__m512i)a.x, _mm512_setzero_si512())};
}
inline Mask<double> top_bit(Vec<std::uint64_t> a) {
  return {_mm512_cmplt_epi64_mask((__m512i)a.x, _mm512_setzero_si512())};
}
inline Mask<double> less(Vec<double> a, Vec<double> b) { return {_mm512_cmp_pd_mask(a.x, b.x, _CMP_LT_OQ)}; }
inline Mask<float> less(Vec<float> a, Vec<float> b) { return {_mm512_cmp_ps_mask(a.x, b.x, _CMP_LT_OQ)}; }
inline Mask<float> operator&(Mask<float> a, Mask<float> b) { return {static_cast<__mmask16>(a.x & b.x)}; }
inline Mask<float> operator|(Mask<float> a, Mask<float> b) { return {static_cast<__mmask16>(a.x | b.x)}; }
inline bool any(Mask<float> a) { return a.x != 0; }
inline Mask<double> operator&(Mask<double> a, Mask<double> b) { return {static_cast<__mmask8>(a.x & b.x)}; }
inline Mask<double> operator|(Mask<double> a, Mask<double> b) { return {static_cast<__mmask8>(a.x | b.x)}; }
inline Mask<double> without(Mask<double> a, Mask<double> b) { return {static_cast<__mmask8>(a.x & ~b.x)}; }
inline bool any(Mask<double> a) { return a.x != 0; }
inline Vec<float> select(Mask<float> mask, Vec<float> a, Vec<float> b) {
  return {_mm512_mask_blend_ps(mask.x, b.x, a.x)};
}
inline Vec<double> select(Mask<double> mask, Vec<double> a, Vec<double> b) {
  return {_mm512_mask_blend_pd(mask.x, b.x, a.x)};
}
