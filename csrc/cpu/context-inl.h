// Contexts: what applies G to vectors. Streamed tokens never form G: c += z (z . v), e += z (z . a), 4 m
// multiply-adds a token and vector. Otherwise G = sum z z' (+ q q') is formed once a sequence, m (m + 1) / 2
// a token, and shared by all trials and heads. One vector reads each token once: 4 n m bytes a sequence in
// float32. Long sums are taken in halves, so that their error grows with log n.

template <class T>
struct Tokens {
  using V = Vec<T>;
  using L = Tile<T>;
  static constexpr std::int64_t N = V::size;
  // Tokens that are transposed at a time: 8 of them are whole vectors in every lane, and stay in L1 up to m
  // = 64.
  static std::int64_t group(std::int64_t m) { return m <= 64 ? 8 : 4; }
  static constexpr std::int64_t kLeaf = 128;  // tokens that are summed one after the other

  const T* const* rows;  // [lanes] first token of each
  const T* const* next;  // [lanes] of the tile that comes after; null when that is not known
  std::int64_t row;      // stride of tokens
  std::int64_t n, m;

  // tile [count, m, lanes] of tokens first, first + 1, ...
  void load(std::int64_t first, std::int64_t count, T* tile) const {
    if (row == m) {
      L::load(rows, first * m, count * m, tile);
    } else {
      for (std::int64_t i = 0; i < count; ++i) L::load(rows, (first + i) * row, m, tile + i * m * N);
    }
  }

  // Asks for the same tokens of the next tile. Sequences of up to 4 KiB are over before the hardware sees a
  // pattern in eight streams: 1.3 ms for 1.6 at m = 11, n = 50, one thread, 18 MB of tokens in L3. Longer
  // ones it does better.
  FASTLIN_INLINE void prefetch(std::int64_t first, std::int64_t count) const {
    constexpr std::int64_t kLine = 64 / sizeof(T), kShort = 4096 / sizeof(T);
    if (next == nullptr || n * row > kShort) return;
    const std::int64_t size = count * row;
    for (int l = 0; l < N; ++l) {
      const T* from = next[l] + first * row;
      for (std::int64_t i = 0; i < size; i += kLine) __builtin_prefetch(from + i);
    }
  }

  static std::int64_t depth(std::int64_t n, std::int64_t leaf) {
    std::int64_t levels = 0;
    while (n > leaf) n = (n + 1) / 2, ++levels;
    return levels;
  }
  static std::int64_t middle(std::int64_t begin, std::int64_t end) {
    return begin + ((end - begin) / 2 + 7) / 8 * 8;
  }
};

// c [m, lanes], e [m, lanes]: sums over tokens begin ... end - 1 are added.
template <class T>
struct Streamed {
  using V = Vec<T>;
  using L = Tile<T>;
  static constexpr std::int64_t N = V::size;

  static std::int64_t scratch(std::int64_t n, std::int64_t m) {
    return (Tokens<T>::group(m) + 2 * Tokens<T>::depth(n, Tokens<T>::kLeaf)) * m * N;
  }

  template <bool kGrad>
  static void apply(const Tokens<T>& z, std::int64_t begin, std::int64_t end, const T* v, const T* a, T* c,
                    T* e, T* scratch) {
    const std::int64_t m = z.m;
    if (end - begin > Tokens<T>::kLeaf) {
      const std::int64_t middle = Tokens<T>::middle(begin, end);
      apply<kGrad>(z, begin, middle, v, a, c, e, scratch);
      T *c2 = scratch, *e2 = scratch + m * N;
      L::zero(c2, m);
      if (kGrad) L::zero(e2, m);
      apply<kGrad>(z, middle, end, v, a, c2, e2, scratch + 2 * m * N);
      L::add(c, c2, m);
      if (kGrad) L::add(e, e2, m);
      return;
    }
    const std::int64_t group = Tokens<T>::group(m);
    for (std::int64_t first = begin; first < end; first += group) {
      const std::int64_t count = std::min(group, end - first);
      z.prefetch(first, count);
      z.load(first, count, scratch);
      std::int64_t i = 0;
      for (; i + 4 <= count; i += 4) add_tokens<4, kGrad>(scratch + i * m * N, m, v, a, c, e);
      if (count - i >= 2) {
        add_tokens<2, kGrad>(scratch + i * m * N, m, v, a, c, e);
        i += 2;
      }
      if (i < count) add_tokens<1, kGrad>(scratch + i * m * N, m, v, a, c, e);
    }
  }

  // The same for I tokens z [I, m, lanes] that are there. Each element serves two sums: left to itself GCC
  // loads it for each: 0.146 for 0.131 ms, 1024 sequences, m = 11, n = 50, AVX2.
  template <int I, bool kGrad>
  static void add_tokens(const T* z, std::int64_t m, const T* v, const T* a, T* c, T* e) {
    V with_v[I], with_a[I];
    FASTLIN_UNROLL
    for (int i = 0; i < I; ++i) with_v[i] = with_a[i] = V::zero();
    for (std::int64_t j = 0; j < m; ++j) {
      const V vj = L::at(v, j), aj = kGrad ? L::at(a, j) : V::zero();
      FASTLIN_UNROLL
      for (int i = 0; i < I; ++i) {
        const V zj = V::load_once(z + (i * m + j) * N);
        with_v[i] = fma(zj, vj, with_v[i]);
        if (kGrad) with_a[i] = fma(zj, aj, with_a[i]);
      }
    }
    for (std::int64_t j = 0; j < m; ++j) {
      V cj = L::at(c, j), ej = kGrad ? L::at(e, j) : V::zero();
      FASTLIN_UNROLL
      for (int i = 0; i < I; ++i) {
        const V zj = V::load_once(z + (i * m + j) * N);
        cj = fma(zj, with_v[i], cj);
        if (kGrad) ej = fma(zj, with_a[i], ej);
      }
      L::put(c, j, cj);
      if (kGrad) L::put(e, j, ej);
    }
  }
};

// G [m, m, lanes], symmetric and whole.
template <class T>
struct Gram {
  using V = Vec<T>;
  using L = Tile<T>;
  static constexpr std::int64_t N = V::size;
  static constexpr std::int64_t kLeaf = 512;

  // Tokens that are transposed together: with their sums they fill half of a 32 KiB cache, from 8 upwards.
  static std::int64_t group(std::int64_t m) {
    const std::int64_t fit = (16 << 10) / (m * N * static_cast<std::int64_t>(sizeof(T)));
    return fit < 8 ? 8 : (fit > 64 ? 64 : fit);
  }
  static std::int64_t scratch(std::int64_t n, std::int64_t m) {
    const std::int64_t levels = Tokens<T>::depth(n, kLeaf);
    return (group(m) + levels * m) * m * N;
  }

  static void of_tokens(const Tokens<T>& z, T* G, T* scratch) {
    L::zero(G, z.m * z.m);
    add_tokens(z, 0, z.n, G, scratch);
    mirror(G, z.m);
  }

  // The symmetric part of stored matrices.
  static void of_matrices(const T* const* rows, std::int64_t row, std::int64_t m, T* G) {
    for (std::int64_t i = 0; i < m; ++i) L::load(rows, i * row, m, G + i * m * N);
    const V half = V::set(T(0.5));
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < i; ++j) {
        L::put(G, i * m + j, half * (L::at(G, i * m + j) + L::at(G, j * m + i)));
      }
    }
    mirror(G, m);
  }

  // G += x x' for vectors x [count, m, lanes].
  static void add_outer(const T* x, std::int64_t count, std::int64_t m, T* G) {
    symmetric_product(m, count, Across<T>{x, m}, Across<T>{x, m}, ToAcross<T>{G, m, T(1), G});
  }

 private:
  static void add_tokens(const Tokens<T>& z, std::int64_t begin, std::int64_t end, T* G, T* scratch) {
    const std::int64_t m = z.m;
    if (end - begin > kLeaf) {
      const std::int64_t middle = Tokens<T>::middle(begin, end);
      add_tokens(z, begin, middle, G, scratch);
      L::zero(scratch, m * m);
      add_tokens(z, middle, end, scratch, scratch + m * m * N);
      L::add(G, scratch, m * m);
      return;
    }
    for (std::int64_t first = begin; first < end; first += group(m)) {
      const std::int64_t count = std::min(group(m), end - first);
      z.prefetch(first, count);
      z.load(first, count, scratch);
      product(m, m, count, Across<T>{scratch, m}, Across<T>{scratch, m}, ToAcross<T>{G, m, T(1), G}, true);
    }
  }

  static void mirror(T* G, std::int64_t m) {
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < i; ++j) L::put(G, j * m + i, L::at(G, i * m + j));
    }
  }
};
