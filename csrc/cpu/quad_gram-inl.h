// Gram matrices of narrow tokens without transposing them: a vector holds a quad of columns of each of a few
// sequences, as in quads-inl.h. Element i of a token is spread over four lanes and multiplies the quads of
// the token up to its own. The lower triangle of G, in quads of a row, takes 21 registers at m = 11: 84
// multiply-adds, of which 66 are needed. The sums are transposed at the end, so that few tokens run faster
// with sequences in lanes (context-inl.h): prompt_loss of 4 trials takes 0.83 times as long with quads at n =
// 50, but 1.07 times as long at n = 20 (Zen 5, m = 11).

template <class T>
struct QuadGram {
  using V = Vec<T>;
  using L = Tile<T>;
  using Groups = QuadGroups<T>;
  static constexpr std::int64_t N = V::size;
  static constexpr int kWidest = 12;
  static constexpr std::int64_t kFewestTokens = 32;

  static constexpr bool kServes = V::quads > 0 && V::registers >= 32;  // the sums fit the registers
  static bool serves(std::int64_t n, std::int64_t m) {
    return kServes && n >= kFewestTokens && m >= 4 && m <= kWidest;
  }
  static std::int64_t scratch(std::int64_t n, std::int64_t m) { return serves(n, m) ? m * m * N : 0; }

  // The lower triangle of G [m, m, lanes] over tokens begin ... end - 1; the rest is undefined.
  template <int kM = kWidest>
  static void sum_tokens(const Tokens<T>& z, std::int64_t begin, std::int64_t end, T* G, T* numbers) {
    if constexpr (kM > 4) {
      if (z.m < kM) return sum_tokens<kM - 1>(z, begin, end, G, numbers);
    }
    for (int group = 0; group < Groups::kGroups; ++group) {
      add_group<kM>(Groups::rows_of(z, begin, end, group), numbers + group * kM * kM);
    }
    const T* rows[N];
    for (int l = 0; l < N; ++l) rows[l] = numbers + l * kM * kM;
    L::load(rows, 0, kM * kM, G);
  }

 private:
  template <int kM>
  static constexpr int quads = (kM + 3) / 4;
  template <int kM>
  static constexpr int column(int quad) {
    return 4 * quad < kM - 4 ? 4 * quad : kM - 4;
  }

  // numbers [lanes, m, m] of the sequences of a group, which are four lanes apart.
  template <int kM>
  static void add_group(const typename Groups::Rows& z, T* numbers) {
    constexpr int Q = quads<kM>, kRows = V::quads, kLine = 64 / static_cast<int>(sizeof(T));
    const T *rows[kRows], *ahead[kRows];
    FASTLIN_UNROLL
    for (int k = 0; k < kRows; ++k) rows[k] = z.first[k], ahead[k] = z.ahead[k];
    V sum[kM][Q];
    FASTLIN_UNROLL
    for (int i = 0; i < kM; ++i) {
      FASTLIN_UNROLL
      for (int j = 0; j < Q; ++j) sum[i][j] = V::zero();
    }
    for (std::int64_t token = 0; token < z.count; ++token) {
      V zs[Q];
      FASTLIN_UNROLL
      for (int j = 0; j < Q; ++j) zs[j] = V::load_quads(rows, column<kM>(j));
      FASTLIN_UNROLL
      for (int i = 0; i < kM; ++i) {
        const V zi = spread(zs[i / 4], i - column<kM>(i / 4));
        FASTLIN_UNROLL
        for (int j = 0; j < Q; ++j) {
          if (4 * j <= i) sum[i][j] = fma(zi, zs[j], sum[i][j]);
        }
      }
      FASTLIN_UNROLL
      for (int k = 0; k < kRows; ++k) {
        for (int line = 0; line < kM; line += kLine) __builtin_prefetch(ahead[k] + line, 0, 2);
        rows[k] += z.row, ahead[k] += z.row;
      }
    }
    FASTLIN_UNROLL
    for (int i = 0; i < kM; ++i) {
      FASTLIN_UNROLL
      for (int j = 0; j < Q; ++j) {
        if (4 * j <= i) put(sum[i][j], numbers + i * kM + column<kM>(j), kM * kM);
      }
    }
  }

  // Stores the quads of a vector, four matrices apart.
  FASTLIN_INLINE static void put(V value, T* to, std::int64_t matrix) {
    T lanes[N];
    value.store(lanes);
    FASTLIN_UNROLL
    for (int k = 0; k < V::quads; ++k) std::copy_n(lanes + 4 * k, 4, to + 4 * k * matrix);
  }

  FASTLIN_INLINE static V spread(V a, int j) {
    switch (j) {
      case 0:
        return V::template spread<0>(a);
      case 1:
        return V::template spread<1>(a);
      case 2:
        return V::template spread<2>(a);
      default:
        return V::template spread<3>(a);
    }
  }
};
