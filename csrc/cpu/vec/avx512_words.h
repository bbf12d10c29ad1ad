// Words, bits and comparisons for AVX-512 F: 16 words, or 8 in lanes of 64 bits. Included inside a target
// region.

template <>
struct Vec<std::uint32_t> {
  static constexpr int size = 16;
  __m512i x;

  static Vec set(std::uint32_t value) { return {_mm512_set1_epi32(static_cast<int>(value))}; }
  void store(std::uint32_t* p) const { _mm512_storeu_si512(p, x); }
};

template <>
struct Vec<std::uint64_t> {
  static constexpr int size = 8;
  __m512i x;

  static Vec set(std::uint64_t value) { return {_mm512_set1_epi64(static_cast<long long>(value))}; }
  static Vec load(const std::uint64_t* p) { return {_mm512_loadu_si512(p)}; }
  void store(std::uint64_t* p) const { _mm512_storeu_si512(p, x); }
};

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
  static Mask all() { return {0xff}; }
};

inline Vec<std::uint32_t> operator+(Vec<std::uint32_t> a, Vec<std::uint32_t> b) {
  return {_mm512_add_epi32(a.x, b.x)};
}
inline Vec<std::uint32_t> operator-(Vec<std::uint32_t> a, Vec<std::uint32_t> b) {
  return {_mm512_sub_epi32(a.x, b.x)};
}
inline Vec<std::uint32_t> operator^(Vec<std::uint32_t> a, Vec<std::uint32_t> b) {
  return {_mm512_xor_si512(a.x, b.x)};
}
inline Vec<std::uint32_t> operator&(Vec<std::uint32_t> a, Vec<std::uint32_t> b) {
  return {_mm512_and_si512(a.x, b.x)};
}
template <int N>
inline Vec<std::uint32_t> shift_left(Vec<std::uint32_t> a) {
  return {_mm512_maskz_slli_epi32(0xffff, a.x, N)};
}
template <int N>
inline Vec<std::uint32_t> shift_right_signed(Vec<std::uint32_t> a) {
  return {_mm512_maskz_srai_epi32(0xffff, a.x, N)};
}
inline Vec<float> as_float(Vec<std::uint32_t> a) { return {_mm512_castsi512_ps(a.x)}; }
inline Vec<std::uint32_t> bits_of(Vec<float> a) { return {_mm512_castps_si512(a.x)}; }
inline Vec<float> to_float(Vec<std::uint32_t> a) { return {_mm512_maskz_cvtepi32_ps(0xffff, a.x)}; }
inline Vec<float> sqrt(Vec<float> a) { return {_mm512_maskz_sqrt_ps(0xffff, a.x)}; }
inline Mask<float> top_bit(Vec<std::uint32_t> a) {
  return {_mm512_cmplt_epi32_mask(a.x, _mm512_setzero_si512())};
}
inline Vec<float> select(Mask<float> mask, Vec<float> a, Vec<float> b) {
  return {_mm512_mask_blend_ps(mask.x, b.x, a.x)};
}

inline Vec<std::uint64_t> operator+(Vec<std::uint64_t> a, Vec<std::uint64_t> b) {
  return {_mm512_add_epi64(a.x, b.x)};
}
inline Vec<std::uint64_t> operator-(Vec<std::uint64_t> a, Vec<std::uint64_t> b) {
  return {_mm512_sub_epi64(a.x, b.x)};
}
inline Vec<std::uint64_t> operator^(Vec<std::uint64_t> a, Vec<std::uint64_t> b) {
  return {_mm512_xor_si512(a.x, b.x)};
}
inline Vec<std::uint64_t> operator&(Vec<std::uint64_t> a, Vec<std::uint64_t> b) {
  return {_mm512_and_si512(a.x, b.x)};
}
inline Vec<std::uint64_t> operator|(Vec<std::uint64_t> a, Vec<std::uint64_t> b) {
  return {_mm512_or_si512(a.x, b.x)};
}
inline Vec<std::uint64_t> xor3(Vec<std::uint64_t> a, Vec<std::uint64_t> b, Vec<std::uint64_t> c) {
  return {_mm512_ternarylogic_epi64(a.x, b.x, c.x, 0x96)};
}
template <int N>
inline Vec<std::uint64_t> shift_left(Vec<std::uint64_t> a) {
  return {_mm512_maskz_slli_epi64(0xff, a.x, N)};
}
template <int N>
inline Vec<std::uint64_t> shift_right(Vec<std::uint64_t> a) {
  return {_mm512_maskz_srli_epi64(0xff, a.x, N)};
}
inline Vec<std::uint64_t> multiply_words(Vec<std::uint64_t> a, Vec<std::uint64_t> b) {
  return {_mm512_maskz_mul_epu32(0xff, a.x, b.x)};
}
inline Vec<std::uint64_t> high_word(Vec<std::uint64_t> a) { return shift_right<32>(a); }
inline Vec<std::uint32_t> words_of(const Vec<std::uint64_t>* parts) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  return {_mm512_permutex2var_epi32(parts[0].x, even, parts[1].x)};
}
inline Vec<double> as_double(Vec<std::uint64_t> a) { return {_mm512_castsi512_pd(a.x)}; }
inline Vec<std::uint64_t> bits_of(Vec<double> a) { return {_mm512_castpd_si512(a.x)}; }
inline Vec<float> operator/(Vec<float> a, Vec<float> b) { return {_mm512_div_ps(a.x, b.x)}; }
inline Vec<double> operator/(Vec<double> a, Vec<double> b) { return {_mm512_div_pd(a.x, b.x)}; }
inline Vec<double> sqrt(Vec<double> a) { return {_mm512_maskz_sqrt_pd(0xff, a.x)}; }
inline void store_rounded(Vec<double> a, float* p) { _mm256_storeu_ps(p, _mm512_maskz_cvtpd_ps(0xff, a.x)); }
inline void store_rounded(Vec<double> a, double* p) { a.store(p); }

inline Mask<double> less(Vec<double> a, Vec<double> b) { return {_mm512_cmp_pd_mask(a.x, b.x, _CMP_LT_OQ)}; }
inline Mask<double> top_bit(Vec<std::uint64_t> a) {
  return {_mm512_cmplt_epi64_mask(a.x, _mm512_setzero_si512())};
}
inline Mask<double> operator&(Mask<double> a, Mask<double> b) { return {static_cast<__mmask8>(a.x & b.x)}; }
inline Mask<double> operator|(Mask<double> a, Mask<double> b) { return {static_cast<__mmask8>(a.x | b.x)}; }
inline Mask<double> without(Mask<double> a, Mask<double> b) { return {static_cast<__mmask8>(a.x & ~b.x)}; }
inline bool any(Mask<double> a) { return a.x != 0; }
inline Vec<double> select(Mask<double> mask, Vec<double> a, Vec<double> b) {
  return {_mm512_mask_blend_pd(mask.x, b.x, a.x)};
}
