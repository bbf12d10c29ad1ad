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

  // tile[i][lane] = rows[lane][offset + i]. The last V::size columns are taken together, whatever overlaps.
  static void load(const T* const* rows, std::int64_t offset, std::int64_t count, T* tile) {
    if (count < N) {
      if (count == 0) return;
      V r[N];
      for (int l = 0; l < N; ++l) r[l] = V::load_first(rows[l] + offset, static_cast<int>(count));
      V::transpose(r);
      for (std::int64_t i = 0; i < count; ++i) put(tile, i, r[i]);
      return;
    }
    for (std::int64_t i = 0;;) {
      V r[N];
      for (int l = 0; l < N; ++l) r[l] = V::load(rows[l] + offset + i);
      V::transpose(r);
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

  // sums[i] += the sum over lanes of entry i: V::size entries at a time, transposed and added in pairs.
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

 private:
  static V sum_entries(const T* tile, int count) {
    V r[N];
    for (int j = 0; j < N; ++j) r[j] = j < count ? at(tile, j) : V::zero();
    V::transpose(r);
    for (int step = 1; step < N; step *= 2) {
      for (int j = 0; j + step < N; j += 2 * step) r[j] = r[j] + r[j + step];
    }
    return r[0];
  }
};

// Operands of products: entry (k, i), with strides in entries. Lanes differ from sequence to sequence,
// numbers are the same for all.
template <class T>
struct Lanes {
  const T* first;
  std::int64_t k, i;
  Vec<T> at(std::int64_t row, std::int64_t column) const {
    return Vec<T>::load(first + (row * k + column * i) * Vec<T>::size);
  }
};

template <class T>
struct Numbers {
  const T* first;
  std::int64_t k, i;
  Vec<T> at(std::int64_t row, std::int64_t column) const {
    return Vec<T>::broadcast(first + row * k + column * i);
  }
};

// Where a product goes, times a factor, over or beside what is there.
template <class T>
struct To {
  T* first;
  std::int64_t i, j;
  T factor = 1;
  bool adds = false;
};

// I x J entries of a product in registers. 12 sums keep both FMA ports busy (4 cycles of latency each) and
// leave four of 16 registers for J factors and one more.
template <int I, int J, class T, class A>
inline void product_part(std::int64_t count, A a, Lanes<T> b, To<T> to, std::int64_t i0, std::int64_t j0) {
  using V = Vec<T>;
  V acc[I][J];
  for (int i = 0; i < I; ++i) {
    for (int j = 0; j < J; ++j) acc[i][j] = V::zero();
  }
  for (std::int64_t k = 0; k < count; ++k) {
    V right[J];
    for (int j = 0; j < J; ++j) right[j] = b.at(k, j0 + j);
    for (int i = 0; i < I; ++i) {
      const V left = a.at(k, i0 + i);
      for (int j = 0; j < J; ++j) acc[i][j] = fma(left, right[j], acc[i][j]);
    }
  }
  const V factor = V::set(to.factor);
  for (int i = 0; i < I; ++i) {
    for (int j = 0; j < J; ++j) {
      T* entry = to.first + ((i0 + i) * to.i + (j0 + j) * to.j) * V::size;
      (to.adds ? fma(factor, acc[i][j], V::load(entry)) : factor * acc[i][j]).store(entry);
    }
  }
}

// to(i, j) = sum_k a(k, i) b(k, j), all of it or only what register tiles on and below the diagonal hold.
template <class T, class A>
inline void product(std::int64_t rows, std::int64_t columns, std::int64_t count, A a, Lanes<T> b, To<T> to,
                    bool lower = false) {
  using Part = void (*)(std::int64_t, A, Lanes<T>, To<T>, std::int64_t, std::int64_t);
  constexpr Part kRests[4][3] = {
      {&product_part<1, 1, T, A>, &product_part<1, 2, T, A>, &product_part<1, 3, T, A>},
      {&product_part<2, 1, T, A>, &product_part<2, 2, T, A>, &product_part<2, 3, T, A>},
      {&product_part<3, 1, T, A>, &product_part<3, 2, T, A>, &product_part<3, 3, T, A>},
      {&product_part<4, 1, T, A>, &product_part<4, 2, T, A>, &product_part<4, 3, T, A>},
  };
  for (std::int64_t i = 0; i < rows; i += 4) {
    const std::int64_t height = std::min<std::int64_t>(4, rows - i);
    const std::int64_t width = lower ? std::min(columns, i + height) : columns;
    for (std::int64_t j = 0; j < width; j += 3) {
      const std::int64_t rest = std::min<std::int64_t>(3, width - j);
      if (height == 4 && rest == 3) {
        product_part<4, 3>(count, a, b, to, i, j);
      } else {
        kRests[height - 1][rest - 1](count, a, b, to, i, j);
      }
    }
  }
}

// A product that is known to be symmetric, m x m: its lower triangle is computed, and mirrored.
template <class T, class A>
inline void symmetric_product(std::int64_t m, std::int64_t count, A a, Lanes<T> b, To<T> to) {
  product(m, m, count, a, b, to, true);
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < i; ++j) Tile<T>::put(to.first, j * m + i, Tile<T>::at(to.first, i * m + j));
  }
}
