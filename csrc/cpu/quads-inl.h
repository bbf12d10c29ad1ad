// Streams tokens without transposing them. A vector holds a quad, four consecutive columns, of each sequence
// of a group. A token is Q = ceil(m / 4) vectors; the last one ends at column m and overlaps the one before.
// A sum over columns ends with two shuffles inside quads, which leave it in all four lanes, where it
// multiplies z. Group i of a tile has its sequences i, i + 4, i + 8, ...; lanes_are_columns-inl.h forms other
// groups.
//
// Narrow tokens: c and e stay in registers for all tokens. At m = 11 on Zen 4 a token of 16 sequences takes
// 48 multiply-adds, 16 additions, 16 shuffles and 36 insertions, 52 cycles of four ports. Measured: 62 cycles
// in L2 and 66 from L3; transposing took 90 and 128. Wide tokens are read twice from L1, a few at a time:
// once for the sums z . v and z . a, once for c and e, in parts that fit the registers. Speed relative to
// transposing, with reads from memory: 1.4 at m = 11, 1.5 at 36, 1.6 at 65, 1.3 at 257.

template <class T>
struct QuadGroups {
  using V = Vec<T>;
  using L = Tile<T>;
  static constexpr std::int64_t N = V::size;
  static constexpr int kGroups = 4, kRows = V::quads;  // sequences of a group

  // The tokens of a group's sequences, and the tokens to prefetch.
  struct Rows {
    const T *first[kRows], *ahead[kRows];
    std::int64_t row, count, m;

    // Token i of sequence k; from `count` on, one of the tokens to prefetch.
    const T* token(int k, std::int64_t i) const {
      return i < count ? first[k] + i * row : ahead[k] + (i - count) * row;
    }
  };

  // The rows of sequences group, group + 4, ... of a tile.
  static Rows rows_of(const Tokens<T>& z, std::int64_t begin, std::int64_t end, int group) {
    Rows rows{{}, {}, z.row, end - begin, z.m};
    const bool last = group + 1 == kGroups, moves_on = last && end == z.n && z.next != nullptr;
    for (int k = 0; k < kRows; ++k) {
      rows.first[k] = z.rows[group + 4 * k] + begin * z.row;
      const T* const* next = moves_on ? z.next : z.rows + (last ? 0 : group + 1);
      rows.ahead[k] = next[4 * k] + (moves_on ? 0 : last ? end : begin) * z.row;
    }
    return rows;
  }

  static std::int64_t quads(std::int64_t m) { return (m + 3) / 4; }
  static std::int64_t column(std::int64_t quad, std::int64_t m) { return std::min(4 * quad, m - 4); }

  // groups [groups, Q] of a tile [m]. The columns that a quad shares with the one before are zero in it, so
  // that sums count them once.
  static void from_tile(const T* tile, std::int64_t m, T* groups) {
    const std::int64_t Q = quads(m);
    for (std::int64_t quad = 0; quad < Q; ++quad) {
      V r[4];
      FASTLIN_UNROLL
      for (int j = 0; j < 4; ++j) {
        const std::int64_t i = column(quad, m) + j;
        r[j] = i < 4 * quad ? V::zero() : L::at(tile, i);
      }
      V::transpose_quads(r);
      FASTLIN_UNROLL
      for (int group = 0; group < kGroups; ++group) L::put(groups, group * Q + quad, r[group]);
    }
  }

  // tile += groups.
  static void add_to_tile(const T* groups, std::int64_t m, T* tile) {
    const std::int64_t Q = quads(m);
    for (std::int64_t quad = 0; quad < Q; ++quad) {
      V r[4];
      FASTLIN_UNROLL
      for (int group = 0; group < kGroups; ++group) r[group] = L::at(groups, group * Q + quad);
      V::transpose_quads(r);
      FASTLIN_UNROLL
      for (int j = 0; j < 4; ++j) {
        const std::int64_t i = column(quad, m) + j;
        if (i >= 4 * quad) L::put(tile, i, L::at(tile, i) + r[j]);
      }
    }
  }
};

template <class T, bool kGrad>
class Quads {
  using V = Vec<T>;
  using L = Tile<T>;
  using Groups = QuadGroups<T>;
  using Rows = typename Groups::Rows;
  static constexpr std::int64_t N = V::size;
  static constexpr int kRows = V::quads, kLine = 64 / static_cast<int>(sizeof(T));

 public:
  // Adds the sums over tokens begin ... end - 1 to c [m, lanes] and e [m, lanes]. m >= 4, scratch [8 m].
  static void add(const Tokens<T>& z, std::int64_t begin, std::int64_t end, const T* v, const T* a, T* c,
                  T* e, T* scratch) {
    const std::int64_t m = z.m, Q = Groups::quads(m), size = Groups::kGroups * Q * N;
    T *vs = scratch, *as = vs + size, *cs = as + size, *es = cs + size;
    Groups::from_tile(v, m, vs);
    if (kGrad) Groups::from_tile(a, m, as);
    for (int group = 0; group < Groups::kGroups; ++group) {
      const std::int64_t first = group * Q * N;
      const Rows rows = Groups::rows_of(z, begin, end, group);
      if (Q <= kMost) {
        stream_narrow<kMost>(rows, vs + first, as + first, cs + first, es + first);
      } else {
        stream_wide(rows, vs + first, as + first, cs + first, es + first);
      }
    }
    Groups::add_to_tile(cs, m, c);
    if (kGrad) Groups::add_to_tile(es, m, e);
  }

  // c [Q] and e [Q] of a group's tokens, from v [Q] and a [Q]. c and e stay in registers. With enough
  // registers, z . v and z . a of the next token are computed while this one is added to c and e, so that
  // fewer operations wait: 4.3 ns against 4.7 ns for a token of 4 sequences (Zen 4, m = 11).
  template <int Q>
  static void stream(const Rows& z, const T* v, const T* a, T* c, T* e) {
    constexpr bool kAhead = 7 * Q + 4 <= V::registers;
    const T *rows[kRows], *ahead[kRows];
    FASTLIN_UNROLL
    for (int k = 0; k < kRows; ++k) rows[k] = z.first[k], ahead[k] = z.ahead[k];
    V vs[Q], as[Q], cs[Q], es[Q];
    FASTLIN_UNROLL
    for (int j = 0; j < Q; ++j) {
      vs[j] = L::at(v, j), cs[j] = V::zero();
      if (kGrad) as[j] = L::at(a, j), es[j] = V::zero();
    }
    V zs[Q], with_v, with_a;
    std::int64_t i = 0;
    if (kAhead && z.count >= 2) {
      V next[Q], after[Q], with_next_v, with_next_a;
      read<Q>(z, rows, ahead, zs);
      multiply<Q>(zs, vs, as, with_v, with_a);
      read<Q>(z, rows, ahead, next);
      for (i = 2; i < z.count; ++i) {
        read<Q>(z, rows, ahead, after);
        multiply<Q>(next, vs, as, with_next_v, with_next_a);
        add<Q>(zs, with_v, with_a, cs, es);
        FASTLIN_UNROLL
        for (int j = 0; j < Q; ++j) zs[j] = next[j], next[j] = after[j];
        with_v = with_next_v, with_a = with_next_a;
      }
      add<Q>(zs, with_v, with_a, cs, es);
      multiply<Q>(next, vs, as, with_v, with_a);
      add<Q>(next, with_v, with_a, cs, es);
    }
    for (; i < z.count; ++i) {
      read<Q>(z, rows, ahead, zs);
      multiply<Q>(zs, vs, as, with_v, with_a);
      add<Q>(zs, with_v, with_a, cs, es);
    }
    FASTLIN_UNROLL
    for (int j = 0; j < Q; ++j) {
      L::put(c, j, cs[j]);
      if (kGrad) L::put(e, j, es[j]);
    }
  }

 private:
  // The most vectors of a narrow token: c and e nearly fit the registers; v and a come from memory, and z may
  // spill.
  static constexpr int kMost = V::registers < 32 ? 7 : 14;

  // Dispatches to the Q of these tokens, from the widest down.
  template <int Q>
  static void stream_narrow(const Rows& z, const T* v, const T* a, T* c, T* e) {
    if (Groups::quads(z.m) == Q) {
      stream<Q>(z, v, a, c, e);
    } else if constexpr (Q > 1) {
      stream_narrow<Q - 1>(z, v, a, c, e);
    }
  }

  // Reads a token and advances to the next one. Prefetches the next group, which the hardware does not
  // predict: 20 ns against 25 ns for a token of 16 sequences.
  template <int Q>
  FASTLIN_INLINE static void read(const Rows& z, const T* (&rows)[kRows], const T* (&ahead)[kRows],
                                  V (&zs)[Q]) {
    FASTLIN_UNROLL
    for (int j = 0; j < Q; ++j) zs[j] = V::load_quads(rows, j + 1 < Q ? 4 * j : z.m - 4);
    FASTLIN_UNROLL
    for (int k = 0; k < kRows; ++k) {
      for (int line = 0; line < 4 * Q; line += kLine) __builtin_prefetch(ahead[k] + line, 0, 2);
      rows[k] += z.row, ahead[k] += z.row;
    }
  }

  // z v and z a; `add` sums them over quads.
  template <int Q>
  FASTLIN_INLINE static void multiply(const V (&zs)[Q], const V (&vs)[Q], const V (&as)[Q], V& with_v,
                                      V& with_a) {
    with_v = zs[0] * vs[0];
    with_a = kGrad ? zs[0] * as[0] : V::zero();
    FASTLIN_UNROLL
    for (int j = 1; j < Q; ++j) {
      with_v = fma(zs[j], vs[j], with_v);
      if (kGrad) with_a = fma(zs[j], as[j], with_a);
    }
  }

  // c += z (z . v), e += z (z . a).
  template <int Q>
  FASTLIN_INLINE static void add(const V (&zs)[Q], V with_v, V with_a, V (&cs)[Q], V (&es)[Q]) {
    with_v = V::sum_quads(with_v);
    if (kGrad) with_a = V::sum_quads(with_a);
    FASTLIN_UNROLL
    for (int j = 0; j < Q; ++j) {
      cs[j] = fma(zs[j], with_v, cs[j]);
      if (kGrad) es[j] = fma(zs[j], with_a, es[j]);
    }
  }

  static constexpr int kPart = V::registers < 32 ? 4 : 8;  // vectors of c, and of e, in registers
  static constexpr int kTokens = 8;                        // tokens between the two reads
  static constexpr int kTogether = 4;                      // tokens that share a load of v and a

  static void stream_wide(const Rows& z, const T* v, const T* a, T* c, T* e) {
    const std::int64_t Q = Groups::quads(z.m);
    L::zero(c, Q);
    if (kGrad) L::zero(e, Q);
    T sums[2 * kTokens * N];  // [tokens, 2]
    // Prefetches up to 64 KiB ahead: the next group, unless tokens are many or wide.
    const std::int64_t fit = (64 << 10) / (kRows * z.m * static_cast<std::int64_t>(sizeof(T)));
    const std::int64_t distance = std::min(z.count, std::max<std::int64_t>(fit, 2 * kTokens));
    const T* rows[kRows];
    for (int k = 0; k < kRows; ++k) rows[k] = z.first[k];
    for (std::int64_t i = 0; i < z.count; i += kTokens) {
      const int count = static_cast<int>(std::min<std::int64_t>(kTokens, z.count - i));
      int token = 0;
      for (; token + kTogether <= count; token += kTogether) {
        make_sums<kTogether>(z, i + token, distance, v, a, sums + 2 * token * N);
      }
      for (; token < count; ++token) make_sums<1>(z, i + token, distance, v, a, sums + 2 * token * N);
      for (std::int64_t quad = 0; quad < Q; quad += kPart) {
        add_part<kPart>(rows, count, quad, std::min<std::int64_t>(kPart, Q - quad), z, sums, c, e);
      }
      for (int k = 0; k < kRows; ++k) rows[k] += kTokens * z.row;
    }
  }

  // sums [I, 2]: z . v and z . a of I tokens from `token` on. Prefetches the tokens at `distance`.
  template <int I>
  static void make_sums(const Rows& z, std::int64_t token, std::int64_t distance, const T* v, const T* a,
                        T* sums) {
    const std::int64_t row = z.row, last = z.m - 4;
    const T *rows[kRows], *ahead[kRows];
    FASTLIN_UNROLL
    for (int k = 0; k < kRows; ++k) {
      rows[k] = z.first[k] + token * row;
      ahead[k] = z.token(k, token + distance);
    }
    V with_v[I], with_a[I];
    FASTLIN_UNROLL
    for (int i = 0; i < I; ++i) with_v[i] = with_a[i] = V::zero();
    for (std::int64_t column = 0;; column += 4, v += N, a += N) {
      const V vj = V::load(v), aj = kGrad ? V::load(a) : V::zero();
      const std::int64_t from = std::min(column, last);
      if (column % kLine == 0) {
        FASTLIN_UNROLL
        for (int k = 0; k < kRows; ++k) {
          for (int i = 0; i < I; ++i) __builtin_prefetch(ahead[k] + i * row + column, 0, 2);
        }
      }
      FASTLIN_UNROLL
      for (int i = 0; i < I; ++i) {
        const V zj = V::load_quads(rows, i * row + from);
        with_v[i] = fma(zj, vj, with_v[i]);
        if (kGrad) with_a[i] = fma(zj, aj, with_a[i]);
      }
      if (from == last) break;
    }
    FASTLIN_UNROLL
    for (int i = 0; i < I; ++i) {
      L::put(sums, 2 * i, V::sum_quads(with_v[i]));
      if (kGrad) L::put(sums, 2 * i + 1, V::sum_quads(with_a[i]));
    }
  }

  // Adds to P vectors of c and e from `quad` on; dispatches to fewer for the last ones.
  template <int P>
  static void add_part(const T* const (&first)[kRows], int count, std::int64_t quad, std::int64_t quads,
                       const Rows& z, const T* sums, T* c, T* e) {
    if (quads < P) {
      if constexpr (P > 1) add_part<P - 1>(first, count, quad, quads, z, sums, c, e);
      return;
    }
    const std::int64_t row = z.row, from = 4 * quad, last = std::min(from + 4 * (P - 1), z.m - 4);
    const T* rows[kRows];
    FASTLIN_UNROLL
    for (int k = 0; k < kRows; ++k) rows[k] = first[k];
    V cs[P], es[P];
    FASTLIN_UNROLL
    for (int j = 0; j < P; ++j) {
      cs[j] = L::at(c, quad + j);
      if (kGrad) es[j] = L::at(e, quad + j);
    }
    for (int i = 0; i < count; ++i) {
      const V with_v = L::at(sums, 2 * i), with_a = kGrad ? L::at(sums, 2 * i + 1) : V::zero();
      FASTLIN_UNROLL
      for (int j = 0; j < P; ++j) {
        const V zj = V::load_quads(rows, j + 1 < P ? from + 4 * j : last);
        cs[j] = fma(zj, with_v, cs[j]);
        if (kGrad) es[j] = fma(zj, with_a, es[j]);
      }
      FASTLIN_UNROLL
      for (int k = 0; k < kRows; ++k) rows[k] += row;
    }
    FASTLIN_UNROLL
    for (int j = 0; j < P; ++j) {
      L::put(c, quad + j, cs[j]);
      if (kGrad) L::put(e, quad + j, es[j]);
    }
  }
};
