// One layer of one trial and one head: lanes are columns. Everything that a sequence has, its query, a, c and
// e, is Q vectors of fours of columns as in quads-inl.h, next to those of the other sequences of its group,
// so that nothing is transposed. The letters are those of attention-inl.h.
//   a = W' q: a row of W times its element of q, which is spread over the four lanes
//   c = P v + G v, e = G a: streamed (Quads)     yhat = scale a . c + rho q . h     g = scale r
//   dW = sum q (g c)', sum of g e, sum of r q: lanes of a column are added up at the end of a chunk or a run
//
// Without tokens, m = 11 on one thread of Zen 4, a sequence takes 18 ns for 25 with sequences in lanes, where
// queries, a, c and e of a tile go through transposes.

template <class T>
class Columns {
  using V = Vec<T>;
  using L = Tile<T>;
  using Groups = QuadGroups<T>;
  static constexpr std::int64_t N = V::size;
  static constexpr int kRows = V::quads;  // sequences of a group

 public:
  Columns(Arena& arena, const Plan<T>& plan, const Results<T>& out, const Chunk<T>& chunk)
      : plan(plan),
        P(plan.problem),
        out(out),
        at(plan.record),
        chunk(chunk),
        m(plan.problem.m),
        Q(Groups::quads(m)),
        gradients(out.dW || out.dv || out.dh || out.dp),
        factor(static_cast<T>(plan.problem.scale)) {
    if constexpr (kRows > 0) {
      if (plan.in_columns) take_room(arena);
    }
  }

  // Adds the sums of the chunk to records [runs, width] and block_dW [m, m]. Returns false when the call is
  // to stop.
  bool run(double* records, double* block_dW, Stop& stop, int thread) {
    if (!W_is_laid_out) {
      for (std::int64_t i = 0; i < m; ++i) lay_out(P.W + i * m, 4, W + i * 4 * Q);
      W_is_laid_out = true;
    }
    return run_width<(kWidestColumns + 3) / 4>(records, block_dW, stop, thread);
  }

 private:
  void take_room(Arena& arena) {
    const std::int64_t sequences = plan.tiles * N, most = sequences / kRows + std::min(P.K, sequences);
    first_of = arena.take<std::int64_t>(most + 1);
    W = arena.take<T>(m * 4 * Q);
    v = arena.take<T>(Q * N);
    base = arena.take<T>(Q * N);
    h = arena.take<T>(P.h != nullptr ? Q * N : 0);
    q = arena.take<T>(most * Q * N);
    a = arena.take<T>(most * Q * N);
    gc = arena.take<T>(most * Q * N);
    targets = arena.take<T>((sequences + kRows) * 4);
    c = arena.take<T>(Q * N);
    e = arena.take<T>(Q * N);
    sums = arena.take<T>((1 + 2 * Q) * N);
    token = arena.take<T>(Q * N);
    scratch = arena.take<T>(2 * Q * N * Tokens<T>::depth(P.n, Tokens<T>::kLeaf));
  }

  // Q quads, or fewer.
  template <int kQ>
  bool run_width(double* records, double* block_dW, Stop& stop, int thread) {
    if constexpr (kQ > 1) {
      if (Q < kQ) return run_width<kQ - 1>(records, block_dW, stop, thread);
    }
    take_targets();
    group_runs();
    std::int64_t group = 0;
    for (; group + 2 <= groups; group += 2) project<kQ, 2>(group);
    if (group < groups) project<kQ, 1>(group);
    group = 0;
    for (std::int64_t run = 0; run < chunk.runs; ++run) {
      if (stop.now(thread)) return false;
      load_parameters(chunk.run_task[run]);
      L::zero(sums, 1 + 2 * Q);
      for (; first_of[group] < chunk.run_end[run]; ++group) {
        if (group % 16 == 15 && stop.now(thread)) return false;
        if (at.e >= 0) {
          head<kQ, true>(group);
        } else {
          head<kQ, false>(group);
        }
      }
      add_to_record(records + run * at.width);
    }
    for (std::int64_t quad = 0; out.dW != nullptr && quad < Q; ++quad) add_dW<kQ>(quad, block_dW);
    return true;
  }

  // Columns of a row [m] by quads [Q, lanes], the same in every four lanes; those that a quad shares with the
  // one before are zero in it.
  void lay_out(const T* row, std::int64_t lanes, T* quads) const {
    for (std::int64_t quad = 0; quad < Q; ++quad) {
      for (std::int64_t l = 0; l < lanes; ++l) {
        const std::int64_t column = Groups::column(quad, m) + l % 4;
        quads[quad * lanes + l] = column < 4 * quad ? T(0) : row[column];
      }
    }
  }

  // Targets, or the gradients that come from above, four times each.
  void take_targets() {
    const T* given = P.has_targets() ? P.y : P.gy;
    if (given == nullptr) return;
    for (std::int64_t i = 0; i < chunk.count; ++i) {
      const T value = given[chunk.sequence[i]];
      for (int j = 0; j < 4; ++j) targets[4 * i + j] = value;
    }
    std::fill_n(targets + 4 * chunk.count, 4 * kRows, T(0));
  }

  // Sequences of a group are of one task; the last group of a run may lack some.
  void group_runs() {
    groups = 0;
    for (std::int64_t run = 0, begin = 0; run < chunk.runs; begin = chunk.run_end[run++]) {
      for (; begin < chunk.run_end[run]; begin += kRows) first_of[groups++] = begin;
    }
    first_of[groups] = chunk.count;
  }

  std::int64_t rows_of(std::int64_t group) const { return first_of[group + 1] - first_of[group]; }

  // A vector without the rows that have no sequence, which hold those of another group.
  static V keep(V value, std::int64_t rows) {
    T lanes[N];
    value.store(lanes);
    std::fill(lanes + 4 * rows, lanes + N, T(0));
    return V::load(lanes);
  }

  // q and a = W' q of some groups.
  template <int kQ, int kGroups>
  void project(std::int64_t group) {
    V as[kGroups][kQ];
    FASTLIN_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      take_query<kQ>(group + g);
      FASTLIN_UNROLL
      for (int j = 0; j < kQ; ++j) as[g][j] = V::zero();
    }
    const T *qs = q + group * kQ * N, *row = W;
    for (std::int64_t quad = 0; quad < kQ; ++quad, qs += N) {
      const std::int64_t used = 4 * quad - Groups::column(quad, m);
      if (used < 1) add_row<0, kQ, kGroups>(qs, row, as);
      if (used < 2) add_row<1, kQ, kGroups>(qs, row, as);
      if (used < 3) add_row<2, kQ, kGroups>(qs, row, as);
      add_row<3, kQ, kGroups>(qs, row, as);
    }
    FASTLIN_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      FASTLIN_UNROLL
      for (int j = 0; j < kQ; ++j) L::put(a, (group + g) * kQ + j, as[g][j]);
    }
  }

  template <int kQ>
  void take_query(std::int64_t group) {
    const T* rows[kRows];
    for (int k = 0; k < kRows; ++k) rows[k] = P.q + chunk.sequence[first_of[group] + k] * P.q_batch;
    const std::int64_t count = rows_of(group);
    FASTLIN_UNROLL
    for (int j = 0; j < kQ; ++j) {
      const V value = V::load_quads(rows, j + 1 < kQ ? 4 * j : m - 4);
      L::put(q, group * kQ + j, count < kRows ? keep(value, count) : value);
    }
  }

  // Adds element kJ of a quad of q times its row of W.
  template <int kJ, int kQ, int kGroups>
  FASTLIN_INLINE void add_row(const T* qs, const T*& row, V (&as)[kGroups][kQ]) const {
    V with[kGroups];
    FASTLIN_UNROLL
    for (int g = 0; g < kGroups; ++g) with[g] = V::template spread<kJ>(V::load(qs + g * kQ * N));
    FASTLIN_UNROLL
    for (int j = 0; j < kQ; ++j) {
      const V Wj = V::load_quad(row + 4 * j);
      FASTLIN_UNROLL
      for (int g = 0; g < kGroups; ++g) as[g][j] = fma(with[g], Wj, as[g][j]);
    }
    row += 4 * kQ;
  }

  // v, h and the prompt's part of c.
  void load_parameters(std::int64_t task) {
    const T* of_task = P.v_of(0, task);
    if (P.has_targets()) coefficient = plan.coefficient[task];
    lay_out(of_task, N, v);
    if (P.h != nullptr) lay_out(P.h + task * m, N, h);
    L::zero(base, Q);
    for (std::int64_t t = 0; P.p != nullptr && t < P.t; ++t) {
      const T* prompt = P.p + (task * P.t + t) * m;
      T with_v = 0;
      for (std::int64_t i = 0; i < m; ++i) with_v += prompt[i] * of_task[i];
      lay_out(prompt, N, token);
      L::add_scaled(V::set(with_v), token, Q, base);
    }
  }

  // The tokens of a group, and those that are read after them.
  typename QuadGroups<T>::Rows tokens_of(std::int64_t group, std::int64_t begin, std::int64_t end) const {
    typename QuadGroups<T>::Rows rows{{}, {}, P.x_row, end - begin, m};
    const T* const* here = chunk.x + first_of[group];
    // The next chunk's first ones stand behind the tiles of this one.
    const T* const* next = chunk.x + (group + 1 == groups ? chunk.tiles * N : first_of[group + 1]);
    for (int k = 0; k < kRows; ++k) {
      rows.first[k] = here[k] + begin * P.x_row;
      rows.ahead[k] = end == P.n ? next[k] : rows.first[k] + (end - begin) * P.x_row;
    }
    return rows;
  }

  // c and e of tokens begin ... end - 1.
  template <int kQ, bool kE>
  void stream(std::int64_t group, std::int64_t begin, std::int64_t end, T* to_c, T* to_e, T* free) {
    if (end - begin <= Tokens<T>::kLeaf) {
      Quads<T, kE>::template stream<kQ>(tokens_of(group, begin, end), v, a + group * kQ * N, to_c, to_e);
      return;
    }
    const std::int64_t middle = Tokens<T>::middle(begin, end);
    stream<kQ, kE>(group, begin, middle, to_c, to_e, free);
    stream<kQ, kE>(group, middle, end, free, free + kQ * N, free + 2 * kQ * N);
    L::add(to_c, free, kQ);
    if (kE) L::add(to_e, free + kQ * N, kQ);
  }

  // Predictions and errors of a group; what they add to the sums, and g c.
  template <int kQ, bool kE>
  void head(std::int64_t group) {
    stream<kQ, kE>(group, 0, P.n, c, e, scratch);
    const std::int64_t rows = rows_of(group);
    const T *qs = q + group * kQ * N, *as = a + group * kQ * N;
    const V scale = V::broadcast(&factor);
    V cs[kQ], es[kQ];
    FASTLIN_UNROLL
    for (int j = 0; j < kQ; ++j) {
      cs[j] = L::at(c, j) + L::at(base, j);
      if (kE) es[j] = L::at(e, j);
    }
    if (P.see_query) {
      const V with_v = dot<kQ>(qs, v), with_a = dot<kQ>(qs, as);
      FASTLIN_UNROLL
      for (int j = 0; j < kQ; ++j) {
        cs[j] = fma(L::at(qs, j), with_v, cs[j]);
        if (kE) es[j] = fma(L::at(qs, j), with_a, es[j]);
      }
    }
    if (rows < kRows) {
      for (int j = 0; j < kQ; ++j) {
        cs[j] = keep(cs[j], rows);
        if (kE) es[j] = keep(es[j], rows);
      }
    }
    V attended = L::at(as, 0) * cs[0];
    FASTLIN_UNROLL
    for (int j = 1; j < kQ; ++j) attended = fma(L::at(as, j), cs[j], attended);
    V yhat = scale * V::sum_quads(attended);
    if (P.h != nullptr) yhat = fma(V::set(static_cast<T>(P.last_skip)), dot<kQ>(qs, h), yhat);
    if (out.yhat != nullptr) scatter_yhat(group, yhat);
    const V residual = error(group, rows, yhat);
    if (!gradients) return;
    const V g = scale * residual;
    T *sum_e = sums + N, *sum_q = sums + (1 + kQ) * N, *scaled = gc + group * kQ * N;
    FASTLIN_UNROLL
    for (int j = 0; j < kQ; ++j) {
      L::put(scaled, j, g * cs[j]);
      if (kE) L::put(sum_e, j, fma(g, es[j], L::at(sum_e, j)));
      L::put(sum_q, j, fma(residual, L::at(qs, j), L::at(sum_q, j)));
    }
  }

  // x . y, in all lanes of a quad; one of them has zeros in the columns that two quads share.
  template <int kQ>
  FASTLIN_INLINE static V dot(const T* x, const T* y) {
    V sum = L::at(x, 0) * L::at(y, 0);
    FASTLIN_UNROLL
    for (int j = 1; j < kQ; ++j) sum = fma(L::at(x, j), L::at(y, j), sum);
    return V::sum_quads(sum);
  }

  // r = dloss/dyhat of the rows; squared errors go to the sums.
  FASTLIN_INLINE V error(std::int64_t group, std::int64_t rows, V yhat) {
    if (!P.has_targets() && P.gy == nullptr) return V::zero();
    V target = V::load(targets + 4 * first_of[group]), share = V::broadcast(&coefficient);
    if (rows < kRows) {
      yhat = keep(yhat, rows);
      target = keep(target, rows);
      share = keep(share, rows);
    }
    if (!P.has_targets()) return target;
    const V difference = yhat - target;
    L::put(sums, 0, fma(difference, difference, L::at(sums, 0)));
    return (difference + difference) * share;
  }

  void scatter_yhat(std::int64_t group, V yhat) {
    T lanes[N];
    yhat.store(lanes);
    for (std::int64_t k = 0; k < rows_of(group); ++k) {
      out.yhat[chunk.sequence[first_of[group] + k]] = lanes[4 * k];
    }
  }

  // to [m] += the sums over the rows of a group of vectors [Q, lanes].
  void add_rows(const T* vectors, double* to) const {
    for (std::int64_t quad = 0; quad < Q; ++quad) {
      double sum[4] = {};
      for (int k = 0; k < kRows; ++k) {
        for (int j = 0; j < 4; ++j) sum[j] += static_cast<double>(vectors[quad * N + 4 * k + j]);
      }
      const std::int64_t column = Groups::column(quad, m);
      for (std::int64_t j = 4 * quad - column; j < 4; ++j) to[column + j] += sum[j];
    }
  }

  void add_to_record(double* record) const {
    for (int k = 0; at.squares >= 0 && k < kRows; ++k) {
      record[at.squares] += static_cast<double>(sums[4 * k]);
    }
    if (at.e >= 0) add_rows(sums + N, record + at.e);
    if (at.q >= 0) add_rows(sums + (1 + Q) * N, record + at.q);
  }

  // The rows of dW that a quad of q has.
  template <int kQ>
  void add_dW(std::int64_t quad, double* block_dW) const {
    V sum[4][kQ];
    FASTLIN_UNROLL
    for (int i = 0; i < 4; ++i) {
      FASTLIN_UNROLL
      for (int j = 0; j < kQ; ++j) sum[i][j] = V::zero();
    }
    const T *qs = q + quad * N, *scaled = gc;
    for (std::int64_t group = 0; group < groups; ++group, qs += kQ * N, scaled += kQ * N) {
      const V here = V::load(qs);
      const V rows[4] = {V::template spread<0>(here), V::template spread<1>(here),
                         V::template spread<2>(here), V::template spread<3>(here)};
      FASTLIN_UNROLL
      for (int j = 0; j < kQ; ++j) {
        const V of_c = L::at(scaled, j);
        FASTLIN_UNROLL
        for (int i = 0; i < 4; ++i) sum[i][j] = fma(rows[i], of_c, sum[i][j]);
      }
    }
    const std::int64_t column = Groups::column(quad, m);
    FASTLIN_UNROLL
    for (int i = 0; i < 4; ++i) {
      T vectors[kQ * N];
      FASTLIN_UNROLL
      for (int j = 0; j < kQ; ++j) L::put(vectors, j, sum[i][j]);
      if (column + i >= 4 * quad) add_rows(vectors, block_dW + (column + i) * m);
    }
  }

  const Plan<T>& plan;
  const Problem<T>& P;
  const Results<T>& out;
  const Record& at;
  const Chunk<T>& chunk;
  const std::int64_t m, Q;
  const bool gradients;
  const T factor;        // scale
  T coefficient = T(0);  // of the squared errors of the run's task
  bool W_is_laid_out = false;
  std::int64_t groups = 0;                      // of the chunk
  std::int64_t* first_of = nullptr;             // [groups + 1] the position of each one's first sequence
  T* W = nullptr;                               // [m, Q, 4]
  T *v = nullptr, *base = nullptr;              // [Q]; the prompt's part of c
  T *h = nullptr, *token = nullptr;             // [Q]
  T *q = nullptr, *a = nullptr, *gc = nullptr;  // [groups, Q]
  T* targets = nullptr;                         // [sequences, 4]
  T *c = nullptr, *e = nullptr;                 // [Q]
  T* sums = nullptr;                            // [1 + 2 Q]: squared errors, g e, r q
  T* scratch = nullptr;
};
