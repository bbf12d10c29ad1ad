// Vec for NEON on AArch64: 4 floats or 2 doubles.

constexpr int kVectorBytes = 16, kRegisters = 32;
#define FASTLIN_VECTOR_REGISTER "w"
#include "cpu/vec/native.h"

inline Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
  return {(Vec<float>::Native)vfmaq_f32((float32x4_t)c.x, (float32x4_t)a.x, (float32x4_t)b.x)};
}
inline Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
  return {(Vec<double>::Native)vfmaq_f64((float64x2_t)c.x, (float64x2_t)a.x, (float64x2_t)b.x)};
}

template <>
inline void Vec<float>::zip(Vec a, Vec b, Vec& low, Vec& high) {
  low.x = (Native)vzip1q_f32((float32x4_t)a.x, (float32x4_t)b.x);
  high.x = (Native)vzip2q_f32((float32x4_t)a.x, (float32x4_t)b.x);
}
template <>
inline void Vec<double>::zip(Vec a, Vec b, Vec& low, Vec& high) {
  low.x = (Native)vzip1q_f64((float64x2_t)a.x, (float64x2_t)b.x);
  high.x = (Native)vzip2q_f64((float64x2_t)a.x, (float64x2_t)b.x);
}
template <>
template <int kJ>
FASTLIN_INLINE Vec<float> Vec<float>::spread(Vec a) {
  return {(Native)vdupq_laneq_f32((float32x4_t)a.x, kJ)};
}
template <>
FASTLIN_INLINE Vec<float> Vec<float>::sum_quads(Vec a) {
  const float32x4_t pairs = vpaddq_f32((float32x4_t)a.x, (float32x4_t)a.x);
  return {(Native)vpaddq_f32(pairs, pairs)};
}

#include "cpu/vec/neon_words.h"
