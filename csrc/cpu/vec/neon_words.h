// Words, bits and comparisons for NEON: 4 words, or 2 in lanes of 64 bits.

template <>
struct Vec<std::uint32_t> {
  static constexpr int size = 4;
  uint32x4_t x;

  static Vec set(std::uint32_t value) { return {vdupq_n_u32(value)}; }
  void store(std::uint32_t* p) const { vst1q_u32(p, x); }
};

template <>
struct Vec<std::uint64_t> {
  static constexpr int size = 2;
  uint64x2_t x;

  static Vec set(std::uint64_t value) { return {vdupq_n_u64(value)}; }
  static Vec load(const std::uint64_t* p) { return {vld1q_u64(p)}; }
  void store(std::uint64_t* p) const { vst1q_u64(p, x); }
};

// All bits of a lane that is in it.
template <class T>
struct Mask;

template <>
struct Mask<float> {
  uint32x4_t x;
};

template <>
struct Mask<double> {
  uint64x2_t x;
  static Mask all() { return {vdupq_n_u64(~std::uint64_t{0})}; }
};

inline Vec<std::uint32_t> operator+(Vec<std::uint32_t> a, Vec<std::uint32_t> b) {
  return {vaddq_u32(a.x, b.x)};
}
inline Vec<std::uint32_t> operator-(Vec<std::uint32_t> a, Vec<std::uint32_t> b) {
  return {vsubq_u32(a.x, b.x)};
}
inline Vec<std::uint32_t> operator^(Vec<std::uint32_t> a, Vec<std::uint32_t> b) {
  return {veorq_u32(a.x, b.x)};
}
inline Vec<std::uint32_t> operator&(Vec<std::uint32_t> a, Vec<std::uint32_t> b) {
  return {vandq_u32(a.x, b.x)};
}
template <int N>
inline Vec<std::uint32_t> shift_left(Vec<std::uint32_t> a) {
  return {vshlq_n_u32(a.x, N)};
}
template <int N>
inline Vec<std::uint32_t> shift_right_signed(Vec<std::uint32_t> a) {
  return {vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(a.x), N))};
}
inline Vec<float> as_float(Vec<std::uint32_t> a) { return {vreinterpretq_f32_u32(a.x)}; }
inline Vec<std::uint32_t> bits_of(Vec<float> a) { return {vreinterpretq_u32_f32(a.x)}; }
inline Vec<float> to_float(Vec<std::uint32_t> a) { return {vcvtq_f32_s32(vreinterpretq_s32_u32(a.x))}; }
inline Vec<float> sqrt(Vec<float> a) { return {vsqrtq_f32(a.x)}; }
inline Mask<float> top_bit(Vec<std::uint32_t> a) { return {vcltzq_s32(vreinterpretq_s32_u32(a.x))}; }
inline Vec<float> select(Mask<float> mask, Vec<float> a, Vec<float> b) {
  return {vbslq_f32(mask.x, a.x, b.x)};
}

inline Vec<std::uint64_t> operator+(Vec<std::uint64_t> a, Vec<std::uint64_t> b) {
  return {vaddq_u64(a.x, b.x)};
}
inline Vec<std::uint64_t> operator-(Vec<std::uint64_t> a, Vec<std::uint64_t> b) {
  return {vsubq_u64(a.x, b.x)};
}
inline Vec<std::uint64_t> operator^(Vec<std::uint64_t> a, Vec<std::uint64_t> b) {
  return {veorq_u64(a.x, b.x)};
}
inline Vec<std::uint64_t> operator&(Vec<std::uint64_t> a, Vec<std::uint64_t> b) {
  return {vandq_u64(a.x, b.x)};
}
inline Vec<std::uint64_t> operator|(Vec<std::uint64_t> a, Vec<std::uint64_t> b) {
  return {vorrq_u64(a.x, b.x)};
}
inline Vec<std::uint64_t> xor3(Vec<std::uint64_t> a, Vec<std::uint64_t> b, Vec<std::uint64_t> c) {
  return a ^ (b ^ c);
}
template <int N>
inline Vec<std::uint64_t> shift_left(Vec<std::uint64_t> a) {
  return {vshlq_n_u64(a.x, N)};
}
template <int N>
inline Vec<std::uint64_t> shift_right(Vec<std::uint64_t> a) {
  return {vshrq_n_u64(a.x, N)};
}
inline Vec<std::uint64_t> multiply_words(Vec<std::uint64_t> a, Vec<std::uint64_t> b) {
  return {vmull_u32(vmovn_u64(a.x), vmovn_u64(b.x))};
}
inline Vec<std::uint64_t> high_word(Vec<std::uint64_t> a) { return shift_right<32>(a); }
inline Vec<std::uint32_t> words_of(const Vec<std::uint64_t>* parts) {
  return {vuzp1q_u32(vreinterpretq_u32_u64(parts[0].x), vreinterpretq_u32_u64(parts[1].x))};
}
inline Vec<double> as_double(Vec<std::uint64_t> a) { return {vreinterpretq_f64_u64(a.x)}; }
inline Vec<std::uint64_t> bits_of(Vec<double> a) { return {vreinterpretq_u64_f64(a.x)}; }
inline Vec<float> operator/(Vec<float> a, Vec<float> b) { return {vdivq_f32(a.x, b.x)}; }
inline Vec<double> operator/(Vec<double> a, Vec<double> b) { return {vdivq_f64(a.x, b.x)}; }
inline Vec<double> sqrt(Vec<double> a) { return {vsqrtq_f64(a.x)}; }
inline void store_rounded(Vec<double> a, float* p) { vst1_f32(p, vcvt_f32_f64(a.x)); }
inline void store_rounded(Vec<double> a, double* p) { a.store(p); }

inline Mask<double> less(Vec<double> a, Vec<double> b) { return {vcltq_f64(a.x, b.x)}; }
inline Mask<double> top_bit(Vec<std::uint64_t> a) { return {vcltzq_s64(vreinterpretq_s64_u64(a.x))}; }
inline Mask<double> operator&(Mask<double> a, Mask<double> b) { return {vandq_u64(a.x, b.x)}; }
inline Mask<double> operator|(Mask<double> a, Mask<double> b) { return {vorrq_u64(a.x, b.x)}; }
inline Mask<double> without(Mask<double> a, Mask<double> b) { return {vbicq_u64(a.x, b.x)}; }
inline bool any(Mask<double> a) { return vmaxvq_u32(vreinterpretq_u32_u64(a.x)) != 0; }
inline Vec<double> select(Mask<double> mask, Vec<double> a, Vec<double> b) {
  return {vbslq_f64(mask.x, a.x, b.x)};
}
