// Tiles: V::size sequences side by side, one in each lane, so that a token element, a vector or a matrix of
// all of them is [.., V::size] in memory. No product has a horizontal sum and no width has padding.

template <class T>
struct Tile {
  using V = Vec<T>;
  static constexpr std::int64_t N = V::size;

  static V at(const T* tile, std::int64_t i) { return V::load(tile + i * N); }
  static void put(T* tile, std::int64_t i, V value) { value.store(tile + i * N); }

  static void zero(T* tile, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) put(tile, i, V::zero());
  }

  static void add(T* tile, const T* other, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) put(tile, i, at(tile, i) + at(other, i));
  }

  static V dot(const T* x, const T* y, std::int64_t count) {
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
  static void add_scaled(V factor, const T* x, std::int64_t count, T* to) {
    for (std::int64_t i = 0; i < count; ++i) put(to, i, fma(factor, at(x, i), at(to, i)));
  }

  // matrix [m, m] += g sym(a v').
  static void add_rank_two(V g, const T* a, const T* v, std::int64_t m, T* matrix) {
    const V half = V::set(T(0.5)) * g;
    for (std::int64_t i = 0; i < m; ++i) {
      const V ai = half * at(a, i), vi = half * at(v, i);
      T* row = matrix + i * m * N;
      for (std::int64_t j = 0; j < m; ++j) put(row, j, fma(ai, at(v, j), fma(vi, at(a, j), at(row, j))));
    }
  }

  // out += 2 sym(a v') x = (x . v) a + (x . a) v.
  static void add_pull(const T* x, const T* a, const T* v, std::int64_t m, V factor, T* out) {
    const V with_v = factor * dot(x, v, m), with_a = factor * dot(x, a, m);
    add_scaled(with_v, a, m, out);
    add_scaled(with_a, v, m, out);
  }

  // tile[i][lane] = rows[lane][offset + i]. The last V::size columns are taken together, whatever overlaps.
  static void load(const T* const* rows, std::int64_t offset, std::int64_t count, T* tile) {
    if (count < N) {
      if (count == 0) return;
      V r[N];
      FASTLIN_UNROLL
      for (int l = 0; l < N; ++l) r[l] = V::load_first(rows[l] + offset, static_cast<int>(count));
      V::transpose(r);
      FASTLIN_UNROLL
      for (int i = 0; i < N; ++i) {
        if (i < count) put(tile, i, r[i]);
      }
      return;
    }
    for (std::int64_t i = 0;;) {
      V r[N];
      V::load_columns(rows, offset + i, r);
      FASTLIN_UNROLL
      for (int j = 0; j < N; ++j) put(tile, i + j, r[j]);
      if (i == count - N) return;
      i = i + N <= count - N ? i + N : count - N;
    }
  }

  // rows[lane][offset + i] = tile[i][lane] for the first `lanes` lanes.
  static void store(const T* tile, std::int64_t count, T* const* rows, std::int64_t offset, int lanes) {
    for (std::int64_t i = 0; i < count;) {
      const std::int64_t first = i + N <= count || count < N ? i : count - N;
      const int width = static_cast<int>(count < N ? count : N);
      V r[N];
      for (int j = 0; j < N; ++j) r[j] = j < width ? at(tile, first + j) : V::zero();
      V::transpose(r);
      for (int l = 0; l < lanes; ++l) {
        if (width == N) {
          r[l].store(rows[l] + offset + first);
        } else {
          r[l].store_first(rows[l] + offset + first, width);
        }
      }
      i = first + width;
    }
  }

  // sums[i] += the sum over lanes of entry i: V::size entries at a time.
  static void add_sums(const T* tile, std::int64_t count, double* sums) {
    std::int64_t i = 0;
    for (; i + N <= count; i += N) {
      T lanes[N];
      sum_entries(tile + i * N, N).store(lanes);
      for (int j = 0; j < N; ++j) sums[i + j] += static_cast<double>(lanes[j]);
    }
    if (i == count) return;
    T lanes[N];
    sum_entries(tile + i * N, static_cast<int>(count - i)).store(lanes);
    for (int j = 0; i + j < count; ++j) sums[i + j] += static_cast<double>(lanes[j]);
  }

  // rows[lane * count + i] += tile[i][lane] in double.
  static void add_to_rows(const T* tile, std::int64_t count, double* rows) {
    for (std::int64_t i = 0; i < count; i += N) {
      const int width = static_cast<int>(std::min(N, count - i));
      V r[N];
      FASTLIN_UNROLL
      for (int j = 0; j < N; ++j) r[j] = j < width ? at(tile, i + j) : V::zero();
      V::transpose(r);
      for (int l = 0; l < N; ++l) {
        T values[N];
        r[l].store(values);
        double* row = rows + l * count + i;
        for (int j = 0; j < width; ++j) row[j] += static_cast<double>(values[j]);
      }
    }
  }

 private:
  FASTLIN_INLINE static V sum_entries(const T* tile, int count) {
    V r[N];
    FASTLIN_UNROLL
    for (int j = 0; j < N; ++j) r[j] = j < count ? at(tile, j) : V::zero();
    return V::sums(r);
  }
};

// Operands of products, with entries (k, i). `Across` has those of one k side by side, `Along` those of one
// i, so that one stride is known when the code is compiled. Strides are in entries: V::size numbers of as
// many sequences, or one number that is the same for all.
template <class T, bool kNumbers = false>
struct Across {
  const T* first;
  std::int64_t stride;
  static constexpr std::int64_t kEntry = kNumbers ? 1 : Vec<T>::size;
  std::int64_t k() const { return stride * kEntry; }
  std::int64_t i() const { return kEntry; }
};

template <class T, bool kNumbers = false>
struct Along {
  const T* first;
  std::int64_t stride;
  static constexpr std::int64_t kEntry = kNumbers ? 1 : Vec<T>::size;
  std::int64_t k() const { return kEntry; }
  std::int64_t i() const { return stride * kEntry; }
};

template <class T>
using NumbersAcross = Across<T, true>;
template <class T>
using NumbersAlong = Along<T, true>;

// Where a product goes: to(i, j) = base(i, j) + factor * product, without base when that is null; they may be
// one. `Across` is side by side in j, `Along` in i.
template <class T, bool kAcross>
struct To {
  T* first;
  std::int64_t stride;
  T factor = 1;
  const T* base = nullptr;
  static constexpr std::int64_t kEntry = Vec<T>::size;
  std::int64_t i() const { return kAcross ? stride * kEntry : kEntry; }
  std::int64_t j() const { return kAcross ? kEntry : stride * kEntry; }
};

template <class T>
using ToAcross = To<T, true>;
template <class T>
using ToAlong = To<T, false>;

// Strides as numbers of their own: a store of vectors could change what a reference refers to, for all that
// the compiler knows, and it would read them again after each.
struct Strides {
  std::int64_t ak, ai, bk, bj, ti, tj;
};

// I x J entries in registers. 12 sums keep both FMA ports busy (4 cycles of latency each) and leave four of
// 16 registers for J factors and one more.
template <int I, int J, bool kNumbers, class T>
FASTLIN_INLINE void product_part(std::int64_t count, Strides by, const T* a, const T* b, T* to, const T* base,
                                 Vec<T> factor) {
  using V = Vec<T>;
  V acc[I][J];
  FASTLIN_UNROLL
  for (int i = 0; i < I; ++i) {
    FASTLIN_UNROLL
    for (int j = 0; j < J; ++j) acc[i][j] = V::zero();
  }
  for (std::int64_t k = 0; k < count; ++k, a += by.ak, b += by.bk) {
    V bj[J];
    FASTLIN_UNROLL
    for (int j = 0; j < J; ++j) bj[j] = V::load(b + j * by.bj);
    FASTLIN_UNROLL
    for (int i = 0; i < I; ++i) {
      const V ai = kNumbers ? V::broadcast(a + i * by.ai) : V::load(a + i * by.ai);
      FASTLIN_UNROLL
      for (int j = 0; j < J; ++j) acc[i][j] = fma(ai, bj[j], acc[i][j]);
    }
  }
  if (base == nullptr) {
    FASTLIN_UNROLL
    for (int i = 0; i < I; ++i) {
      FASTLIN_UNROLL
      for (int j = 0; j < J; ++j) (factor * acc[i][j]).store(to + i * by.ti + j * by.tj);
    }
    return;
  }
  FASTLIN_UNROLL
  for (int i = 0; i < I; ++i) {
    FASTLIN_UNROLL
    for (int j = 0; j < J; ++j) {
      const std::int64_t entry = i * by.ti + j * by.tj;
      fma(factor, acc[i][j], V::load(base + entry)).store(to + entry);
    }
  }
}

// Register tiles: 4 x 3 of 16 registers, 6 x 4 of 32.
template <class T>
constexpr int kTileRows = Vec<T>::registers < 32 ? 4 : 6;
template <class T>
constexpr int kTileColumns = Vec<T>::registers < 32 ? 3 : 4;

// I rows and the last J columns or fewer of a product.
template <int I, int J, bool kNumbers, class T>
FASTLIN_INLINE void product_end(std::int64_t columns, std::int64_t count, Strides by, const T* a, const T* b,
                                T* to, const T* base, Vec<T> factor) {
  if (columns == J) {
    product_part<I, J, kNumbers>(count, by, a, b, to, base, factor);
  } else if constexpr (J > 1) {
    product_end<I, J - 1, kNumbers>(columns, count, by, a, b, to, base, factor);
  }
}

// I rows of a product.
template <int I, class T, class A, class B, class C>
void product_rows(std::int64_t columns, std::int64_t count, const A& left, const B& right, const C& out,
                  std::int64_t i0) {
  constexpr bool kNumbers = A::kEntry == 1 && Vec<T>::size > 1;
  constexpr int J = kTileColumns<T>;
  const Strides by{left.k(), left.i(), right.k(), right.i(), out.i(), out.j()};
  const T *a = left.first + i0 * by.ai, *b = right.first;
  T* to = out.first + i0 * by.ti;
  const T* base = out.base == nullptr ? nullptr : out.base + i0 * by.ti;
  const Vec<T> factor = Vec<T>::set(out.factor);
  std::int64_t j = 0;
  for (; j + J <= columns; j += J) {
    product_part<I, J, kNumbers>(count, by, a, b, to, base, factor);
    b += J * by.bj;
    to += J * by.tj;
    if (base != nullptr) base += J * by.tj;
  }
  product_end<I, J - 1, kNumbers>(columns - j, count, by, a, b, to, base, factor);
}

// The last I rows or fewer.
template <int I, class T, class A, class B, class C>
void last_rows(std::int64_t rows, std::int64_t columns, std::int64_t count, const A& a, const B& b,
               const C& to, std::int64_t i0) {
  if (rows == I) {
    product_rows<I, T>(columns, count, a, b, to, i0);
  } else if constexpr (I > 1) {
    last_rows<I - 1, T>(rows, columns, count, a, b, to, i0);
  }
}

// to(i, j) = sum_k a(k, i) b(k, j), all of it or only what register tiles on and below the diagonal hold.
template <class A, class B, class C>
inline void product(std::int64_t rows, std::int64_t columns, std::int64_t count, const A& a, const B& b,
                    const C& to, bool lower = false) {
  using T = std::remove_reference_t<decltype(*to.first)>;
  constexpr int I = kTileRows<T>;
  // Blocks of nearly the same height: 11 rows are 6 + 5, 13 are 5 + 4 + 4.
  const std::int64_t blocks = (rows + I - 1) / I;
  for (std::int64_t block = 0, i = 0; block < blocks; ++block) {
    const std::int64_t height = (rows - i + blocks - block - 1) / (blocks - block);
    last_rows<I, T>(height, lower ? std::min(columns, i + height) : columns, count, a, b, to, i);
    i += height;
  }
}

// The last I rows or fewer of a product with one column.
template <int I, class T>
void last_of_column(std::int64_t rows, std::int64_t count, Strides by, const T* a, const T* b, const T* base,
                    T* to) {
  if (rows == I) {
    product_part<I, 1, (Vec<T>::size > 1)>(count, by, a, b, to, base, Vec<T>::set(T(1)));
  } else if constexpr (I > 1) {
    last_of_column<I - 1>(rows, count, by, a, b, base, to);
  }
}

// to [rows] = base + sum_k a(k, i) b(k) of numbers a [count, rows] and vectors b [count]. The 12 sums that
// keep both FMA ports busy are 12 rows here.
template <class T>
inline void add_column(std::int64_t rows, std::int64_t count, const T* a, const T* b, const T* base, T* to) {
  constexpr int N = Vec<T>::size, I = 12;
  const Strides by{rows, 1, N, 0, N, 0};
  for (std::int64_t i = 0; i < rows;) {
    const std::int64_t left = rows - i, blocks = (left + I - 1) / I;
    const std::int64_t height = blocks == 1 ? left : (left + blocks - 1) / blocks;
    last_of_column<I>(height, count, by, a + i, b, base + i * N, to + i * N);
    i += height;
  }
}

// A product that is known to be symmetric, m x m: its lower triangle is computed, and mirrored.
template <class T, class A, class B>
inline void symmetric_product(std::int64_t m, std::int64_t count, const A& a, const B& b,
                              const ToAcross<T>& to) {
  product(m, m, count, a, b, to, true);
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < i; ++j) Tile<T>::put(to.first, j * m + i, Tile<T>::at(to.first, i * m + j));
  }
}
