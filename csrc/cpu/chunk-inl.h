// A chunk: a few tiles of sequences, consecutive in the order of tasks. All trials run on it while it is in
// the cache.

template <class T>
struct Chunk {
  using V = Vec<T>;
  using L = Tile<T>;
  static constexpr std::int64_t N = V::size;

  std::int64_t tiles = 0, count = 0;  // tiles in use, sequences
  // [tiles + 1, lanes], with the tile after the chunk; lanes without a sequence repeat the last one.
  std::int64_t* sequence;
  std::int64_t* task;  // [tiles, lanes]
  std::int64_t* run;   // [tiles, lanes] index into run_task
  bool* whole;         // [tiles] whether all lanes belong to one run
  bool* changed;       // [tiles] whether a lane's task differs from that in the tile before
  std::int64_t runs = 0;
  std::int64_t* run_task;  // [tiles lanes]
  const T** x;             // [tiles + 1, lanes] tokens or Gram matrices
  T* q;                    // [tiles, m, lanes]; the sampler fills q and y of drawn sequences
  T* y;                    // [tiles, lanes] targets
  T* coefficient;          // [tiles, lanes] of the squared error in the loss; 0 in lanes without a sequence

  Chunk(Arena& arena, const Plan<T>& plan) : plan_(plan) {
    const std::int64_t lanes = plan.tiles * N;
    sequence = arena.take<std::int64_t>(lanes + N);
    task = arena.take<std::int64_t>(lanes);
    run = arena.take<std::int64_t>(lanes);
    run_task = arena.take<std::int64_t>(lanes);
    whole = arena.take<bool>(plan.tiles);
    changed = arena.take<bool>(plan.tiles);
    x = arena.take<const T*>(lanes + N);
    q = arena.take<T>(lanes * plan.problem.m);
    y = arena.take<T>(lanes);
    coefficient = arena.take<T>(lanes);
  }

  // Loads the sequences at positions begin ... end - 1, at most plan.tiles * lanes.
  void load(std::int64_t begin, std::int64_t end) {
    const Problem<T>& P = plan_.problem;
    count = end - begin;
    tiles = (count + N - 1) / N;
    for (std::int64_t i = 0; i < count; ++i) sequence[i] = plan_.by_task.sequence(begin + i);
    std::fill(sequence + count, sequence + tiles * N, sequence[count - 1]);
    label_runs(begin, end);
    for (int l = 0; l < N; ++l) sequence[tiles * N + l] = plan_.by_task.sequence(std::min(end + l, P.B - 1));
    for (std::int64_t i = 0; i < (tiles + 1) * N; ++i) {
      x[i] = P.x == nullptr ? nullptr : P.x + sequence[i] * P.x_batch;  // without tokens there is no address
    }
    if (P.y != nullptr) {
      for (std::int64_t i = 0; i < count; ++i) y[i] = P.y[sequence[i]];
      std::fill(y + count, y + tiles * N, T(0));
    }
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      const std::int64_t first = tile * N, last = first + N - 1;
      whole[tile] = run[first] == run[last];
      changed[tile] = tile == 0 || run[first - 1] != run[last] || !whole[tile] || !whole[tile - 1];
      if (P.q == nullptr) continue;  // the sampler draws it
      const T* rows[N];
      for (int l = 0; l < N; ++l) rows[l] = P.q + sequence[first + l] * P.q_batch;
      L::load(rows, 0, P.m, q + tile * P.m * N);
      clear_idle(tile, P.m, q + tile * P.m * N);
    }
  }

  // Sets task, run and coefficient of the lanes; lanes without a sequence belong to the last run.
  void label_runs(std::int64_t begin, std::int64_t end) {
    const bool has_targets = plan_.problem.has_targets();
    const std::vector<std::int64_t>& start = plan_.by_task.start;
    runs = 0;
    for (std::int64_t k = plan_.task(begin), i = 0; i < tiles * N; ++k) {
      const std::int64_t stop = start[k + 1] < end ? start[k + 1] - begin : tiles * N;
      if (stop <= i) continue;  // a task without sequences
      std::fill(task + i, task + stop, k);
      std::fill(run + i, run + stop, runs);
      if (has_targets) std::fill(coefficient + i, coefficient + stop, plan_.coefficient[k]);
      run_task[runs++] = k;
      i = stop;
    }
    if (has_targets) std::fill(coefficient + count, coefficient + tiles * N, T(0));
  }

  // How many lanes of a tile have a sequence.
  int lanes(std::int64_t tile) const { return static_cast<int>(count - tile * N < N ? count - tile * N : N); }

  // Zeroes the lanes without a sequence: an infinity there would become NaN in a sum over lanes.
  void clear_idle(std::int64_t tile, std::int64_t entries, T* values) const {
    for (int l = lanes(tile); l < N; ++l) {
      for (std::int64_t i = 0; i < entries; ++i) values[i * N + l] = T(0);
    }
  }

  // out [size, lanes]: the row of each lane's task, from `values` [K, size].
  void by_task(std::int64_t tile, const T* values, std::int64_t size, T* out) const {
    if (whole[tile]) {
      const T* row = values + task[tile * N] * size;
      for (std::int64_t i = 0; i < size; ++i) L::put(out, i, V::broadcast(row + i));
      return;
    }
    const T* rows[N];
    for (int l = 0; l < N; ++l) rows[l] = values + task[tile * N + l] * size;
    L::load(rows, 0, size, out);
  }

 private:
  const Plan<T>& plan_;
};
