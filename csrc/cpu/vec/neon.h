// Vec for NEON on AArch64: 4 floats or 2 doubles.

#include "cpu/vec/common.h"

template <class T>
struct Vec;

template <>
struct Vec<float> {
  static constexpr int size = 4;
  static constexpr int columns = 4;  // that load_columns takes
  static constexpr int quads = 1;    // rows of load_quads
  static constexpr int registers = 32;
  float32x4_t x;

  static Vec zero() { return {vdupq_n_f32(0.0f)}; }
  static Vec set(float value) { return {vdupq_n_f32(value)}; }
  static Vec broadcast(const float* p) { return {vld1q_dup_f32(p)}; }
  static Vec load(const float* p) { return {vld1q_f32(p)}; }
  static Vec load_once(const float* p) {
    Vec value = load(p);
    asm("" : "+w"(value.x));
    return value;
  }
  static Vec load_first(const float* p, int count) { return load_some<Vec>(p, count); }
  void store(float* p) const { vst1q_f32(p, x); }
  void store_first(float* p, int count) const { store_some(*this, p, count); }

  static void zip(Vec a, Vec b, Vec& low, Vec& high) {
    low.x = vzip1q_f32(a.x, b.x);
    high.x = vzip2q_f32(a.x, b.x);
  }
  FASTLIN_INLINE static Vec load_quads(const float* const* rows, std::int64_t offset) {
    return load(rows[0] + offset);
  }
  FASTLIN_INLINE static Vec load_quad(const float* p) { return load(p); }
  template <int kJ>
  FASTLIN_INLINE static Vec spread(Vec a) {
    return {vdupq_laneq_f32(a.x, kJ)};
  }
  FASTLIN_INLINE static Vec sum_quads(Vec a) {
    const float32x4_t pairs = vpaddq_f32(a.x, a.x);
    return {vpaddq_f32(pairs, pairs)};
  }
  FASTLIN_INLINE static void transpose_quads(Vec (&r)[4]) { transpose(r); }
  FASTLIN_INLINE static void load_columns(const float* const* rows, std::int64_t offset, Vec (&r)[4]) {
    load_columns_by_transpose(rows, offset, r);
  }
  FASTLIN_INLINE static void transpose(Vec (&r)[4]) { transpose_by_zips(r); }
  FASTLIN_INLINE static Vec sums(Vec (&r)[4]) { return sums_by_zips(r); }
};

inline Vec<float> operator+(Vec<float> a, Vec<float> b) { return {vaddq_f32(a.x, b.x)}; }
inline Vec<float> operator-(Vec<float> a, Vec<float> b) { return {vsubq_f32(a.x, b.x)}; }
inline Vec<float> operator*(Vec<float> a, Vec<float> b) { return {vmulq_f32(a.x, b.x)}; }
inline Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) { return {vfmaq_f32(c.x, a.x, b.x)}; }

template <>
struct Vec<double> {
  static constexpr int size = 2;
  static constexpr int columns = 2;
  static constexpr int quads = 0;
  static constexpr int registers = 32;
  float64x2_t x;

  static Vec zero() { return {vdupq_n_f64(0.0)}; }
  static Vec set(double value) { return {vdupq_n_f64(value)}; }
  static Vec broadcast(const double* p) { return {vld1q_dup_f64(p)}; }
  static Vec load(const double* p) { return {vld1q_f64(p)}; }
  static Vec load_once(const double* p) {
    Vec value = load(p);
    asm("" : "+w"(value.x));
    return value;
  }
  static Vec load_first(const double* p, int count) { return load_some<Vec>(p, count); }
  void store(double* p) const { vst1q_f64(p, x); }
  void store_first(double* p, int count) const { store_some(*this, p, count); }

  static void zip(Vec a, Vec b, Vec& low, Vec& high) {
    low.x = vzip1q_f64(a.x, b.x);
    high.x = vzip2q_f64(a.x, b.x);
  }
  FASTLIN_INLINE static void load_columns(const double* const* rows, std::int64_t offset, Vec (&r)[2]) {
    load_columns_by_transpose(rows, offset, r);
  }
  FASTLIN_INLINE static void transpose(Vec (&r)[2]) { transpose_by_zips(r); }
  FASTLIN_INLINE static Vec sums(Vec (&r)[2]) { return sums_by_zips(r); }
};

inline Vec<double> operator+(Vec<double> a, Vec<double> b) { return {vaddq_f64(a.x, b.x)}; }
inline Vec<double> operator-(Vec<double> a, Vec<double> b) { return {vsubq_f64(a.x, b.x)}; }
inline Vec<double> operator*(Vec<double> a, Vec<double> b) { return {vmulq_f64(a.x, b.x)}; }
inline Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) { return {vfmaq_f64(c.x, a.x, b.x)}; }

#include "cpu/vec/neon_words.h"
