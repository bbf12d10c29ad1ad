// Words, bits and comparisons for AVX2: 8 words, or 4 in lanes of 64 bits. Included inside a target region.

template <>
struct Vec<std::uint32_t> {
  static constexpr int size = 8;
  __m256i x;

  static Vec set(std::uint32_t value) { return {_mm256_set1_epi32(static_cast<int>(value))}; }
  void store(std::uint32_t* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
};

template <>
struct Vec<std::uint64_t> {
  static constexpr int size = 4;
  __m256i x;

  static Vec set(std::uint64_t value) { return {_mm256_set1_epi64x(static_cast<long long>(value))}; }
  static Vec load(const std::uint64_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
  }
  void store(std::uint64_t* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
};

// The top bit of a lane tells whether it is in it.
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

inline Vec<std::uint32_t> operator+(Vec<std::uint32_t> a, Vec<std::uint32_t> b) {
  return {_mm256_add_epi32(a.x, b.x)};
}
inline Vec<std::uint32_t> operator-(Vec<std::uint32_t> a, Vec<std::uint32_t> b) {
  return {_mm256_sub_epi32(a.x, b.x)};
}
inline Vec<std::uint32_t> operator^(Vec<std::uint32_t> a, Vec<std::uint32_t> b) {
  return {_mm256_xor_si256(a.x, b.x)};
}
inline Vec<std::uint32_t> operator&(Vec<std::uint32_t> a, Vec<std::uint32_t> b) {
  return {_mm256_and_si256(a.x, b.x)};
}
template <int N>
inline Vec<std::uint32_t> shift_left(Vec<std::uint32_t> a) {
  return {_mm256_slli_epi32(a.x, N)};
}
template <int N>
inline Vec<std::uint32_t> shift_right_signed(Vec<std::uint32_t> a) {
  return {_mm256_srai_epi32(a.x, N)};
}
inline Vec<float> as_float(Vec<std::uint32_t> a) { return {_mm256_castsi256_ps(a.x)}; }
inline Vec<std::uint32_t> bits_of(Vec<float> a) { return {_mm256_castps_si256(a.x)}; }
inline Vec<float> to_float(Vec<std::uint32_t> a) { return {_mm256_cvtepi32_ps(a.x)}; }
inline Vec<float> sqrt(Vec<float> a) { return {_mm256_sqrt_ps(a.x)}; }
inline Mask<float> top_bit(Vec<std::uint32_t> a) { return {_mm256_castsi256_ps(a.x)}; }
inline Vec<float> select(Mask<float> mask, Vec<float> a, Vec<float> b) {
  return {_mm256_blendv_ps(b.x, a.x, mask.x)};
}

inline Vec<std::uint64_t> operator+(Vec<std::uint64_t> a, Vec<std::uint64_t> b) {
  return {_mm256_add_epi64(a.x, b.x)};
}
inline Vec<std::uint64_t> operator-(Vec<std::uint64_t> a, Vec<std::uint64_t> b) {
  return {_mm256_sub_epi64(a.x, b.x)};
}
inline Vec<std::uint64_t> operator^(Vec<std::uint64_t> a, Vec<std::uint64_t> b) {
  return {_mm256_xor_si256(a.x, b.x)};
}
inline Vec<std::uint64_t> operator&(Vec<std::uint64_t> a, Vec<std::uint64_t> b) {
  return {_mm256_and_si256(a.x, b.x)};
}
inline Vec<std::uint64_t> operator|(Vec<std::uint64_t> a, Vec<std::uint64_t> b) {
  return {_mm256_or_si256(a.x, b.x)};
}
inline Vec<std::uint64_t> xor3(Vec<std::uint64_t> a, Vec<std::uint64_t> b, Vec<std::uint64_t> c) {
  return a ^ (b ^ c);
}
template <int N>
inline Vec<std::uint64_t> shift_left(Vec<std::uint64_t> a) {
  return {_mm256_slli_epi64(a.x, N)};
}
template <int N>
inline Vec<std::uint64_t> shift_right(Vec<std::uint64_t> a) {
  return {_mm256_srli_epi64(a.x, N)};
}
inline Vec<std::uint64_t> multiply_words(Vec<std::uint64_t> a, Vec<std::uint64_t> b) {
  return {_mm256_mul_epu32(a.x, b.x)};
}
// A shuffle instead of a shift: port 5 has time, unlike those that multiply.
inline Vec<std::uint64_t> high_word(Vec<std::uint64_t> a) { return {_mm256_shuffle_epi32(a.x, 0xf5)}; }
inline Vec<std::uint32_t> words_of(const Vec<std::uint64_t>* parts) {
  const __m256 low = _mm256_castsi256_ps(parts[0].x), high = _mm256_castsi256_ps(parts[1].x);
  return {_mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(low, high, 0x88)), 0xd8)};
}
inline Vec<double> as_double(Vec<std::uint64_t> a) { return {_mm256_castsi256_pd(a.x)}; }
inline Vec<std::uint64_t> bits_of(Vec<double> a) { return {_mm256_castpd_si256(a.x)}; }
inline Vec<float> operator/(Vec<float> a, Vec<float> b) { return {_mm256_div_ps(a.x, b.x)}; }
inline Vec<double> operator/(Vec<double> a, Vec<double> b) { return {_mm256_div_pd(a.x, b.x)}; }
inline Vec<double> sqrt(Vec<double> a) { return {_mm256_sqrt_pd(a.x)}; }
inline void store_rounded(Vec<double> a, float* p) { _mm_storeu_ps(p, _mm256_cvtpd_ps(a.x)); }
inline void store_rounded(Vec<double> a, double* p) { a.store(p); }

inline Mask<double> less(Vec<double> a, Vec<double> b) { return {_mm256_cmp_pd(a.x, b.x, _CMP_LT_OQ)}; }
inline Mask<double> top_bit(Vec<std::uint64_t> a) { return {_mm256_castsi256_pd(a.x)}; }
inline Mask<double> operator&(Mask<double> a, Mask<double> b) { return {_mm256_and_pd(a.x, b.x)}; }
inline Mask<double> operator|(Mask<double> a, Mask<double> b) { return {_mm256_or_pd(a.x, b.x)}; }
inline Mask<double> without(Mask<double> a, Mask<double> b) { return {_mm256_andnot_pd(b.x, a.x)}; }
inline bool any(Mask<double> a) { return _mm256_movemask_pd(a.x) != 0; }
inline Vec<double> select(Mask<double> mask, Vec<double> a, Vec<double> b) {
  return {_mm256_blendv_pd(b.x, a.x, mask.x)};
}
