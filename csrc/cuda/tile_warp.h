// Tiles of a warp: sums over lanes, transposes through shared memory, and products in registers.
// core/tile-inl.h has the layout.

template <class T>
struct Tile : Entries<T> {
  using V = Vec<T>;
  using Entries<T>::N;

  // Calls f(i), i < count, in the threads of the warp, each i in one: for numbers that all lanes share.
  template <class F>
  FASTLIN_HD static void for_each_number(std::int64_t count, F f) {
    for (std::int64_t i = lane(); i < count; i += N) f(i);
    sync_lanes();
  }

  // to [count] = from, numbers.
  FASTLIN_HD static void round(const double* from, std::int64_t count, T* to) {
    for_each_number(count, [=](std::int64_t i) { to[i] = static_cast<T>(from[i]); });
  }

  // tile [size, lanes] of rows of an array [K, size] by the lanes' tasks.
  template <class From>
  FASTLIN_HD static void by_task(const From* values, const std::int64_t* task, std::int64_t size, T* tile) {
    const From* row = values + task[lane()] * size;
    FASTLIN_ROLL
    for (std::int64_t i = 0; i < size; ++i) tile[i * N + lane()] = static_cast<T>(row[i]);
  }
  FASTLIN_HD static void round_by_task(const double* values, const std::int64_t* task, std::int64_t size,
                                       T* tile) {
    by_task(values, task, size, tile);
  }

  // The sum of an entry over lanes begin ... end - 1. Each thread sums up its own entry and starts at its own
  // lane, so that no two read the same bank of shared memory.
  FASTLIN_HD static T sum(const T* entry, int begin, int end) {
    T total = 0;
    FASTLIN_ROLL
    for (int s = 0; s < N; ++s) {
      const int l = (s + lane()) & (N - 1);
      const T value = entry[l];
      total += l >= begin && l < end ? value : T(0);
    }
    return total;
  }

  // sums[i] += the sum over lanes of entry i.
  FASTLIN_HD static void add_sums(const T* tile, std::int64_t count, double* sums) {
    sync_lanes();
    for (std::int64_t i = lane(); i < count; i += N) sums[i] += static_cast<double>(sum(tile + i * N, 0, N));
    sync_lanes();
  }

  // sums [m, m] += the sum over lanes of x y'. A thread has 3 x 2 entries, which at m = 11 are 24 threads: 6
  // multiply-adds for 5 loads.
  FASTLIN_HD static void add_outer(const T* x, const T* y, std::int64_t m, double* sums) {
    constexpr int I = 3, J = 2;
    sync_lanes();
    const std::int64_t columns = (m + J - 1) / J, count = (m + I - 1) / I * columns;
    for (std::int64_t part = lane(); part < count; part += N) {
      const std::int64_t i0 = part / columns * I, j0 = part % columns * J;
      T acc[I][J] = {};
      FASTLIN_ROLL
      for (int s = 0; s < N; ++s) {
        const int l = (s + lane()) & (N - 1);
        T xi[I], yj[J];
        FASTLIN_UNROLL
        for (int i = 0; i < I; ++i) xi[i] = x[(i0 + i < m ? i0 + i : m - 1) * N + l];
        FASTLIN_UNROLL
        for (int j = 0; j < J; ++j) yj[j] = y[(j0 + j < m ? j0 + j : m - 1) * N + l];
        FASTLIN_UNROLL
        for (int i = 0; i < I; ++i) {
          FASTLIN_UNROLL
          for (int j = 0; j < J; ++j) acc[i][j] = std::fma(xi[i], yj[j], acc[i][j]);
        }
      }
      FASTLIN_UNROLL
      for (int i = 0; i < I; ++i) {
        FASTLIN_UNROLL
        for (int j = 0; j < J; ++j) {
          if (i0 + i < m && j0 + j < m) sums[(i0 + i) * m + j0 + j] += static_cast<double>(acc[i][j]);
        }
      }
    }
    sync_lanes();
  }

  // A square of 32 rows and columns on its way between rows in memory and lanes. A row more in the stride
  // than there are banks: neither its rows nor its columns meet in one.
  static constexpr std::int64_t kStagingStride = N + 1, kStaging = N * kStagingStride;

  // tile [count, lanes] = x[index[lane] * stride + column + i]. A warp reads 32 numbers of a row at a time,
  // whole lines; warps share out the columns. Lanes from `lanes` on become zeros.
  FASTLIN_HD static void load_rows(const T* x, std::int64_t count, const std::int64_t* index,
                                   std::int64_t stride, std::int64_t column, int lanes, int warp, int warps,
                                   T* staging, T* tile) {
    for (std::int64_t j = warp * N; j < count; j += warps * N) {
      const bool inside = j + lane() < count;
      FASTLIN_ROLL
      for (int l = 0; l < N; ++l) {
        const bool there = inside && l < lanes;
        staging[lane() * kStagingStride + l] = there ? x[index[l] * stride + column + j + lane()] : T(0);
      }
      sync_lanes();
      FASTLIN_ROLL
      for (std::int64_t i = 0; i < N && j + i < count; ++i) {
        tile[(j + i) * N + lane()] = staging[i * kStagingStride + lane()];
      }
      sync_lanes();
    }
  }

  // The way back.
  FASTLIN_HD static void store_rows(const T* tile, std::int64_t count, const std::int64_t* index,
                                    std::int64_t stride, std::int64_t column, int lanes, int warp, int warps,
                                    T* staging, T* x) {
    for (std::int64_t j = warp * N; j < count; j += warps * N) {
      FASTLIN_ROLL
      for (std::int64_t i = 0; i < N && j + i < count; ++i) {
        staging[i * kStagingStride + lane()] = tile[(j + i) * N + lane()];
      }
      sync_lanes();
      FASTLIN_ROLL
      for (int l = 0; l < lanes; ++l) {
        if (j + lane() < count)
          x[index[l] * stride + column + j + lane()] = staging[lane() * kStagingStride + l];
      }
      sync_lanes();
    }
  }
};

// I x J entries of a product in registers. What reaches over its edge repeats the last row or column and is
// not stored.
template <int I, int J, class A, class B, class C>
FASTLIN_HD FASTLIN_INLINE void product_part(std::int64_t rows, std::int64_t columns, std::int64_t count,
                                            const A& left, const B& right, const C& out, std::int64_t i0,
                                            std::int64_t j0) {
  using T = std::remove_reference_t<decltype(*out.first)>;
  using V = Vec<T>;
  V acc[I][J];
  int a[I], b[J];  // rows, from the pointers that go along k: an address is one instruction of 32 x 32 bits
  FASTLIN_UNROLL
  for (int i = 0; i < I; ++i) {
    a[i] = static_cast<int>((i0 + i < rows ? i0 + i : rows - 1) * left.i()) + (A::kEntry == 1 ? 0 : lane());
    FASTLIN_UNROLL
    for (int j = 0; j < J; ++j) acc[i][j] = V::zero();
  }
  FASTLIN_UNROLL
  for (int j = 0; j < J; ++j)
    b[j] = static_cast<int>((j0 + j < columns ? j0 + j : columns - 1) * right.i()) + lane();
  const std::int64_t ak = left.k(), bk = right.k();
  const T *along_a = left.first, *along_b = right.first;
  FASTLIN_ROLL
  for (int k = static_cast<int>(count); k > 0; --k, along_a += ak, along_b += bk) {
    V ai[I], bj[J];
    FASTLIN_UNROLL
    for (int i = 0; i < I; ++i) ai[i] = V::broadcast(along_a + a[i]);
    FASTLIN_UNROLL
    for (int j = 0; j < J; ++j) bj[j] = V::broadcast(along_b + b[j]);
    FASTLIN_UNROLL
    for (int i = 0; i < I; ++i) {
      FASTLIN_UNROLL
      for (int j = 0; j < J; ++j) acc[i][j] = fma(ai[i], bj[j], acc[i][j]);
    }
  }
  const V factor = V::set(out.factor);
  FASTLIN_UNROLL
  for (int i = 0; i < I; ++i) {
    FASTLIN_UNROLL
    for (int j = 0; j < J; ++j) {
      if (i0 + i >= rows || j0 + j >= columns) continue;
      const std::int64_t entry = (i0 + i) * out.i() + (j0 + j) * out.j();
      const V made =
          out.base == nullptr ? factor * acc[i][j] : fma(factor, acc[i][j], V::load(out.base + entry));
      made.store(out.first + entry);
    }
  }
}

template <int I, int J, class A, class B, class C>
FASTLIN_HD FASTLIN_INLINE void product_parts(std::int64_t rows, std::int64_t columns, std::int64_t count,
                                             const A& a, const B& b, const C& to, bool lower) {
  for (std::int64_t i = 0; i < rows; i += I) {
    const std::int64_t end = lower && i + I < columns ? i + I : columns;
    for (std::int64_t j = 0; j < end; j += J) product_part<I, J>(rows, columns, count, a, b, to, i, j);
  }
}

// to(i, j) = sum_k a(k, i) b(k, j), all of it or only what register tiles on and below the diagonal hold. A
// lane reads and writes its own sequence: no lane waits for another. 4 x 4 entries are 16 multiply-adds for 8
// loads; numbers of double take two registers, and 3 x 3 is what they have room for.
template <class A, class B, class C>
FASTLIN_HD FASTLIN_INLINE void product(std::int64_t rows, std::int64_t columns, std::int64_t count,
                                       const A& a, const B& b, const C& to, bool lower = false) {
  constexpr int kSide = sizeof(*to.first) == sizeof(float) ? 4 : 3;
  product_parts<kSide, kSide>(rows, columns, count, a, b, to, lower);
}

// The same with one column.
template <class A, class B, class C>
FASTLIN_HD FASTLIN_INLINE void product_column(std::int64_t rows, std::int64_t count, const A& a, const B& b,
                                              const C& to) {
  product_parts<8, 1>(rows, 1, count, a, b, to, false);
}
