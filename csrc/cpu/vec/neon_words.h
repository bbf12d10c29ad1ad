// Words, bits and comparisons for NEON: 4 words, or 2 in lanes of 64 bits.

// All bits of a lane are set where the mask holds.
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

template <int N>
inline Vec<std::uint32_t> shift_right_signed(Vec<std::uint32_t> a) {
  return {(Vec<std::uint32_t>::Native)vshrq_n_s32((int32x4_t)a.x, N)};
}
inline Vec<std::uint64_t> multiply_words(Vec<std::uint64_t> a, Vec<std::uint64_t> b) {
  return {(Vec<std::uint64_t>::Native)vmull_u32(vmovn_u64((uint64x2_t)a.x), vmovn_u64((uint64x2_t)b.x))};
}
inline Vec<std::uint64_t> high_word(Vec<std::uint64_t> a) { return shift_right<32>(a); }
inline Vec<std::uint32_t> words_of(const Vec<std::uint64_t>* parts) {
  return {(Vec<std::uint32_t>::Native)vuzp1q_u32((uint32x4_t)parts[0].x, (uint32x4_t)parts[1].x)};
}
inline Vec<float> to_float(Vec<std::uint32_t> a) {
  return {(Vec<float>::Native)vcvtq_f32_s32((int32x4_t)a.x)};
}
inline Vec<float> sqrt(Vec<float> a) { return {(Vec<float>::Native)vsqrtq_f32((float32x4_t)a.x)}; }
inline Vec<double> sqrt(Vec<double> a) { return {(Vec<double>::Native)vsqrtq_f64((float64x2_t)a.x)}; }
inline void store_rounded(Vec<double> a, float* p) { vst1_f32(p, vcvt_f32_f64((float64x2_t)a.x)); }

inline Mask<float> top_bit(Vec<std::uint32_t> a) { return {vcltzq_s32((int32x4_t)a.x)}; }
inline Mask<double> top_bit(Vec<std::uint64_t> a) { return {vcltzq_s64((int64x2_t)a.x)}; }
inline Mask<double> less(Vec<double> a, Vec<double> b) {
  return {vcltq_f64((float64x2_t)a.x, (float64x2_t)b.x)};
}
inline Mask<float> less(Vec<float> a, Vec<float> b) {
  return {vcltq_f32((float32x4_t)a.x, (float32x4_t)b.x)};
}
inline Mask<float> operator&(Mask<float> a, Mask<float> b) { return {vandq_u32(a.x, b.x)}; }
inline Mask<float> operator|(Mask<float> a, Mask<float> b) { return {vorrq_u32(a.x, b.x)}; }
inline bool any(Mask<float> a) { return vmaxvq_u32(a.x) != 0; }
inline Mask<double> operator&(Mask<double> a, Mask<double> b) { return {vandq_u64(a.x, b.x)}; }
inline Mask<double> operator|(Mask<double> a, Mask<double> b) { return {vorrq_u64(a.x, b.x)}; }
inline Mask<double> without(Mask<double> a, Mask<double> b) { return {vbicq_u64(a.x, b.x)}; }
inline bool any(Mask<double> a) { return vmaxvq_u32(vreinterpretq_u32_u64(a.x)) != 0; }
inline Vec<float> select(Mask<float> mask, Vec<float> a, Vec<float> b) {
  return {(Vec<float>::Native)vbslq_f32(mask.x, (float32x4_t)a.x, (float32x4_t)b.x)};
}
inline Vec<double> select(Mask<double> mask, Vec<double> a, Vec<double> b) {
  return {(Vec<double>::Native)vbslq_f64(mask.x, (float64x2_t)a.x, (float64x2_t)b.x)};
}
