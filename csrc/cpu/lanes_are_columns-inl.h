// One layer of one trial and one head: lanes are columns. The query, a, c and e of a sequence are Q quads of
// columns, as in quads-inl.h. A vector holds the same quad of each sequence of a group, so that nothing is
// transposed. The letters are those of lanes_are_sequences-inl.h.
//   a = W' q: each row of W times its element of q, spread over the four lanes of a quad
//   c = P v + G v, e = G a: streamed (Quads)     yhat = scale a . c + rho q . h     g = scale r
//   dW = sum q (g c)': the rows of a vector are added up at the end of a chunk
//   lanes_are_columns_by_task-inl.h adds up g e, g a, r q and the squared error of each sequence by task
//
// Sequences run in memory order, not in the order of tasks: each row of a group has the v and the prompt of
// its own task. In the order of tasks the next sequence, of 2 kB, may be anywhere: the same work takes 1.1
// to 1.2 times as long from L3 and 1.3 to 2.5 times from memory.
//
// Without tokens, at m = 11 on one thread of Zen 4, a sequence takes 17 ns, against 25 ns with sequences in
// lanes, which must transpose the queries, a, c and e of a tile.

template <class T>
class LanesAreColumns {
  using V = Vec<T>;
  using L = Tile<T>;
  using Groups = QuadGroups<T>;
  static constexpr std::int64_t N = V::size;

  static constexpr int kRows = V::quads;  // sequences of a group

 public:
  LanesAreColumns(Arena& arena, const Plan<T>& plan, const Results<T>& out)
      : plan(plan),
        P(plan.problem),
        out(out),
        at(plan.record),
        m(plan.problem.m),
        Q(Groups::quads(m)),
        gradients(out.dW || out.dv || out.dh || out.dp),
        parameters(arena, plan) {
    const std::int64_t most = plan.tiles * N / kRows;
    W = arena.take<T>(m * 4 * Q);
    q = arena.take<T>(most * Q * N);
    a = arena.take<T>(most * Q * N);
    c = arena.take<T>(most * Q * N);
    sums = arena.take<T>(kAtOnce * plan.quads_of_sums * N);
    targets = arena.take<T>((most + 1) * N);
    scratch = arena.take<T>(2 * Q * N * Tokens<T>::depth(P.n, Tokens<T>::kLeaf));
  }

  // Runs sequences begin ... end - 1. Adds dW to block_dW [m, m]. Calls by_task.group<Q>(first, rows, sums)
  // with the sums [quads_of_sums, N] of each group, and by_task.end_chunk() after each chunk. Returns false
  // if the call must stop.
  template <class S>
  bool run(std::int64_t begin, std::int64_t end, double* block_dW, Stop& stop, int thread, S& by_task) {
    const std::int64_t step = plan.tiles * N;
    for (first = begin; first < end; first += step) {
      count = std::min(step, end - first);
      groups = (count + kRows - 1) / kRows;
      if (!chunk<(kWidestColumns + 3) / 4>(block_dW, stop, thread, by_task)) return false;
    }
    return true;
  }

 private:
  static constexpr std::int64_t kAtOnce =
      ColumnParameters<T>::kAtOnce;  // groups between their tokens and their sums

  // Dispatches to kQ == Q, from the widest down.
  template <int kQ, class S>
  bool chunk(double* block_dW, Stop& stop, int thread, S& by_task) {
    if constexpr (kQ > 1) {
      if (Q < kQ) return chunk<kQ - 1>(block_dW, stop, thread, by_task);
    }
    for (std::int64_t i = 0; !W_is_laid_out && i < m; ++i) {
      parameters.template lay_out<kQ>(P.W + i * m, W + i * 4 * kQ);
    }
    W_is_laid_out = true;
    load_targets();
    std::int64_t group = 0;
    for (; group + 2 <= groups; group += 2) project<kQ, 2>(group);
    if (group < groups) project<kQ, 1>(group);
    if (!(at.e >= 0 ? pass<kQ, true>(stop, thread, by_task) : pass<kQ, false>(stop, thread, by_task))) {
      return false;
    }
    by_task.end_chunk();
    for (std::int64_t quad = 0; out.dW != nullptr && quad < Q; ++quad) add_dW<kQ>(quad, block_dW);
    return !stop.requested(thread);
  }

  // Software pipeline: the tokens of a group, the errors of the group before, the sums of the one before
  // that. No step waits for what was just stored: besides its tokens a sequence takes 17 ns, and 20 ns with
  // one group at a time. All tokens of a chunk before all errors would take 15 ns, but would not overlap with
  // reads from memory: 1.07 times as long in all with two tasks and 1.25 times with 10,000, n = 20.
  template <int kQ, bool kE, class S>
  bool pass(Stop& stop, int thread, S& by_task) {
    // Polls the interrupt about every 100,000 tokens.
    const std::int64_t poll_interval = std::clamp<std::int64_t>(100'000 / (kRows * (P.n + 1)), 1, 16);
    const auto errors = [this](std::int64_t group) {
      if (rows_of(group) == kRows) {
        run_head<kQ, kE, true>(group);
      } else {
        run_head<kQ, kE, false>(group);
      }
    };
    const auto add_sums = [&](std::int64_t group) {
      by_task.template group<kQ>(first + group * kRows, rows_of(group), sums_of(group));
    };
    for (std::int64_t group = 0; group < groups; ++group) {
      if (group % poll_interval == 0 && stop.requested(thread)) return false;
      parameters.template load_group<kQ>(group, [&](int row) { return task_of(group, row); });
      context<kQ, kE>(group);
      if (group > 0) errors(group - 1);
      if (group > 1) add_sums(group - 2);
    }
    errors(groups - 1);
    if (groups > 1) add_sums(groups - 2);
    add_sums(groups - 1);
    return true;
  }

  T* sums_of(std::int64_t group) const { return sums + group % kAtOnce * plan.quads_of_sums * N; }

  // Targets, or gradients of the predictions, four times each: one for each lane of a quad.
  void load_targets() {
    const T* values = P.has_targets() ? P.y : P.gy;
    if (values == nullptr) return;
    for (std::int64_t i = 0; i < count; ++i) {
      const T value = values[first + i];
      for (int j = 0; j < 4; ++j) targets[4 * i + j] = value;
    }
    std::fill_n(targets + 4 * count, 4 * kRows, T(0));
  }

  std::int64_t rows_of(std::int64_t group) const {
    return std::min<std::int64_t>(kRows, count - group * kRows);
  }
  // The sequence of a row; a row without one repeats the last sequence of the chunk.
  std::int64_t sequence(std::int64_t group, int row) const {
    return first + std::min(group * kRows + row, count - 1);
  }
  std::int64_t task_of(std::int64_t group, int row) const {
    return P.task == nullptr ? 0 : P.task[sequence(group, row)];
  }

  // Zeroes the rows that have no sequence.
  static V keep_rows(V value, std::int64_t rows) {
    T lanes[N];
    value.store(lanes);
    std::fill(lanes + 4 * rows, lanes + N, T(0));
    return V::load(lanes);
  }

  // Loads q and computes a = W' q of kGroups groups.
  template <int kQ, int kGroups>
  void project(std::int64_t group) {
    V as[kGroups][kQ];
    FASTLIN_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      load_query<kQ>(group + g);
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
  void load_query(std::int64_t group) {
    const T* rows[kRows];
    for (int k = 0; k < kRows; ++k) rows[k] = P.q + sequence(group, k) * P.q_batch;
    const std::int64_t count = rows_of(group);
    FASTLIN_UNROLL
    for (int j = 0; j < kQ; ++j) {
      const V value = V::load_quads(rows, j + 1 < kQ ? 4 * j : m - 4);
      L::put(q, group * kQ + j, count < kRows ? keep_rows(value, count) : value);
    }
  }

  // Adds element kJ of a quad of q times the next row of W.
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

  // The tokens of a group, and the tokens to prefetch.
  typename Groups::Rows tokens_of(std::int64_t group, std::int64_t begin, std::int64_t end) const {
    typename Groups::Rows rows{{}, {}, P.x_row, end - begin, m};
    for (int k = 0; k < kRows; ++k) {
      const std::int64_t next = std::min(first + (group + 1) * kRows + k, P.B - 1);
      rows.first[k] = P.x + sequence(group, k) * P.x_batch + begin * P.x_row;
      rows.ahead[k] = end == P.n ? P.x + next * P.x_batch : rows.first[k] + (end - begin) * P.x_row;
    }
    return rows;
  }

  // c and e of a group; e goes where its sums will be.
  template <int kQ, bool kE>
  void context(std::int64_t group) {
    T *to_c = c + group * kQ * N, *to_e = sums_of(group) + N;
    if (P.n > 0) {
      stream<kQ, kE>(group, 0, P.n, to_c, to_e, scratch);
    } else {  // without tokens there is no address
      L::zero(to_c, kQ);
      if (kE) L::zero(to_e, kQ);
    }
  }

  // The same for tokens begin ... end - 1.
  template <int kQ, bool kE>
  void stream(std::int64_t group, std::int64_t begin, std::int64_t end, T* to_c, T* to_e, T* free) {
    if (end - begin <= Tokens<T>::kLeaf) {
      Quads<T, kE>::template stream<kQ>(tokens_of(group, begin, end), parameters.v(group), a + group * kQ * N,
                                        to_c, to_e);
      return;
    }
    const std::int64_t middle = Tokens<T>::middle(begin, end);
    stream<kQ, kE>(group, begin, middle, to_c, to_e, free);
    stream<kQ, kE>(group, middle, end, free, free + kQ * N, free + 2 * kQ * N);
    L::add(to_c, free, kQ);
    if (kE) L::add(to_e, free + kQ * N, kQ);
  }

  // Predictions and errors of a group, g c, and the sums of its rows; those of e overwrite e. A group that is
  // not whole has rows without a sequence.
  template <int kQ, bool kE, bool kWhole>
  void run_head(std::int64_t group) {
    const T *qs = q + group * kQ * N, *as = a + group * kQ * N;
    const T *v = parameters.v(group), *base = parameters.base(group);
    T *to_c = c + group * kQ * N, *to = sums_of(group) + N;
    const Head<T> head(P, out);
    V cs[kQ], es[kQ];
    FASTLIN_UNROLL
    for (int j = 0; j < kQ; ++j) {
      cs[j] = L::at(to_c, j) + L::at(base, j);
      if (kE) es[j] = L::at(to, j);
    }
    if (P.see_query) {
      const V with_v = dot<kQ>(qs, v), with_a = dot<kQ>(qs, as);
      FASTLIN_UNROLL
      for (int j = 0; j < kQ; ++j) {
        cs[j] = fma(L::at(qs, j), with_v, cs[j]);
        if (kE) es[j] = fma(L::at(qs, j), with_a, es[j]);
      }
    }
    if (!kWhole) {
      FASTLIN_UNROLL
      for (int j = 0; j < kQ; ++j) {
        cs[j] = keep_rows(cs[j], rows_of(group));
        if (kE) es[j] = keep_rows(es[j], rows_of(group));
      }
    }
    V attended = L::at(as, 0) * cs[0];
    FASTLIN_UNROLL
    for (int j = 1; j < kQ; ++j) attended = fma(L::at(as, j), cs[j], attended);
    V squares = V::zero();
    const V residual = head.error(V::sum_quads(attended), RowsOf<kQ, kWhole>{*this, group}, squares);
    L::put(sums_of(group), 0, kWhole ? squares : keep_rows(squares, rows_of(group)));
    if (!gradients) return;
    const V g = head.scale * residual;
    FASTLIN_UNROLL
    for (int j = 0; j < kQ; ++j) L::put(to_c, j, g * cs[j]);
    if (kE) {
      FASTLIN_UNROLL
      for (int j = 0; j < kQ; ++j, to += N) (g * es[j]).store(to);
    }
    if (at.q >= 0) {
      FASTLIN_UNROLL
      for (int j = 0; j < kQ; ++j, to += N) (residual * L::at(qs, j)).store(to);
    }
    if (at.a >= 0) {
      FASTLIN_UNROLL
      for (int j = 0; j < kQ; ++j, to += N) (g * L::at(as, j)).store(to);
    }
  }

  // x . y in all lanes of a quad; x or y has zeros in the columns that two quads share.
  template <int kQ>
  FASTLIN_INLINE static V dot(const T* x, const T* y) {
    V sum = L::at(x, 0) * L::at(y, 0);
    FASTLIN_UNROLL
    for (int j = 1; j < kQ; ++j) sum = fma(L::at(x, j), L::at(y, j), sum);
    return V::sum_quads(sum);
  }

  // The sequences of a group, for the head. A row without a sequence has coefficient and slope 0.
  template <int kQ, bool kWhole>
  struct RowsOf {
    const LanesAreColumns& all;
    const std::int64_t group;

    V skipped() const { return dot<kQ>(all.q + group * kQ * N, all.parameters.h(group)); }
    V target() const { return V::load(all.targets + group * N); }
    V coefficient() const { return kept(V::load(all.parameters.coefficient(group))); }
    V slope() const { return kept(target()); }
    void store(V yhat) const {
      T lanes[N];
      yhat.store(lanes);
      for (int k = 0; k < all.rows_of(group); ++k) all.out.yhat[all.sequence(group, k)] = lanes[4 * k];
    }
    V kept(V value) const { return kWhole ? value : keep_rows(value, all.rows_of(group)); }
  };

  // to [m] += vectors [Q, lanes], summed over the rows of a group.
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

  // Adds the rows of dW that belong to a quad of q.
  template <int kQ>
  void add_dW(std::int64_t quad, double* block_dW) const {
    V sum[4][kQ];
    FASTLIN_UNROLL
    for (int i = 0; i < 4; ++i) {
      FASTLIN_UNROLL
      for (int j = 0; j < kQ; ++j) sum[i][j] = V::zero();
    }
    const T *qs = q + quad * N, *scaled = c;
    for (std::int64_t group = 0; group < groups; ++group, qs += kQ * N, scaled += kQ * N) {
      const V quad_of_q = V::load(qs);
      const V rows[4] = {V::template spread<0>(quad_of_q), V::template spread<1>(quad_of_q),
                         V::template spread<2>(quad_of_q), V::template spread<3>(quad_of_q)};
      FASTLIN_UNROLL
      for (int j = 0; j < kQ; ++j) {
        const V gc = L::at(scaled, j);
        FASTLIN_UNROLL
        for (int i = 0; i < 4; ++i) sum[i][j] = fma(rows[i], gc, sum[i][j]);
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
  const std::int64_t m, Q;
  const bool gradients;
  std::int64_t first = 0, count = 0, groups = 0;  // the chunk: first sequence, number of sequences, of groups
  bool W_is_laid_out = false;
  ColumnParameters<T> parameters;
  T* W;        // [m, Q, 4]
  T *q, *a;    // [groups, Q]
  T* c;        // [groups, Q], then g c
  T* sums;     // [groups at once, quads_of_sums]
  T* targets;  // [sequences, 4]
  T* scratch;
};
