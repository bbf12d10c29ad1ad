// Tiles on a CPU: transposes in registers, and products in blocks of registers. core/tile-inl.h has the
// layout.

template <class T>
struct Tile : Entries<T> {
  using V = Vec<T>;
  using Entries<T>::N;
  using Entries<T>::at;
  using Entries<T>::put;

  // Calls f(i), i < count, for numbers that all lanes share.
  template <class F>
  static void for_each_number(std::int64_t count, F f) {
    for (std::int64_t i = 0; i < count; ++i) f(i);
  }

  // to [count] = from [count], rounded to T.
  static void round(const double* from, std::int64_t count, T* to) {
    for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(from[i]);
  }

  // tile [size, lanes]: the row of each lane's task, from values [K, size], rounded to T.
  static void round_by_task(const double* values, const std::int64_t* task, std::int64_t size, T* tile) {
    for (int l = 0; l < N; ++l) {
      for (std::int64_t i = 0; i < size; ++i) tile[i * N + l] = static_cast<T>(values[task[l] * size + i]);
    }
  }

  // tile[i][lane] = rows[lane][offset + i]. The last V::columns columns are loaded together and may overlap
  // those before. Prefetches the same columns of the rows `ahead`, if there are any.
  static void load(const T* const* rows, std::int64_t offset, std::int64_t count, T* tile,
                   const T* const* ahead = nullptr) {
    constexpr std::int64_t kColumns = V::columns, kLine = 64 / sizeof(T);
    if (count < kColumns) {
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
      if (ahead != nullptr && i % kLine == 0) {
        for (int l = 0; l < N; ++l) __builtin_prefetch(ahead[l] + offset + i, 0, 2);
      }
      load_columns(rows, offset + i, tile + i * N);
      if (i == count - kColumns) return;
      i = i + kColumns <= count - kColumns ? i + kColumns : count - kColumns;
    }
  }

  // tile [V::columns, lanes] of V::columns columns.
  FASTLIN_INLINE static void load_columns(const T* const* rows, std::int64_t offset, T* tile) {
    V r[V::columns];
    V::load_columns(rows, offset, r);
    FASTLIN_UNROLL
    for (int j = 0; j < V::columns; ++j) put(tile, j, r[j]);
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

// Strides, passed by value: through a reference the compiler would reload them after each store of a vector,
// which might have changed them.
struct Strides {
  std::int64_t ak, ai, bk, bj, ti, tj;
};

// I x J entries of a product, in registers. 12 sums keep both FMA ports busy (4 cycles of latency each) and
// leave four of 16 registers for J factors and one more.
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

// Entries in registers: 4 x 3 with 16 registers, 6 x 4 with 32.
template <class T>
constexpr int kTileRows = Vec<T>::registers < 32 ? 4 : 6;
template <class T>
constexpr int kTileColumns = Vec<T>::registers < 32 ? 3 : 4;

// I rows and the last columns of a product, J or fewer.
template <int I, int J, bool kNumbers, class T>
FASTLIN_INLINE void columns_at_most(std::int64_t columns, std::int64_t count, Strides by, const T* a,
                                    const T* b, T* to, const T* base, Vec<T> factor) {
  if (columns == J) {
    product_part<I, J, kNumbers>(count, by, a, b, to, base, factor);
  } else if constexpr (J > 1) {
    columns_at_most<I, J - 1, kNumbers>(columns, count, by, a, b, to, base, factor);
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
  columns_at_most<I, J - 1, kNumbers>(columns - j, count, by, a, b, to, base, factor);
}

// `rows` rows of a product, I or fewer.
template <int I, class T, class A, class B, class C>
void rows_at_most(std::int64_t rows, std::int64_t columns, std::int64_t count, const A& a, const B& b,
                  const C& to, std::int64_t i0) {
  if (rows == I) {
    product_rows<I, T>(columns, count, a, b, to, i0);
  } else if constexpr (I > 1) {
    rows_at_most<I - 1, T>(rows, columns, count, a, b, to, i0);
  }
}

// The entries j <= i of an I x I block on the diagonal, in registers.
template <int I, bool kNumbers, class T>
void triangle_part(std::int64_t count, Strides by, const T* a, const T* b, T* to, const T* base,
                   Vec<T> factor) {
  using V = Vec<T>;
  V acc[I][I];
  FASTLIN_UNROLL
  for (int i = 0; i < I; ++i) {
    FASTLIN_UNROLL
    for (int j = 0; j <= i; ++j) acc[i][j] = V::zero();
  }
  for (std::int64_t k = 0; k < count; ++k, a += by.ak, b += by.bk) {
    V bj[I];
    FASTLIN_UNROLL
    for (int i = 0; i < I; ++i) {
      bj[i] = V::load(b + i * by.bj);
      const V ai = kNumbers ? V::broadcast(a + i * by.ai) : V::load(a + i * by.ai);
      FASTLIN_UNROLL
      for (int j = 0; j <= i; ++j) acc[i][j] = fma(ai, bj[j], acc[i][j]);
    }
  }
  FASTLIN_UNROLL
  for (int i = 0; i < I; ++i) {
    FASTLIN_UNROLL
    for (int j = 0; j <= i; ++j) {
      const std::int64_t entry = i * by.ti + j * by.tj;
      const V start = base == nullptr ? V::zero() : V::load(base + entry);
      fma(factor, acc[i][j], start).store(to + entry);
    }
  }
}

// The lower triangle of `rows` rows on the diagonal, I or fewer.
template <int I, class T, class A, class B, class C>
void triangle_at_most(std::int64_t rows, std::int64_t count, const A& left, const B& right, const C& out,
                      std::int64_t i0) {
  if (rows == I) {
    const Strides by{left.k(), left.i(), right.k(), right.i(), out.i(), out.j()};
    const std::int64_t corner = i0 * (by.ti + by.tj);
    triangle_part<I, (A::kEntry == 1 && Vec<T>::size > 1)>(
        count, by, left.first + i0 * by.ai, right.first + i0 * by.bj, out.first + corner,
        out.base == nullptr ? nullptr : out.base + corner, Vec<T>::set(out.factor));
  } else if constexpr (I > 1) {
    triangle_at_most<I - 1, T>(rows, count, left, right, out, i0);
  }
}

// to(i, j) = sum_k a(k, i) b(k, j), all of it or only j <= i.
template <class A, class B, class C>
inline void product(std::int64_t rows, std::int64_t columns, std::int64_t count, const A& a, const B& b,
                    const C& to, bool lower = false) {
  using T = std::remove_reference_t<decltype(*to.first)>;
  constexpr int I = kTileRows<T>;
  // Blocks of nearly equal height: 11 rows are 6 + 5, 13 are 5 + 4 + 4.
  const std::int64_t blocks = (rows + I - 1) / I;
  for (std::int64_t block = 0, i = 0; block < blocks; ++block) {
    const std::int64_t height = (rows - i + blocks - block - 1) / (blocks - block);
    rows_at_most<I, T>(height, lower ? i : columns, count, a, b, to, i);
    if (lower) triangle_at_most<I, T>(height, count, a, b, to, i);
    i += height;
  }
}

// The same with one column.
template <class A, class B, class C>
inline void product_column(std::int64_t rows, std::int64_t count, const A& a, const B& b, const C& to) {
  product(rows, 1, count, a, b, to);
}

// `rows` rows of a product with one column, I or fewer.
template <int I, class T>
void column_at_most(std::int64_t rows, std::int64_t count, Strides by, const T* a, const T* b, const T* base,
                    T* to) {
  if (rows == I) {
    product_part<I, 1, (Vec<T>::size > 1)>(count, by, a, b, to, base, Vec<T>::set(T(1)));
  } else if constexpr (I > 1) {
    column_at_most<I - 1>(rows, count, by, a, b, base, to);
  }
}

// to [rows] = base + sum_k a(k, i) b(k) of numbers a [count, rows] and vectors b [count]. Its 12 rows keep
// both FMA ports busy.
template <class T>
inline void add_column(std::int64_t rows, std::int64_t count, const T* a, const T* b, const T* base, T* to) {
  constexpr int N = Vec<T>::size, I = 12;
  const Strides by{rows, 1, N, 0, N, 0};
  for (std::int64_t i = 0; i < rows;) {
    const std::int64_t left = rows - i, blocks = (left + I - 1) / I;
    const std::int64_t height = blocks == 1 ? left : (left + blocks - 1) / blocks;
    column_at_most<I>(height, count, by, a + i, b, base + i * N, to + i * N);
    i += height;
  }
}
