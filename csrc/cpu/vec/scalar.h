// Vec of one number, in standard C++.

template <class T>
struct Vec {
  static constexpr int size = 1;
  static constexpr int columns = 1;  // columns that load_columns reads
  static constexpr int quads = 0;    // rows that load_quads reads: it has none
  static constexpr int registers = 16;
  T x;

  static Vec zero() { return {T(0)}; }
  static Vec set(T value) { return {value}; }
  static Vec broadcast(const T* p) { return {*p}; }
  static Vec load(const T* p) { return {*p}; }
  static Vec load_once(const T* p) { return load(p); }
  static Vec load_first(const T* p, int count) { return {count > 0 ? *p : T(0)}; }
  void store(T* p) const { *p = x; }
  void store_first(T* p, int count) const {
    if (count > 0) *p = x;
  }

  friend Vec fma(Vec a, Vec b, Vec c) { return {a.x * b.x + c.x}; }

  static void load_columns(const T* const* rows, std::int64_t offset, Vec (&r)[1]) {
    r[0] = load(rows[0] + offset);
  }
  FASTLIN_INLINE static void transpose(Vec (&)[1]) {}
  FASTLIN_INLINE static Vec sums(Vec (&r)[1]) { return r[0]; }
};

#include "cpu/vec/scalar_words.h"

template <class T>
inline void store_rounded(Vec<double> a, T* p) {
  *p = static_cast<T>(a.x);
}
