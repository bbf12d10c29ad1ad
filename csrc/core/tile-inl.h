// Tiles: V::size sequences, one in each lane. A number, a vector or a matrix of each sequence is [..,
// V::size] in memory. No product sums over lanes, and no width needs padding.

template <class T>
struct Entries {
  using V = Vec<T>;
  static constexpr std::int64_t N = V::size;

  FASTLIN_HD static V at(const T* tile, std::int64_t i) { return V::load(tile + i * N); }
  FASTLIN_HD static void put(T* tile, std::int64_t i, V value) { value.store(tile + i * N); }

  FASTLIN_HD static void zero(T* tile, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) put(tile, i, V::zero());
  }

  FASTLIN_HD static void copy(const T* from, std::int64_t count, T* to) {
    for (std::int64_t i = 0; i < count; ++i) put(to, i, at(from, i));
  }

  FASTLIN_HD static void add(T* tile, const T* other, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) put(tile, i, at(tile, i) + at(other, i));
  }

  FASTLIN_HD static V dot(const T* x, const T* y, std::int64_t count) {
    V even = V::zero(), odd = V::zero();
    std::int64_t i = 0;
    for (; i + 2 <= count; i += 2) {
      even = fma(at(x, i), at(y, i), even);
      odd = fma(at(x, i + 1), at(y, i + 1), odd);
    }
    if (i < count) even = fma(at(x, i), at(y, i), even);
    return even + odd;
  }

  // to += factor * x.
  FASTLIN_HD static void add_scaled(V factor, const T* x, std::int64_t count, T* to) {
    for (std::int64_t i = 0; i < count; ++i) put(to, i, fma(factor, at(x, i), at(to, i)));
  }

  // matrix [m, m] += g sym(a v').
  FASTLIN_HD static void add_rank_two(V g, const T* a, const T* v, std::int64_t m, T* matrix) {
    const V half = V::set(T(0.5)) * g;
    for (std::int64_t i = 0; i < m; ++i) {
      const V ai = half * at(a, i), vi = half * at(v, i);
      T* row = matrix + i * m * N;
      for (std::int64_t j = 0; j < m; ++j) put(row, j, fma(ai, at(v, j), fma(vi, at(a, j), at(row, j))));
    }
  }

  // out += 2 sym(a v') x = (x . v) a + (x . a) v.
  FASTLIN_HD static void add_pull(const T* x, const T* a, const T* v, std::int64_t m, V factor, T* out) {
    const V with_v = factor * dot(x, v, m), with_a = factor * dot(x, a, m);
    add_scaled(with_v, a, m, out);
    add_scaled(with_a, v, m, out);
  }
};

// Operands of products, with entries (k, i). `Across` stores the entries of one k contiguously, `Along` those
// of one i, so that one stride is a compile-time constant. Strides count entries. An entry is V::size
// numbers, one for each sequence; with kNumbers it is one number that all sequences share.
template <class T, bool kNumbers = false>
struct Across {
  const T* first;
  std::int64_t stride;
  static constexpr std::int64_t kEntry = kNumbers ? 1 : Vec<T>::size;
  FASTLIN_HD std::int64_t k() const { return stride * kEntry; }
  FASTLIN_HD std::int64_t i() const { return kEntry; }
};

template <class T, bool kNumbers = false>
struct Along {
  const T* first;
  std::int64_t stride;
  static constexpr std::int64_t kEntry = kNumbers ? 1 : Vec<T>::size;
  FASTLIN_HD std::int64_t k() const { return kEntry; }
  FASTLIN_HD std::int64_t i() const { return stride * kEntry; }
};

template <class T>
using NumbersAcross = Across<T, true>;
template <class T>
using NumbersAlong = Along<T, true>;

// Destination of a product: to(i, j) = base(i, j) + factor * product; a null base is zero, and base may equal
// the destination. `ToAcross` is contiguous in j, `ToAlong` in i.
template <class T, bool kAcross>
struct To {
  T* first;
  std::int64_t stride;
  T factor = 1;
  const T* base = nullptr;
  static constexpr std::int64_t kEntry = Vec<T>::size;
  FASTLIN_HD std::int64_t i() const { return kAcross ? stride * kEntry : kEntry; }
  FASTLIN_HD std::int64_t j() const { return kAcross ? kEntry : stride * kEntry; }
};

template <class T>
using ToAcross = To<T, true>;
template <class T>
using ToAlong = To<T, false>;

// An m x m product that is symmetric: computes its lower triangle and mirrors it.
template <class T, class A, class B>
FASTLIN_HD void symmetric_product(std::int64_t m, std::int64_t count, const A& a, const B& b,
                                  const ToAcross<T>& to) {
  product(m, m, count, a, b, to, true);
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < i; ++j)
      Entries<T>::put(to.first, j * m + i, Entries<T>::at(to.first, i * m + j));
  }
}
