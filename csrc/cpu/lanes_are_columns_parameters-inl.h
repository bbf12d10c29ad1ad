// Parameters of the tasks of a group's rows, with columns in lanes (lanes_are_columns-inl.h): the coefficient
// of the squared errors (1 vector), v (Q vectors), the prompt's part of c (Q), and h (Q) if there is one.
//
// The parameters of a task are computed once, in a table, unless there are many tasks, and gathered for each
// group.

template <class T>
class ColumnParameters {
  using V = Vec<T>;
  using L = Tile<T>;
  using Groups = QuadGroups<T>;
  using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  static constexpr std::int64_t N = V::size;
  static constexpr int kRows = V::quads;

 public:
  static constexpr std::int64_t kAtOnce = 3;  // groups whose vectors are stored

  ColumnParameters(Arena& arena, const Plan<T>& plan)
      : plan(plan),
        P(plan.problem),
        m(P.m),
        Q(Groups::quads(m)),
        vectors(1 + (P.h != nullptr ? 3 : 2) * Q),
        has_table(P.K <= std::min<std::int64_t>(P.t > 1 ? 1024 : 64, P.B)) {
    for (std::int64_t i = 0; i < 4; ++i) not_shared[i] = m - 4 + i < 4 * (Q - 1) ? 0 : ~Bits(0);
    table = arena.take<T>(has_table ? P.K * vectors * 4 : 0);
    computed = arena.take<T>(kAtOnce * vectors * N);
    std::fill_n(latest_tasks, kRows, std::int64_t(-1));
  }

  // Vectors of one of the latest kAtOnce groups.
  const T* coefficient(std::int64_t group) const { return vectors_of(group); }
  const T* v(std::int64_t group) const { return coefficient(group) + N; }
  const T* base(std::int64_t group) const { return coefficient(group) + (1 + Q) * N; }
  const T* h(std::int64_t group) const { return coefficient(group) + (1 + 2 * Q) * N; }

  // Loads the vectors of a group. task_of(row) is the task of a row; rows from kRows on are those of later
  // groups.
  template <int kQ, class F>
  FASTLIN_INLINE void load_group(std::int64_t group, F task_of) {
    if (has_table && !is_ready) make_table<kQ>();
    is_ready = true;
    std::int64_t task[kRows];
    for (int k = 0; k < kRows; ++k) task[k] = task_of(k);
    T* to = vectors_of(group);
    if (has_table) return gather(task, to);
    for (int k = 0; k < kRows; ++k) prefetch(task_of(2 * kRows + k));
    if (!std::equal(task, task + kRows, latest_tasks)) {
      make<kQ>(task, to);
    } else if (latest != to) {
      std::copy_n(latest, vectors * N, to);
    }
    std::copy_n(task, kRows, latest_tasks);
    latest = to;
  }

  // Copies a row [m] to quads [kQ, 4]; the columns that the last quad shares with the one before are zero in
  // it. Stores four numbers at a time: a vector load right after stores of single numbers would stall.
  template <int kQ>
  FASTLIN_INLINE void lay_out(const T* row, T* quads) const {
    std::memcpy(quads, row, 4 * (kQ - 1) * sizeof(T));
    Bits last[4];
    std::memcpy(last, row + m - 4, sizeof(last));
    for (int i = 0; i < 4; ++i) last[i] &= not_shared[i];
    std::memcpy(quads + 4 * (kQ - 1), last, sizeof(last));
  }

 private:
  T* vectors_of(std::int64_t group) const { return computed + group % kAtOnce * vectors * N; }

  // With many tasks the parameters of the next groups are not in a near cache.
  void prefetch(std::int64_t task) const {
    // First and last line: the whole row at m = 11. The rest of a longer row arrives while these are used.
    __builtin_prefetch(P.v_of(0, task));
    __builtin_prefetch(P.v_of(0, task) + m - 1);
    if (P.p == nullptr) return;
    __builtin_prefetch(P.p + task * P.t * m);
    __builtin_prefetch(P.p + task * P.t * m + m - 1);
  }

  template <int kQ>
  void make_table() {
    std::int64_t task[kRows];
    for (std::int64_t first = 0; first < P.K; first += kRows) {
      for (int k = 0; k < kRows; ++k) task[k] = std::min(first + k, P.K - 1);
      make<kQ>(task, computed);
      for (int k = 0; k < kRows; ++k) {
        for (std::int64_t j = 0; j < vectors; ++j) {
          std::copy_n(computed + j * N + 4 * k, 4, table + (task[k] * vectors + j) * 4);
        }
      }
    }
  }

  // Gathers the vectors of the rows' tasks from the table.
  FASTLIN_INLINE void gather(const std::int64_t (&task)[kRows], T* to) const {
    const T* rows[kRows];
    for (int k = 0; k < kRows; ++k) rows[k] = table + task[k] * 4 * vectors;
    for (std::int64_t j = 0; j < vectors; ++j) L::put(to, j, V::load_quads(rows, 4 * j));
  }

  template <int kQ>
  void make(const std::int64_t (&task)[kRows], T* to) const {
    typename Groups::Rows prompts{{}, {}, m, P.t, m};
    T quads[kRows][4 * kQ], coefficients[kRows][4];
    const T *rows[kRows], *coefficient_rows[kRows];
    for (int k = 0; k < kRows; ++k) {
      rows[k] = quads[k], coefficient_rows[k] = coefficients[k];
      lay_out<kQ>(P.v_of(0, task[k]), quads[k]);
      if (P.p != nullptr) prompts.first[k] = prompts.ahead[k] = P.p + task[k] * P.t * m;
      const T coefficient = P.has_targets() ? plan.coefficient[task[k]] : T(0);
      for (int j = 0; j < 4; ++j) coefficients[k][j] = coefficient;
    }
    L::put(to, 0, V::load_quads(coefficient_rows, 0));
    T *v = to + N, *base = v + kQ * N, *h = base + kQ * N;
    load_rows<kQ>(rows, v);
    if (P.p != nullptr) {
      Quads<T, false>::template stream<kQ>(prompts, v, nullptr, base, nullptr);
    } else {
      L::zero(base, kQ);
    }
    if (P.h == nullptr) return;
    for (int k = 0; k < kRows; ++k) lay_out<kQ>(P.h + task[k] * m, quads[k]);
    load_rows<kQ>(rows, h);
  }

  template <int kQ>
  FASTLIN_INLINE static void load_rows(const T* const (&rows)[kRows], T* to) {
    FASTLIN_UNROLL
    for (int j = 0; j < kQ; ++j) L::put(to, j, V::load_quads(rows, 4 * j));
  }

  const Plan<T>& plan;
  const Problem<T>& P;
  const std::int64_t m, Q, vectors;  // vectors: how many a group has
  const bool has_table;
  bool is_ready = false;
  Bits not_shared[4];  // all ones in columns that the last quad does not share
  // [K, vectors, 4]. Without it each group streams its prompt tokens again: with t = 50, n = 50, B = 8192 on
  // one thread, 1024 tasks take 2.0 ms with the table, and 1025 take 2.4 ms without.
  T* table;
  T* computed;                // [groups at once, vectors, N]
  const T* latest = nullptr;  // the last vectors computed without a table
  std::int64_t latest_tasks[kRows];
};
