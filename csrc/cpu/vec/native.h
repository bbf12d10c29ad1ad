// Vec on the compiler's vector types, whose operators become the instructions that the intrinsics name.
// The file of an instruction set defines kVectorBytes, kRegisters and FASTLIN_VECTOR_REGISTER (the asm
// constraint of a vector register) before it includes this one. After it, the file defines the members that
// have no body here, and those that its instructions do better.

#include "cpu/vec/common.h"

template <class T>
struct Vec {
  static constexpr int size = kVectorBytes / static_cast<int>(sizeof(T));
  static constexpr int columns = size < 4 ? size : 4;  // columns that load_columns reads
  static constexpr int quads = size / 4;               // rows that load_quads reads
  static constexpr int registers = kRegisters;
  typedef T Native __attribute__((vector_size(kVectorBytes)));
  typedef T Unaligned __attribute__((vector_size(kVectorBytes), aligned(alignof(T)), may_alias));
  Native x;

  static Vec zero() { return {Native{}}; }
  static Vec set(T value) { return {value - Native{}}; }  // 0 + value would lose the sign of -0
  static Vec broadcast(const T* p) { return set(*p); }
  static Vec load(const T* p) { return {*reinterpret_cast<const Unaligned*>(p)}; }
  // A load that the compiler does not repeat where the value is used again.
  static Vec load_once(const T* p) {
    Vec value = load(p);
    asm("" : "+" FASTLIN_VECTOR_REGISTER(value.x));
    return value;
  }
  void store(T* p) const { *reinterpret_cast<Unaligned*>(p) = x; }

  // The first `count` elements; a load sets the others to zero.
  static Vec load_first(const T* p, int count) { return load_some<Vec>(p, count); }
  void store_first(T* p, int count) const { store_some(*this, p, count); }

  // Interleaves the lower halves of two vectors, then the upper halves.
  static void zip(Vec a, Vec b, Vec& low, Vec& high);
  FASTLIN_INLINE static void transpose(Vec (&r)[size]) { transpose_by_zips(r); }
  FASTLIN_INLINE static Vec sums(Vec (&r)[size]) { return sums_by_zips(r); }  // lane i: the sum of r[i]
  // r[j] = element offset + j of each row.
  FASTLIN_INLINE static void load_columns(const T* const* rows, std::int64_t offset, Vec (&r)[columns]) {
    if constexpr (size > 4) {
      load_columns_by_quads(rows, offset, r);
    } else {
      load_columns_by_transpose(rows, offset, r);
    }
  }

  // A quad is four lanes: one quad of each row, or the same one for all. These bodies serve one quad a
  // vector.
  FASTLIN_INLINE static Vec load_quads(const T* const* rows, std::int64_t offset) {
    return load(rows[0] + offset);
  }
  FASTLIN_INLINE static Vec load_quad(const T* p) { return load(p); }
  // A 4 x 4 transpose in each quad.
  FASTLIN_INLINE static void transpose_quads(Vec (&r)[4]) { transpose(r); }
  // Lane kJ of each quad, or the sum of the quad, in its four lanes.
  template <int kJ>
  static Vec spread(Vec a);
  static Vec sum_quads(Vec a);
};

#include "cpu/vec/operators.h"

inline Vec<float> as_float(Vec<std::uint32_t> a) { return {(Vec<float>::Native)a.x}; }
inline Vec<double> as_double(Vec<std::uint64_t> a) { return {(Vec<double>::Native)a.x}; }
inline Vec<std::uint32_t> bits_of(Vec<float> a) { return {(Vec<std::uint32_t>::Native)a.x}; }
inline Vec<std::uint64_t> bits_of(Vec<double> a) { return {(Vec<std::uint64_t>::Native)a.x}; }
inline void store_rounded(Vec<double> a, double* p) { a.store(p); }

template <class T>
inline Vec<T> xor3(Vec<T> a, Vec<T> b, Vec<T> c) {
  return a ^ (b ^ c);
}
