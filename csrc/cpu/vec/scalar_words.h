// Words, bits and comparisons for a Vec that is one number, x: on a CPU, and in a thread of a GPU's warp.

#include "cpu/vec/operators.h"

template <class T>
struct Mask {
  bool x;
  FASTLIN_HD static Mask all() { return {true}; }
  FASTLIN_HD friend Mask operator&(Mask a, Mask b) { return {a.x && b.x}; }
  FASTLIN_HD friend Mask operator|(Mask a, Mask b) { return {a.x || b.x}; }
  FASTLIN_HD friend Mask without(Mask a, Mask b) { return {a.x && !b.x}; }
  FASTLIN_HD friend bool any(Mask a) { return a.x; }
};

template <class To, class From>
FASTLIN_HD inline To same_bits(From from) {
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

FASTLIN_HD inline Vec<float> sqrt(Vec<float> a) { return {std::sqrt(a.x)}; }
FASTLIN_HD inline Vec<float> as_float(Vec<std::uint32_t> a) { return {same_bits<float>(a.x)}; }
FASTLIN_HD inline Vec<std::uint32_t> bits_of(Vec<float> a) { return {same_bits<std::uint32_t>(a.x)}; }
FASTLIN_HD inline Vec<float> to_float(Vec<std::uint32_t> a) {
  return {static_cast<float>(static_cast<std::int32_t>(a.x))};
}
template <int N>
FASTLIN_HD inline Vec<std::uint32_t> shift_right_signed(Vec<std::uint32_t> a) {
  return {static_cast<std::uint32_t>(static_cast<std::int32_t>(a.x) >> N)};
}
FASTLIN_HD inline Mask<float> top_bit(Vec<std::uint32_t> a) { return {a.x >> 31 != 0}; }

FASTLIN_HD inline Vec<double> sqrt(Vec<double> a) { return {std::sqrt(a.x)}; }
template <class T>
FASTLIN_HD inline Mask<T> less(Vec<T> a, Vec<T> b) {
  return {a.x < b.x};
}
FASTLIN_HD inline Vec<double> as_double(Vec<std::uint64_t> a) { return {same_bits<double>(a.x)}; }
FASTLIN_HD inline Vec<std::uint64_t> bits_of(Vec<double> a) { return {same_bits<std::uint64_t>(a.x)}; }
FASTLIN_HD inline Mask<double> top_bit(Vec<std::uint64_t> a) { return {a.x >> 63 != 0}; }
FASTLIN_HD inline Vec<std::uint64_t> multiply_words(Vec<std::uint64_t> a, Vec<std::uint64_t> b) {
#ifdef __CUDA_ARCH__
  // nvcc multiplies masked numbers of 64 bits in two instructions more.
  std::uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;"
      : "=l"(product)
      : "r"(static_cast<std::uint32_t>(a.x)), "r"(static_cast<std::uint32_t>(b.x)));
  return {product};
#else
  return {(a.x & 0xffffffffu) * (b.x & 0xffffffffu)};
#endif
}
FASTLIN_HD inline Vec<std::uint64_t> high_word(Vec<std::uint64_t> a) { return {a.x >> 32}; }
FASTLIN_HD inline Vec<std::uint32_t> words_of(const Vec<std::uint64_t>* parts) {
  return {static_cast<std::uint32_t>(parts[0].x)};
}
template <class T>
FASTLIN_HD inline Vec<T> select(Mask<T> mask, Vec<T> a, Vec<T> b) {
  return mask.x ? a : b;
}
template <class T>
FASTLIN_HD inline Vec<T> xor3(Vec<T> a, Vec<T> b, Vec<T> c) {
  return {a.x ^ b.x ^ c.x};
}
