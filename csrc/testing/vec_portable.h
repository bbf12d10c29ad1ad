// Vec of FASTLIN_PORTABLE_BYTES bytes in standard C++: tests the kernels at lane counts that this machine may
// lack.

#include "cpu/vec/common.h"

template <class T>
struct Vec {
  static constexpr int size = FASTLIN_PORTABLE_BYTES / static_cast<int>(sizeof(T));
  static constexpr int columns = size < 4 ? size : 4;  // columns that load_columns reads
  static constexpr int quads = size / 4;               // rows that load_quads reads
  static constexpr int registers = FASTLIN_PORTABLE_BYTES == 64 ? 32 : 16;
  T x[size];

  static Vec zero() { return set(T(0)); }
  static Vec set(T value) {
    Vec out;
    for (T& lane : out.x) lane = value;
    return out;
  }
  static Vec broadcast(const T* p) { return set(*p); }
  static Vec load(const T* p) {
    Vec out;
    for (int i = 0; i < size; ++i) out.x[i] = p[i];
    return out;
  }
  static Vec load_first(const T* p, int count) { return load_some<Vec>(p, count); }
  void store(T* p) const {
    for (int i = 0; i < size; ++i) p[i] = x[i];
  }
  void store_first(T* p, int count) const { store_some(*this, p, count); }

  friend Vec operator+(Vec a, const Vec& b) {
    for (int i = 0; i < size; ++i) a.x[i] += b.x[i];
    return a;
  }
  friend Vec operator-(Vec a, const Vec& b) {
    for (int i = 0; i < size; ++i) a.x[i] -= b.x[i];
    return a;
  }
  friend Vec operator*(Vec a, const Vec& b) {
    for (int i = 0; i < size; ++i) a.x[i] *= b.x[i];
    return a;
  }
  friend Vec fma(const Vec& a, const Vec& b, Vec c) {
    for (int i = 0; i < size; ++i) c.x[i] += a.x[i] * b.x[i];
    return c;
  }

  // Interleaves the lower halves of two vectors, then the upper halves.
  static void zip(const Vec& a, const Vec& b, Vec& low, Vec& high) {
    for (int i = 0; i < size / 2; ++i) {
      low.x[2 * i] = a.x[i];
      low.x[2 * i + 1] = b.x[i];
      high.x[2 * i] = a.x[size / 2 + i];
      high.x[2 * i + 1] = b.x[size / 2 + i];
    }
  }
  static Vec load_once(const T* p) { return load(p); }
  static Vec load_quads(const T* const* rows, std::int64_t offset) {
    Vec out;
    for (int i = 0; i < size; ++i) out.x[i] = rows[i / 4][offset + i % 4];
    return out;
  }
  static Vec load_quad(const T* p) {
    Vec out;
    for (int i = 0; i < size; ++i) out.x[i] = p[i % 4];
    return out;
  }
  template <int kJ>
  static Vec spread(const Vec& a) {
    Vec out;
    for (int i = 0; i < size; ++i) out.x[i] = a.x[i / 4 * 4 + kJ];
    return out;
  }
  static Vec sum_quads(const Vec& a) {
    Vec out;
    for (int i = 0; i < size; ++i) {
      const T* quad = a.x + i / 4 * 4;
      out.x[i] = (quad[0] + quad[1]) + (quad[2] + quad[3]);
    }
    return out;
  }
  static void transpose_quads(Vec (&r)[4]) {
    Vec rows[4];
    std::copy_n(r, 4, rows);
    for (int i = 0; i < 4 * size; ++i) r[i / size].x[i % size] = rows[i % 4].x[i % size / 4 * 4 + i / size];
  }
  static void load_columns(const T* const* rows, std::int64_t offset, Vec (&r)[columns]) {
    for (int i = 0; i < columns; ++i) {
      for (int l = 0; l < size; ++l) r[i].x[l] = rows[l][offset + i];
    }
  }
  static void transpose(Vec (&r)[size]) { transpose_by_zips(r); }
  static Vec sums(Vec (&r)[size]) { return sums_by_zips(r); }
};

#include "testing/vec_portable_words.h"
