// Vec of a warp: 32 lanes, one number in each thread. A load or a store is one line of 128 bytes (float),
// whatever the entry: no conflict in shared memory, one transaction beyond it.

// The thread's lane. On the host, which only lays out workspace, there is none.
FASTLIN_HD inline int lane() {
#if defined(__CUDA_ARCH__) || defined(FASTLIN_EMULATED)
  return static_cast<int>(threadIdx.x);
#else
  return 0;
#endif
}

// What lanes have written is seen by the others of the warp.
FASTLIN_HD inline void sync_lanes() {
#if defined(__CUDA_ARCH__) || defined(FASTLIN_EMULATED)
  __syncwarp();
#endif
}

template <class T>
struct Vec {
  static constexpr int size = 32;
  static constexpr int registers = 8;  // few, so that many warps fit: see core/draws-inl.h
  T x;

  FASTLIN_HD static Vec zero() { return {T(0)}; }
  FASTLIN_HD static Vec set(T value) { return {value}; }
  FASTLIN_HD static Vec broadcast(const T* p) { return {*p}; }
  FASTLIN_HD static Vec load(const T* p) { return {p[lane()]}; }
  FASTLIN_HD void store(T* p) const { p[lane()] = x; }

  FASTLIN_HD friend Vec operator+(Vec a, Vec b) { return {static_cast<T>(a.x + b.x)}; }
  FASTLIN_HD friend Vec operator-(Vec a, Vec b) { return {static_cast<T>(a.x - b.x)}; }
  FASTLIN_HD friend Vec operator*(Vec a, Vec b) { return {static_cast<T>(a.x * b.x)}; }
  FASTLIN_HD friend Vec fma(Vec a, Vec b, Vec c) { return {std::fma(a.x, b.x, c.x)}; }
};

#include "cpu/vec/scalar_words.h"

// core/normal-inl.h. The instructions are those of nvcc's correctly rounded square root, less its test for
// numbers outside of this range: the test is a branch, and ends what the compiler can do at the same time.
FASTLIN_HD FASTLIN_INLINE Vec<float> sqrt_in_range(Vec<float> a) {
#ifdef __CUDA_ARCH__
  float inverse;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(a.x));
  const float root = a.x * inverse;
  return {std::fma(std::fma(-root, root, a.x), 0.5f * inverse, root)};
#else
  return sqrt(a);
#endif
}

template <class T>
FASTLIN_HD inline void store_rounded(Vec<double> a, T* p) {
  p[lane()] = static_cast<T>(a.x);
}
