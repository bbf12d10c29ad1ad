// Contexts apply G to vectors. Streaming never forms G: c += z (z . v), e += z (z . a), 4 m multiply-adds for
// each token and vector. Otherwise G = sum z z' (+ q q') is formed once a sequence, with m (m + 1) / 2
// multiply-adds a token, and all trials and heads share it. One vector reads each token once: 4 n m bytes a
// sequence in float32. Long sums are split in halves, so that their error grows with log n.

// Adds the sums over tokens begin ... end - 1 to c [m, lanes] and e [m, lanes].
template <class T>
struct Streamed {
  using V = Vec<T>;
  using L = Tile<T>;
  static constexpr std::int64_t N = V::size;

  static std::int64_t scratch(std::int64_t n, std::int64_t m) {
    return (Tokens<T>::kMost + 2 * Tokens<T>::depth(n, Tokens<T>::kLeaf)) * m * N;
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
    if constexpr (V::quads > 0) {
      if (m >= 4) {
        Quads<T, kGrad>::add(z, begin, end, v, a, c, e, scratch);
        return;
      }
    }
    const std::int64_t step = Tokens<T>::at_once(m);
    for (std::int64_t first = begin; first < end; first += step) {
      const std::int64_t count = std::min(step, end - first);
      z.load(first, count, scratch);
      add_loaded<kGrad>(scratch, count, m, v, a, c, e);
    }
  }

  // The same for loaded tokens [count, m, lanes].
  template <bool kGrad>
  static void add_loaded(const T* z, std::int64_t count, std::int64_t m, const T* v, const T* a, T* c, T* e) {
    std::int64_t i = 0;
    for (; i + 4 <= count; i += 4) add_tokens<4, kGrad>(z + i * m * N, m, v, a, c, e);
    if (count - i >= 2) {
      add_tokens<2, kGrad>(z + i * m * N, m, v, a, c, e);
      i += 2;
    }
    if (i < count) add_tokens<1, kGrad>(z + i * m * N, m, v, a, c, e);
  }

  // The same for I tokens z [I, m, lanes]. Two sums use each element. load_once stops GCC from loading it
  // twice: 0.131 ms against 0.146 ms (1024 sequences, m = 11, n = 50, AVX2).
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

// G [m, m, lanes], both triangles.
template <class T>
struct Gram {
  using V = Vec<T>;
  using L = Tile<T>;
  static constexpr std::int64_t N = V::size;
  static constexpr std::int64_t kLeaf = 512;

  // Tokens transposed at a time, 8 to 64: they and their sums fit a 32 KiB cache.
  static std::int64_t at_once(std::int64_t m) {
    const std::int64_t fit = (20 << 10) / (m * N * static_cast<std::int64_t>(sizeof(T)));
    return fit < 8 ? 8 : (fit > 64 ? 64 : fit);
  }
  static std::int64_t scratch(std::int64_t n, std::int64_t m) {
    const std::int64_t levels = Tokens<T>::depth(n, kLeaf);
    return std::max((at_once(m) + levels * m) * m * N, levels * m * m * N + QuadGram<T>::scratch(n, m));
  }

  static void of_tokens(const Tokens<T>& z, T* G, T* scratch) {
    if (z.n == 0) L::zero(G, z.m * z.m);
    sum_tokens(z, 0, z.n, G, scratch);
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
  // The lower triangle of G, over tokens begin ... end - 1.
  static void sum_tokens(const Tokens<T>& z, std::int64_t begin, std::int64_t end, T* G, T* scratch) {
    const std::int64_t m = z.m;
    if (end - begin > kLeaf) {
      const std::int64_t middle = Tokens<T>::middle(begin, end);
      sum_tokens(z, begin, middle, G, scratch);
      sum_tokens(z, middle, end, scratch, scratch + m * m * N);
      for (std::int64_t i = 0; i < m; ++i) L::add(G + i * m * N, scratch + i * m * N, i + 1);
      return;
    }
    if constexpr (QuadGram<T>::kServes) {
      if (QuadGram<T>::serves(end - begin, m)) {
        QuadGram<T>::sum_tokens(z, begin, end, G, scratch);
        return;
      }
    }
    // As few steps as possible, of nearly equal size: each loads and stores the sums.
    const std::int64_t steps = (end - begin + at_once(m) - 1) / at_once(m);
    for (std::int64_t left = steps, first = begin; left > 0; --left) {
      const std::int64_t count = (end - first + left - 1) / left;
      z.load(first, count, scratch);
      product(m, m, count, Across<T>{scratch, m}, Across<T>{scratch, m},
              ToAcross<T>{G, m, T(1), left == steps ? nullptr : G}, true);
      first += count;
    }
  }

  static void mirror(T* G, std::int64_t m) {
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < i; ++j) L::put(G, j * m + i, L::at(G, i * m + j));
    }
  }
};
