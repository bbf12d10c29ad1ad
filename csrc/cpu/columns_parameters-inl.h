// What the tasks of the rows bring to a group with columns in lanes (columns-inl.h): vectors of the
// coefficient of the squared errors, 1, v, Q, the prompt's part of c, Q, and h, Q, where there is one.
//
// Those of a task are made once, unless tasks are many, and put together for each group. Where few tasks make
// few combinations in a group's rows, these are put together once: two tasks have 16 in four rows.

template <class T>
class ColumnParameters {
  using V = Vec<T>;
  using L = Tile<T>;
  using Groups = QuadGroups<T>;
  using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  static constexpr std::int64_t N = V::size;
  static constexpr int kRows = V::quads;
  static constexpr std::int64_t kMostCombinations = 32;  // 7 kB for two tasks and m = 11

 public:
  static constexpr std::int64_t kAtOnce = 3;  // groups whose vectors are kept

  ColumnParameters(Arena& arena, const Plan<T>& plan)
      : plan(plan),
        P(plan.problem),
        m(P.m),
        Q(Groups::quads(m)),
        kept(1 + (P.h != nullptr ? 3 : 2) * Q),
        has_table(P.K <= std::min<std::int64_t>(P.t > 1 ? 1024 : 64, P.B)),
        combinations(combinations_of(P.K, std::min(kMostCombinations, P.B))) {
    for (std::int64_t i = 0; i < 4; ++i) not_shared[i] = m - 4 + i < 4 * (Q - 1) ? 0 : ~Bits(0);
    table = arena.take<T>(has_table ? P.K * kept * 4 : 0);
    combined = arena.take<T>(combinations * kept * N);
    made = arena.take<T>(kAtOnce * kept * N);
    std::fill_n(latest_tasks, kRows, std::int64_t(-1));
  }

  // Of the latest groups.
  const T* share(std::int64_t group) const { return of_group[group % kAtOnce]; }
  const T* v(std::int64_t group) const { return share(group) + N; }
  const T* base(std::int64_t group) const { return share(group) + (1 + Q) * N; }
  const T* h(std::int64_t group) const { return share(group) + (1 + 2 * Q) * N; }

  // On to a group. task_of(row) is the task of a row, or, from kRows on, of one in a later group.
  template <int kQ, class F>
  FASTLIN_INLINE void take(std::int64_t group, F task_of) {
    if (!is_ready) make_table<kQ>();
    is_ready = true;
    std::int64_t task[kRows];
    for (int k = 0; k < kRows; ++k) task[k] = task_of(k);
    const std::int64_t slot = group % kAtOnce;
    if (combinations > 0) {
      std::int64_t combination = 0;
      for (int k = 0; k < kRows; ++k) combination = combination * P.K + task[k];
      of_group[slot] = combined + combination * kept * N;
      return;
    }
    T* to = made + slot * kept * N;
    of_group[slot] = to;
    if (has_table) return gather(task, to);
    for (int k = 0; k < kRows; ++k) ask_for(task_of(2 * kRows + k));
    if (!std::equal(task, task + kRows, latest_tasks)) {
      make<kQ>(task, to);
    } else if (latest != to) {
      std::copy_n(latest, kept * N, to);
    }
    std::copy_n(task, kRows, latest_tasks);
    latest = to;
  }

  // Columns of a row [m] by quads [kQ, 4]; those that a quad shares with the one before are zero in it. By
  // fours: a vector is loaded from what was stored so at once, and waits for what was stored by ones.
  template <int kQ>
  FASTLIN_INLINE void lay_out(const T* row, T* quads) const {
    std::memcpy(quads, row, 4 * (kQ - 1) * sizeof(T));
    Bits last[4];
    std::memcpy(last, row + m - 4, sizeof(last));
    for (int i = 0; i < 4; ++i) last[i] &= not_shared[i];
    std::memcpy(quads + 4 * (kQ - 1), last, sizeof(last));
  }

 private:
  // K tasks in each row, or 0 where that is more than `most`.
  static std::int64_t combinations_of(std::int64_t K, std::int64_t most) {
    std::int64_t count = 1;
    for (int k = 0; k < kRows; ++k) {
      if (count > most / K) return 0;
      count *= K;
    }
    return count;
  }

  // Many tasks do not leave theirs in a cache near by.
  void ask_for(std::int64_t task) const {
    // Where a row of m = 11 begins and ends; the rest of longer ones comes while these are used.
    __builtin_prefetch(P.v_of(0, task));
    __builtin_prefetch(P.v_of(0, task) + m - 1);
    if (P.p == nullptr) return;
    __builtin_prefetch(P.p + task * P.t * m);
    __builtin_prefetch(P.p + task * P.t * m + m - 1);
  }

  // The table, if there is one, and the combinations, if there are any.
  template <int kQ>
  void make_table() {
    std::int64_t task[kRows];
    for (std::int64_t first = 0; has_table && first < P.K; first += kRows) {
      for (int k = 0; k < kRows; ++k) task[k] = std::min(first + k, P.K - 1);
      make<kQ>(task, made);
      for (int k = 0; k < kRows; ++k) {
        for (std::int64_t j = 0; j < kept; ++j) {
          std::copy_n(made + j * N + 4 * k, 4, table + (task[k] * kept + j) * 4);
        }
      }
    }
    for (std::int64_t i = 0; i < combinations; ++i) {
      for (std::int64_t k = kRows - 1, rest = i; k >= 0; --k, rest /= P.K) task[k] = rest % P.K;
      gather(task, combined + i * kept * N);
    }
  }

  // Vectors [kept] of the rows' tasks, from the table.
  FASTLIN_INLINE void gather(const std::int64_t (&task)[kRows], T* to) const {
    const T* rows[kRows];
    for (int k = 0; k < kRows; ++k) rows[k] = table + task[k] * 4 * kept;
    for (std::int64_t j = 0; j < kept; ++j) L::put(to, j, V::load_quads(rows, 4 * j));
  }

  template <int kQ>
  void make(const std::int64_t (&task)[kRows], T* to) const {
    typename Groups::Rows prompts{{}, {}, m, P.t, m};
    T laid[kRows][4 * kQ], shares[kRows][4];
    const T *rows[kRows], *share_rows[kRows];
    for (int k = 0; k < kRows; ++k) {
      rows[k] = laid[k], share_rows[k] = shares[k];
      lay_out<kQ>(P.v_of(0, task[k]), laid[k]);
      if (P.p != nullptr) prompts.first[k] = prompts.ahead[k] = P.p + task[k] * P.t * m;
      const T share = P.has_targets() ? plan.coefficient[task[k]] : T(0);
      for (int j = 0; j < 4; ++j) shares[k][j] = share;
    }
    L::put(to, 0, V::load_quads(share_rows, 0));
    T *v = to + N, *base = v + kQ * N, *h = base + kQ * N;
    load_rows<kQ>(rows, v);
    if (P.p != nullptr) {
      Quads<T, false>::template stream<kQ>(prompts, v, nullptr, base, nullptr);
    } else {
      L::zero(base, kQ);
    }
    if (P.h == nullptr) return;
    for (int k = 0; k < kRows; ++k) lay_out<kQ>(P.h + task[k] * m, laid[k]);
    load_rows<kQ>(rows, h);
  }

  template <int kQ>
  FASTLIN_INLINE static void load_rows(const T* const (&rows)[kRows], T* to) {
    FASTLIN_UNROLL
    for (int j = 0; j < kQ; ++j) L::put(to, j, V::load_quads(rows, 4 * j));
  }

  const Plan<T>& plan;
  const Problem<T>& P;
  const std::int64_t m, Q, kept;  // kept: vectors of a group
  const bool has_table;
  const std::int64_t combinations;
  bool is_ready = false;
  Bits not_shared[4];  // all ones where the last quad does not share its column
  // [K, kept, 4]. With t = 50 prompt tokens, which each group would stream again, n = 50, B = 8192, one
  // thread: 1024 tasks take 2.0 ms with it and 1025 take 2.4 without.
  T* table;
  T* combined;  // [combinations, kept, N]
  T* made;      // [groups at once, kept, N]
  const T* of_group[kAtOnce];
  const T* latest = nullptr;  // that were made without a table
  std::int64_t latest_tasks[kRows];
};
