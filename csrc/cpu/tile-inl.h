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

  // rows[lane * count + i] += tile[i][lane] in double, for the first `lanes` lanes.
  static void add_to_rows(const T* tile, std::int64_t count, int lanes, double* rows) {
    for (std::int64_t i = 0; i < count; i += N) {
      const int width = static_cast<int>(std::min(N, count - i));
      V r[N];
      FASTLIN_UNROLL
      for (int j = 0; j < N; ++j) r[j] = j < width ? at(tile, i + j) : V::zero();
      V::transpose(r);
      for (int l = 0; l < lanes; ++l) {
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

// I rows of a product, J columns at a time, in registers; J divides `columns`. Operands come by value:
// through a reference the compiler would reload their strides after each store of a vector, which might have
// changed them. Most products have no factor: their sums start at the base, and are stored as they are.
//
// Not inlined: next to other tiles GCC computes the addresses of all of them ahead and spills them. 6 x 2
// tiles take 62 cycles for 121 multiply-adds of 16 lanes (Zen 5, at best 60.5); inlined 6 x 4 tiles took 71.
//
// The two asm keep the factor and the one that it is compared with out of vector registers: GCC held both
// throughout the loops, so that 6 x 4 tiles spilled two operands (4 to 11 trials: 1.04 to 1.06 times as
// long).
template <int I, int J, class A, class B, class C>
FASTLIN_NOINLINE void product_columns(std::int64_t columns, std::int64_t count, A left, B right, C out) {
  using T = std::remove_reference_t<decltype(*out.first)>;
  using V = Vec<T>;
  constexpr bool kNumbers = A::kEntry == 1 && V::size > 1;
  bool has_factor = out.factor != T(1);
  asm("" : "+r"(has_factor));
  const bool starts_at_base = out.base != nullptr && !has_factor;
  for (; columns > 0; columns -= J) {
    V acc[I][J];
    FASTLIN_UNROLL
    for (int i = 0; i < I; ++i) {
      FASTLIN_UNROLL
      for (int j = 0; j < J; ++j) acc[i][j] = V::zero();
    }
    if (starts_at_base) {
      FASTLIN_UNROLL
      for (int i = 0; i < I; ++i) {
        FASTLIN_UNROLL
        for (int j = 0; j < J; ++j) acc[i][j] = V::load(out.base + i * out.i() + j * out.j());
      }
    }
    const T *a = left.first, *b = right.first;
    for (std::int64_t k = 0; k < count; ++k, a += left.k(), b += right.k()) {
      V bj[J];
      FASTLIN_UNROLL
      for (int j = 0; j < J; ++j) bj[j] = V::load(b + j * right.i());
      FASTLIN_UNROLL
      for (int i = 0; i < I; ++i) {
        const V ai = kNumbers ? V::broadcast(a + i * left.i()) : V::load(a + i * left.i());
        FASTLIN_UNROLL
        for (int j = 0; j < J; ++j) acc[i][j] = fma(ai, bj[j], acc[i][j]);
      }
    }
    if (has_factor) {
      T number = out.factor;
      asm("" : "+m"(number));
      const V factor = V::broadcast(&number);
      FASTLIN_UNROLL
      for (int i = 0; i < I; ++i) {
        FASTLIN_UNROLL
        for (int j = 0; j < J; ++j) {
          const V start = out.base == nullptr ? V::zero() : V::load(out.base + i * out.i() + j * out.j());
          acc[i][j] = fma(factor, acc[i][j], start);
        }
      }
    }
    FASTLIN_UNROLL
    for (int i = 0; i < I; ++i) {
      FASTLIN_UNROLL
      for (int j = 0; j < J; ++j) acc[i][j].store(out.first + i * out.i() + j * out.j());
    }
    right.first += J * right.i();
    out.first += J * out.j();
    if (out.base != nullptr) out.base += J * out.j();
  }
}

// The entries j <= i of an I x I block on the diagonal, in registers.
template <int I, class A, class B, class C>
FASTLIN_NOINLINE void triangle_part(std::int64_t count, A left, B right, C out) {
  using T = std::remove_reference_t<decltype(*out.first)>;
  using V = Vec<T>;
  constexpr bool kNumbers = A::kEntry == 1 && V::size > 1;
  V acc[I][I];
  FASTLIN_UNROLL
  for (int i = 0; i < I; ++i) {
    FASTLIN_UNROLL
    for (int j = 0; j <= i; ++j) acc[i][j] = V::zero();
  }
  const T *a = left.first, *b = right.first;
  for (std::int64_t k = 0; k < count; ++k, a += left.k(), b += right.k()) {
    V bj[I];
    FASTLIN_UNROLL
    for (int i = 0; i < I; ++i) {
      bj[i] = V::load(b + i * right.i());
      const V ai = kNumbers ? V::broadcast(a + i * left.i()) : V::load(a + i * left.i());
      FASTLIN_UNROLL
      for (int j = 0; j <= i; ++j) acc[i][j] = fma(ai, bj[j], acc[i][j]);
    }
  }
  const V factor = V::set(out.factor);
  FASTLIN_UNROLL
  for (int i = 0; i < I; ++i) {
    FASTLIN_UNROLL
    for (int j = 0; j <= i; ++j) {
      const std::int64_t entry = i * out.i() + j * out.j();
      const V start = out.base == nullptr ? V::zero() : V::load(out.base + entry);
      fma(factor, acc[i][j], start).store(out.first + entry);
    }
  }
}

// Entries in registers: 12 sums keep both FMA ports busy (4 cycles of latency each) and leave four of 16
// registers for factors. With 32 registers, products of vectors by vectors have 24 sums, and so fewer loads.
// A triangle of 6 rows has 21 sums.
constexpr int kProductRows = 6;
template <class T, class A>
constexpr int kProductColumns = Vec<T>::registers < 32 || A::kEntry == 1 ? 2 : 4;
template <class T>
constexpr int kTriangleRows = Vec<T>::registers < 32 ? 4 : 6;

// How many rows to do next, at most `most`, of `left` that are left: 11 are 6 + 5, 13 are 6 + 4
// + 3.
inline std::int64_t rows_at_once(std::int64_t left, std::int64_t most) {
  return left >= 2 * most ? most : left > most ? (left + 1) / 2 : left;
}

// I rows of a product and the triangle that follows them on the diagonal, with `lower`; J columns at a time,
// then fewer.
template <int I, int J, class A, class B, class C>
void product_columns_at_most(std::int64_t columns, std::int64_t count, A left, B right, C out, bool lower) {
  using T = std::remove_reference_t<decltype(*out.first)>;
  const std::int64_t whole = columns / J * J;
  if (whole > 0) {
    product_columns<I, J>(whole, count, left, right, out);
    right.first += whole * right.i();
    out.first += whole * out.j();
    if (out.base != nullptr) out.base += whole * out.j();
  }
  if constexpr (J > 1) {
    if (columns > whole || lower) {
      product_columns_at_most<I, J - 1>(columns - whole, count, left, right, out, lower);
    }
  } else if constexpr (I <= kTriangleRows<T>) {
    if (lower) triangle_part<I>(count, left, right, out);
  }
}

// `rows` rows of a product, I or fewer.
template <int I, class A, class B, class C>
void product_rows(std::int64_t rows, std::int64_t columns, std::int64_t count, const A& left, const B& right,
                  const C& out, bool lower) {
  using T = std::remove_reference_t<decltype(*out.first)>;
  if (rows == I) {
    product_columns_at_most<I, kProductColumns<T, A>>(columns, count, left, right, out, lower);
  } else if constexpr (I > 1) {
    product_rows<I - 1>(rows, columns, count, left, right, out, lower);
  }
}

// to(i, j) = sum_k a(k, i) b(k, j), all of it or only j <= i.
template <class A, class B, class C>
inline void product(std::int64_t rows, std::int64_t columns, std::int64_t count, A a, B b, C to,
                    bool lower = false) {
  using T = std::remove_reference_t<decltype(*to.first)>;
  for (std::int64_t i = 0, next = 0; i < rows; i += next) {
    next = rows_at_once(rows - i, lower ? kTriangleRows<T> : kProductRows);
    product_rows<kProductRows>(next, lower ? i : columns, count, a, b, to, lower);
    a.first += next * a.i();
    to.first += next * to.i();
    if (to.base != nullptr) to.base += next * to.i();
  }
}

// The same with one column.
template <class A, class B, class C>
inline void product_column(std::int64_t rows, std::int64_t count, const A& a, const B& b, const C& to) {
  product(rows, 1, count, a, b, to);
}
